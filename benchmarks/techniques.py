"""Three techniques that reduce the cost of solves, each compared with a standard method on a small seeded problem.

    python -m benchmarks.techniques

- Spectral training: a field trained on noisy trajectories without solves, and the same field trained through solves.
  Both are evaluated by an accurate solve with the trained field.
- Hypersolver: Heun's method with and without a learned correction, on the field that was trained through solves, from
  held-out initial values.
- OT-Flow: a potential flow trained with four steps of RK4, and the same flow trained with dopri5 and a continuous
  adjoint. Both are evaluated by accurate log-likelihoods of held-out data.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import seminode as sn
from seminode.models.hypersolver import HyperSolver, fit
from seminode.models.ot_flow import OTFlow
from seminode.models.spectral import SpectralTrajectory, train_spectral

TIGHT: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


class Field(nn.Module):
    """An autonomous field on the plane with one hidden layer and tanh."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)).double()

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.net(z)


def damped_pendulum(t: Tensor, z: Tensor) -> Tensor:
    return torch.stack([z[..., 1], -2.0 * torch.sin(z[..., 0]) - 0.3 * z[..., 1]], -1)


def starts(n: int, seed: int) -> Tensor:
    """Initial values, uniform on [−1.5, 1.5]²."""
    return 3.0 * torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 1.5


@dataclass(frozen=True)
class Trajectories:
    """Noisy observations of a damped pendulum with exact initial values."""

    y0: Tensor
    ts: Tensor
    clean: Tensor
    data: Tensor

    @classmethod
    def drawn(cls, n: int, seed: int, end: float = 4.0, times: int = 33, noise: float = 0.05) -> Trajectories:
        y0, ts = starts(n, seed), torch.linspace(0.0, end, times, dtype=torch.float64)
        clean = sn.solve(damped_pendulum, y0, ts, **TIGHT).ys
        data = clean + noise * torch.randn(
            clean.shape, dtype=clean.dtype, generator=torch.Generator().manual_seed(seed + 1)
        )
        data[0] = y0
        return cls(y0, ts, clean, data)

    @property
    def floor(self) -> float:
        """The mean square of the noise, which is the loss of the true field."""
        return float((self.data - self.clean).square().mean())

    def loss(self, field: nn.Module) -> float:
        """Mean square distance between an accurate solution and the data."""
        with torch.no_grad():
            return float((sn.solve(field, self.y0, self.ts, **TIGHT).ys - self.data).square().mean())


def seconds(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the CPU time of this process, which has one thread, so that other load has little influence."""
    start = time.process_time()
    result = run()
    return result, time.process_time() - start


def descend(loss: Callable[[], Tensor], parameters: Any, steps: int, lr: float) -> None:
    """Minimise by Adam with a cosine schedule of the learning rate."""
    optimiser = torch.optim.Adam(parameters, lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 0.5 * lr * (1.0 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


def solved_field(problem: Trajectories, steps: int, lr: float = 3e-2, seed: int = 0) -> Field:
    """A field trained through solves with `Replay`."""
    torch.manual_seed(seed)
    field = Field()

    def loss() -> Tensor:
        ys = sn.solve(field, problem.y0, problem.ts, rtol=1e-4, atol=1e-4).ys
        return (ys - problem.data).square().mean()

    descend(loss, field.parameters(), steps, lr)
    return field


def spectral_field(problem: Trajectories, steps: int, lr: float = 1e-1, degree: int = 14, seed: int = 0) -> Field:
    """A field trained without solves, from the same initialisation."""
    torch.manual_seed(seed)
    field = Field()
    z = SpectralTrajectory(problem.y0, problem.ts, degree)
    z.interpolate(problem.ts, problem.data, smoothing=1e-6)
    train_spectral(
        field, z, lambda z: (z(problem.ts) - problem.data).square().mean(), steps=steps, lr_field=lr, gamma=1.0
    )
    return field


@dataclass(frozen=True)
class HyperResult:
    """Mean errors at the end time from held-out initial values, and NFE and seconds of the methods."""

    plain: float
    corrected: float
    rk4: float
    nfe: int
    nfe_to_match: int
    seconds_plain: float
    seconds_corrected: float
    seconds_to_match: float
    seconds_to_fit: float


def hypersolved(field: nn.Module, eps: float = 0.25, end: float = 4.0, n: int = 128, steps: int = 1000) -> HyperResult:
    """Heun's method with a correction, without it, and without it at the fewest steps of the same accuracy."""
    torch.manual_seed(0)
    hyper = HyperSolver("heun", dim=2).double()
    grid = torch.arange(0.0, end + 0.5 * eps, eps, dtype=torch.float64)
    _, fit_seconds = seconds(lambda: fit(hyper, field, starts(n, 20), grid, steps=steps))
    z0 = starts(256, 30)
    with torch.no_grad():
        exact = sn.solve(field, z0, [0.0, end], rtol=1e-10, atol=1e-10).ys[-1]

        def run(solver: Any, dt: float) -> tuple[float, int, float]:
            def solve() -> sn.Solution:
                return sn.solve(field, z0, [0.0, end], solver=solver, controller=sn.FixedStep(dt))

            runs = [seconds(solve) for _ in range(5)]
            sol = runs[0][0]
            return float((sol.ys[-1] - exact).norm(dim=1).mean()), sol.stats.nfe, min(time for _, time in runs)

        plain, nfe, plain_seconds = run(sn.Heun(), eps)
        corrected, corrected_nfe, corrected_seconds = run(hyper, eps)
        rk4, rk4_nfe, _ = run(sn.RK4(), 2.0 * eps)
        assert corrected_nfe == rk4_nfe == nfe
        factor, matched = 1, (plain, nfe, plain_seconds)
        while matched[0] > corrected and factor < 64:
            factor += 1
            matched = run(sn.Heun(), eps / factor)
    return HyperResult(
        plain, corrected, rk4, nfe, matched[1], plain_seconds, corrected_seconds, matched[2], fit_seconds
    )


def moons(n: int, seed: int) -> Tensor:
    """Two interleaved half circles with noise, centred and scaled."""
    generator = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(n, generator=generator)
    upper = torch.rand(n, 1, generator=generator) < 0.5
    x = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
    x = torch.where(upper, x, torch.tensor([1.0, 0.5]) - x) + 0.1 * torch.randn(n, 2, generator=generator)
    return (x - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


def gaussian_nll(x: Tensor) -> float:
    """The NLL of the normal distribution fitted to x, which is the best that a linear flow can reach."""
    return float(0.5 * torch.logdet(2.0 * math.pi * math.e * torch.cov(x.T, correction=0)))


def trained_flow(x: Tensor, iterations: int, batch: int = 256, lr: float = 0.1, **options: Any) -> OTFlow:
    """A trained flow, with the same initialisation and minibatches for all options."""
    torch.manual_seed(2)
    flow = OTFlow(2, **options)
    draw = torch.Generator().manual_seed(3)

    def loss() -> Tensor:
        return flow.loss(x[torch.randint(len(x), (batch,), generator=draw)])

    descend(loss, flow.parameters(), iterations, lr)
    return flow


#: Four steps of RK4 with the discrete gradient; and an adaptive method with a continuous adjoint.
STEPPED: dict[str, Any] = {"steps": 4, "adjoint": sn.Direct()}
CONTINUOUS: dict[str, Any] = {"solver": "dopri5", "rtol": 1e-4, "atol": 1e-4, "adjoint": sn.Backsolve()}


def judged(flow: OTFlow, x: Tensor) -> float:
    """Mean negative log-likelihood by an accurate solve."""
    exact = copy.deepcopy(flow)
    exact.options = {"solver": "dopri5", "rtol": 1e-6, "atol": 1e-6}
    with torch.no_grad():
        return float(-exact.log_prob(x).mean())


def row(name: str, *cells: str | float) -> str:
    """A line of the table: technique, reference, ratio, and the seconds of both."""
    texts = [cell if isinstance(cell, str) else f"{cell:.1f}" for cell in cells]
    return f"{name:52}" + "".join(f"{text:>10}" for text in texts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all numbers of training steps")
    scale = parser.parse_args(argv).scale
    torch.set_num_threads(1)

    def count(steps: int) -> int:
        return max(2, round(scale * steps))

    train, test = Trajectories.drawn(64, 0), Trajectories.drawn(64, 10)
    spectral, spectral_seconds = seconds(lambda: spectral_field(train, count(1000)))
    solved, solved_seconds = seconds(lambda: solved_field(train, count(1500)))
    print(row("", "technique", "reference", "ratio", "s", "s (ref.)"))
    for name, problem in (("training", train), ("held-out", test)):
        a, b = problem.loss(spectral), problem.loss(solved)
        title = f"spectral training, {name} loss (noise {problem.floor:.5f})"
        print(row(title, f"{a:.5f}", f"{b:.5f}", f"{a / b:.3f}", spectral_seconds, solved_seconds), flush=True)

    hyper = hypersolved(solved, steps=count(1000))
    title = f"hypersolved Heun, held-out error, {hyper.nfe} evaluations"
    errors = f"{hyper.corrected:.2e}", f"{hyper.plain:.2e}", f"{hyper.corrected / hyper.plain:.3f}"
    print(row(title, *errors, hyper.seconds_to_fit, "–"), flush=True)

    x, held_out = moons(2048, 0), moons(2048, 1)
    flow, flow_seconds = seconds(lambda: trained_flow(x, count(150), **STEPPED))
    continuous, continuous_seconds = seconds(lambda: trained_flow(x, count(150), **CONTINUOUS))
    a, b = judged(flow, held_out), judged(continuous, held_out)
    title = f"OT-Flow, held-out NLL (Gaussian: {gaussian_nll(held_out):.3f})"
    print(row(title, f"{a:.4f}", f"{b:.4f}", f"{a / b:.3f}", flow_seconds, continuous_seconds))

    print(f"\nhypersolver: error of Heun / error of corrected Heun = {hyper.plain / hyper.corrected:.1f} at equal NFE.")
    print(
        f"RK4 at equal NFE has an error of {hyper.rk4:.2e}; Heun needs {hyper.nfe_to_match} NFE for the same accuracy."
    )
    times = (hyper.seconds_plain, hyper.seconds_corrected, hyper.seconds_to_match)
    print(
        "Milliseconds per solve: Heun {:.1f}, corrected Heun {:.1f}, Heun with the same accuracy {:.1f}.".format(
            *(1e3 * t for t in times)
        )
    )


if __name__ == "__main__":
    main()

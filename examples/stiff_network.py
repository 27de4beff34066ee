"""Train a network on Robertson's problem, a stiff neural ODE, and count what an explicit solver would need.

The data are 25 states between t = 10⁻⁴ and 10², at log-spaced times. The network sees each species relative to its
range and returns slopes relative to the largest one; the loss is the mean absolute error relative to the ranges. Kim et
al., *Stiff neural ordinary differential equations* (2021), give the reasons for such scales. Training uses all segments
between neighbouring data as one batch, in the time log t.

    python examples/stiff_network.py [--iterations 300] [--explicit-end 100]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import seminode as sn

FIRST, LAST, COUNT = 1e-4, 1e2, 25
RTOL, ATOL = 1e-3, 1e-3  # of scaled states


def robertson(t: Tensor, y: Tensor) -> Tensor:
    a, b, c = y.unbind(-1)
    first, second, third = 0.04 * a, 1e4 * b * c, 3e7 * b * b
    return torch.stack([second - first, first - second - third, third], -1)


@dataclass(frozen=True)
class Data:
    """States z = y / scale at log-spaced times, and the largest slope of each species in this scale."""

    ts: Tensor
    zs: Tensor
    scale: Tensor
    slope: Tensor

    @classmethod
    def make(cls) -> Data:
        ts = torch.logspace(math.log10(FIRST), math.log10(LAST), COUNT, dtype=torch.float64)
        y0 = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        ys = sn.solve(robertson, y0, [0.0, *ts.tolist()], solver="kvaerno5", rtol=1e-8, atol=1e-14).ys
        scale = ys.amax(0) - ys.amin(0)
        slope = (robertson(ts, ys) / scale).abs().amax(0)
        return cls(ts, ys[1:] / scale, scale, slope)

    @property
    def start(self) -> Tensor:
        return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) / self.scale


class NeuralField(nn.Module):
    """dz/dt = slope · net(z). The scales are constants; states are (3,) or (B, 3)."""

    slope: Tensor

    def __init__(self, slope: Tensor, width: int = 16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3)
        ).double()
        self.register_buffer("slope", slope)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.slope * self.net(z)


def ends_of_segments(field: NeuralField, data: Data, solver: sn.Kvaerno5) -> Tensor:
    """The states at the ends of all segments, which start at data: t = a·(b/a)^τ with 0 ≤ τ ≤ 1 for all of them."""
    starts, ratio = data.ts[:-1, None], math.log(float(data.ts[1] / data.ts[0]))

    def stretched(tau: Tensor, z: Tensor) -> Tensor:
        t = starts * torch.exp(ratio * tau)
        return ratio * t * field(t, z)

    # Direct needs the least time: Replay would solve for the stages once more.
    options: Any = {"rtol": RTOL, "atol": ATOL, "adjoint": sn.Direct(), "save": "last"}
    return sn.solve(stretched, data.zs[:-1], [0.0, 1.0], solver=solver, **options).ys[-1]


def train(field: NeuralField, data: Data, iterations: int, learning_rate: float = 0.01) -> list[float]:
    """The loss of every iteration."""
    solver = sn.Kvaerno5(linear_solver="batched")
    optimiser = torch.optim.Adam(field.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, learning_rate, total_steps=iterations)
    losses = []
    start = time.perf_counter()
    for i in range(iterations):
        optimiser.zero_grad()
        loss = (ends_of_segments(field, data, solver) - data.zs[1:]).abs().mean()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if i % 25 == 0 or i == iterations - 1:
            print(f"{i:5}  loss {losses[-1]:.5f}  {time.perf_counter() - start:6.1f} s", flush=True)
    return losses


@torch.no_grad()
def forward_cost(field: NeuralField, data: Data, solver: Any, end: float) -> tuple[int, Tensor]:
    """Evaluations of a solve from t = 0, and its end."""
    options: Any = {"rtol": RTOL, "atol": ATOL, "save": "last", "max_steps": 10_000_000}
    sol = sn.solve(field, data.start, [0.0, end], solver=solver, **options)
    return sol.stats.nfe, sol.ys[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--explicit-end", type=float, default=100.0, help="where the explicit solve ends")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = Data.make()
    field = NeuralField(data.slope)
    train(field, data, options.iterations)
    with torch.no_grad():
        times = [0.0, *data.ts.tolist()]
        zs = sn.solve(field, data.start, times, solver="kvaerno5", rtol=RTOL, atol=ATOL).ys[1:]
    print(f"mean error of the whole trajectory, relative to the ranges: {(zs - data.zs).abs().mean():.4f}")
    implicit, explicit = (forward_cost(field, data, name, options.explicit_end)[0] for name in ("kvaerno5", "dopri5"))
    print(f"evaluations to t = {options.explicit_end:g}: kvaerno5 {implicit}, dopri5 {explicit}")
    print(f"dopri5 needs {explicit / implicit:.0f} times as many")


if __name__ == "__main__":
    main()

"""Fit a neural ODE to noisy samples of a spiral, compare the gradients of two adjoints, and plot the learned field.

The data are one trajectory of a damped oscillator with a stiffening spring. A small network learns its vector field
from segments of that trajectory, which become longer during the training. It takes less than a minute on one core.

    python examples/spiral.py [--image out/demo/spiral.png]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from drawing import BLUE, INK, ORANGE, STYLE, need, save
from torch import Tensor, nn

import seminode as sn

T1, SAMPLES, NOISE = 14.0, 141, 0.03
ITERATIONS, LEARNING_RATE = 360, 0.02
SHORTEST, STRIDE = 10, 3  # initial length of a segment and distance between segments, in samples
GROWTH = 0.7  # fraction of the training after which the segment is the whole trajectory
RTOL, ATOL = 1e-4, 1e-6


def oscillator(t: Tensor, y: Tensor) -> Tensor:
    """q' = p, p' = −(q + q³)/2 − p/4."""
    q, p = y.unbind(-1)
    return torch.stack([p, -0.5 * (q + q**3) - 0.25 * p], -1)


class NeuralField(nn.Module):
    """A vector field on the plane that does not depend on time."""

    def __init__(self, width: int = 48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


@dataclass(frozen=True)
class Data:
    ts: Tensor
    exact: Tensor
    samples: Tensor

    @classmethod
    def make(cls) -> Data:
        ts = torch.linspace(0.0, T1, SAMPLES, dtype=torch.float64)
        y0 = torch.tensor([2.0, 0.0], dtype=torch.float64)
        exact = sn.solve(oscillator, y0, ts, solver="dopri8", rtol=1e-9, atol=1e-9).ys
        noise = NOISE * torch.randn_like(exact)
        noise[0] = 0.0  # the initial state is known
        return cls(ts, exact, exact + noise)

    def segments(self, length: int) -> tuple[Tensor, Tensor]:
        """Times and samples of many segments of the trajectory, as one batch for one solve."""
        starts = torch.arange(0, SAMPLES - length, STRIDE)
        within = torch.arange(length + 1)
        return self.ts[: length + 1], self.samples[within[:, None] + starts]


def train(field: NeuralField, data: Data) -> None:
    optimiser = torch.optim.Adam(field.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=ITERATIONS)
    columns = ("iteration", "  t1", "   loss", "nfe", "accepted", "rejected", "backward nfe", "seconds")
    print("  ".join(columns))
    start = time.perf_counter()
    for i in range(1, ITERATIONS + 1):
        fraction = min(1.0, i / (GROWTH * ITERATIONS))
        length = round((1.0 - fraction) * SHORTEST + fraction * (SAMPLES - 1))
        ts, target = data.segments(length)
        sol = sn.solve(field, target[0], ts, rtol=RTOL, atol=ATOL)  # Replay() is the default adjoint
        loss = (sol.ys - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if i == 1 or i % 40 == 0:
            stats, backward = sol.stats, sol.stats.backward
            assert backward is not None
            cells = (i, f"{float(ts[-1]):.1f}", f"{loss.item():.5f}", stats.nfe, stats.accepted, stats.rejected)
            cells = (*cells, backward.nfe, f"{time.perf_counter() - start:.1f}")
            print("  ".join(f"{cell:>{len(name)}}" for cell, name in zip(cells, columns, strict=True)), flush=True)


def gradient(field: NeuralField, data: Data, adjoint: Any) -> tuple[Tensor, sn.Stats]:
    """The gradient of the loss over the whole trajectory with respect to all parameters, as one vector."""
    sol = sn.solve(field, data.exact[0], data.ts, adjoint=adjoint, rtol=RTOL, atol=ATOL)
    loss = (sol.ys - data.samples).square().mean()
    grads = torch.autograd.grad(loss, list(field.parameters()))
    return torch.cat([grad.flatten() for grad in grads]), sol.stats


def compare_adjoints(field: NeuralField, data: Data) -> None:
    direct, _ = gradient(field, data, sn.Direct())
    replay, stats = gradient(field, data, sn.Replay())
    difference = float((direct - replay).norm() / direct.norm())
    print(f"\nRelative difference of the gradients of Direct and Replay over the whole trajectory: {difference:.1e}")
    print(f"Replay: {stats}")


EDGE = 2.4  # half the side of the plotted square


@torch.no_grad()
def draw(field: NeuralField, data: Data, sol: sn.Solution, path: Path) -> None:
    """Left: the learned field and its trajectory. Right: the state and the step sizes of the solver over time."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(9.6, 4.9), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=(1.08, 1), height_ratios=(1.6, 1))
        plane, states, steps = (figure.add_subplot(cell) for cell in (grid[:, 0], grid[0, 1], grid[1, 1]))
        draw_field(plane, field)
        draw_trajectory(plane, data, sol)
        draw_states(states, data, sol)
        draw_steps(steps, sol)
        figure.align_ylabels([states, steps])
        save(figure, path)
        plt.close(figure)


def draw_field(axes: Any, field: NeuralField) -> None:
    """Streamlines, with the speed as the background colour."""
    x = torch.linspace(-EDGE, EDGE, 80, dtype=torch.float64)
    slopes = field(torch.tensor(0.0), torch.stack(torch.meshgrid(x, x, indexing="xy"), -1))
    speed = slopes.norm(dim=-1).log1p().numpy()
    square = (-EDGE, EDGE, -EDGE, EDGE)
    axes.imshow(speed, extent=square, origin="lower", cmap="Blues", vmax=6.0, interpolation="bicubic", zorder=0)
    axes.streamplot(
        x.numpy(),
        x.numpy(),
        slopes[..., 0].numpy(),
        slopes[..., 1].numpy(),
        color="#7d93a3",
        density=1.15,
        linewidth=0.6,
        arrowsize=0.7,
        zorder=1,
    )


def draw_trajectory(axes: Any, data: Data, sol: sn.Solution) -> None:
    assert sol.dense is not None
    assert sol.record is not None
    ts = torch.linspace(0.0, T1, 1500, dtype=torch.float64)
    ends = torch.tensor([0.0, *(plan.t1 for plan in sol.record.accepted)], dtype=torch.float64)
    ring = {"markerfacecolor": "white", "markeredgecolor": ORANGE, "markeredgewidth": 1.4, "markersize": 5}
    axes.plot(*data.samples.T.numpy(), ".", color=INK, markersize=3.5, alpha=0.6, zorder=2, label="samples")
    axes.plot(*sol.dense(ts).T.numpy(), color=BLUE, linewidth=2.0, zorder=3, label="learned trajectory")
    axes.plot(*sol.dense(ends).T.numpy(), "o", **ring, zorder=4, label="ends of accepted steps")
    axes.set(xlabel="q", ylabel="p", xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), aspect="equal")
    axes.set_title("The learned field and its trajectory")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3, columnspacing=1.4)


def draw_states(axes: Any, data: Data, sol: sn.Solution) -> None:
    assert sol.dense is not None
    ts = torch.linspace(0.0, T1, 1500, dtype=torch.float64)
    ys = sol.dense(ts)
    for i, (name, colour) in enumerate((("q", BLUE), ("p", ORANGE))):
        axes.plot(data.ts.numpy(), data.samples[:, i].numpy(), ".", color=INK, markersize=3, alpha=0.5)
        axes.plot(ts.numpy(), ys[:, i].numpy(), color=colour, linewidth=1.8, label=name)
    axes.set(xlim=(0.0, T1), ylabel="state")
    axes.tick_params(labelbottom=False)
    axes.set_title("Samples and solution over time")
    axes.legend(loc="upper right", ncols=2)


def draw_steps(axes: Any, sol: sn.Solution) -> None:
    assert sol.record is not None
    accepted, rejected = sol.record.accepted, sol.record.rejected
    sizes = [plan.dt for plan in accepted]
    edges = [accepted[0].t0, *(plan.t1 for plan in accepted)]
    axes.stairs(sizes, edges, fill=True, color=BLUE, alpha=0.15)
    axes.stairs(sizes, edges, color=BLUE, linewidth=1.3, label="accepted")
    middles = [0.5 * (plan.t0 + plan.t1) for plan in rejected]
    axes.plot(middles, [plan.dt for plan in rejected], "x", color=ORANGE, markersize=5, mew=1.4, label="rejected")
    axes.set(xlabel="t", ylabel="step size", xlim=(0.0, T1), ylim=(0.0, 1.35 * max(sizes)))
    axes.legend(loc="upper right", ncols=2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a neural ODE to a spiral and plot it.")
    parser.add_argument("--image", type=Path, default=Path("out/demo/spiral.png"), help="file of the plot")
    path: Path = parser.parse_args().image
    need("matplotlib")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help so small a network

    data = Data.make()
    field = NeuralField().double()
    train(field, data)
    compare_adjoints(field, data)

    with torch.no_grad():
        sol = sn.solve(field, data.exact[0], data.ts, dense=True, record=True, rtol=RTOL, atol=ATOL)
    loss = float((sol.ys - data.samples).square().mean())
    error = math.sqrt(float((sol.ys - data.exact).square().mean()))
    print(f"\nFinal loss over the whole trajectory: {loss:.5f}; variance of the noise: {NOISE**2:.5f}")
    print(f"RMS distance from the noiseless trajectory: {error:.3f}; {sol.stats}")
    draw(field, data, sol, path)
    print(f"Plot: {path}")


if __name__ == "__main__":
    main()

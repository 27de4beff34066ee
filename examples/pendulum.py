"""Teach a Symplectic ODE-Net the double pendulum, let it swing the pendulum up, and draw how it does.

The network learns mass, potential and actuation by plain regression on true accelerations, which a simulator knows and
an experiment would not tell. The papers train through solves instead, which needs observations alone and takes far
longer. It is tested as in the papers: windows of 0.35 s are predicted, by solves, from their first points. What was
learned gives a controller at once: cancel the potential, put it upside down, brake. It lifts the true pendulum from
hanging at rest. Less than two minutes on two cores.

    python examples/pendulum.py [--image out/demo/pendulum.png] [--seed 0]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawing import BLUE, GREY, INK, ORANGE, STYLE, need, save
from torch import Tensor
from torch.nn import functional

from seminode.models import pendulum
from seminode.models.symplectic import SymplecticODENet

ITERATIONS, BATCH = 800, 64
TRIALS = 20  # of each torque; three of them are for testing
TOLERANCE = 1e-4
BRAKE = 1.0  # per second


@torch.no_grad()
def window_error(model: SymplecticODENet, windows: Tensor) -> float:
    """Mean squared error of windows (batch, times, 8) that are predicted from their first points."""
    ts = pendulum.DT * torch.arange(windows.shape[1])
    return float(functional.mse_loss(model(windows[:, 0], ts), windows.transpose(0, 1)))


def learn(model: SymplecticODENet, seed: int) -> None:
    windows = pendulum.dataset(trials=TRIALS).test
    print(f"Mean squared error of {len(windows)} windows of the data set that are predicted by solves:")
    print(f"  untrained             {window_error(model, windows):.1e}", flush=True)
    start = time.perf_counter()
    pendulum.fit_accelerations(model.field, ITERATIONS, BATCH, seed=seed)
    seconds = time.perf_counter() - start
    print(f"  after the regression  {window_error(model, windows):.1e}", end="")
    print(f"   {ITERATIONS} iterations in {seconds:.0f} s; {model.nfe} evaluations a solve", flush=True)


def damping(model: SymplecticODENet) -> float:
    """A brake in proportion to the mass, which is known up to a factor only: BRAKE·M₁₁ of the hanging pendulum."""
    hanging = torch.tensor([1.0, 1.0, 0.0, 0.0])
    with torch.no_grad():
        return BRAKE * float(torch.linalg.inv(model.field.inverse_mass_matrix(hanging))[0, 0])


def report(title: str, run: pendulum.Run) -> None:
    errors = (run.states[:, :2].cos() - torch.tensor([-1.0, 1.0])).abs()
    late = (errors.amax(-1) > 0.01).nonzero().flatten().tolist()
    first, second = errors[-1].tolist()
    print(f"{title}: |cos q1 + 1| = {first:.4f}, |cos q2 - 1| = {second:.4f} after {float(run.ts[-1]):.2f} s", end="; ")
    settled = late[-1] + 1 if late else 0
    print(f"both below 0.01 from {float(run.ts[settled]):.2f} s on" if settled < len(errors) else "not settled")
    print("  largest torques: {:.1f}, {:.1f}".format(*run.torques.abs().amax(0).tolist()))


HEIGHTS = (-0.8, -0.1, 0.6, 0.98)  # of −cos q₁: the pendulum is drawn when it first comes this high
GAP, TRAIL = 0.8, 1.0  # lengths of a link between two drawings; seconds of the past that each shows


def joints(states: Tensor) -> Tensor:
    """The end of each link, (…, 2 links, 2), in a plane with y upwards."""
    q1, q2 = states[..., 0], states[..., 1]
    first = torch.stack((q1.sin(), -q1.cos()), -1)
    return torch.stack((first, first + torch.stack(((q1 + q2).sin(), -(q1 + q2).cos()), -1)), -2)


def moments(run: pendulum.Run) -> list[int]:
    """Steps to draw: the start, on the way up, the furthest point of the swing beyond the top, the end."""
    height = -run.states[:, 0].cos()
    up = [int((height >= level).nonzero()[0]) for level in HEIGHTS if bool((height >= level).any())]
    beyond = [up[-1] + int(height[up[-1] :].argmin())] if len(up) == len(HEIGHTS) else []
    return [0, *up, *beyond, len(height) - 1]


def draw(run: pendulum.Run, path: Path) -> None:
    """The pendulum at some moments with the way of its tip; below it angles, velocities and torques over time."""
    import matplotlib.pyplot as plt

    chosen = moments(run)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(9.6, 6.6), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1, 1.75))
        above, below = parts
        frames, panels = above.subplots(), below.subplots(2, 2, sharex=True)
        edge = 0.0
        for moment in chosen:
            edge = draw_pendulum(frames, run, moment, edge) + GAP
        frames.set(xlim=(-GAP, edge), ylim=(-2.2, 2.9), aspect="equal")
        frames.set_axis_off()
        frames.set_title("A learned controller swings up the true pendulum")
        draw_panels(panels, run)
        for axes in panels.flat:
            for moment in chosen[1:-1]:
                axes.axvline(float(run.ts[moment]), color=GREY, linewidth=0.6, alpha=0.6, zorder=0)
        save(figure, path)
        plt.close(figure)


def draw_pendulum(axes: Any, run: pendulum.Run, moment: int, edge: float) -> float:
    """To the right of an edge, with a fading past; returns the edge of what was drawn."""
    first = max(0, moment - round(TRAIL / pendulum.DT))
    ends = joints(run.states)
    reach = ends[first : moment + 1, :, 0]
    x = edge - min(float(reach.min()), -0.4)
    pivot = torch.tensor([[x, 0.0]], dtype=torch.float64)
    ends = ends + pivot
    for i in range(first, moment):
        fresh = (i + 1 - first) / (moment - first)
        trail = {"color": ORANGE, "linewidth": 2.4, "solid_capstyle": "butt"}
        axes.plot(*ends[i : i + 2, 1].T.numpy(), **trail, alpha=0.8 * fresh**1.5)
        if (moment - i) % 4 == 0:
            links = torch.cat((pivot, ends[i])).T.numpy()
            axes.plot(*links, color=BLUE, linewidth=2.0, alpha=0.22 * fresh, solid_capstyle="round")
    links = torch.cat((pivot, ends[moment])).T.numpy()
    axes.plot(*links, color=BLUE, linewidth=4.0, solid_capstyle="round", zorder=3)
    axes.plot(*links[:, 1:], "o", color=BLUE, markeredgecolor="white", markeredgewidth=1.2, markersize=8, zorder=4)
    axes.plot(x, 0.0, "s", color=INK, markersize=6, zorder=5)
    axes.text(x, 2.45, f"{float(run.ts[moment]):.1f} s", ha="center", color=INK)
    return x + max(float(reach.max()), 0.4)


def draw_panels(panels: Any, run: pendulum.Run) -> None:
    q, w = run.states.split(2, -1)
    what = (
        ("Where the links point: cosine", q.cos(), ("cos q₁", "cos q₂")),
        ("Sine", q.sin(), ("sin q₁", "sin q₂")),
        ("Angular velocity, 1/s", w, ("q₁′", "q₂′")),
        ("Torque", run.torques, ("u₁", "u₂")),
    )
    for axes, (title, values, names) in zip(panels.flat, what, strict=True):
        for i, (name, colour) in enumerate(zip(names, (BLUE, ORANGE), strict=True)):
            axes.plot(run.ts.numpy(), values[:, i].numpy(), color=colour, linewidth=1.6, label=name)
        axes.set(xlim=(0.0, 20.0), xticks=range(0, 21, 5))
        axes.set_title(title)
        axes.legend(loc="best", ncols=2)
    for goal in (-1.0, 1.0):
        panels[0, 0].axhline(goal, color=INK, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
    for axes in panels[1]:
        axes.set_xlabel("t (s)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the double pendulum and swing it up.")
    parser.add_argument("--image", type=Path, default=Path("out/demo/pendulum.png"), help="where the picture goes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need("matplotlib", "scipy")
    torch.manual_seed(options.seed)

    model = SymplecticODENet(rtol=TOLERANCE, atol=TOLERANCE)
    learn(model, options.seed)
    print("\nThe true pendulum under control, from hanging at rest:")
    report("published gains", pendulum.simulate(model.control))
    run = pendulum.simulate(partial(model.control, damping=damping(model)))
    report("brake by the mass", run)
    draw(run, options.image)
    print(f"Picture: {options.image}")


if __name__ == "__main__":
    main()

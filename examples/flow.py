"""Train a continuous normalising flow on a shape in the plane, and plot how noise becomes the shape.

A small network is trained by maximum likelihood, with the exact divergence, to map points of the shape to noise. Then
the inverse flow maps noise to the shape. It takes one or two minutes on one core.

    python examples/flow.py [--shape pinwheel] [--image out/demo/flow.png] [--seed 0] [--iterations 600]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drawing import need, save
from torch import Tensor

import seminode as sn
from seminode.models.cnf import CNF, ConcatMLP
from seminode.models.running import along, integrals_of, start

BATCH, LEARNING_RATE, WIDTHS = 256, 0.01, (64, 64, 64)
RTOL, ATOL = 1e-3, 1e-4
EDGE, GRID = 2.8, 160  # half the side of the plotted square, and the number of grid points along a side
SLICES, POINTS, LINES = 6, 6000, 700


def pinwheel(n: int, arms: int = 5) -> Tensor:
    """Gaussian blobs, stretched radially and wound around the centre."""
    arm = torch.randint(arms, (n,))
    along_arm = 1.0 + 0.32 * torch.randn(n)
    across = 0.1 * torch.randn(n)
    angle = arm * (2.0 * math.pi / arms) + 0.28 * torch.exp(along_arm)
    x, y = along_arm * angle.cos() - across * angle.sin(), along_arm * angle.sin() + across * angle.cos()
    return 1.35 * torch.stack([x, y], -1)


def moons(n: int) -> Tensor:
    """Two interleaved half circles."""
    angle = math.pi * torch.rand(n)
    upper = torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], -1)
    side = torch.where(torch.rand(n, 1) < 0.5, 1.0, -1.0)
    return 1.4 * (side * upper + 0.06 * torch.randn(n, 2))


def spirals(n: int) -> Tensor:
    """Two arms of one and a quarter turns each, denser at the centre."""
    angle = 2.5 * math.pi * torch.rand(n, 1).sqrt()
    side = torch.where(torch.rand(n, 1) < 0.5, 1.0, -1.0)
    arm = torch.cat([-angle.cos(), angle.sin()], -1) * angle / 3.2
    return side * arm + 0.07 * torch.randn(n, 2)


SHAPES: dict[str, Callable[[int], Tensor]] = {"pinwheel": pinwheel, "moons": moons, "spirals": spirals}


def make_flow() -> CNF:
    """In the plane the exact divergence costs two VJPs. `Direct` is the fastest adjoint for so small a network."""
    return CNF(ConcatMLP(2, WIDTHS), trace="exact", rtol=RTOL, atol=ATOL, adjoint=sn.Direct())


def train(flow: CNF, draw_batch: Callable[[int], Tensor], iterations: int) -> None:
    optimiser = torch.optim.Adam(flow.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, LEARNING_RATE, total_steps=iterations)
    columns = ("iteration", "  loss", "nfe", "seconds")
    print("  ".join(columns))
    begin, mean = time.perf_counter(), math.nan
    for i in range(1, iterations + 1):
        loss = -flow.log_prob(draw_batch(BATCH)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        mean = loss.item() if i == 1 else 0.95 * mean + 0.05 * loss.item()
        if i == 1 or i % max(1, iterations // 10) == 0:
            cells = (i, f"{mean:.3f}", flow.nfe, f"{time.perf_counter() - begin:.1f}")
            print("  ".join(f"{cell:>{len(name)}}" for cell, name in zip(cells, columns, strict=True)), flush=True)


@dataclass(frozen=True)
class Unrolled:
    """The inverse flow from noise to the shape: `points[i]` and `densities[i]` at `times[i]`, from T down to 0."""

    times: Tensor
    points: Tensor
    densities: Tensor
    lines: Tensor


@torch.no_grad()
def unroll(flow: CNF, slices: int = SLICES, points: int = POINTS, grid: int = GRID) -> Unrolled:
    times = torch.linspace(flow.t1, 0.0, slices)
    noise = torch.randn(points, 2)
    samples = flow.solve(flow.field, noise, times).ys
    fine_times = torch.linspace(flow.t1, 0.0, 60)
    lines = flow.solve(flow.field, noise[:LINES], fine_times).ys
    densities = torch.stack([density(flow, float(t), grid) for t in times])
    return Unrolled(times, samples, densities, lines)


def density(flow: CNF, t: float, grid: int) -> Tensor:
    """The density of z(t) on a grid over the square, by the flow from t to T and the base density."""
    x = torch.linspace(-EDGE, EDGE, grid)
    z = torch.stack(torch.meshgrid(x, x, indexing="xy"), -1).view(-1, 2)
    if t < flow.t1:
        running = (flow.trace,)
        field = partial(along, flow.field, running)
        solution = flow.solve(field, start(z, running), (t, flow.t1), integrals=integrals_of(running))
        z, delta = (leaf[-1] for leaf in solution.ys)
    else:
        delta = 0.0
    return (flow.base_log_prob(z) - delta).exp().view(grid, grid)


NIGHT, INK = "#0b1020", "#dfe6ee"
GLOW = (NIGHT, "#2b1d5c", "#7a2a8c", "#d5486f", "#f9975c", "#fdeec1")


def draw(unrolled: Unrolled, path: Path) -> None:
    """Top: samples at a few times. Bottom: the density at the same times. Right: the trajectories of some samples."""
    import matplotlib.pyplot as plt

    slices, inch, head = len(unrolled.times), 1.7, 0.34
    width, height = (slices + 2) * inch, 2 * inch + head
    with plt.rc_context({"figure.facecolor": NIGHT, "text.color": INK, "axes.titlecolor": INK, "axes.titlesize": 9}):
        figure = plt.figure(figsize=(width, height))
        cells = figure.add_gridspec(
            2, slices + 2, wspace=0.02, hspace=0.02, left=0.004, right=0.996, bottom=0.01, top=1.0 - head / height
        )
        hues = colours(unrolled.points[0])
        for i, t in enumerate(unrolled.times.tolist()):
            top, bottom = (figure.add_subplot(cells[row, i]) for row in (0, 1))
            top.scatter(*unrolled.points[i].T.numpy(), s=1.3, c=hues.numpy(), alpha=0.8, linewidths=0)
            top.set_title(f"t = {t:.1f}")
            draw_density(bottom, unrolled.densities[i])
            frame(top)
            frame(bottom)
        right = figure.add_subplot(cells[:, slices:])
        draw_paths(right, unrolled.lines, hues)
        right.set_title("from noise to the shape")
        frame(right)
        save(figure, path, dpi=125, colours=256, dither=True)
        plt.close(figure)


def colours(noise: Tensor) -> Tensor:
    """A colour for each point by its direction in the noise, so that neighbours in the noise remain recognisable."""
    turns = torch.atan2(noise[:, 1], noise[:, 0])[:, None] + 2.0 * math.pi / 3.0 * torch.arange(3)
    return 0.64 + 0.36 * turns.cos()


def draw_density(axes: Any, values: Tensor) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    glow = LinearSegmentedColormap.from_list("glow", GLOW)
    square = (-EDGE, EDGE, -EDGE, EDGE)
    # The square root makes thin tails visible next to the peaks.
    axes.imshow(values.sqrt().numpy(), extent=square, origin="lower", cmap=glow, vmin=0.0, interpolation="bicubic")


def draw_paths(axes: Any, lines: Tensor, hues: Tensor) -> None:
    """Each trajectory becomes more opaque from noise to the shape."""
    from matplotlib.collections import LineCollection

    pieces = torch.stack([lines[:-1], lines[1:]], 2)  # (times, lines, ends, 2)
    strength = torch.linspace(0.05, 0.75, len(pieces))[:, None, None].expand(-1, lines.shape[1], 1)
    shades = torch.cat([hues[: lines.shape[1]].expand(len(pieces), -1, -1), strength], -1)
    axes.add_collection(LineCollection(list(pieces.flatten(0, 1).numpy()), colors=shades.flatten(0, 1).numpy(), lw=0.6))
    axes.scatter(*lines[-1].T.numpy(), s=5, c=hues[: lines.shape[1]].numpy(), linewidths=0, zorder=3)


def frame(axes: Any) -> None:
    axes.set(xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), aspect="equal", xticks=[], yticks=[], facecolor=NIGHT)
    axes.spines[:].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a flow on a shape and plot how noise becomes the shape.")
    parser.add_argument("--shape", choices=SHAPES, default="pinwheel")
    parser.add_argument("--image", type=Path, default=Path("out/demo/flow.png"), help="file of the plot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=600)
    options = parser.parse_args()
    need("matplotlib")
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # more threads do not help so small a network

    flow = make_flow()
    train(flow, SHAPES[options.shape], options.iterations)
    flow.options.update(rtol=1e-5, atol=1e-6)  # for the numbers and plots below
    unrolled = unroll(flow)
    area = (2.0 * EDGE / (GRID - 1)) ** 2
    with torch.no_grad():
        held_out = -float(flow.log_prob(SHAPES[options.shape](2000)).mean())
    print(f"\nLoss on new points of the shape: {held_out:.3f} nats")
    print(f"Integral of the density over the square: {float(unrolled.densities[-1].sum()) * area:.4f}")
    draw(unrolled, options.image)
    print(f"Plot: {options.image}")


if __name__ == "__main__":
    main()

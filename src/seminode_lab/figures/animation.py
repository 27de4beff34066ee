"""An animation of the swing-up: the pendulum with a trail of its tip, and the torques."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .style import BLUE, GREY, INK, ORANGE, styled
from .swing import Swing

WORLD = 2.2  # lengths of a link from the pivot to the edge of the picture
TRAIL = 20  # frames
SIZE, PIXELS = (4.0, 2.8), 160  # inches, and pixels per inch
PALETTE = 48  # colours
REST = 1500  # milliseconds of the last frame


class Stage:
    """The parts of the picture that move."""

    def __init__(self, swing: Swing):
        from matplotlib.collections import LineCollection
        from matplotlib.figure import Figure

        self.swing, self.ends = swing, swing.joints()
        self.figure = Figure(figsize=SIZE, dpi=PIXELS)
        world, bars = self.figure.add_axes((0.0, 0.0, 0.7, 1.0)), self.figure.add_axes((0.75, 0.13, 0.22, 0.7))
        world.set(xlim=(-WORLD, WORLD), ylim=(-WORLD, WORLD), aspect="equal")
        world.set_axis_off()
        world.axhline(0.0, color=GREY, linewidth=0.5, zorder=0)
        self.trail = LineCollection([], colors=ORANGE, linewidths=2.4)
        world.add_collection(self.trail)
        (self.links,) = world.plot([], [], color=BLUE, linewidth=5, solid_capstyle="round", zorder=3)
        (self.tips,) = world.plot([], [], "o", color=BLUE, markeredgecolor="white", markersize=9, zorder=4)
        (self.pivot,) = world.plot(0.0, 0.0, "s", color=INK, markersize=7, zorder=5)
        self.clock = world.text(-2.1, 1.9, "", color=INK)
        self.bars = bars.bar(["u₁", "u₂"], [0.0, 0.0], color=[BLUE, ORANGE], width=0.6)
        most = float(np.ceil(np.abs(swing.torques).max() / 5) * 5) or 1.0
        bars.set(ylim=(-most, most), xlim=(-0.6, 1.6), title="torques")
        bars.axhline(0.0, color=GREY, linewidth=0.8)
        bars.spines["bottom"].set_visible(False)
        bars.tick_params(bottom=False, labelsize=8)

    def show(self, i: int) -> None:
        past = self.ends[max(0, i - TRAIL) : i + 1, 1]
        segments = np.stack((past[:-1], past[1:]), 1)
        self.trail.set_segments(list(segments))
        self.trail.set_alpha(list(np.linspace(0.1, 0.9, len(segments))) if len(segments) else None)
        self.links.set_data(*np.concatenate(([[0.0, 0.0]], self.ends[i])).T)
        self.tips.set_data(*self.ends[i].T)
        self.clock.set_text(f"{self.swing.ts[i]:4.1f} s")
        for bar, torque in zip(self.bars, self.swing.torques[i], strict=True):
            bar.set_height(torque)

    def frames(self) -> Iterator[Any]:
        """Every state as an image. The static parts are drawn once, which makes this ten times faster."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from PIL import Image

        canvas = FigureCanvasAgg(self.figure)
        moving: list[Any] = [self.trail, self.links, self.tips, self.pivot, self.clock, *self.bars]
        for part in moving:
            part.set_animated(True)
        canvas.draw()
        still = canvas.copy_from_bbox(self.figure.bbox)
        for i in range(len(self.swing.ts)):
            self.show(i)
            canvas.restore_region(still)
            for part in moving:
                part.axes.draw_artist(part)
            yield Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


@styled
def animate(swing: Swing, path: Path) -> None:
    """Write a GIF in real time, which pauses on the last state and repeats."""
    from PIL import Image

    frames = list(Stage(swing).frames())
    # With one palette for all frames, they differ only where something moves, and only that is stored.
    palette = frames[len(frames) // 3].quantize(PALETTE)
    first, *rest = [frame.quantize(PALETTE, palette=palette, dither=Image.Dither.NONE) for frame in frames]
    step = round(1000 * swing.dt)
    lengths = [step] * len(rest) + [REST]
    first.save(path, "GIF", save_all=True, append_images=rest, duration=lengths, loop=0, optimize=False)

"""A figure of a swing-up: the pendulum at some moments with the path of its tip, and its state over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .style import BLUE, GREY, INK, ORANGE, new_figure, styled

HEIGHTS = (-0.8, -0.1, 0.6, 0.98)  # the pendulum is drawn when −cos q₁ first reaches these values
GAP, TRAIL = 0.8, 1.0  # the gap between two drawings in lengths of a link; the duration of a trail in seconds


@dataclass(frozen=True, eq=False)
class Swing:
    """A closed-loop simulation: times (n,), states (n, 4) as (q1, q2, w1, w2), and the torques (n, 2) before them."""

    ts: np.ndarray
    states: np.ndarray
    torques: np.ndarray

    @property
    def dt(self) -> float:
        return float(self.ts[1] - self.ts[0])

    def joints(self) -> np.ndarray:
        """The end of each link, (n, 2 links, 2), in coordinates with y upwards."""
        q1, q2 = self.states[:, 0], self.states[:, 1]
        first = np.stack((np.sin(q1), -np.cos(q1)), -1)
        return np.stack((first, first + np.stack((np.sin(q1 + q2), -np.cos(q1 + q2)), -1)), -2)

    def moments(self) -> list[int]:
        """The steps that are drawn: the start, some during the rise, the largest overshoot, and the end."""
        height = -np.cos(self.states[:, 0])
        up = [int(np.argmax(height >= level)) for level in HEIGHTS if (height >= level).any()]
        beyond = [up[-1] + int(height[up[-1] :].argmin())] if len(up) == len(HEIGHTS) else []
        return list(dict.fromkeys([0, *up, *beyond, len(height) - 1]))


@styled
def swing_figure(swing: Swing) -> Any:
    """Draw the pendulum at some moments with the path of its tip; below, angles, velocities and torques over time."""
    chosen = swing.moments()
    figure = new_figure(9.6, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.75))
    frames, panels = above.subplots(), below.subplots(2, 2, sharex=True)
    edge = 0.0
    for moment in chosen:
        edge = draw_pendulum(frames, swing, moment, edge) + GAP
    frames.set(xlim=(-GAP, edge), ylim=(-2.2, 2.9), aspect="equal")
    frames.set_axis_off()
    frames.set_title("A learned controller swings up the true pendulum")
    draw_panels(panels, swing)
    for axes in panels.flat:
        for moment in chosen[1:-1]:
            axes.axvline(float(swing.ts[moment]), color=GREY, linewidth=0.6, alpha=0.6, zorder=0)
    return figure


def draw_pendulum(axes: Any, swing: Swing, moment: int, edge: float) -> float:
    """Draw the pendulum to the right of `edge`, with a fading trail; return the right edge of the drawing."""
    first = max(0, moment - round(TRAIL / swing.dt))
    ends = swing.joints()
    reach = ends[first : moment + 1, :, 0]
    x = edge - min(float(reach.min()), -0.4)
    pivot = np.array([[x, 0.0]])
    ends = ends + pivot
    for i in range(first, moment):
        fresh = (i + 1 - first) / (moment - first)
        trail: dict[str, Any] = {"color": ORANGE, "linewidth": 2.4, "solid_capstyle": "butt"}
        axes.plot(*ends[i : i + 2, 1].T, **trail, alpha=0.8 * fresh**1.5)
        if (moment - i) % 4 == 0:
            links = np.concatenate((pivot, ends[i])).T
            axes.plot(*links, color=BLUE, linewidth=2.0, alpha=0.22 * fresh, solid_capstyle="round")
    links = np.concatenate((pivot, ends[moment])).T
    axes.plot(*links, color=BLUE, linewidth=4.0, solid_capstyle="round", zorder=3)
    axes.plot(*links[:, 1:], "o", color=BLUE, markeredgecolor="white", markeredgewidth=1.2, markersize=8, zorder=4)
    axes.plot(x, 0.0, "s", color=INK, markersize=6, zorder=5)
    axes.text(x, 2.45, f"{float(swing.ts[moment]):.1f} s", ha="center", color=INK)
    return x + max(float(reach.max()), 0.4)


def draw_panels(panels: Any, swing: Swing) -> None:
    """Draw four panels: cosines, sines, velocities and torques."""
    q, w = swing.states[:, :2], swing.states[:, 2:]
    what = (
        ("Where the links point: cosine", np.cos(q), ("cos q₁", "cos q₂")),
        ("Sine", np.sin(q), ("sin q₁", "sin q₂")),
        ("Angular velocity, 1/s", w, ("q₁′", "q₂′")),
        ("Torque", swing.torques, ("u₁", "u₂")),
    )
    for axes, (title, values, names) in zip(panels.flat, what, strict=True):
        for i, (name, colour) in enumerate(zip(names, (BLUE, ORANGE), strict=True)):
            axes.plot(swing.ts, values[:, i], color=colour, linewidth=1.6, label=name)
        axes.set(xlim=(0.0, 20.0), xticks=range(0, 21, 5))
        axes.set_title(title)
        axes.legend(loc="best", ncols=2)
    for goal in (-1.0, 1.0):
        panels[0, 0].axhline(goal, color=INK, linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
    for axes in panels[1]:
        axes.set_xlabel("t (s)")

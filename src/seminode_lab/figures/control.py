"""F2, F3 and an animation: a trained model of the pendulum swings up the true one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..measures import GAINS
from ..store import Finished
from ..uprightness import ROUGHLY, Uprightness, of_run
from .animation import animate
from .selection import of_experiment
from .style import LABELS, Picture, new_figure, styled
from .swing import Swing, swing_figure

#: The published frames show a model trained with the seminorm. So do ours, if there is one.
PREFERRED = ("seminorm", "published", "mixed", "best")

FRAMES = range(0, 200, 20)
WORLD, HALF_WIDTH = 2.2, 0.1
LINK, JOINT = (0.0, 0.8, 0.8), (0.8, 0.8, 0.0)


@dataclass(frozen=True)
class Choice:
    """The swing-up that is shown, and its description."""

    swing: Swing
    run: Finished
    gains: str
    upright: Uprightness | None
    counts: str  # over all runs

    @property
    def sentence(self) -> str:
        end = "does not settle"
        if self.upright is not None and self.upright.since is not None:
            since, last = f"{self.upright.since:.1f} s", f"{self.upright.last:.2g}°"
            end = f"stays within {self.upright.bound:g}° of upright from {since} on, and is off by {last} at the end"
        seed, mode = self.run.settings["seed"], LABELS[self.run.settings["mode"]]
        gains = GAINS[self.gains]
        return f"With {gains}, the true pendulum {end} (model trained with {mode}, seed {seed}). {self.counts}"


def choose(runs: Sequence[Finished]) -> Choice | None:
    """The first run whose pendulum settles with the published gains, else with damping, else the first run."""
    order = sorted(runs, key=lambda run: (PREFERRED.index(run.settings["mode"]), run.settings["seed"]))
    kept = [(run, run.arrays("control")) for run in order]
    for wanted in (True, False):
        for gains in GAINS:
            for run, arrays in kept:
                upright = of_run(run, gains)
                if f"{gains}_states" in arrays and (settles(upright) or not wanted):
                    swing = Swing(arrays["ts"], arrays[f"{gains}_states"], arrays[f"{gains}_torques"])
                    return Choice(swing, run, gains, upright, settled_counts([run for run, arrays in kept if arrays]))
    return None


def settles(upright: Uprightness | None) -> bool:
    """Whether a pendulum stays upright in the end, at least roughly."""
    return upright is not None and upright.bound is not None


def settled_counts(runs: Sequence[Finished]) -> str:
    published, braked = (sum(settles(of_run(run, gains)) for run in runs) for gains in GAINS)
    return (
        f"Of {len(runs)} runs, {published} settle within {ROUGHLY:g}° with the published gains and {braked} with the "
        "damping."
    )


@styled
def frames_picture(choice: Choice) -> Picture:
    """F2."""
    from matplotlib.patches import Circle, Polygon

    width, height = 12.0, 1.3
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    side = 1 / len(FRAMES)
    ends = choice.swing.joints()
    for frame, i in enumerate(FRAMES):
        axes = figure.add_axes((frame * side, 0.5 - side * width / height / 2, side, side * width / height))
        axes.axhline(1.0, color="black", linewidth=0.8)
        begin = np.zeros(2)
        for end in ends[min(i, len(ends) - 1)]:
            along = end - begin
            across = HALF_WIDTH * np.array([-along[1], along[0]])  # links are of length 1
            corners = [begin + across, end + across, end - across, begin - across]
            axes.add_patch(Polygon(corners, facecolor=LINK, edgecolor="black", linewidth=0.4))
            axes.add_patch(
                Circle((begin[0], begin[1]), HALF_WIDTH, facecolor=JOINT, edgecolor="black", linewidth=0.4, zorder=3)
            )
            begin = end
        axes.set(xlim=(-WORLD, WORLD), ylim=(-WORLD, WORLD), xticks=[], yticks=[])
        axes.spines[["top", "right"]].set_visible(True)
    caption = f"States 0, 20, …, 180: seconds 0 to 9. {choice.sentence}"
    return Picture("f2-control-frames", "F2, the swing-up of the pendulum", caption, figure)


@styled
def evolution_picture(choice: Choice) -> Picture:
    """F3."""
    swing = choice.swing
    figure = new_figure(12.0, 4.0)
    panels = figure.subplots(2, 3, sharex=True)
    torques = swing.torques.copy()
    torques[0] = 0.0  # none has acted yet
    for i, (row, target) in enumerate(zip(panels, (-1.0, 1.0), strict=True)):
        q = swing.states[:, i]
        row[0].plot(swing.ts, np.cos(q), "--", color="tab:blue", label="cos")
        row[0].plot(swing.ts, np.sin(q), "-", color="tab:blue", label="sin")
        row[0].axhline(target, color="black", linewidth=0.6, linestyle="--")
        row[0].legend(loc="best")
        row[1].plot(swing.ts, swing.states[:, 2 + i], color="tab:blue")
        row[2].plot(swing.ts, torques[:, i], color="tab:blue")
        for axes, name in zip(row, ("q", r"\dot{q}", "u"), strict=True):
            axes.axhline(0.0, color="black", linewidth=0.6)
            axes.set_ylabel(f"${name}_{i + 1}$")
            axes.set(xlim=(0.0, 20.0), xticks=range(0, 21, 5))
    for axes in panels[1]:
        axes.set_xlabel("t (s)")
    caption = f"Angles, velocities and torques over 20 s; dashed lines are the targets. {choice.sentence}"
    return Picture("f3-state-evolution", "F3, the state of the pendulum during the swing-up", caption, figure)


def swing_picture(choice: Choice) -> Picture:
    """Our own figure: an image and an animation."""
    caption = f"In real time, with the path of the tip and the torques. {choice.sentence}"
    figure: Any = swing_figure(choice.swing)
    return Picture("swing-up", "The swing-up", caption, figure, partial(animate, choice.swing))


def pictures(runs: Sequence[Finished]) -> list[Picture]:
    choice = choose(of_experiment(runs, "hnn"))
    return [] if choice is None else [frames_picture(choice), evolution_picture(choice), swing_picture(choice)]

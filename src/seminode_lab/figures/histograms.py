"""F4 and F5: at which times the backward pass of the pendulum evaluates the field and rejects steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..models import pendulum
from ..modes import WINDOW
from ..store import Finished
from .selection import ByMode, by_row, made_of, of_experiment
from .style import COLOURS, LABELS, Picture, new_figure, styled

BINS = 200
SIZE = (7.0, 2.0)
#: Seconds from the first point of a window to the last.
SPAN = pendulum.DT * (WINDOW - 1)
AXIS = (
    f"A window spans {SPAN:.2f} s, from the first point (left) to the eighth (right), with a solve between any two "
    f"points; the axis is cut into {BINS} bins. Times below 0 are steps that run past the end."
)


def times_of(runs: Sequence[Finished], what: str) -> np.ndarray:
    """All times of a kind from all evaluation passes over the training set of all runs."""
    kept = [run.times(each["epoch"]).get(what) for run in runs for each in run.metrics]
    return np.concatenate([np.empty(0, np.float32), *(each for each in kept if each is not None)])


def draw_histograms(
    axes: Any, times: Mapping[str, np.ndarray], colours: Mapping[str, str], ylabel: str, bins: Any = BINS
) -> None:
    """Draw histograms over each other; if `bins` is a number, each has its own edges."""
    from matplotlib.patches import Patch

    handles = []
    for mode, each in times.items():
        style = {"color": colours[mode], "alpha": 0.8, "linewidth": 0}
        if len(each):
            axes.hist(each, bins=bins, **style)
        handles.append(Patch(**style, label=f"{LABELS[mode]} ({len(each):,})"))
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), borderaxespad=0.1)
    axes.margins(x=0.02)
    axes.set_xlabel("time t in a window (s); the backward pass runs from right to left")
    axes.set_ylabel(ylabel)
    axes.yaxis.get_major_locator().set_params(integer=True)


@styled
def evaluations_picture(modes: ByMode, published: bool) -> Picture | None:
    """F4: the two procedures of the paper, or the norms as defined and seminode's best."""
    shown = _procedures(modes, published)
    times = {mode: times_of(runs, "evaluations") for mode, runs in shown.items()}
    if not any(map(len, times.values())):
        return None
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    draw_histograms(axes, times, _colours(shown), "evaluations per bin")
    caption = "Times of all backward evaluations in the evaluation passes over the training set; "
    caption += f"{made_of(shown)}. {AXIS} The bar at t = {SPAN:.2f} contains the first evaluation of every batch."
    if published:
        name, how = "f4-evaluations-published", "as published"
    else:
        name, how = "f4-evaluations", "norms as defined"
        if {"mixed", "seminorm"} <= times.keys() and len(times["mixed"]) == len(times["seminorm"]):
            caption += " Both norms need the same number of evaluations, so blue hides red."
    return Picture(name, f"F4, where the pendulum's field is evaluated, {how}", caption, figure)


@styled
def rejections_picture(modes: ByMode) -> Picture | None:
    """F5: the steps that the solver rejected, and those that the paper's counter takes for rejected."""
    shown = _procedures(modes, published=True)
    kinds = {"rejected by the solver": "rejected", "rejected by the strided counter": "published_rejected"}
    times = {title: {m: times_of(runs, what) for m, runs in shown.items()} for title, what in kinds.items()}
    if not any(len(times_of(runs, "evaluations")) for runs in shown.values()):
        return None
    figure = new_figure(SIZE[0], 2 * SIZE[1])
    everything = np.concatenate([np.array([0.0, SPAN]), *(x for each in times.values() for x in each.values())])
    edges = np.linspace(float(everything.min()), float(everything.max()), BINS + 1)
    for axes, (title, each) in zip(figure.subplots(2, 1), times.items(), strict=True):
        draw_histograms(axes, each, _colours(shown), "steps per bin", edges)
        axes.set_title(title.capitalize())
        axes.set_xlim(edges[0] - 0.01, edges[-1] + 0.01)
        if not any(map(len, each.values())):
            axes.set_yticks([0])
            axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="0.5")
    said = [", ".join(f"{len(x):,} ({LABELS[mode]})" for mode, x in each.items()) for each in times.values()]
    caption = "Where the backward pass rejects steps, in the evaluation passes over the training set; "
    caption += f"{made_of(shown)}. {AXIS} The solver rejected {said[0]}. "
    caption += f"The paper's counter finds {said[1]}. "
    caption += (
        "The additional ones are artefacts: every output restarts the solve with additional evaluations, after which "
        "the counter looks at the wrong evaluations."
    )
    return Picture("f5-rejections", "F5, rejected steps of the pendulum, correct and as counted", caption, figure)


def pictures(runs: Sequence[Finished]) -> list[Picture]:
    rows = by_row(of_experiment(runs, "hnn"))
    if not rows:
        return []
    modes = next(iter(rows.values()))
    drawn = [evaluations_picture(modes, True) if "published" in modes else None]
    drawn += [evaluations_picture(modes, False), rejections_picture(modes)]
    return [each for each in drawn if each is not None]


def _procedures(modes: ByMode, published: bool) -> ByMode:
    """The modes of a variant. Without runs in the mode `published`, those with the norms as defined."""
    wanted = ("mixed", "published") if published and "published" in modes else ("mixed", "seminorm", "best")
    return {mode: modes[mode] for mode in wanted if mode in modes}


def _colours(shown: ByMode) -> dict[str, str]:
    """The colours of modes. The published seminorm is blue, as in the paper, if the correct one is not shown."""
    alone = {"published": COLOURS["seminorm"]} if "seminorm" not in shown else {}
    return COLOURS | alone

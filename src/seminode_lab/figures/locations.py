"""Where backward passes of neural CDEs and flows accept and reject steps, as F5 shows it for the pendulum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..store import Finished
from .histograms import times_of
from .selection import ByMode, by_row, made_of, of_experiment, row_label
from .style import COLOURS, LABELS, Picture, new_figure, styled

BINS = 80
SHOWN = ("mixed", "seminorm")
KINDS = {"accepted": "accepted steps per bin", "rejected": "rejected steps per bin"}
#: What the axis shows.
AXES = {
    "ncde": "time t in a series; the backward pass runs from right to left",
    "cnf": "time t in a block; the backward pass runs from right to left",
}
#: What a reader must know about the axis.
EXTENTS = {
    "ncde": "A series has a knot at every whole t, where steps end.",
    "cnf": "The backward solve of a block runs from t = 1 to 0; below 0 are last steps that run past the end, from "
    "where the published procedure interpolates back.",
}
NAMES = {"ncde": "neural CDE", "cnf": "flow"}


@styled
def locations_picture(experiment: str, modes: ByMode, name: str) -> Picture | None:
    """Histograms of the ends of accepted and rejected steps, for the two norms of the paper."""
    shown = {mode: modes[mode] for mode in SHOWN if mode in modes}
    times = {what: {mode: times_of(runs, what) for mode, runs in shown.items()} for what in KINDS}
    if not any(len(each) for each in times["accepted"].values()):
        return None
    ends = np.concatenate([each for own in times.values() for each in own.values()])
    edges = np.linspace(float(ends.min()), float(ends.max()), BINS + 1)
    figure = new_figure(7.0, 3.8)
    panels: Any = figure.subplots(2, 1, sharex=True)
    for axes, (what, label) in zip(panels, KINDS.items(), strict=True):
        for mode, each in times[what].items():
            axes.hist(each, bins=edges, histtype="step", color=COLOURS[mode], label=f"{LABELS[mode]} ({len(each):,})")
        axes.set_ylabel(label)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(shown), borderaxespad=0.1)
    panels[1].set_xlabel(AXES[experiment])
    shares = ", ".join(f"{_share(times, mode):.1f} % ({LABELS[mode]})" for mode in shown)
    caption = (
        f"{row_label(modes)}: where the backward passes of all recorded evaluation passes end their steps, in {BINS} "
        f"bins; {made_of(shown)}. {EXTENTS[experiment]} Rejected are {shares}."
    )
    return Picture(name, f"Accepted and rejected steps of the {NAMES[experiment]}", caption, figure)


def _share(times: dict[str, dict[str, np.ndarray]], mode: str) -> float:
    accepted, rejected = (len(times[what][mode]) for what in KINDS)
    return 100 * rejected / max(1, accepted + rejected)


def pictures(runs: Sequence[Finished]) -> list[Picture]:
    """One figure per experiment: of the row with the tightest tolerance that has both norms."""
    found = []
    for experiment in NAMES:
        rows = [modes for modes in by_row(of_experiment(runs, experiment)).values() if set(SHOWN) <= modes.keys()]
        drawn = locations_picture(experiment, rows[-1], f"locations-{experiment}") if rows else None
        found += [] if drawn is None else [drawn]
    return found

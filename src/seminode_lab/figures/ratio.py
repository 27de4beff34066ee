"""F6: the saving of the seminorm over the ratio of parameters to state. The paper reports that it grows with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import published
from ..measures import DATA, published_nfe, true_nfe
from ..settings import rows as paper_rows
from ..sizes import sizes
from ..spread import Spread, saving
from ..store import Finished
from .selection import ByMode, by_row, row_label, settings_of
from .style import COLOURS, GREY, INK, Picture, new_figure, styled


class Point(NamedTuple):
    """A model with d channels of state and p parameters in its field, and its saving of backward NFE."""

    name: str
    d: int
    p: float
    saving: float  # per cent

    @property
    def ratio(self) -> float:
        """The size of the adjoint system, relative to that without parameters.

        >>> round(Point("Neural CDE", 90, 86_050, 39.6).ratio, 1)
        476.4
        """
        return (1 + 2 * self.d + self.p) / (1 + 2 * self.d)


#: The published rows that are shown. For the neural CDE, it is the loosest tolerance.
NAMES = {
    "cnf-mnist-32": "MNIST 32",
    "cnf-cifar10-64": "CIFAR-10",
    "cnf-mnist-64": "MNIST 64",
    "cnf-mnist-128": "MNIST 128",
    "ncde-speech_commands-0.001": "Neural CDE",
    "hnn-pendulum": "HNN",
}


@functools.cache
def published_points() -> tuple[Point, ...]:
    """The six points of the paper, with the savings from its tables."""
    savings = {row.name: row.saving for row in published.ROWS}
    settings = {row.row: row for row in paper_rows("paper")}
    return tuple(Point(name, *sizes(settings[row]), savings[row]) for row, name in NAMES.items())


def saved(modes: ByMode, mode: str, count: Callable[[Finished], float]) -> float | None:
    """The saving compared with the mixed norm, from means over runs, in per cent."""
    ours, default = (Spread.of(count(run) for run in modes.get(name, ())) for name in (mode, "mixed"))
    return saving(ours, default)


class Kind(NamedTuple):
    """One kind of points in the figure."""

    label: str
    colour: str
    marker: str
    points: Sequence[Point]


def our_points(rows: dict[str, ByMode]) -> list[Kind]:
    """The points of our runs: with the published procedure, correct, and seminode's best."""
    compatible, correct, best = [], [], []
    for modes in rows.values():
        first = next(iter(modes.values()))[0]
        name, (d, p) = row_label(modes), sizes(settings_of(first))
        slicing = "published" if "published" in modes else "seminorm"
        for points, mode, count in (
            (compatible, slicing, published_nfe),
            (correct, "seminorm", true_nfe),
            (best, "best", true_nfe),
        ):
            found = saved(modes, mode, count)
            if found is not None:
                points.append(Point(name, d, p, found))
    return [
        Kind("ours, by the published procedure", COLOURS["published"], "s", compatible),
        Kind("ours, correct", COLOURS["seminorm"], "D", correct),
        Kind("ours, best", COLOURS["best"], "^", best),
    ]


def _shown(rows: dict[str, ByMode]) -> dict[str, ByMode]:
    """All rows, but only the loosest tolerance of a neural CDE, as published. Rows are sorted from loose to tight."""
    found: dict[tuple[str, str], str] = {}
    for row, modes in rows.items():
        settings = next(iter(modes.values()))[0].settings
        own = "" if settings["experiment"] == "ncde" else row
        found.setdefault((settings["data"], own), row)
    return {row: rows[row] for row in found.values()}


@styled
def ratio_picture(runs: Sequence[Finished]) -> Picture | None:
    rows = _shown(by_row(runs))
    kinds = [kind for kind in our_points(rows) if kind.points]
    if not kinds:
        return None
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    axes.axhline(0.0, color=GREY, linewidth=0.8, zorder=0)
    _draw_points(axes, Kind("published", INK, "o", published_points()), hollow=True)
    for point in published_points():
        axes.annotate(point.name, (point.ratio, point.saving), (-6, 0), **_SMALL, ha="right", color=INK)
    for kind in kinds:
        _draw_points(axes, kind, hollow=kind.marker == "s")  # so that points at the same place are visible
    for at in _one_each(kinds):
        axes.annotate(at.name, (at.ratio, at.saving), (7, 6), **_SMALL, ha="left", color=COLOURS["seminorm"])
    axes.set(xscale="log", xlabel="(1 + 2d + p) / (1 + 2d)", ylabel="fewer backward NFE (%)")
    axes.margins(x=0.22, y=0.08)
    figure.legend(loc="outside upper center", ncols=4)
    caption = (
        "Saving of backward evaluations over the size of the adjoint state with the parameters, relative to that "
        "without them: d is the size of the state of one sample, p the number of parameters of the field. The six "
        f"published points, and ours for {len(rows)} rows. "
    )
    caption += _pendulum(kinds)
    return Picture("f6-parameter-state-ratio", "F6, parameters, state and saving", caption.strip(), figure)


_SMALL: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}


def _draw_points(axes: Any, kind: Kind, hollow: bool = False) -> None:
    x, y = [point.ratio for point in kind.points], [point.saving for point in kind.points]
    face = {"markerfacecolor": "none", "markersize": 8} if hollow else {"markersize": 6, "markeredgewidth": 0}
    axes.plot(x, y, kind.marker, color=kind.colour, label=kind.label, **face)


def _one_each(kinds: Sequence[Kind]) -> list[Point]:
    """The lowest point of every row, which gets the label."""
    found: dict[str, Point] = {}
    for point in (point for kind in kinds for point in kind.points):
        if point.name not in found or point.saving < found[point.name].saving:
            found[point.name] = point
    return list(found.values())


def _pendulum(kinds: Sequence[Kind]) -> str:
    """A sentence about the point of the pendulum."""
    found = {kind.label: point.saving for kind in kinds for point in kind.points if point.name == DATA["pendulum"]}
    compatible, correct = found.get("ours, by the published procedure"), found.get("ours, correct")
    if compatible is None or correct is None:
        return ""
    return (
        f"On the pendulum (HNN), the saving is {compatible:.0f} % with the published slice and {correct:.0f} % with "
        "the seminorm as defined."
    )


def pictures(runs: Sequence[Finished]) -> list[Picture]:
    found = ratio_picture(runs)
    return [] if found is None else [found]

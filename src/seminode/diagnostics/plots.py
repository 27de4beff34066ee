"""The work–precision plot of a profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .results import Profile, Row
from .subject import largest

#: The palette of Okabe and Ito, which is safe for colour-blind readers.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#999999")
MARKERS = "os^DvP*X"

Price = Callable[[Row], float]
PRICES: tuple[tuple[str, Price], ...] = (
    ("forward + backward, seconds", lambda row: row.seconds),
    ("forward + backward, F", lambda row: row.cost),
)


def check_matplotlib() -> None:
    """Raise an error that says what to install if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("draw: needs matplotlib, which is not installed; try pip install 'seminode[lab]'") from error


def draw(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Plot gradient errors against seconds and against F.

    Colours are adjoints, markers are solvers. Compiled contenders have hollow markers and dashed lines. Lines connect
    the tolerances of a contender. A ring marks the recommended row. Above the dotted line, a gradient is not good
    enough.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in profile.rows if row.measured and row.error == row.error]
    if not rows:
        raise ValueError("draw: expected at least one row with a gradient error, found none")
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    for axis, (label, price) in zip(figure.subplots(1, 2, sharey=True), PRICES, strict=True):
        _panel(axis, profile, rows, price)
        axis.set_xlabel(label)
    figure.axes[0].set_ylabel("relative error of the gradient")
    handles = _handles(rows)
    columns = min(6, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    if "summary" in profile.problem:
        figure.suptitle(str(profile.problem["summary"]), fontsize="small", wrap=True)
    figure.savefig(Path(path), dpi=150)


def _panel(axis: Any, profile: Profile, rows: Sequence[Row], price: Price) -> None:
    floor = max(profile.reference.good_to or 0.0, 1e-16)  # smaller errors are not resolved
    for curve in _curves(rows):
        style = _style(curve[0], rows)
        axis.loglog([price(row) for row in curve], [max(row.error, floor) for row in curve], **style)
    chosen = profile.recommendation
    if chosen is not None:
        axis.axhline(chosen.limit, color="0.6", linestyle=":", linewidth=1)
        at = [price(chosen.row)], [max(chosen.row.error, floor)]
        axis.loglog(*at, "o", markersize=14, markerfacecolor="none", color="0.3", linewidth=1)
    axis.grid(True, color="0.9", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _curves(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each contender at all tolerances, from loose to tight."""
    curves: dict[Any, list[Row]] = {}
    for row in rows:
        curves.setdefault((row.contender.adjoint, row.contender.solver, row.contender.compile), []).append(row)
    return [sorted(curve, key=lambda row: -(largest(row.contender.rtol) or 0.0)) for curve in curves.values()]


def _style(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    adjoints, solvers = _names(rows)
    contender = row.contender
    style = {
        "color": COLOURS[adjoints.index(contender.adjoint_name) % len(COLOURS)],
        "marker": MARKERS[solvers.index(contender.solver_name) % len(MARKERS)],
        "markersize": 6,
        "linewidth": 1.2,
    }
    return style | ({"markerfacecolor": "none", "linestyle": "--"} if contender.compile else {})


def _names(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    return sorted({row.contender.adjoint_name for row in rows}), sorted({row.contender.solver_name for row in rows})


def _handles(rows: Sequence[Row]) -> list[Any]:
    from matplotlib.lines import Line2D

    adjoints, solvers = _names(rows)
    handles = [Line2D([], [], color=COLOURS[i % len(COLOURS)], label=name) for i, name in enumerate(adjoints)]
    bare: dict[str, Any] = {"linestyle": "none", "color": "0.3"}
    handles += [Line2D([], [], marker=MARKERS[i % len(MARKERS)], label=name, **bare) for i, name in enumerate(solvers)]
    if any(row.contender.compile for row in rows):
        handles.append(Line2D([], [], marker="o", markerfacecolor="none", label="compiled (hollow)", **bare))
    return handles

"""The figure of the race: time against gradient error, or, of results with one tolerance, times in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .curves import Envelope, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
COLOURS = {
    "seminode": "#c2185b",
    "torchdiffeq": "#5c6bc0",
    "torchode": "#26a69a",
    "torchcde": "#8d6e63",
    "diffrax": "#b26a00",
}


def panel(axes: Axes, result: Result) -> None:
    """One dot per setting at its minimum, the fastest at the top; a line to its median; its gradient error."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows = [row for row in result["rows"] if "minimum" in row and "error" in row]
    rows.sort(key=lambda row: row["minimum"])
    for place, row in enumerate(rows):
        colour = COLOURS.get(row["library"], "black")
        axes.plot([row["minimum"], row["median"]], [place, place], color=colour, linewidth=1.5, alpha=0.5)
        axes.plot(row["minimum"], place, "o" if row["compiled"] else "s", color=colour, markersize=5)
        axes.annotate(
            f"{row['error']:.0e}",
            (1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
            color="0.35",
        )
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=6)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(COLOURS.get(row["library"], "black"))
        label.set_fontweight("bold" if row["library"] == "seminode" else "normal")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", which="both", linewidth=0.3, color="0.85")
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("seconds, forward and backward", fontsize=7)
    axes.set_title(result["problem"], fontsize=9, fontweight="bold", loc="left")
    axes.set_title("gradient error", fontsize=6, color="0.35", loc="right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def curves(axes: Axes, result: Result) -> None:
    """Time against gradient error: a thin line for every setting, a thick one for the envelope of each library."""
    for row in result["rows"]:
        found = points(row)
        style = "-" if row["compiled"] else ":"
        colour = COLOURS.get(row["library"], "black")
        xs, ys = [each.error for each in found], [each.minimum for each in found]
        axes.plot(xs, ys, style, color=colour, linewidth=0.7, alpha=0.5, marker=".", markersize=3)
    for library, colour in COLOURS.items():
        envelope = Envelope([row for row in result["rows"] if row["library"] == library])
        errors = envelope.errors
        if errors:
            grid = [errors[0] * (errors[-1] / errors[0]) ** (i / 200) for i in range(201)]
            readings = [(error, at.seconds) for error in grid if (at := envelope.at(error)) is not None]
            axes.plot(*zip(*readings, strict=True), color=colour, linewidth=2.0, label=library)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(which="both", linewidth=0.3, color="0.85")
    axes.tick_params(labelsize=7)
    axes.set_xlabel("gradient error" if result.get("differentiate", True) else "error of the outputs", fontsize=7)
    axes.set_ylabel("seconds", fontsize=7)
    axes.set_title(result["problem"], fontsize=9, fontweight="bold", loc="left")
    axes.legend(fontsize=6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(results: Sequence[Result], out: Path) -> None:
    from matplotlib.figure import Figure

    columns = 2 if len(results) > 1 else 1
    count = -(-len(results) // columns)
    most = max([24, *(len(each["rows"]) for each in results if not any("curve" in row for row in each["rows"]))])
    figure = Figure(figsize=(6.4 * columns, (0.6 + 0.135 * most) * count), layout="constrained")
    grid = figure.subplots(count, columns, squeeze=False).flatten()
    for axes, result in zip(grid, results, strict=False):
        (curves if any("curve" in row for row in result["rows"]) else panel)(axes, result)
    for axes in grid[len(results) :]:
        axes.set_visible(False)
    note = "circle or solid line: compiled, square or dotted line: not compiled; thick lines: the best of a library"
    figure.supxlabel(note, fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)

"""Work and precision of all adjoints: the error of a gradient over its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seminode.diagnostics.plots import COLOURS as OTHERS
from seminode.diagnostics.plots import MARKERS

from ..measures import KINDS
from ..settings import EXPERIMENTS
from ..store import read_json
from .selection import data_label
from .style import COLOURS, Picture, new_figure, styled

#: Colours of the adjoints: for those of the paper its own, for the others those of profiles.
LINES = {
    "Backsolve, mixed norm, fresh": COLOURS["mixed"],
    "Backsolve, mixed per tensor, fresh": "tab:pink",
    "Backsolve, seminorm, fresh": COLOURS["seminorm"],
    "Backsolve, published slice, fresh": COLOURS["published"],
    "Backsolve, mixed norm, carry": "tab:orange",
    "Backsolve, seminorm, carry": OTHERS[2],
    "Quadrature": OTHERS[3],
    "Reversible": "tab:cyan",
    "Interpolating": OTHERS[1],
    "Replay": COLOURS["best"],
    "Checkpointed(10)": OTHERS[6],
    "Direct": OTHERS[0],
}
#: Names in files of earlier versions.
FORMER = {"Backsolve, default norm, fresh": "Backsolve, mixed norm, fresh"}


def fastest(row: Mapping[str, Any]) -> float:
    """Seconds of the fastest pass: other work on the machine can only make a pass slower."""
    passes = zip(row.get("forward_seconds") or (), row.get("backward_seconds") or (), strict=True)
    return min((sum(each) for each in passes), default=row["median_seconds"])


#: Measures of the cost of a gradient. `Direct` has no backward evaluations, so the sum of both passes is compared.
PRICES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "forward + backward, seconds": fastest,
    "forward + backward, NFE": lambda row: row["forward"]["nfe"] + row["backward"]["nfe"],
}


def curves(found: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The measurements of every adjoint, from loose to tight tolerances."""
    rows = [{**row, "name": FORMER.get(row["name"], row["name"])} for row in found["rows"]]
    names = dict.fromkeys(row["name"] for row in rows)
    measured = [row for row in rows if row["reason"] is None and row["params_error"] is not None]
    by_name = {name: [row for row in measured if row["name"] == name] for name in names}
    return {name: sorted(rows, key=lambda row: -row["rtol"]) for name, rows in by_name.items() if rows}


@styled
def precision_picture(found: Mapping[str, Any]) -> Picture | None:
    shown = curves(found)
    if not shown:
        return None
    experiment = found["settings"]["experiment"]
    figure = new_figure(9.6, 4.4)
    for axes, (label, price) in zip(figure.subplots(1, 2, sharey=True), PRICES.items(), strict=True):
        for name, rows in shown.items():
            _draw(axes, name, rows, price)
        if _coarse(found, shown):
            axes.axhline(found["reference"]["good_to"], color="0.6", linestyle=":", linewidth=1)
        _decades(axes.xaxis, "{x:g}")
        axes.set_xlabel(label)
        axes.grid(True, color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
    _decades(figure.axes[0].yaxis, "{x:.0e}")
    figure.axes[0].set_ylabel("relative error, gradient of the field's parameters")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4)
    title = f"{KINDS[experiment]}: work and precision"
    return Picture(f"precision-{experiment}", title, _caption(found, shown), figure)


def state_of(found: Mapping[str, Any]) -> str:
    """What the model of a measurement has learned, in words that follow "the model"."""
    weights = found.get("weights")
    if weights is None:
        fitted = found["plan"].get("fitted")
        return f"after {fitted} iterations of regression" if fitted else "at its initialisation"
    judged = ""
    if "validation_accuracy" in weights:
        judged = f", validation accuracy {100 * weights['validation_accuracy']:.1f} %"
    elif "validation_loss" in weights:
        judged = f", validation loss {weights['validation_loss']:.4g}"
    return f"after {weights['updates']:,} updates (run {weights['run']} of the preset {weights['preset']}{judged})"


def _coarse(found: Mapping[str, Any], shown: Mapping[str, Sequence[Mapping[str, Any]]]) -> bool:
    """Whether the reference is not much more accurate than what is compared with it."""
    least = min(row["params_error"] for rows in shown.values() for row in rows)
    return found["reference"]["good_to"] > 0.1 * least


def _draw(axes: Any, name: str, rows: Sequence[Mapping[str, Any]], price: Callable[..., float]) -> None:
    marker = MARKERS[list(LINES).index(name) % len(MARKERS)]
    style: dict[str, Any] = {"color": LINES[name], "marker": marker, "markersize": 6, "linewidth": 1.2, "alpha": 0.9}
    axes.loglog([price(row) for row in rows], [row["params_error"] for row in rows], label=name, **style)


def _decades(axis: Any, written: str) -> None:
    """Set ticks also within decades, with few digits, because the ranges are often shorter than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = axis.get_view_interval()
    within = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0) if high < 10 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=within if high < 200 * low else (1.0,)))
    axis.set_major_formatter(StrMethodFormatter(written))
    axis.set_minor_formatter(NullFormatter())


def _caption(found: Mapping[str, Any], shown: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    plan, reference = found["plan"], found["reference"]
    levels = ", ".join(f"{rtol:g}" for rtol, _ in plan["tolerances"])
    timed = f"those of the fastest of {plan['repeats']} passes" if plan["repeats"] > 1 else "those of one pass"
    text = (
        f"{len(shown)} adjoints on one batch of {plan['batch']} ({data_label(found['settings']['data'])}), the "
        f"model {state_of(found)}, rtol {levels}. Errors are relative to a reference in float64 ({reference['note']}), "
        f"which is accurate to {reference['good_to']:.0e}. Seconds are {timed}. Points further left "
        "are cheaper, points further down more accurate. "
    )
    loosest = max(plan["tolerances"])[0]
    counts = [
        f"{row['backward']['nfe']} with {name}"
        for name in ("Backsolve, mixed norm, fresh", "Backsolve, seminorm, fresh", "Replay")
        for row in shown.get(name, ())
        if row["rtol"] == loosest
    ]
    if _coarse(found, shown):
        text += "The dotted line is the accuracy of the reference; smaller errors cannot be resolved. "
    return text + (f"Backward evaluations at rtol {loosest:g}: {'; '.join(counts)}." if counts else "")


def pictures(folder: Path) -> list[Picture]:
    """The figures of the files `precision-<experiment>.json` in a folder."""
    paths = [folder / f"precision-{name}.json" for name in EXPERIMENTS]
    found = [precision_picture(read_json(path)) for path in paths if path.exists()]
    return [each for each in found if each is not None]

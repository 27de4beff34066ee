"""The knife edge of the pendulum: backward evaluations per interval as functions of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..knife import FILE, NORMS, Edge
from ..store import StoreError, read_json
from .style import COLOURS, GREY, LABELS, Picture, new_figure, styled

NAMES = {
    "interval": "interval between points (s)",
    "tolerance": "rtol and atol",
    "scale": "scale of the loss",
    "points": "points of a window",
}
STYLES = {"mixed": ("-", "o", 5.5), "seminorm": ("--", "x", 5.0), "published": ("-", "s", 3.5)}


@styled
def knife_picture(found: Mapping[str, Any]) -> Picture:
    edges = [Edge(**edge) for edge in found["edges"]]
    figure = new_figure(9.6, 5.2)
    panels = figure.subplots(2, 2, sharey=True).flat
    for axes, (name, label) in zip(panels, NAMES.items(), strict=True):
        own = [i for i, edge in enumerate(edges) if edge.varied == name]
        for norm in NORMS:
            line, marker, size = STYLES[norm]
            per_interval = [found["counts"][norm][i] / (edges[i].points - 1) for i in own]
            style: dict[str, Any] = {"color": COLOURS[norm], "linestyle": line, "marker": marker, "markersize": size}
            axes.plot([edges[i].value for i in own], per_interval, label=LABELS[norm], linewidth=1.2, **style)
        axes.axvline(getattr(Edge(), name), color=GREY, linestyle=":", linewidth=1)
        if name != "points":
            axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_yticks([8, 14, 20, 26], ["8", "14", "20", "26"], minor=False)
        axes.minorticks_off()
        if name == "interval":
            ticks = [0.0125, 0.025, 0.05, 0.1, 0.2]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel(label)
    figure.supylabel("backward evaluations per interval", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Picture("knife", "The knife edge of the pendulum", _caption(found, edges), figure)


def savings(found: Mapping[str, Any], norm: str) -> list[float]:
    """The savings compared with the mixed norm, in per cent, setting by setting."""
    pairs = zip(found["counts"][norm], found["counts"]["mixed"], strict=True)
    return [100.0 * (1.0 - own / base) for own, base in pairs]


def _caption(found: Mapping[str, Any], edges: list[Edge]) -> str:
    base = next((i for i, edge in enumerate(edges) if edge == Edge(varied=edge.varied)), None)
    text = (
        f"One batch of {found['batch']} windows, a network after {found['fitted']} iterations of regression. A solve "
        "takes 2 evaluations and 6 per step: 8 for one step, 14 for two. The dotted lines are the published settings, "
        "from which one quantity is varied at a time. The lines of the mixed norm and of the seminorm lie on each "
        "other where they need as many evaluations. "
    )
    if base is not None:
        counts = ", ".join(f"{found['counts'][norm][base]} ({LABELS[norm]})" for norm in NORMS)
        text += f"There a window takes {counts}. "
    slip, own = savings(found, "published"), savings(found, "seminorm")
    counts = []
    for name, label in NAMES.items():
        some = [x for x, edge in zip(slip, edges, strict=True) if edge.varied == name]
        counts.append(f"{sum(x > 5 for x in some)} of {len(some)} ({label.split(' (')[0]})")
    return text + (
        f"The slice of the published code saves more than 5 % in {', '.join(counts)}; the seminorm as defined does so "
        f"in {sum(x > 5 for x in own)} of all {len(own)} settings."
    )


def pictures(folder: Path) -> list[Picture]:
    """The figure of the file `knife.json` in a folder, if there is one."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [knife_picture(read_json(path))]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}: damaged ({type(error).__name__}: {error}); delete it to have it made again"
        ) from error

"""Where savings come from: the predicted saving of every case of the experiment over the measured one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seminode.diagnostics.plots import COLOURS, MARKERS

from ..origins import FILE, Outcome
from ..store import StoreError, read_json
from .style import GREY, Picture, new_figure, styled

NAMES = {
    "the base case": "base case",
    "width": "width of the network",
    "hidden": "size of the state",
    "atol": "atol",
    "scale": "scale of the loss",
    "layers": "depth",
    "rtol": "rtol and atol",
}


@styled
def origins_picture(found: Mapping[str, Any]) -> Picture:
    outcomes = [Outcome(**row) for row in found["outcomes"]]
    kinds = [case["varied"] for case in found["cases"]]
    figure = new_figure(9.6, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    high = max(max(each.saving, each.predicted_saving) for each in outcomes) + 5
    left.plot((-5, high), (-5, high), color=GREY, linewidth=1, linestyle=":")
    for i, kind in enumerate(dict.fromkeys(kinds)):
        own = [each for each, name in zip(outcomes, kinds, strict=True) if name == kind]
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        style |= {"linestyle": "none", "alpha": 0.85, "label": NAMES.get(kind, kind)}
        left.plot([each.predicted_saving for each in own], [each.saving for each in own], **style)
        right.plot([100 * each.by_params for each in own], [each.saving for each in own], **style)
    left.set_xlabel("predicted saving (%)")
    left.set_ylabel("measured saving of backward evaluations (%)")
    right.set_xlabel("steps whose error ratio the parameters set (%)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Picture("origins", "Where savings come from", _caption(found, outcomes), figure)


def _caption(found: Mapping[str, Any], outcomes: list[Outcome]) -> str:
    share = 100 * found["explained"]
    return (
        f"{len(outcomes)} untrained neural CDEs on one batch of {found['batch']} (Japanese Vowels), one quantity varied "
        "at a time. Left: a solve with the mixed norm records the error of the state and that of the parameters in every "
        "step; from the errors of the state, and the fact that they grow in proportion to the length of a step because "
        "the field has kinks, follows how many evaluations the seminorm will need. The prediction explains "
        f"{share:.0f} % of the variance of the savings. Right: that the parameters set most error ratios is necessary "
        "for a saving, but not sufficient. If one step per knot is enough for both norms, nothing can be saved."
    )


def pictures(folder: Path) -> list[Picture]:
    """The figure of the file `origins.json` in a folder, if there is one."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [origins_picture(read_json(path))]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}: damaged ({type(error).__name__}: {error}); delete it to have it made again"
        ) from error

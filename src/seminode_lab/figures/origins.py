"""Where savings come from: the predicted saving of every case of the experiment over the measured one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seminode.diagnostics.plots import COLOURS, MARKERS

from ..origins import CHOSEN_ON, FILE, ORDER, ORDERS, Case, Outcome, groups
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
    chosen, outcomes = [Case(**case) for case in found["cases"]], [Outcome(**row) for row in found["outcomes"]]
    figure = new_figure(9.6, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    kinked = [(case, each) for case, each in zip(chosen, outcomes, strict=True) if not case.smooth]
    high = max(max(each.saving, each.predicted_saving()) for _, each in kinked) + 5
    left.plot((-5, high), (-5, high), color=GREY, linewidth=1, linestyle=":")
    for i, kind in enumerate(dict.fromkeys(case.varied for case, _ in kinked)):
        for held_out in (True, False):
            own = [x for case, x in kinked if case.varied == kind and (case.seed != CHOSEN_ON) == held_out]
            style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
            style |= {"linestyle": "none", "alpha": 0.85, "markerfacecolor": None if held_out else "none"}
            style["label"] = NAMES.get(kind, kind) if held_out else None
            left.plot([each.predicted_saving() for each in own], [each.saving for each in own], **style)
            right.plot([100 * each.by_params for each in own], [each.saving for each in own], **style)
    left.set_xlabel("predicted saving (%)")
    left.set_ylabel("measured saving of backward evaluations (%)")
    right.set_xlabel("steps whose error ratio the parameters set (%)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Picture("origins", "Where savings come from", _caption(found, chosen, outcomes), figure)


def _share(shares: Mapping[str, float | None], order: float = ORDER) -> str:
    found = shares[f"{order:g}"]
    return "nothing" if found is None else f"{100 * found:.0f} %"


def _caption(found: Mapping[str, Any], chosen: list[Case], outcomes: list[Outcome]) -> str:
    shares, sizes = found["explained"], {name: len(each) for name, each in groups(chosen, outcomes).items()}
    held = shares["held out"]
    others = ", ".join(f"{_share(held, order)} with order {order:g}" for order in ORDERS if order != ORDER)
    text = (
        f"Untrained neural CDEs, each on one batch of {found['batch']} (Japanese Vowels), one quantity varied at a "
        "time. Left: a solve with the mixed norm records the errors of the state and of the parameters in every step; "
        "from the errors of the state follows how many evaluations the seminorm will need, if the error of a step is "
        f"in proportion to its length (order {ORDER:g}). This rule was chosen after several others had been tried, on "
        f"the {sizes['chosen on']} cases with open markers, where it explains {_share(shares['chosen on'])} of the "
        f"variance of the savings. On the {sizes['held out']} other cases, with other weights and samples, it explains "
        f"{_share(held)} ({others}). Right: that the parameters set most error ratios is necessary for a saving, but "
        "not sufficient; if one step per knot is enough for both norms, nothing can be saved."
    )
    smooth = groups(chosen, outcomes).get("smooth", [])
    if smooth:
        most = max(abs(each.saving) for each in smooth)
        text += (
            f" With softplus instead of ReLU, the saving of {len(smooth)} cases is at most {most:.1f} %, so the "
            "kinks of the field seem to be where the errors come from."
        )
        text += "" if most else " Since nothing is saved there, these cases cannot test the order."
    return text


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

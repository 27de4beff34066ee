"""The overshoot of the published procedure: where its last steps end, and what that does to the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..overshoot import FILE, NORMS, Ending
from ..store import StoreError, read_json
from .precision import state_of
from .selection import data_label
from .style import COLOURS, GREY, LABELS, Picture, new_figure, styled


def pairs(found: Mapping[str, Any], norm: str) -> list[tuple[Ending, Ending]]:
    """The passes that run past the end and those that land on it, at the same tolerances."""
    own = [Ending(**each) for each in found["endings"] if each["norm"] == norm]
    landed = {each.tolerance: each for each in own if each.lands}
    return [(each, landed[each.tolerance]) for each in own if not each.lands]


@styled
def overshoot_picture(found: Mapping[str, Any]) -> Picture:
    figure = new_figure(9.6, 3.6)
    left, right = figure.subplots(1, 2)
    for norm in NORMS:
        both = pairs(found, norm)
        tolerances = [past.tolerance for past, _ in both]
        marker = {"mixed": "o", "seminorm": "x"}[norm]
        style: dict[str, Any] = {"color": COLOURS[norm], "marker": marker}
        left.plot(tolerances, [past.furthest[1] for past, _ in both], label=LABELS[norm], **style)
        right.plot(tolerances, [past.error for past, _ in both], label=f"{LABELS[norm]}, as published", **style)
        label = f"{LABELS[norm]}, last step ends at 0"
        right.plot(tolerances, [landed.error for _, landed in both], linestyle="--", label=label, **style)
    left.axhline(0.0, color=GREY, linewidth=1, linestyle=":")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("rtol and atol")
        axes.legend(loc="best")
    left.set_ylabel("end of the last step; the solve ends at t = 0")
    right.set_yscale("log")
    right.set_ylabel("relative error of the gradient")
    return Picture("overshoot", "The last step of the published procedure", _caption(found), figure)


def _caption(found: Mapping[str, Any]) -> str:
    worst = max((pair for norm in NORMS for pair in pairs(found, norm)), key=_times)
    past, landed = worst
    same = all(a.backward_nfe == b.backward_nfe for norm in NORMS for a, b in pairs(found, norm))
    evaluations = "Both take the same number of evaluations. " if same else ""
    data = data_label(found["settings"]["data"])
    return (
        f"A flow on one batch of {found['batch']} ({data}), the model {state_of(found)}. The published procedure does "
        "not end its last step where the backward solve ends, but interpolates back. Left: where the step ends that "
        f"runs furthest. Right: the error of the gradient, compared with the same procedure whose last step ends at 0. "
        f"{evaluations}The effect is largest at a tolerance of {past.tolerance:g} ({LABELS[past.norm]}): there the "
        f"furthest step runs from t = {past.furthest[0]:.2f} to {past.furthest[1]:.2f}, and the error is "
        f"{past.error:.1e} instead of {landed.error:.1e}, {_times(worst):.0f} times as large. The reference is "
        f"accurate to {found['good_to']:.0e}."
    )


def _times(pair: Sequence[Ending]) -> float:
    return pair[0].error / max(pair[1].error, 1e-30)


def pictures(folder: Path) -> list[Picture]:
    """The figure of the file `overshoot.json` in a folder, if there is one."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [overshoot_picture(read_json(path))]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}: damaged ({type(error).__name__}: {error}); delete it to have it made again"
        ) from error

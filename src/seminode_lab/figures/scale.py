"""The scale of the loss of a flow: evaluations with both norms over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..loss_scale import NORMS, ScaledLoss, nats
from ..settings import Settings
from ..store import StoreError, read_json
from .precision import state_of
from .selection import data_label
from .style import COLOURS, GREY, LABELS, Picture, new_figure, styled


@styled
def scale_picture(measured: Sequence[Mapping[str, Any]]) -> Picture:
    """One panel per flow."""
    figure = new_figure(4.8 * len(measured), 3.2)
    for axes, found in zip(figure.subplots(1, len(measured), squeeze=False).flat, measured, strict=True):
        own = [ScaledLoss(**each) for each in found["counts"]]
        for norm in NORMS:
            at = [each.factor for each in own]
            axes.plot(at, [getattr(each, norm) for each in own], color=COLOURS[norm], marker="o", label=LABELS[norm])
        for factor in (1.0, nats(found["dims"])):
            axes.axvline(factor, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="factor of the loss in bits per dimension", ylabel="backward evaluations")
        axes.set_title(_title(Settings.of_json(found["settings"])))
        axes.legend(loc="best")
    caption = " ".join(map(_words, measured))
    caption = (
        "The same weights, samples and noise; only the loss is multiplied by a factor. Dotted: bits per dimension (1) "
        f"and nats per image. {caption} The paper does not name the scale of its loss."
    )
    return Picture("flow-scale", "The scale of a flow's loss decides what is saved", caption, figure)


def _title(settings: Settings) -> str:
    return f"{data_label(settings.data)}, {dict(settings.model).get('hidden')} channels, rtol {settings.rtol:g}"


def _words(found: Mapping[str, Any]) -> str:
    own = [ScaledLoss(**each) for each in found["counts"]]
    said = ", ".join(f"{each.saving + 0.0:.1f} % at {each.factor:.3g}" for each in own)
    settings = Settings.of_json(found["settings"])
    return f"{_title(settings)}, one batch of {found['batch']}, the model {state_of(found)}: the seminorm saves {said}."


def pictures(folder: Path) -> list[Picture]:
    """The figure of all files `scale-*.json` in a folder, if there are any."""
    paths = sorted(folder.glob("scale-*.json"))
    try:
        measured = [read_json(path) for path in paths]
        return [scale_picture(measured)] if measured else []
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(map(str, paths))
        raise StoreError(
            f"{names}: damaged ({type(error).__name__}: {error}); delete them to have them made again"
        ) from error

"""F1a and F1b: the accuracy and the backward cost of the neural CDE during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..settings import TOLERANCES
from ..store import Finished
from .selection import ByMode, by_data, by_row, made_of, of_experiment, tolerances
from .style import COLOURS, LABELS, Picture, new_figure, styled

#: The tolerance of the published curves, inferred from their final values.
MEDIUM = TOLERANCES[1][0]
SIZE = (7.0, 2.0)
PAPER_MODES = ("mixed", "seminorm")

Value = Callable[[Mapping[str, Any]], float]


class Curve(NamedTuple):
    """Mean and sample standard deviation over runs at each epoch; the deviation of a single run is NaN."""

    epochs: np.ndarray
    mean: np.ndarray
    sd: np.ndarray


def accuracy(evaluation: Mapping[str, Any]) -> float:
    return evaluation["validation"]["accuracy"]


def backward_nfe(evaluation: Mapping[str, Any]) -> float:
    return evaluation["validation"]["backward_nfe"]


def curve(runs: Sequence[Finished], value: Value, drop_lowest: bool = False) -> Curve:
    """The curve over all runs that were evaluated at an epoch. The evaluation after the last epoch is at the end."""
    found: dict[int, list[float]] = {}
    for run in runs:
        epochs = run.settings["schedule"]["epochs"]
        for each in run.metrics:
            at = epochs if each["epoch"] == epochs - 1 else each["epoch"]
            found.setdefault(at, []).append(value(each))
    at = sorted(found)
    values = [sorted(found[epoch])[drop_lowest and len(found[epoch]) > 1 :] for epoch in at]
    sd = [float(np.std(each, ddof=1)) if len(each) > 1 else float("nan") for each in values]
    return Curve(np.array(at), np.array([np.mean(each) for each in values]), np.array(sd))


def draw_curves(axes: Any, modes: ByMode, value: Value, drop_lowest: bool = False) -> dict[str, Curve]:
    """Draw a line for the mean of each mode and a band of one standard deviation."""
    found = {mode: curve(runs, value, drop_lowest) for mode, runs in modes.items()}
    for mode, each in found.items():
        axes.plot(each.epochs, each.mean, color=COLOURS[mode], label=LABELS[mode], marker="o", markersize=4)
        axes.fill_between(
            each.epochs, each.mean - each.sd, each.mean + each.sd, color=COLOURS[mode], alpha=0.5, linewidth=0
        )
    axes.set_xlim(0, max(run.settings["schedule"]["epochs"] for runs in modes.values() for run in runs))
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if value is accuracy:
        axes.set_ylim(0.0, 1.0)
    else:
        axes.set_ylim(bottom=0.0)
    return found


def _legend_above(axes: Any) -> None:
    """A legend in one line above the axes, where it hides no band."""
    columns = len(axes.get_legend_handles_labels()[0])
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.1)


@styled
def accuracy_picture(modes: ByMode, published: bool, name: str) -> Picture:
    """F1a. The published variant drops the lowest run at every epoch and shows only the two norms of the paper."""
    shown = {mode: runs for mode, runs in modes.items() if mode in PAPER_MODES} if published else modes
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    curves = draw_curves(axes, shown, accuracy, drop_lowest=published)
    axes.set_ylabel("validation accuracy")
    _legend_above(axes)
    how = "as published" if published else "all runs"
    ends = ", ".join(f"{LABELS[mode]} {100 * each.mean[-1]:.1f} %" for mode, each in curves.items())
    caption = f"Validation accuracy at {_tolerance(shown)}, mean and ±1 sample deviation of {made_of(shown)}. "
    if published:
        caption += "At every epoch the lowest run is dropped, as in the paper, which does not mention it. "
        if max(map(len, shown.values())) == 2:
            caption += "Of two runs this leaves the higher one, so the curve is a maximum without a deviation. "
        caption += f"Final values: {ends}."
    else:
        caption += f"No run is dropped. Final values: {ends}."
    return Picture(name, f"F1a, accuracy of the neural CDE, {how}", caption, figure)


@styled
def nfe_picture(modes: ByMode, name: str) -> Picture:
    """F1b."""
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    curves = draw_curves(axes, modes, backward_nfe)
    axes.set_ylabel("backward NFE")
    _legend_above(axes)
    caption = "Backward evaluations of one pass over the validation set at "
    caption += f"{_tolerance(modes)}, mean and ±1 sample deviation of {made_of(modes)}."
    if "mixed" in curves and "seminorm" in curves:
        less = 1 - curves["seminorm"].mean[-1] / curves["mixed"].mean[-1]
        caption += f" At the end of training the seminorm takes {_less(less)}."
    return Picture(name, "F1b, backward evaluations of the neural CDE", caption, figure)


@styled
def multiples_picture(panels: Sequence[ByMode], value: Value, name: str) -> Picture:
    """F1a with all runs, or F1b, for all tolerances side by side."""
    figure = new_figure(3.2 * len(panels), 2.6)
    drawn = []
    for axes, modes in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        drawn.append(draw_curves(axes, modes, value))
        axes.set_title(_tolerance(modes))
    figure.axes[0].set_ylabel("validation accuracy" if value is accuracy else "backward NFE")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(handles))
    if value is accuracy:
        title, told, which = "F1a, accuracy of the neural CDE, all runs", "Validation accuracy", "No run is dropped."
    else:
        title, told = (
            "F1b, backward evaluations of the neural CDE",
            "Backward evaluations of a pass over validation data",
        )
        which = f"Each panel has its own scale.{_at_the_end(drawn)}"
    caption = f"{told}, mean and ±1 sample deviation of {made_of(panels[0])}, by tolerance. {which}"
    return Picture(name, title, caption, figure)


def _at_the_end(drawn: Sequence[Mapping[str, Curve]]) -> str:
    """How many evaluations the seminorm saves in each panel."""
    both = [(each["mixed"], each["seminorm"]) for each in drawn if {"mixed", "seminorm"} <= each.keys()]
    said = [_less(1 - less.mean[-1] / more.mean[-1]) for more, less in both]
    return f" At the end of training the seminorm takes {', '.join(said)}." if said else ""


def pictures(runs: Sequence[Finished]) -> list[Picture]:
    """F1a as published and with all runs, and F1b, for every data set; the latter two at all tolerances."""
    parts = by_data(of_experiment(runs, "ncde"))
    found = []
    for data, part in parts.items():
        name = "" if len(parts) == 1 else f"-{data}"
        rtols = tolerances(part)
        panels = [next(iter(by_row([r for r in part if r.settings["rtol"] == rtol]).values())) for rtol in rtols]
        chosen = panels[rtols.index(MEDIUM) if MEDIUM in rtols else 0]
        if all(len(chosen.get(mode, ())) > 1 for mode in PAPER_MODES):  # otherwise the lowest cannot be dropped
            found.append(accuracy_picture(chosen, True, f"f1a-accuracy-published{name}"))
        if len(panels) > 1:
            found.append(multiples_picture(panels, accuracy, f"f1a-accuracy{name}"))
            found.append(multiples_picture(panels, backward_nfe, f"f1b-nfe{name}"))
        else:
            found.append(accuracy_picture(chosen, False, f"f1a-accuracy{name}"))
            found.append(nfe_picture(chosen, f"f1b-nfe{name}"))
    return found


def _tolerance(modes: ByMode) -> str:
    settings = next(iter(modes.values()))[0].settings
    return f"rtol {settings['rtol']:g}, atol {settings['atol']:g}"


def _less(share: float) -> str:
    """A difference in words.

    >>> _less(0.584), _less(-0.1)
    ('58 % fewer', '10 % more')
    """
    return f"{100 * abs(share):.0f} % {'fewer' if share >= 0 else 'more'}"

"""The cost of a training epoch in evaluations and seconds, for every row and mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..measures import KINDS, forward_nfe, result, seconds, true_nfe
from ..modes import MODES
from ..settings import EXPERIMENTS
from ..spread import counted
from ..store import Finished
from .selection import ByMode, by_row, of_experiment, row_label
from .style import COLOURS, INK, LABELS, Picture, new_figure, styled


def evaluations(run: Finished) -> tuple[float, float]:
    """Forward and backward evaluations per epoch, averaged over all epochs."""
    epochs = result(run)["epochs"]
    return forward_nfe(run) / epochs, true_nfe(run) / epochs


@styled
def costs_picture(runs: Sequence[Finished]) -> Picture:
    """One row of panels per experiment: evaluations and seconds."""
    experiments = [name for name in EXPERIMENTS if of_experiment(runs, name)]
    rows = {name: by_row(of_experiment(runs, name)) for name in experiments}
    heights = [0.5 + 0.22 * sum(len(modes) + 1 for modes in rows[name].values()) for name in experiments]
    figure = new_figure(9.6, 0.5 + sum(heights))
    panels = figure.subplots(len(experiments), 2, squeeze=False, height_ratios=heights)
    for name, (counts, times) in zip(experiments, panels, strict=True):
        _draw(counts, times, rows[name])
        counts.set_title(f"{KINDS[name]}: evaluations per epoch")
        times.set_title("Seconds per epoch")
    figure.legend(handles=_handles(runs), loc="outside lower center", ncols=6)
    presets = ", ".join(sorted({run.settings["preset"] for run in runs}))
    caption = (
        f"Evaluations of the field, forward (pale) and backward (full), and seconds of training, both per epoch: means "
        f"over {counted(len(runs), 'run')} (preset {presets}), with one dot per run."
    )
    return Picture("costs", "The cost of an epoch", caption, figure)


def _draw(counts: Any, times: Any, rows: dict[str, ByMode]) -> None:
    """Draw the bars of all modes and rows."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    y, ticks = 0.0, []
    for modes in rows.values():
        ticks.append((y + (len(modes) - 1) / 2, row_label(modes)))
        for mode, group in modes.items():
            forward, backward = np.array([evaluations(run) for run in group]).T
            taken = np.array([seconds(run) / result(run)["epochs"] for run in group])
            colour = COLOURS[mode]
            counts.barh(y, forward.mean(), color=colour, alpha=0.35, height=0.8)
            counts.barh(y, backward.mean(), left=forward.mean(), color=colour, height=0.8)
            times.barh(y, taken.mean(), color=colour, height=0.8)
            for axes, values in ((counts, forward + backward), (times, taken)):
                axes.plot(values, [y] * len(values), ".", color=INK, markersize=4, alpha=0.7)
            y += 1
        y += 0.8
    counts.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    times.set_yticks([])
    for axes in (counts, times):
        axes.invert_yaxis()
        axes.set_xlim(left=0.0)
        axes.margins(y=0.02)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x == round(x) else f"{x:g}"))


def _handles(runs: Sequence[Finished]) -> list[Any]:
    from matplotlib.patches import Patch

    shown = {run.settings["mode"] for run in runs}
    modes = [Patch(color=COLOURS[mode], label=LABELS[mode]) for mode in MODES if mode in shown]
    return [*modes, Patch(color="0.75", label="forward"), Patch(color="0.45", label="backward")]


def pictures(runs: Sequence[Finished]) -> list[Picture]:
    return [costs_picture(runs)] if runs else []

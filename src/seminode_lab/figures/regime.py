"""How hard the solves of flows become in training, and what the seminorm saves there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seminode.diagnostics.plots import COLOURS, MARKERS

from ..probing import MODES
from ..published import ROWS
from ..store import Finished, undamaged
from ..weights import PLACES
from .selection import data_label, settings_of
from .style import GREY, Picture, new_figure, styled

#: Backward evaluations per block in the paper, with the mixed norm: flows on MNIST, on average over training.
BLOCKS = 12


class Probe(NamedTuple):
    """Backward evaluations per block after some updates, the mean over blocks, by mode."""

    iterations: int
    evaluations: Mapping[str, float]

    @property
    def saving(self) -> float:
        """What the seminorm saves, in per cent."""
        mixed = self.evaluations["mixed"]
        return 100 * (1 - self.evaluations["seminorm"] / mixed) if mixed else 0.0


def probes(run: Finished) -> list[Probe]:
    """The counts that a run has recorded, in order."""
    found = [each["probe"] for each in run.metrics if "probe" in each]
    return [Probe(each["iterations"], {mode: sum(each[mode]) / len(each[mode]) for mode in MODES}) for each in found]


def probed(folder: Path) -> dict[str, list[Finished]]:
    """The runs with counts, by row: those that provide initial weights too, and unfinished ones as well."""
    found: dict[str, list[Finished]] = {}
    for place in PLACES:
        for run in undamaged(folder / place) if (folder / place).is_dir() else ():  # the report names the others
            if run.settings.get("probe") is not None and run.settings.get("start") is None and probes(run):
                found.setdefault(settings_of(run).row, []).append(run)
    return found


def published_range() -> tuple[float, float]:
    """The evaluations per block of the paper's flows on MNIST: the least and the most."""
    each = [row.mixed.nfe.mean / row.updates / BLOCKS for row in ROWS if row.name.startswith("cnf-mnist")]
    return min(each), max(each)


@styled
def regime_picture(found: Mapping[str, Sequence[Finished]]) -> Picture:
    figure = new_figure(9.6, 3.6)
    left, right = figure.subplots(1, 2)
    low, high = published_range()
    left.axhspan(low, high, color=GREY, alpha=0.25, linewidth=0)
    right.axvspan(low, high, color=GREY, alpha=0.25, linewidth=0, label="the paper's mean over training")
    for i, (_, own) in enumerate(found.items()):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for j, run in enumerate(own):
            counts = probes(run)
            label = label_of(run) if j == 0 else None
            times = [each.iterations for each in counts]
            mixed = [each.evaluations["mixed"] for each in counts]
            left.plot(times, mixed, markersize=4, label=label, **style)
            right.plot(mixed, [each.saving for each in counts], linestyle="none", label=label, **style)
    left.set(xlabel="updates", ylabel="backward evaluations per block", ylim=(0, None))
    right.set(xlabel="backward evaluations per block, mixed norm", ylabel="saved by the seminorm (%)")
    right.axhline(0.0, color=GREY, linewidth=0.8, zorder=0)
    right.legend(loc="best")
    return Picture("flow-regime", "How hard flows become, and what is saved", _caption(found), figure)


def label_of(run: Finished) -> str:
    settings = settings_of(run)
    given = dict(settings.model)
    blocks = given.get("scales", 3) * given.get("blocks", 4)
    return f"{data_label(settings.data)}, {given.get('hidden')} channels, {blocks} block{'s' * (blocks > 1)}"


def _caption(found: Mapping[str, Sequence[Finished]]) -> str:
    low, high = published_range()
    first = next(iter(found.values()))[0]
    text = (
        f"Flows in training, counted on one batch of {first.settings['batch']} at rtol and atol "
        f"{first.settings['probe']:g}, always with the same noise. Left: backward evaluations per block with the mixed "
        f"norm. Right: what the seminorm saves with the same weights. Grey: {low:.0f} to {high:.0f} evaluations, the "
        "paper's means over training on MNIST. "
    )
    return text + " ".join(_words(own) for own in found.values())


def _words(own: Sequence[Finished]) -> str:
    settings, counts = settings_of(own[0]), [each for run in own for each in probes(run)]
    most = max(counts, key=lambda each: each.evaluations["mixed"])
    last = ", ".join(f"{probes(run)[-1].evaluations['mixed']:.0f}" for run in own)
    seeds = f"{len(own)} seed{'s' * (len(own) > 1)}"
    unfinished = sum(run.result is None for run in own)
    state = f", {unfinished} of them still in training" if unfinished else ""
    return (
        f"{label_of(own[0])} (learning rate {settings.schedule.lr:g}, trained at a tolerance of {settings.rtol:g}, "
        f"{seeds}{state}): {last} evaluations after {probes(own[0])[-1].iterations:,} updates; at most "
        f"{most.evaluations['mixed']:.0f}, where the seminorm saves {most.saving + 0.0:.1f} %; its largest saving is "
        f"{max(each.saving for each in counts) + 0.0:.1f} %."
    )


def pictures(folder: Path) -> list[Picture]:
    """The figure of all flows in a folder that have recorded counts, if there are any."""
    found = probed(folder)
    return [regime_picture(found)] if found else []

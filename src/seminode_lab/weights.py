"""Trained weights from the checkpoints of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .modes import ALL_MODES
from .settings import Settings
from .store import CHECKPOINT, METRICS, RESULT, Checkpoint, Finished, StoreError, present, read_metrics

#: Folders, within a folder of run folders, that may hold checkpoints; `starts` has runs that provide initial weights.
PLACES = (".", "starts")
#: Modes, in the order in which their weights are preferred.
PREFERRED = ("best", "seminorm", "mixed", "published", "per_tensor")


def final(checkpoint: Checkpoint, settings: Settings) -> dict[str, Tensor]:
    """The weights that a run ends with: the selected ones, or the last ones if its schedule selects none."""
    return checkpoint.part("best" if settings.schedule.selects else "model")


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of a model and the run that has trained them.

    Attributes:
        about: the run, its preset, and how long it has been trained.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


def _candidates(settings: Settings, folder: Path) -> Iterator[tuple[tuple[int, int, float], Path, Settings]]:
    """Runs of the same model with a checkpoint; those to be preferred have the lowest key."""
    for place in PLACES:
        for path in sorted((folder / place).glob(f"*/{CHECKPOINT}")):
            try:
                run = Finished.load(path.parent)
                run.check()
                found = Settings.of_json(run.settings)
            except StoreError:
                continue  # the report names damaged runs
            own = (found.experiment, found.data, found.model, found.library)
            if own == (settings.experiment, settings.data, settings.model, None):
                mode = PREFERRED.index(found.mode) if found.mode in ALL_MODES else len(PREFERRED)
                yield (abs(found.seed - settings.seed), mode, abs(found.rtol - settings.rtol)), path, found


def trained(settings: Settings, folder: Path) -> TrainedWeights | None:
    """The weights of a run in a folder that has trained the same model; `None` if there is none.

    The nearest seed is taken, then the mode `best` before the others, then the nearest tolerance.
    """
    found = sorted(_candidates(settings, folder), key=lambda each: each[0])
    if not found:
        return None
    _, path, own = found[0]
    checkpoint = Checkpoint.load(path)
    about = {
        "run": own.name,
        "preset": own.preset,
        "epochs": checkpoint.epoch + 1,
        "updates": checkpoint.rest.get("iterations"),
        **_quality(path.parent, checkpoint.epoch),
    }
    # Of a run that is not complete, the last weights are taken: it has not made its last selection.
    whole = present(path.parent / RESULT)
    return TrainedWeights(final(checkpoint, own) if whole else checkpoint.part("model"), about)


def _quality(folder: Path, epoch: int) -> dict[str, float]:
    """Loss and accuracy of the last evaluation up to an epoch."""
    path = folder / METRICS
    passes = [each for each in read_metrics(path) if each["epoch"] <= epoch]
    last = passes[-1].get("validation", {}) if passes else {}
    return {f"validation_{name}": last[name] for name in ("loss", "accuracy") if name in last}

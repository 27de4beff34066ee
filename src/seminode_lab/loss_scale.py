"""What the seminorm saves on a flow, depending on the scale of the loss.

A gradient grows with the loss, its absolute tolerance does not. So the scale decides whether the parameters or the
state set the step size. The paper does not say whether its loss is in bits per dimension or in nats per image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .counting import evaluations
from .measuring import batch_of, up_to_date
from .modes import solve_options
from .provenance import circumstances
from .running import Root
from .settings import Settings
from .store import StoreError, read_json, write_json
from .tasks import ModelTask
from .weights import trained

NORMS = ("mixed", "seminorm")
#: Factors of the loss in bits per dimension, besides the one that makes it nats per image.
FACTORS = (0.1, 1.0, 10.0)
BATCH, SEED = 32, 0


@dataclass(frozen=True)
class ScaledLoss:
    """Backward evaluations of all blocks with a loss that is multiplied by a factor, by norm."""

    factor: float
    mixed: int
    seminorm: int

    @property
    def saving(self) -> float:
        """What the seminorm saves, in per cent."""
        return 100 * (1 - self.seminorm / self.mixed)


def nats(dims: int) -> float:
    """The factor from bits per dimension to nats per image.

    >>> round(nats(196))
    136
    """
    return dims * math.log(2)


def counts(task: ModelTask[Any, Any], settings: Settings, factor: float) -> ScaledLoss:
    """Count on the batch of a task. The noise is the same for all norms and factors."""
    found = {}
    rows = torch.arange(task.samples("train"))
    for norm in NORMS:
        task.model.options = {"rtol": settings.rtol, "atol": settings.atol, **solve_options("cnf", norm)}
        torch.manual_seed(SEED)
        outcome = task.outcome(("train", rows), record=False)
        (factor * outcome.loss).backward()
        task.model.zero_grad()
        found[norm] = sum(evaluations(each.backward) for each in outcome.stats if each.backward is not None)
    return ScaledLoss(factor, **found)


def file_of(settings: Settings) -> str:
    return f"scale-{settings.row}.json"


def measured(folder: Path, settings: Settings) -> tuple[int, list[ScaledLoss]] | None:
    """The dimensions of an image and the counts of a row, by growing factor; `None` if they were not measured."""
    path = folder / file_of(settings)
    if not path.exists():
        return None
    try:
        found = read_json(path)
        return int(found["dims"]), [ScaledLoss(**each) for each in found["counts"]]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}: damaged ({type(error).__name__}: {error}); delete it to have it made again"
        ) from error


def measure(settings: Settings, out: Path, root: Root = None, progress: Callable[[str], None] | None = None) -> Path:
    """Measure a flow and write `out/scale-<row>.json`, unless that exists with the same settings and weights."""
    path, weights = out / file_of(settings), trained(settings, out)
    batch = min(settings.batch, BATCH)
    asked = {"settings": settings.as_json(), "batch": batch}
    if up_to_date(path, asked, weights):
        return path
    if progress is not None:
        progress(f"the scale of the loss: {settings.row}")
    task = batch_of(settings, batch, 0, root, weights).task
    dims = task.model.dims
    found = [counts(task, settings, factor) for factor in sorted((*FACTORS, nats(dims)))]
    about = {
        "circumstances": circumstances(),
        "plan": {"fitted": 0},
        "weights": None if weights is None else dict(weights.about),
    }
    write_json(path, asked | about | {"dims": dims, "counts": [asdict(each) for each in found]})
    return path

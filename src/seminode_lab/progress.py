"""The callbacks of a training run, through which it reports its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import seminode as sn


@dataclass(frozen=True)
class Start:
    """Where training starts or resumes, and how long it will take."""

    epochs: int
    batches: int | None  # per epoch
    epoch: int  # the next one
    iterations: int  # completed so far


@dataclass
class TrainingCallbacks:
    """Functions that a run calls while it works. The default of each does nothing."""

    #: Before data are loaded and the model is built; the argument describes the run in one line.
    load: Callable[[str], None] = lambda description: None
    begin: Callable[[Start], None] = lambda start: None
    batch: Callable[[int, int, float, Sequence[sn.Stats]], None] = lambda epoch, batch, loss, stats: None
    #: After a batch of an evaluation.
    look: Callable[[str, int], None] = lambda split, batch: None
    evaluated: Callable[[Mapping[str, Any]], None] = lambda evaluation: None
    #: After an epoch, with its learning rate and the seconds so far. The run is saved right after this call.
    epoch: Callable[[int, float, Mapping[str, float]], None] = lambda epoch, lr, seconds: None
    end: Callable[[Mapping[str, Any]], None] = lambda result: None

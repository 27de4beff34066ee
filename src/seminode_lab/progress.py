"""What a training loop tells of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import seminode as sn


@dataclass(frozen=True)
class Start:
    """Where a run begins or goes on, and how far it has to go."""

    epochs: int
    batches: int | None  # of an epoch
    epoch: int  # the next one
    iterations: int  # that are done


@dataclass
class TrainingCallbacks:
    """What the loop tells of itself while it runs; every call may be ignored."""

    begin: Callable[[Start], None] = lambda start: None
    batch: Callable[[int, int, float, Sequence[sn.Stats]], None] = lambda epoch, batch, loss, stats: None
    #: A batch of an evaluation.
    look: Callable[[str, int], None] = lambda split, batch: None
    evaluated: Callable[[Mapping[str, Any]], None] = lambda evaluation: None
    #: An epoch, its learning rate and the seconds so far; it is saved right after this.
    epoch: Callable[[int, float, Mapping[str, float]], None] = lambda epoch, lr, seconds: None
    end: Callable[[Mapping[str, Any]], None] = lambda result: None

"""What a training run trains: a model, its batches and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor, nn

import seminode as sn

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Outcome:
    """The loss of a batch, the statistics of its solves, and the number of correct samples, for classification."""

    loss: Tensor
    samples: int
    stats: Sequence[sn.Stats]
    records: Sequence[sn.Record] = ()
    right: int = 0


@dataclass(frozen=True)
class Trial:
    """An application of a trained model: its numbers and arrays."""

    name: str
    numbers: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


Model = TypeVar("Model", bound=nn.Module)


class Task(ABC, Generic[Model]):
    """What is trained: a model, its batches and its loss."""

    model: Model
    accuracy: bool = False  # whether it is a classification
    noisy: bool = False  # whether the model draws random numbers

    @abstractmethod
    def batches(self, split: str, shuffle: bool) -> Iterable[Any]:
        """The batches of a split, if required shuffled by PyTorch's global generator."""

    @abstractmethod
    def outcome(self, batch: Any, record: bool) -> Outcome: ...

    def count(self, split: str) -> int | None:
        """The number of batches of a split; `None` if it is not known in advance."""
        return None

    def prepare(self) -> None:
        """Work that is done once per process, such as compiling. It is timed separately from training."""

    def probe(self) -> Mapping[str, Any] | None:
        """Numbers of one batch that are recorded with every evaluation of the model in training, if there are any."""
        return None

    def trial(self) -> Trial | None:
        """An application of the trained model, if there is one."""
        return None

"""Measurements from one pass over the data of a split."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import seminode as sn

from .counting import Strided, evaluations, strided


@dataclass
class DataPass:
    """Measurements from one pass over a split, per batch."""

    losses: list[float] = field(default_factory=list)
    right: int = 0
    samples: int = 0
    sizes: list[int] = field(default_factory=list)
    stats: list[sn.Stats] = field(default_factory=list)
    records: list[sn.Record] = field(default_factory=list)
    seconds: float = 0.0
    drifted: int = 0  # backward solves that did not reconstruct the initial state

    @property
    def loss(self) -> float:
        """The mean loss over samples."""
        return sum(x * n for x, n in zip(self.losses, self.sizes, strict=True)) / max(1, self.samples)

    def numbers(self) -> dict[str, Any]:
        back = [each.backward for each in self.stats if each.backward is not None]
        found: dict[str, Any] = {"loss": self.loss, "samples": self.samples, "seconds": self.seconds}
        for way, stats in (("forward", self.stats), ("backward", back)):
            for name in ("nfe", "accepted", "rejected"):
                found[f"{way}_{name}"] = sum(getattr(each, name) for each in stats)
        found["backward_nfe"] = sum(map(evaluations, back))
        found["backward_vjp_params"] = sum(each.vjp_params for each in back)
        found["drifted"] = self.drifted
        counted = self._strided()
        found["published_accepted"] = sum(len(each.accepted) for each in counted)
        found["published_rejected"] = sum(len(each.rejected) for each in counted)
        return found

    def _strided(self) -> list[Strided]:
        """The steps of every backward pass, as the paper counts them."""
        return [strided(record.backward.evaluations) for record in self.records if record.backward is not None]

    def times(self) -> dict[str, np.ndarray]:
        """The times of evaluations and of ends of steps in the backward passes of all batches."""
        back = [record.backward for record in self.records if record.backward is not None]
        counted = self._strided()
        lists = {
            "evaluations": [t for record in back for t in record.evaluations],
            "accepted": [plan.t1 for record in back for plan in record.accepted],
            "rejected": [plan.t1 for record in back for plan in record.rejected],
            "published_accepted": [t for each in counted for t in each.accepted],
            "published_rejected": [t for each in counted for t in each.rejected],
        }
        return {name: np.asarray(values, dtype=np.float32) for name, values in lists.items()}

"""The length of training, its optimiser, its learning rate, and when the model is evaluated."""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAYS = ("plateau", "cosine")


@dataclass(frozen=True)
class Schedule:
    """The length of training, the optimiser and its learning rate, and when to evaluate the model."""

    epochs: int
    lr: float
    weight_decay: float = 0.01
    every: int = 10  # epochs from one evaluation to the next
    factor: float = 0.1  # by which the learning rate is multiplied if the training loss has not improved …
    patience: int = 2  # … in this number of evaluations
    give_up: int = 100  # training stops this number of epochs after the best one
    warm_up: int = 0  # iterations in which the learning rate increases
    selects: bool = True  # whether the training loss determines the learning rate and the best weights
    optimiser: str = "AdamW"
    decay: str = "plateau"  # or "cosine": from `lr` to 0 over the whole training, whatever the loss

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ValueError(f"decay: expected one of {', '.join(DECAYS)}, found {self.decay!r}")

    def rate(self, iteration: int, iterations: int | None) -> float | None:
        """The learning rate of an update, of so many in total; `None` if it stays as it is."""
        if iteration < self.warm_up:
            return self.lr * (iteration + 1) / self.warm_up
        if self.decay == "plateau":
            return None
        if iterations is None:
            raise ValueError("decay: 'cosine' needs a task that knows the number of its batches")
        done = (iteration - self.warm_up) / max(1, iterations - self.warm_up)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    def evaluates(self, epoch: int) -> bool:
        return epoch % self.every == 0 or epoch == self.epochs - 1

"""The training loop of the experiments, with the schedule of the paper. It counts evaluations and can be resumed.

Every epoch starts from its own seed, and the checkpoint contains everything else that the next epoch depends on. A
resumed run therefore produces exactly the same numbers as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import seminode as sn

from .counting import Strided, evaluations, strided
from .progress import Start, TrainingCallbacks
from .store import Checkpoint, Run

SPLITS = ("train", "validation", "test")
#: Quantities that are summed over all updates.
TOTALS = ("forward_nfe", "backward_nfe", "backward_rejected", "backward_accepted", "drifted")

DECAYS = ("plateau", "cosine")


class TrainingFailed(Exception):
    """Training cannot continue. The message gives the reason."""


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
            raise TrainingFailed("a cosine needs the number of batches of an epoch, which is not known here")
        done = (iteration - self.warm_up) / max(1, iterations - self.warm_up)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    def evaluates(self, epoch: int) -> bool:
        return epoch % self.every == 0 or epoch == self.epochs - 1


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

    def trial(self) -> Trial | None:
        """An application of the trained model, if there is one."""
        return None


def seed_of(seed: int, epoch: int) -> int:
    """The seed of an epoch, which differs from those of other epochs and seeds."""
    return (seed * 1_000_003 + epoch) % 2**63


class Training:
    """A run in progress."""

    def __init__(
        self, run: Run, task: Task[Any], schedule: Schedule, seed: int, progress: TrainingCallbacks | None = None
    ):
        self.run, self.task, self.schedule, self.seed = run, task, schedule, seed
        self.progress = progress or TrainingCallbacks()
        kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[schedule.optimiser]
        self.optimiser = kind(task.model.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimiser, factor=schedule.factor, patience=schedule.patience, threshold=1e-4
        )
        self.next_epoch = 0
        self.iterations = 0
        self.seconds = {"preparation": 0.0, "training": 0.0, "evaluation": 0.0, "training_processor": 0.0}
        self.peak_memory: int | None = None
        self.best_loss, self.best_epoch = math.inf, -1
        self.best: dict[str, Tensor] = self._weights()
        self.totals = dict.fromkeys(TOTALS, 0)
        self.evaluations: list[dict[str, Any]] = []
        self.stopped = False

    def _weights(self) -> dict[str, Tensor]:
        return {name: x.detach().clone() for name, x in self.task.model.state_dict().items()}

    # Checkpoints.

    def checkpoint(self) -> Checkpoint:
        optimiser = self.optimiser.state_dict()
        tensors = {f"model:{name}": x for name, x in self._weights().items()}
        tensors |= {f"best:{name}": x for name, x in self.best.items()}
        for i, state in optimiser["state"].items():
            tensors |= {f"optimiser:{i}:{name}": torch.as_tensor(x) for name, x in state.items()}
        rest = {
            "groups": optimiser["param_groups"],
            "plateau": self.plateau.state_dict(),
            "iterations": self.iterations,
            "seconds": dict(self.seconds),
            "peak_memory": self.peak_memory,
            "best": [self.best_loss, self.best_epoch],
            "totals": self.totals,
            "stopped": self.stopped,
        }
        return Checkpoint(self.next_epoch - 1, tensors, rest)

    def resume(self) -> bool:
        """Restore the state from the run's checkpoint; return whether there is one."""
        found = self.run.checkpoint()
        if found is None:
            self.run.rewind(-1)
            return False
        self.task.model.load_state_dict(found.part("model"))
        self.best = found.part("best")
        state: dict[int, dict[str, Tensor]] = {}
        for name, x in found.part("optimiser").items():
            i, _, key = name.partition(":")
            state.setdefault(int(i), {})[key] = x
        self.optimiser.load_state_dict({"state": state, "param_groups": found.rest["groups"]})
        self.plateau.load_state_dict(dict(found.rest["plateau"]))
        self.iterations, self.seconds = found.rest["iterations"], {**self.seconds, **found.rest["seconds"]}
        self.peak_memory = found.rest["peak_memory"]
        self.best_loss, self.best_epoch = found.rest["best"]
        self.totals, self.stopped = dict(found.rest["totals"]), found.rest["stopped"]
        self.next_epoch = found.epoch + 1
        self.evaluations = self.run.rewind(found.epoch)
        return True

    # Training.

    def train(self) -> dict[str, Any]:
        """Train to the end; write and return the result."""
        batches = self.task.count("train")
        self.progress.begin(Start(self.schedule.epochs, batches, self.next_epoch, self.iterations))
        begin = time.perf_counter()
        with drifts():
            self.task.prepare()
        self.seconds["preparation"] += time.perf_counter() - begin
        while self.next_epoch < self.schedule.epochs and not self.stopped:
            self.epoch()
        return self.finish()

    def epoch(self) -> None:
        """Train for one epoch, evaluate the model if it is due, and save a checkpoint."""
        epoch, begin, worked = self.next_epoch, time.perf_counter(), time.process_time()
        torch.manual_seed(seed_of(self.seed, epoch))
        self.task.model.train()
        with drifts() as seen:
            for i, batch in enumerate(self.task.batches("train", shuffle=True)):
                self._update(epoch, i, batch)
        self.totals["drifted"] += len(seen)
        self.seconds["training"] += time.perf_counter() - begin
        self.seconds["training_processor"] += time.process_time() - worked
        if self.schedule.evaluates(epoch):
            self._evaluate(epoch)
        self.peak_memory = max(filter(None, (self.peak_memory, peak_memory())), default=None)
        self.progress.epoch(epoch, self.optimiser.param_groups[0]["lr"], self.seconds)
        self.next_epoch += 1
        self.run.save(self.checkpoint())

    def _update(self, epoch: int, i: int, batch: Any) -> None:
        batches = self.task.count("train")
        rate = self.schedule.rate(self.iterations, None if batches is None else batches * self.schedule.epochs)
        for group in self.optimiser.param_groups if rate is not None else ():
            group["lr"] = rate
        outcome = self.task.outcome(batch, record=False)
        loss = outcome.loss.item()
        where = f"epoch {epoch}, batch {i}"
        if not math.isfinite(loss):
            raise TrainingFailed(f"the loss is {loss} at {where}: training has diverged. Try a smaller learning rate.")
        self.optimiser.zero_grad()
        outcome.loss.backward()
        size = gradient_size(self.task.model)
        if not math.isfinite(size):
            raise TrainingFailed(f"the gradient is not finite at {where}, although the loss is finite ({loss:.3g})")
        self.optimiser.step()
        self.iterations += 1
        for stats in outcome.stats:
            back = stats.backward
            self.totals["forward_nfe"] += stats.nfe
            if back is not None:
                self.totals["backward_nfe"] += evaluations(back)
                self.totals["backward_accepted"] += back.accepted
                self.totals["backward_rejected"] += back.rejected
        self.progress.batch(epoch, i, loss, outcome.stats)

    # Evaluation.

    def look(self, split: str, record: bool) -> DataPass:
        """Evaluate the model on a split, with backward passes to count their evaluations; gradients are discarded."""
        found, begin = DataPass(), time.perf_counter()
        self.task.model.eval()
        for i, batch in enumerate(self.task.batches(split, shuffle=True)):
            with drifts() as seen:
                outcome = self.task.outcome(batch, record)
                outcome.loss.backward()
            self.optimiser.zero_grad()
            found.drifted += len(seen)
            found.losses.append(outcome.loss.item())
            found.sizes.append(outcome.samples)
            found.samples += outcome.samples
            found.right += outcome.right
            found.stats += outcome.stats
            found.records += outcome.records
            self.progress.look(split, i)
        found.seconds = time.perf_counter() - begin
        self.task.model.train()
        return found

    def numbers(self, found: DataPass) -> dict[str, Any]:
        accuracy = {"accuracy": found.right / max(1, found.samples)} if self.task.accuracy else {}
        return found.numbers() | accuracy

    def _evaluate(self, epoch: int) -> None:
        splits = ("train", "validation") if self.schedule.selects else ("validation",)
        found = {split: self.look(split, record=True) for split in splits}
        self.seconds["evaluation"] += sum(each.seconds for each in found.values())
        evaluation = {
            "epoch": epoch,
            "lr": self.optimiser.param_groups[0]["lr"],
            **{split: self.numbers(each) for split, each in found.items()},
            "totals": dict(self.totals),
            "seconds": dict(self.seconds),
        }
        self.evaluations.append(evaluation)
        self.run.evaluated(self.evaluations, found[splits[0]].times())
        if self.schedule.selects:
            self._select(epoch, found["train"].loss)
        self.progress.evaluated(evaluation)

    def _select(self, epoch: int, loss: float) -> None:
        if self.schedule.decay == "plateau":
            self.plateau.step(loss)
        if loss * 1.0001 < self.best_loss:
            self.best_loss, self.best_epoch, self.best = loss, epoch, self._weights()
        self.stopped = epoch > self.best_epoch + self.schedule.give_up

    def finish(self) -> dict[str, Any]:
        """Evaluate the best weights, or the last ones if none are selected, and write the result."""
        if self.schedule.selects:
            self.task.model.load_state_dict(self.best)
        torch.manual_seed(seed_of(self.seed, self.schedule.epochs))
        splits = SPLITS if self.schedule.selects else SPLITS[1:]
        result = {split: self.numbers(self.look(split, record=True)) for split in splits}
        result |= {"best_epoch": self.best_epoch, "epochs": self.next_epoch, "totals": self.totals}
        result |= {"seconds": dict(self.seconds), "peak_memory": self.peak_memory}
        trial = self.task.trial()
        if trial is not None:
            self.run.keep(trial.name, trial.arrays)
            result[trial.name] = dict(trial.numbers)
        self.run.finish(result)
        self.progress.end(result)
        return result


@contextlib.contextmanager
def drifts() -> Iterator[list[str]]:
    """Collect the messages of `DriftWarning`, to count them: the published adjoint drifts in many batches."""
    found: list[str] = []
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, sn.DriftWarning):
                found.append(str(message))
            else:
                shown(message, category, *where, **more)

        warnings.simplefilter("always", sn.DriftWarning)
        warnings.showwarning = show
        yield found


def gradient_size(model: nn.Module) -> float:
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    return float(nn.utils.get_total_norm(grads)) if grads else 0.0


def peak_memory() -> int | None:
    """The peak memory of this process in bytes; `None` if the system does not report it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else 1024 * found

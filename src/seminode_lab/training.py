"""The training loop of the experiments, with the schedule of the paper. It counts evaluations and can be resumed.

Every epoch starts from its own seed, and the checkpoint contains everything else that the rest of the run depends on. A
resumed run therefore produces exactly the same numbers as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import seminode as sn

from .counting import evaluations
from .passes import DataPass
from .progress import Start, TrainingCallbacks
from .ranks import Ranks
from .restoring import check_tensors, load_weights, optimiser_state
from .schedule import Schedule
from .store import CHECKPOINT, CHECKPOINT_REMEDY, Checkpoint, Run, StoreError
from .task import SPLITS, Outcome, Task

#: Quantities that are summed over all updates.
TOTALS = ("forward_nfe", "backward_nfe", "backward_rejected", "backward_accepted", "drifted")


class TrainingFailed(Exception):
    """Training cannot continue. The message gives the reason."""


def seed_of(seed: int, epoch: int) -> int:
    """The seed of an epoch, which differs from those of other epochs and seeds."""
    return (seed * 1_000_003 + epoch) % 2**63


class Training:
    """A run in progress."""

    def __init__(
        self,
        run: Run,
        task: Task[Any],
        schedule: Schedule,
        seed: int,
        progress: TrainingCallbacks | None = None,
        checkpoint_minutes: float = math.inf,
        ranks: Ranks | None = None,
    ):
        self.run, self.task, self.schedule, self.seed = run, task, schedule, seed
        self.progress, self.ranks = progress or TrainingCallbacks(), ranks or Ranks()
        self.pause, self.saved = 60.0 * checkpoint_minutes, time.monotonic()
        kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[schedule.optimiser]
        self.optimiser = kind(task.model.parameters(), lr=schedule.lr, weight_decay=schedule.weight_decay)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimiser, factor=schedule.factor, patience=schedule.patience, threshold=1e-4
        )
        self.next_epoch = 0
        self.next_batch = 0
        self.chance: dict[str, Tensor] | None = None  # of the generators, if training goes on within an epoch
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
        if self.next_batch:
            tensors |= {f"chance:{name}": x for name, x in generators().items()}
            rest["batch"] = self.next_batch
        return Checkpoint(self.next_epoch - 1, tensors, rest)

    def resume(self) -> bool:
        """Restore the state from the run's checkpoint; return whether there is one."""
        found = self.run.checkpoint()
        if found is None:
            self.run.rewind(-1)
            return False
        path = self.run.path / CHECKPOINT
        found.check(path)
        best, self.best = self.best, found.part("best")
        check_tensors(path, "best", self.best, best)
        load_weights(self.task.model, found.part("model"), path)
        state = optimiser_state(self.optimiser, found.part("optimiser"), path)
        self.next_epoch, self.next_batch = found.epoch + 1, found.rest.get("batch", 0)
        self.chance = found.part("chance") if self.next_batch else None
        if self.chance is not None:
            here = {name: x for name, x in generators().items() if name == "cpu" or name in self.chance}
            check_tensors(path, "chance", {name: x for name, x in self.chance.items() if name in here}, here)
        try:
            self.optimiser.load_state_dict({"state": state, "param_groups": found.rest["groups"]})
            self.plateau.load_state_dict(dict(found.rest["plateau"]))
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}: groups: {error}. {CHECKPOINT_REMEDY}") from error
        self.iterations, self.seconds = found.rest["iterations"], {**self.seconds, **found.rest["seconds"]}
        self.peak_memory = found.rest["peak_memory"]
        self.best_loss, self.best_epoch = found.rest["best"]
        self.totals, self.stopped = {**self.totals, **found.rest["totals"]}, found.rest["stopped"]
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
        """Train for one epoch or for the rest of one, evaluate the model if it is due, and save a checkpoint."""
        epoch = self.next_epoch
        torch.manual_seed(seed_of(self.seed, epoch))
        self.task.model.train()
        self._updates(epoch)
        if self.schedule.evaluates(epoch):
            self._evaluate(epoch)
        self.peak_memory = max(filter(None, (self.peak_memory, peak_memory())), default=None)
        self.progress.epoch(epoch, self.optimiser.param_groups[0]["lr"], self.seconds)
        self.next_epoch, self.next_batch = epoch + 1, 0
        self._save()

    def _updates(self, epoch: int) -> None:
        begin, worked = time.perf_counter(), time.process_time()
        batches = enumerate(self.task.batches("train", shuffle=True))
        for _ in itertools.islice(batches, self.next_batch):  # which were trained on before the run was resumed
            pass
        if self.chance is not None:
            set_generators(self.chance)
            self.chance = None
        if self.task.noisy and not self.ranks.first:
            torch.manual_seed(seed_of(self.seed, epoch) + 2**32 * self.ranks.rank + self.next_batch)
        for i, batch in batches:
            with drifts() as seen:
                self._update(epoch, i, batch)
            self.totals["drifted"] += len(seen)
            self.next_batch = i + 1
            now, work = time.perf_counter(), time.process_time()
            self.seconds["training"] += now - begin
            self.seconds["training_processor"] += work - worked
            begin, worked = now, work
            if time.monotonic() - self.saved > self.pause:
                self._save()
                begin, worked = time.perf_counter(), time.process_time()

    def _save(self) -> None:
        self.run.save(self.checkpoint())
        self.saved = time.monotonic()

    def _update(self, epoch: int, i: int, batch: Any) -> None:
        batches = self.task.count("train")
        rate = self.schedule.rate(self.iterations, None if batches is None else batches * self.schedule.epochs)
        for group in self.optimiser.param_groups if rate is not None else ():
            group["lr"] = rate
        outcome = self.task.outcome(batch, record=False)
        samples, _, loss = self._common(outcome)
        own = outcome.loss * (outcome.samples / samples) if self.ranks.size > 1 else outcome.loss
        where = f"epoch {epoch}, batch {i}"
        if not math.isfinite(loss):
            raise TrainingFailed(f"the loss is {loss} at {where}: training has diverged. Try a smaller learning rate.")
        self.optimiser.zero_grad()
        own.backward()
        self.ranks.add_gradients(self.task.model)
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

    def _common(self, outcome: Outcome) -> tuple[int, int, float]:
        """The samples of a batch, how many of them are right, and their mean loss, over all processes."""
        n, right, loss = outcome.samples, outcome.right, outcome.loss.item()
        if self.ranks.size == 1:
            return n, right, loss
        total, rights, losses = self.ranks.sums(n, right, n * loss)
        return int(total), int(rights), losses / total

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
            samples, right, loss = self._common(outcome)
            found.losses.append(loss)
            found.sizes.append(samples)
            found.samples += samples
            found.right += right
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
        probed = self.task.probe()
        if probed is not None:
            evaluation["probe"] = {"iterations": self.iterations, **probed}
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
        if torch.cuda.is_initialized():
            result["device_memory"] = torch.cuda.max_memory_allocated()
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


def generators() -> dict[str, Tensor]:
    """The states of PyTorch's generators: that of the processor and, if GPUs are in use, those of all GPUs."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
    return {"cpu": torch.get_rng_state(), **{f"cuda{i}": state for i, state in enumerate(gpus)}}


def set_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    for i in range(gpus):
        if f"cuda{i}" in states:
            torch.cuda.set_rng_state(states[f"cuda{i}"], i)


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

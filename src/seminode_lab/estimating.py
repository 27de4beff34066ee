"""What a run will cost, from a measurement of one of its updates."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .counting import evaluations
from .grid import Column, Table
from .running import task_of
from .settings import Settings
from .task import SPLITS
from .training import peak_memory


@dataclass(frozen=True)
class Estimate:
    """The cost of a run. Its memory is that of the process that has measured it, which should measure nothing else."""

    settings: Settings
    preparation: float  # seconds, above all for compiling
    seconds: float  # per update
    forward: int  # evaluations per update
    backward: int
    updates: int
    passes: int  # batches in evaluations of the model, each of which costs as much as an update
    memory: int | None
    device_memory: int | None

    @property
    def hours(self) -> float:
        return (self.preparation + self.seconds * (self.updates + self.passes)) / 3600.0


def estimate(settings: Settings, root: Path | None = None) -> Estimate:
    """Measure the second update of a run; the first one is a warm-up. Nothing is trained or written."""
    task = task_of(settings, root)
    gpu = task.device.type == "cuda"
    begin = time.perf_counter()
    task.prepare()
    batch = next(iter(task.batches("train", shuffle=False)))
    task.outcome(batch, False).loss.backward()
    middle = _now(gpu)
    outcome = task.outcome(batch, False)
    outcome.loss.backward()
    end = _now(gpu)
    back = [each.backward for each in outcome.stats if each.backward is not None]
    counts = {split: task.count(split) for split in SPLITS}
    return Estimate(
        settings,
        middle - begin,
        end - middle,
        sum(each.nfe for each in outcome.stats),
        sum(map(evaluations, back)),
        settings.schedule.epochs * counts["train"],
        passes(settings, counts),
        peak_memory(),
        torch.cuda.max_memory_allocated() if gpu else None,
    )


def passes(settings: Settings, counts: dict[str, int]) -> int:
    """The number of batches in all evaluations of the model, during training and at its end."""
    schedule = settings.schedule
    during = sum(map(schedule.evaluates, range(schedule.epochs)))
    chosen = counts["train"] if schedule.selects else 0
    return during * (chosen + counts["validation"]) + chosen + counts["validation"] + counts["test"]


def _now(gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def table(found: list[Estimate], seeds: dict[str, int]) -> Table:
    """The estimates, and their sum over all seeds."""
    names = ("", "seconds", "forward", "backward", "updates", "passes", "GB", "hours", "seeds", "hours in all")
    rows, total = [], 0.0
    for each in found:
        count = seeds[each.settings.experiment]
        total += count * each.hours
        memory = each.device_memory or each.memory
        rows.append(
            (
                f"{each.settings.row}-{each.settings.mode}",
                f"{each.seconds:.3g}",
                f"{each.forward:,}",
                f"{each.backward:,}",
                f"{each.updates:,}",
                f"{each.passes:,}",
                "" if memory is None else f"{memory / 1e9:.2f}",
                f"{each.hours:.3g}",
                str(count),
                f"{count * each.hours:.3g}",
            )
        )
    rows.append(("sum", *[""] * (len(names) - 2), f"{total:.3g}"))
    notes = (
        "Seconds and evaluations are per update, of the untrained model; trained models may need more evaluations.",
        "Passes are batches on which the model is evaluated, each with a backward pass. Memory is that of the GPU, or "
        "of the process. Training that provides initial weights and is not itself a run of the preset is not included.",
    )
    return Table("estimate", "What the runs will cost", tuple(map(Column, names)), tuple(rows), notes)

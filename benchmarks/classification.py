"""Train several classifiers of series in the same way, and compare test accuracy and seconds per epoch.

All models are trained with AdamW, one cycle of the learning rate, and noise on the inputs. They take turns, one epoch
at a time, on one thread. Seconds are those of the processor, so that other programs affect all models alike.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from seminode_lab.data import SeriesSet

from .adjoints import aligned

DECAY, NOISE, LEARNING_RATE = 0.05, 0.05, 1e-2


@dataclass(frozen=True)
class Result:
    """One training: the accuracy on the test series and the median seconds of an epoch."""

    model: str
    seed: int
    accuracy: float
    seconds: float


class Training:
    """One training with random numbers of its own, so that it may be interrupted by others."""

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module],
        data: SeriesSet,
        *,
        epochs: int,
        batch: int,
        seed: int,
        lr: float = LEARNING_RATE,
    ):
        torch.manual_seed(seed)
        self.name, self.seed, self.data, self.batch = name, seed, data, batch
        self.model = make()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), weight_decay=DECAY)
        steps = epochs * -(-len(data) // batch)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimiser, lr, total_steps=steps)
        self.seconds: list[float] = []
        self.random = torch.get_rng_state()

    def epoch(self) -> None:
        torch.set_rng_state(self.random)
        began = time.process_time()
        for rows in torch.randperm(len(self.data)).split(self.batch):
            lengths = self.data.lengths[rows]
            x = self.data.x[rows, : int(lengths.max())]
            scores = self.model(x + NOISE * torch.randn_like(x), lengths=lengths)
            loss = functional.cross_entropy(scores, self.data.labels[rows])
            if not bool(loss.isfinite()):
                raise FloatingPointError(
                    f"{self.name}, seed {self.seed}: the loss is {loss.item()}; lower the learning rate"
                )
            self.optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.schedule.step()
        self.seconds.append(time.process_time() - began)
        self.random = torch.get_rng_state()

    @torch.no_grad()
    def accuracy(self, data: SeriesSet) -> float:
        self.model.eval()
        right = 0
        for rows in torch.arange(len(data)).split(500):
            scores = self.model(data.x[rows], lengths=data.lengths[rows])
            right += int((scores.argmax(-1) == data.labels[rows]).sum())
        self.model.train()
        return right / len(data)

    def result(self, test: SeriesSet) -> Result:
        return Result(self.name, self.seed, self.accuracy(test), statistics.median(self.seconds))


def compare(
    models: Mapping[str, Callable[[], nn.Module]],
    data: SeriesSet,
    test: SeriesSet,
    *,
    epochs: int,
    batch: int,
    seeds: int,
    rates: Mapping[str, float] | None = None,
) -> Iterator[Result]:
    """Train every model once per seed, and print each result. `rates` are learning rates other than the usual one."""
    usual = dict.fromkeys(models, LEARNING_RATE) | dict(rates or {})
    for seed in range(seeds):
        trainings = [
            Training(name, make, data, epochs=epochs, batch=batch, seed=seed, lr=usual[name])
            for name, make in models.items()
        ]
        for _ in range(epochs):
            for training in trainings:
                training.epoch()
        for training in trainings:
            last = training.result(test)
            print(f"{last.model}, seed {seed}: {last.accuracy:.1%}, {last.seconds:.3f} s per epoch", flush=True)
            yield last


def run(results: Iterator[Result], path: Path | None, **settings: int) -> None:
    """Print a table at the end. The file has every result as soon as it is known, so that a run may be stopped."""
    known: list[Result] = []
    for result in results:
        known.append(result)
        if path:
            write(path, known, **settings)
    print(report(known))


def report(results: Sequence[Result]) -> str:
    """A table with one row per model, as in docs/models.md; times are also given relative to the first model."""
    rows = [("model", "test accuracy", "range", "seconds per epoch", "relative")]
    medians: list[float] = []
    for name in dict.fromkeys(result.model for result in results):
        own = [result for result in results if result.model == name]
        scores = [result.accuracy for result in own]
        medians.append(statistics.median(result.seconds for result in own))
        spread = f"{min(scores):.1%}-{max(scores):.1%}"
        relative = f"{medians[-1] / medians[0]:.2f}"
        rows.append((name, f"{statistics.mean(scores):.1%}", spread, f"{medians[-1]:.3g}", relative))
    return "\n".join(aligned(rows))


def write(path: Path, results: Sequence[Result], **settings: int) -> None:
    content = {**settings, "results": [dataclasses.asdict(result) for result in results]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[Result]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Result(**each) for each in content["results"]]

"""Neural CDE, Log-NCDE and linear CDE on Japanese Vowels: test accuracy and seconds per epoch.

    python -m benchmarks.vowels [--epochs 40] [--seeds 3] [--models neural log linear] [--json results.json]

270 series of 7 to 26 points with 12 channels, nine speakers, 370 test series. All models are trained in the same way
(AdamW, one cycle of the learning rate, batches of 64, noise on the inputs), each with the solver that suits it: the
neural CDE of `examples/vowels.py` with adaptive steps, the Log-NCDE with one step of Heun's method per window of four
intervals, the linear CDE without a solver.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import seminode as sn
from seminode.models import LinearCDE, LogNCDE, MatrixField, NeuralCDE
from seminode_lab.data import SeriesSet, japanese_vowels

from .adjoints import aligned

BATCH, DECAY, NOISE = 64, 0.05, 0.05


def neural() -> nn.Module:
    field = MatrixField(hidden=32, channels=13, width=48, layers=2)
    return NeuralCDE(channels=12, hidden=32, outputs=9, field=field, path="linear", rtol=1e-2, atol=1e-3)


def log() -> nn.Module:
    field = MatrixField(hidden=32, channels=13, width=48, layers=2, activation=nn.SiLU)
    options = {"solver": "heun", "controller": sn.FixedStep(1.0), "adjoint": sn.Direct()}
    return LogNCDE(12, 32, 9, window_length=4.0, field=field, **options)


def linear() -> nn.Module:
    return LinearCDE(12, 32, 9, block=4)


#: How each model is made, and its largest learning rate.
MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "neural": (neural, 1e-2),
    "log": (log, 1e-2),
    "linear": (linear, 1e-2),
}


@dataclass(frozen=True)
class Result:
    """One training: the accuracy on the test series and the median seconds of an epoch."""

    model: str
    seed: int
    accuracy: float
    seconds: float


def train(name: str, data: SeriesSet, test: SeriesSet, epochs: int, seed: int) -> Result:
    make, lr = MODELS[name]
    torch.manual_seed(seed)
    model = make()
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=DECAY)
    batches = -(-len(data) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=epochs * batches)
    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        for rows in torch.randperm(len(data)).split(BATCH):
            lengths = data.lengths[rows]
            x = data.x[rows, : int(lengths.max())]
            scores = model(x + NOISE * torch.randn_like(x), lengths=lengths)
            loss = functional.cross_entropy(scores, data.labels[rows])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
        seconds.append(time.perf_counter() - began)
    return Result(name, seed, accuracy(model, test), statistics.median(seconds))


@torch.no_grad()
def accuracy(model: nn.Module, data: SeriesSet) -> float:
    model.eval()
    scores = model(data.x, lengths=data.lengths)
    return float((scores.argmax(-1) == data.labels).double().mean())


def report(results: Sequence[Result]) -> str:
    rows = [("model", "test accuracy", "range", "seconds per epoch")]
    for name in dict.fromkeys(result.model for result in results):
        own = [result for result in results if result.model == name]
        scores = [result.accuracy for result in own]
        seconds = statistics.median(result.seconds for result in own)
        spread = f"{min(scores):.1%}-{max(scores):.1%}"
        rows.append((name, f"{statistics.mean(scores):.1%}", spread, f"{seconds:.3f}"))
    return "\n".join(aligned(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write all results to this file, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    data, test = japanese_vowels()
    statistics_of_data = data.statistics()
    data, test = data.normalised(*statistics_of_data), test.normalised(*statistics_of_data)
    results = []
    for name in options.models:
        for seed in range(options.seeds):
            results.append(train(name, data, test, options.epochs, seed))
            last = results[-1]
            print(f"{name}, seed {seed}: {last.accuracy:.1%}, {last.seconds:.3f} s per epoch", flush=True)
    print(report(results))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()

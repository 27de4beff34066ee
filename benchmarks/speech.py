"""Neural CDE, Log-NCDE and linear CDE on a part of Speech Commands: test accuracy and seconds per epoch.

    python -m benchmarks.speech [--epochs 10] [--series 2000] [--seeds 1] [--models neural log linear] [--json FILE]

Ten words as series of 161 points with 20 channels. A part of the training series, and half as many test series, so that
the comparison takes minutes instead of many hours: accuracies are far below those of all series and of larger models.
All models are trained in the same way, in batches of 128: the neural CDE with adaptive steps that end at every
point, the Log-NCDE with one step of Heun's method per window of 16 intervals, the linear CDE without a solver.

It needs the data: see docs/data.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import seminode as sn
from seminode.models import LinearCDE, LogNCDE, MatrixField, NeuralCDE
from seminode_lab.data import SeriesSet, speech_commands

from .classification import compare, run

BATCH = 128


def neural() -> nn.Module:
    field = MatrixField(hidden=32, channels=21, width=48, layers=2)
    return NeuralCDE(channels=20, hidden=32, outputs=10, field=field, path="linear", rtol=1e-2, atol=1e-3)


def log() -> nn.Module:
    field = MatrixField(hidden=32, channels=21, width=48, layers=2, activation=nn.SiLU)
    return LogNCDE(
        20, 32, 10, window_length=16.0, field=field, solver="heun", controller=sn.FixedStep(1.0), adjoint=sn.Direct()
    )


def linear() -> nn.Module:
    # The state is a product of 160 matrices, so they start near the identity.
    return LinearCDE(20, 32, 10, block=4, init_scale=0.1)


#: Lower than the usual rate, for the same reason.
RATES = {"linear": 3e-3}

MODELS: dict[str, Callable[[], nn.Module]] = {"neural": neural, "log": log, "linear": linear}


def part(data: SeriesSet, count: int) -> SeriesSet:
    """A random part, always the same one."""
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
    return SeriesSet(data.x[rows], data.lengths[rows], data.labels[rows])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--series", type=int, default=2_000, help="for training; half as many for testing")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write every result to this file, too, as soon as it is known")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    everything = speech_commands()
    data, test = part(everything.train, options.series), part(everything.test, options.series // 2)
    del everything
    models = {name: MODELS[name] for name in options.models}
    results = compare(models, data, test, epochs=options.epochs, batch=BATCH, seeds=options.seeds, rates=RATES)
    run(results, options.json, epochs=options.epochs, series=len(data), tested=len(test))


if __name__ == "__main__":
    main()

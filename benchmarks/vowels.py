"""Neural CDE, Log-NCDE and linear CDE on Japanese Vowels: test accuracy and seconds per epoch.

    python -m benchmarks.vowels [--epochs 40] [--seeds 3] [--models neural log linear] [--json FILE]

270 series of 7 to 26 points with 12 channels, nine speakers, 370 test series. All models are trained in the same way,
in batches of 64, each with the solver that suits it: the neural CDE of `examples/vowels.py` with adaptive steps, the
Log-NCDE with one step of Heun's method per window of four intervals, the linear CDE without a solver.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import seminode as sn
from seminode.models import LinearCDE, LogNCDE, MatrixField, NeuralCDE
from seminode_lab.data import japanese_vowels

from .classification import compare, run

BATCH = 64


def neural() -> nn.Module:
    field = MatrixField(hidden=32, channels=13, width=48, layers=2)
    return NeuralCDE(channels=12, hidden=32, outputs=9, field=field, path="linear", rtol=1e-2, atol=1e-3)


def log() -> nn.Module:
    field = MatrixField(hidden=32, channels=13, width=48, layers=2, activation=nn.SiLU)
    return LogNCDE(
        12, 32, 9, window_length=4.0, field=field, solver="heun", controller=sn.FixedStep(1.0), adjoint=sn.Direct()
    )


def linear() -> nn.Module:
    return LinearCDE(12, 32, 9, block=4)


MODELS: dict[str, Callable[[], nn.Module]] = {"neural": neural, "log": log, "linear": linear}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write every result to this file, too, as soon as it is known")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    data, test = japanese_vowels()
    statistics = data.statistics()
    data, test = data.normalised(*statistics), test.normalised(*statistics)
    models = {name: MODELS[name] for name in options.models}
    results = compare(models, data, test, epochs=options.epochs, batch=BATCH, seeds=options.seeds)
    run(results, options.json, epochs=options.epochs)


if __name__ == "__main__":
    main()

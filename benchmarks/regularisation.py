"""Evaluations that regularisers save: NFE and loss of models trained with and without them.

    python -m benchmarks.regularisation [--quick] [--first-seed 5] [--methods RNODE stiffness] [--json results.json]

A neural ODE in the plane classifies two noisy concentric circles, which it cannot separate with straight trajectories.
The seed determines 256 training points and the initial parameters. All models are trained in the same way, with 200
steps of Adam and fixed steps of RK4, or of dopri5 where the error estimate is the cost. The comparison is one solve
with dopri5 in float64 on 2,000 test points, which are the same for all seeds. λ is the largest value of a grid whose
mean validation loss over all seeds exceeds that of the baseline by at most one standard deviation of the baseline.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import seminode as sn
from seminode.models.neural_ode import NeuralODE
from seminode.models.regularisers import TotalDerivative, rnode
from seminode.models.running import Regulariser, penalty
from seminode.models.step_costs import SolverError, Stiffness

from .adjoints import aligned

SEEDS = range(5)
ITERATIONS = 200
TRAINING_STEP = 0.2
TOLERANCE = 1e-6
LOOSE = 1e-3
POINTS = 256
HELD_OUT = 2_000

Weighted = Callable[[float], tuple[Regulariser, ...]]

#: For each method, its costs as a function of λ, and the grid of λ in decreasing order.
METHODS: dict[str, tuple[Weighted, tuple[float, ...]]] = {
    "RNODE": (lambda weight: rnode(weight, weight), (0.1, 0.03, 0.01)),
    "TayNODE, K = 2": (lambda weight: (TotalDerivative(2, weight),), (0.3, 0.1, 0.03)),
    "TayNODE, K = 3": (lambda weight: (TotalDerivative(3, weight),), (0.1, 0.03, 0.01)),
    "solver error": (lambda weight: (SolverError(weight),), (3e5, 1e5, 3e4)),
    "solver error, local": (lambda weight: (SolverError(weight, local=True),), (3e5, 1e5, 3e4)),
    "stiffness": (lambda weight: (Stiffness(weight),), (0.01, 0.003, 0.001)),
}


class Field(nn.Module):
    """A network of the state and the time with two hidden layers."""

    def __init__(self, size: int = 2, width: int = 32):
        super().__init__()
        layers = (nn.Linear(size + 1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, size))
        self.net = nn.Sequential(*layers)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.net(torch.cat([z, t.expand(len(z), 1)], -1))


def circles(points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy points around circles of radius 0.5 and 1.5, alternately, and their labels. The classes overlap."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(points) % 2).float()
    angle = 2 * math.pi * torch.rand(points, generator=generator)
    circle = torch.stack([angle.cos(), angle.sin()], -1) * (0.5 + labels)[:, None]
    return circle + 0.25 * torch.randn(points, 2, generator=generator), labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits[:, 0], labels)


def trained(seed: int, regularisers: Sequence[Regulariser] = (), iterations: int = ITERATIONS) -> NeuralODE:
    torch.manual_seed(seed)
    estimated = any(isinstance(regulariser, SolverError) for regulariser in regularisers)
    model = NeuralODE(
        Field(),
        readout=nn.Linear(2, 1),
        regularisers=regularisers,
        solver="dopri5" if estimated else "rk4",  # rk4 has no estimate of its error
        controller=sn.FixedStep(TRAINING_STEP),
        adjoint=sn.Direct(),
    )
    x, labels = circles(POINTS, seed=1_000 + seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, iterations)
    for _ in range(iterations):
        logits, costs = model(x, costs=True)
        optimiser.zero_grad()
        (loss_of(logits, labels) + penalty(regularisers, costs)).backward()
        optimiser.step()
        schedule.step()
    return model


@dataclass(frozen=True)
class Measurement:
    """A trained model: NFE of one solve over the test points, losses, and the time of the training."""

    nfe: int
    loose_nfe: int
    validation: float
    test: float
    seconds: float  # CPU time


def measure(seed: int, regularisers: Sequence[Regulariser], iterations: int) -> Measurement:
    """Train, then solve in float64 with adaptive steps and without the regularisers."""
    began = time.process_time()
    model = trained(seed, regularisers, iterations)
    seconds = time.process_time() - began
    model = model.double()
    held_out = (circles(HELD_OUT, seed=1), circles(HELD_OUT, seed=2))
    (x, labels), (x_test, labels_test) = ((x.double(), labels.double()) for x, labels in held_out)
    with torch.no_grad():
        model.options = {"rtol": LOOSE, "atol": LOOSE}
        model(x_test)
        loose_nfe = model.nfe
        model.options = {"rtol": TOLERANCE, "atol": TOLERANCE}
        validation, test = float(loss_of(model(x), labels)), float(loss_of(model(x_test), labels_test))
    return Measurement(model.nfe, loose_nfe, validation, test, seconds)


@dataclass(frozen=True)
class Result:
    """One method with one λ: one measurement per seed."""

    method: str
    weight: float
    seeds: tuple[Measurement, ...]

    def mean(self, which: str) -> float:
        return statistics.mean(getattr(seed, which) for seed in self.seeds)

    def deviation(self, which: str) -> float:
        return statistics.stdev(getattr(seed, which) for seed in self.seeds) if len(self.seeds) > 1 else 0.0

    def reduction(self, baseline: Result) -> float:
        """The fraction of the evaluations that is saved, median over the seeds."""
        pairs = zip(self.seeds, baseline.seeds, strict=True)
        return statistics.median(1.0 - regularised.nfe / plain.nfe for regularised, plain in pairs)

    def median(self, which: str) -> float:
        return statistics.median(getattr(seed, which) for seed in self.seeds)

    def as_good_as(self, baseline: Result, which: str) -> bool:
        return self.mean(which) <= baseline.mean(which) + baseline.deviation(which)


def run(method: str, weight: float, seeds: Sequence[int], iterations: int) -> Result:
    costs = METHODS[method][0](weight) if method in METHODS else ()
    return Result(method, weight, tuple(measure(seed, costs, iterations) for seed in seeds))


def study(
    seeds: Sequence[int] = SEEDS, iterations: int = ITERATIONS, methods: Sequence[str] | None = None
) -> tuple[Result, list[Result]]:
    """The baseline, and for every method the results from the largest λ to the first one that keeps the loss."""
    baseline = run("none", 0.0, seeds, iterations)
    tried: list[Result] = []
    for method in METHODS if methods is None else methods:
        for weight in METHODS[method][1]:
            tried.append(run(method, weight, seeds, iterations))
            if tried[-1].as_good_as(baseline, "validation"):
                break
    return baseline, tried


def chosen(baseline: Result, tried: Sequence[Result]) -> dict[str, Result]:
    """For each method the result with the selected λ; methods for which no λ keeps the loss are left out."""
    return {result.method: result for result in tried if result.as_good_as(baseline, "validation")}


HEADER = ("regulariser", "λ", "NFE", "range", "fewer", "validation loss", "test loss", f"NFE at {LOOSE:g}", "training")


def row(result: Result, baseline: Result) -> tuple[str, ...]:
    nfe = [seed.nfe for seed in result.seeds]
    spread = [f"{result.median('nfe'):g}", f"{min(nfe)}-{max(nfe)}"]
    losses = [f"{result.mean(which):.3f} ± {result.deviation(which):.3f}" for which in ("validation", "test")]
    reduction = "" if result is baseline else f"{100 * result.reduction(baseline):.0f} %"
    weight = "" if result is baseline else f"{result.weight:g}"
    further = [f"{result.median('loose_nfe'):g}", f"{result.median('seconds'):.1f} s"]
    return (result.method, weight, *spread, reduction, *losses, *further)


def report(baseline: Result, tried: Sequence[Result]) -> str:
    picked = chosen(baseline, tried)
    lines = aligned([HEADER, *(row(result, baseline) for result in (baseline, *picked.values()))])
    for method in dict.fromkeys(result.method for result in tried):
        if method not in picked:
            lines.append(f"{method}: no λ of the grid {METHODS[method][1]} keeps the loss")
    rejected = [result for result in tried if result not in picked.values()]
    if rejected:
        table = aligned([HEADER, *(row(result, baseline) for result in rejected)])
        lines += ["", "tried, but the loss increases too much:", *table]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, half the training")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of five seeds, or of two with --quick")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--json", type=Path, help="write all measurements to this file, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    count, iterations = (2, ITERATIONS // 2) if options.quick else (len(SEEDS), ITERATIONS)
    seeds = range(options.first_seed, options.first_seed + count)
    began = time.perf_counter()
    baseline, tried = study(seeds, iterations, options.methods)
    print(
        f"seeds {seeds[0]} to {seeds[-1]}, {iterations} iterations; NFE of dopri5 at rtol = atol = "
        f"{TOLERANCE:g}, median and range; losses: mean ± standard deviation; torch {torch.__version__}"
    )
    print(report(baseline, tried))
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(result) for result in (baseline, *tried)], indent=1))


if __name__ == "__main__":
    main()

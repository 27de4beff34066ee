"""Train the same flow twice, by maximum likelihood and by flow matching, and compare likelihood and training time.

Both trainings start from the same parameters and end with a network f(t, z) whose flow is a density. Maximum
likelihood solves the equation in every iteration; flow matching only evaluates f. The likelihood on test data is
computed in the same way for both, with the exact divergence. Data are two moons in the plane, or digits of 8×8 pixels.
Seconds are those of the processor, on one thread.

    python examples/flow_matching.py [--data moons digits] [--image out/demo/flow_matching.png] [--quick]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from drawing import STYLE, need, save
from flow import moons
from torch import Tensor
from torch.nn import functional

import seminode as sn
from seminode.models import CNF, ConcatMLP, flow_matching_loss, flow_sample
from seminode_lab.data import digits

EVALUATED: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


@dataclass(frozen=True)
class Problem:
    """Data and settings. `offset` makes a log-density of scaled data one in bits per dimension of the original ones."""

    name: str
    unit: str
    dim: int
    widths: tuple[int, ...]
    draw: Callable[[int], Tensor]
    test: Tensor
    likelihood_steps: int
    matching_steps: int
    batch: int = 256
    matching_batch: int = 256
    lr: float = 0.03  # of flow matching
    trace: Any = "exact"
    scale: float = 1.0
    offset: float = 0.0

    def nll(self, log_prob: Tensor) -> float:
        return float(self.offset - self.scale * log_prob.mean())


def two_moons() -> Problem:
    training, test = moons(50_000), moons(2_000)

    def draw(n: int) -> Tensor:
        return training[torch.randint(len(training), (n,))]

    return Problem("moons", "nats", 2, (64, 64, 64), draw, test, 600, 1_400, matching_batch=1_024, lr=0.04)


def small_digits() -> Problem:
    """Pixels from 0 to 16 plus uniform noise, divided by 17, then as logits: a density of numbers without bounds."""
    images, rate = digits(), 0.05
    training, test = (part.x.flatten(1).float() for part in images)

    def logits(x: Tensor) -> Tensor:
        return torch.logit(rate + (1 - 2 * rate) * (x + torch.rand_like(x)) / 17)

    def draw(n: int) -> Tensor:
        return logits(training[torch.randint(len(training), (n,))])

    tested = logits(test)
    # log |d logit/dx| for each pixel, so that the bits are those of the integers from 0 to 16.
    inside = torch.sigmoid(tested)
    slope = ((1 - 2 * rate) / 17 / (inside * (1 - inside))).log().sum(1).mean()
    bits = 1 / (64 * math.log(2))
    return Problem(
        "digits", "bits per pixel", 64, (256, 256), draw, tested, 400, 1_000, lr=0.005, trace="hutchinson", scale=bits,
        offset=-bits * float(slope),
    )  # fmt: skip


PROBLEMS: dict[str, Callable[[], Problem]] = {"moons": two_moons, "digits": small_digits}


def times(n: int) -> Tensor:
    """Times in [0, 1], one from each of n strata, with more of them near the data at t = 0, where f varies most."""
    return ((torch.randperm(n) + torch.rand(n)) / n) ** 1.5


def train(field: ConcatMLP, loss: Callable[[], Tensor], steps: int, lr: float, rising: float = 0.3) -> float:
    """Adam with one cycle of the learning rate, which rises for a part of the steps; returns processor seconds."""
    optimiser = torch.optim.Adam(field.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps, pct_start=rising)
    begin = time.process_time()
    for _ in range(steps):
        value = loss()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        schedule.step()
    return time.process_time() - begin


@dataclass(frozen=True)
class Result:
    method: str
    field: ConcatMLP
    seconds: float
    nll: float
    nfe: int


def compare(problem: Problem, seed: int = 0) -> list[Result]:
    """Train by both methods; print the negative log-likelihood of the test data and the seconds of the training."""
    print(f"{problem.name}: negative log-likelihood of {len(problem.test):,} test samples in {problem.unit}")
    print("method               iterations  seconds     NLL  nfe of a likelihood")
    results = []
    for method in ("maximum likelihood", "flow matching"):
        torch.manual_seed(seed)
        field = ConcatMLP(problem.dim, problem.widths)
        if method == "maximum likelihood":
            flow = CNF(field, trace=problem.trace, rtol=1e-3, atol=1e-4, adjoint=sn.Direct())
            steps = problem.likelihood_steps
            seconds = train(field, lambda flow=flow: -flow.log_prob(problem.draw(problem.batch)).mean(), steps, 0.01)
        else:
            steps, size = problem.matching_steps, problem.matching_batch

            def loss(field: ConcatMLP = field, size: int = size) -> Tensor:
                return flow_matching_loss(field, problem.draw(size), t=times(size), batched=True)

            seconds = train(field, loss, steps, problem.lr, rising=0.2)
        nll, nfe = evaluate(problem, field)
        results.append(Result(method, field, seconds, nll, nfe))
        print(f"{method:<19} {steps:>11,} {seconds:>8.1f} {nll:>7.3f} {nfe:>20}", flush=True)
    likelihood, matching = results
    print(
        f"flow matching: NLL {matching.nll - likelihood.nll:+.3f} ({matching.nll / likelihood.nll - 1:+.1%}) in "
        f"1/{likelihood.seconds / matching.seconds:.1f} of the time"
    )
    return results


@torch.no_grad()
def evaluate(problem: Problem, field: ConcatMLP) -> tuple[float, int]:
    flow = CNF(field, trace="exact", **EVALUATED)
    return problem.nll(flow.log_prob(problem.test)), flow.nfe


def draw(problem: Problem, results: list[Result], path: Path) -> None:
    """Test data, and samples of both flows."""
    import matplotlib.pyplot as plt

    torch.manual_seed(1)
    noise = torch.randn(2_000 if problem.dim == 2 else 36, problem.dim)
    samples = [problem.test[: len(noise)], *(flow_sample(result.field, noise, preset="accurate") for result in results)]
    titles = ["data", *(f"{result.method}, {result.seconds:.0f} s" for result in results)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(9.0, 3.1), layout="constrained")
        for each, x, title in zip(axes, samples, titles, strict=True):
            if problem.dim == 2:
                each.plot(*x.T.numpy(), ".", markersize=1.5)
            else:
                framed = functional.pad(torch.sigmoid(x).view(6, 6, 8, 8), (1, 1, 1, 1))
                rows = framed.transpose(1, 2).reshape(60, 60)
                each.imshow(rows.numpy(), cmap="gray_r", vmin=0.05, vmax=0.95)
            each.set(xticks=(), yticks=(), aspect="equal")
            each.set_title(title)
        save(figure, path, dpi=130)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare flow matching with maximum likelihood.")
    parser.add_argument("--data", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--image", type=Path, default=Path("out/demo/flow_matching.png"), help="files of the plots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the iterations")
    options = parser.parse_args()
    need("matplotlib")
    torch.set_num_threads(1)  # more threads do not help so small a network
    for name in options.data:
        torch.manual_seed(options.seed)
        problem = PROBLEMS[name]()
        if options.quick:
            steps = (problem.likelihood_steps // 20, problem.matching_steps // 20)
            problem = replace(problem, likelihood_steps=steps[0], matching_steps=steps[1], test=problem.test[:100])
        results = compare(problem, options.seed)
        path = options.image.with_stem(f"{options.image.stem}_{name}")
        draw(problem, results, path)
        print(f"Plot: {path}\n")


if __name__ == "__main__":
    main()

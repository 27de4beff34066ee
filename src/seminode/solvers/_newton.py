"""Simplified Newton iterations for the stages of an implicit step.

The unknowns are the increments Zᵢ = dt·Σⱼ aᵢⱼ f(tⱼ, wⱼ + Zⱼ) of some stages, from which the slopes follow without an
evaluation: at a stiff state, an evaluation magnifies the error that Newton's method has left.

Hairer and Wanner, *Solving Ordinary Differential Equations II* (1996), IV.8, for the test of convergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._field.linearisation import from_real, to_real
from .._stepping.combination import scaled_sum, sparse
from ..norms import ErrorNorm
from ._linear import StageFactors

#: Iterations before a step counts as failed, with a tolerance and to rounding.
ITERATIONS, ITERATIONS_TO_ROUNDING = 10, 50


class Criterion(Protocol):
    """When to stop: `size` measures an update, `done` and `hopeless` judge it."""

    iterations: int

    def size(self, update: Tensor, states: Tensor) -> float: ...
    def done(self, size: float, rate: float | None, carried: float) -> bool: ...
    def hopeless(self, size: float, rate: float, left: int) -> bool: ...


class WithinTolerance:
    """Stop when the remaining error, extrapolated from the rate θ of convergence, is `kappa` of what a step may err by.

    After an update of size δ the remaining error is about θ/(1 − θ)·δ. In the first iteration θ is not known: the factor
    of earlier iterations takes its place, raised to the power 0.8 each time that it is used.
    """

    iterations = ITERATIONS

    def __init__(self, norm: ErrorNorm, kappa: float, y0: Tensor):
        self._norm, self._kappa, self._y0 = norm, kappa, y0.abs()

    def size(self, update: Tensor, states: Tensor) -> float:
        norm = self._norm
        sizes = [
            norm.measured(x / norm.allowed(torch.maximum(self._y0, y.abs())))
            for x, y in zip(update, states, strict=True)
        ]
        return max(sizes) if all(map(math.isfinite, sizes)) else math.inf

    def done(self, size: float, rate: float | None, carried: float) -> bool:
        return (carried if rate is None else remaining(rate)) * size <= self._kappa

    def hopeless(self, size: float, rate: float, left: int) -> bool:
        return rate >= 1.0 or size * rate**left * remaining(rate) > self._kappa


class ToRounding:
    """Stop when updates are as small as rounding errors, or so small that they no longer shrink."""

    iterations = ITERATIONS_TO_ROUNDING

    def __init__(self, like: Tensor):
        self._eps = torch.finfo(like.dtype).eps
        self._small = max(32.0, 1e-4 / math.sqrt(self._eps))

    def size(self, update: Tensor, states: Tensor) -> float:
        """The largest entry, each relative to its own size, in rounding errors."""
        magnitude = states.abs()
        floor = max(self._eps * float(magnitude.amax()), torch.finfo(states.dtype).tiny)
        size = float((update.abs() / (magnitude + floor)).amax()) / self._eps
        return size if math.isfinite(size) else math.inf

    def done(self, size: float, rate: float | None, carried: float) -> bool:
        stuck = rate is not None and rate > 0.5 and size < self._small
        return size <= 2.0 or stuck

    def hopeless(self, size: float, rate: float, left: int) -> bool:
        return rate >= 1.0


def remaining(rate: float) -> float:
    """The error that is left, relative to the latest update."""
    return rate / (1.0 - rate) if rate < 1.0 else math.inf


class Iterated(NamedTuple):
    """Where an iteration has ended. `rate` is the worst rate of convergence that was seen, `carried` the last factor."""

    increments: Tensor
    converged: bool
    iterations: int
    rate: float
    carried: float


def newton(
    evaluate: Callable[[int, Tensor], Tensor],
    a: Sequence[Sequence[float]],
    dt: float,
    starts: Sequence[Tensor],
    guess: Tensor,
    factors: StageFactors,
    damping: float,
    criterion: Criterion,
    carried: float,
) -> Iterated:
    """Solve Zᵢ = dt·Σⱼ aᵢⱼ f(wⱼ + Zⱼ) for the increments of some stages, stacked.

    `evaluate(j, y)` is the field at stage j, `starts` are the wⱼ. `damping` multiplies every update: for factors that
    were made for another step size dt′ it is 2/(1 + dt/dt′), which makes the error of the matrix as small as possible
    at both ends of the spectrum (Hindmarsh et al., *SUNDIALS*, 2005).
    """
    increments, rows = guess, [sparse(row) for row in a]
    base = torch.stack(list(starts))
    worst, before, rate = 0.0, math.inf, None
    carried = carried**0.8
    for k in range(criterion.iterations):
        states = base + increments
        slopes = [evaluate(j, y) for j, y in enumerate(states)]
        residual = torch.stack([scaled_sum(dt, row, slopes) for row in rows]) - increments
        flat = factors.solve(torch.stack([to_real(x) for x in residual]))
        update = torch.stack([from_real(x, starts[0]) for x in flat])
        if damping != 1.0:
            update = update * damping
        increments = increments + update
        size = criterion.size(update, states)
        if size == math.inf:
            return Iterated(increments, False, k + 1, math.inf, carried)
        if k > 0:
            rate = size / before if before > 0.0 else 0.0
            worst = max(worst, rate)
        if size == 0.0 or criterion.done(size, rate, carried):
            factor = carried if rate is None else max(min(remaining(rate), 1e3), torch.finfo(torch.float64).eps)
            return Iterated(increments, True, k + 1, worst, factor)
        if rate is not None and criterion.hopeless(size, rate, criterion.iterations - 1 - k):
            break
        before = size
    return Iterated(increments, False, k + 1, worst, carried)

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

from .._error_norm import ErrorNorm
from .._field.linearisation import from_real, to_real
from .._stepping.combination import scaled_sum, sparse
from ._linear import Jacobian, Spectrum, StageFactors
from ._stages import Block
from .base import ImplicitEvaluate, IterationCounter

#: A factorisation for another step size slows Newton's method to this rate at most; see `newton`.
MISMATCH = 0.3
#: Where steps grow, a factorisation is made for one that is longer by this factor.
AHEAD = 1.5
#: A Jacobian is evaluated anew where Newton's method converges more slowly than this, and for a new factorisation.
SLOW, AGED = 0.4, 0.1
#: Where an update removes less than this of an error, the Jacobian is not that of the field: see `reach_of_updates`.
TOO_SHORT = 0.02
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

    After an update of size δ the remaining error is about θ/(1 − θ)·δ. In the first iteration θ is not known: the
    factor of earlier iterations takes its place, raised to the power 0.8 each time that it is used.
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

    def __init__(self, eps: float):
        self._eps = eps  # of the field, which may answer in half precision
        self._small = max(32.0, 1e-4 / math.sqrt(self._eps))
        self._norm = math.inf

    def size(self, update: Tensor, states: Tensor) -> float:
        """The largest entry, each relative to its own size, in rounding errors."""
        magnitude, change = states.abs(), update.abs()
        largest = float(magnitude.amax())
        floor = max(self._eps * largest, torch.finfo(states.dtype).tiny)
        size = float((change / (magnitude + floor)).amax()) / self._eps
        self._norm = float(change.amax()) / max(floor, self._eps * largest)
        return size if math.isfinite(size) else math.inf

    def done(self, size: float, rate: float | None, carried: float) -> bool:
        stuck = rate is not None and rate > 0.5 and self._norm < self._small
        return size <= 2.0 or stuck

    def hopeless(self, size: float, rate: float, left: int) -> bool:
        return rate >= 1.0


def remaining(rate: float) -> float:
    """The error that is left, relative to the latest update."""
    return rate / (1.0 - rate) if rate < 1.0 else math.inf


class Iterated(NamedTuple):
    """Where an iteration has ended. `rate` is the worst rate of convergence seen, `carried` the last factor."""

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
    refresh: Callable[[Tensor], StageFactors | None] | None = None,
    y0: Tensor | None = None,
) -> Iterated:
    """Solve Zᵢ = dt·Σⱼ aᵢⱼ f(wⱼ + Zⱼ) for the increments of some stages, stacked.

    `evaluate(j, y)` is the field at stage j, `starts` are the wⱼ. `damping` multiplies every update: for factors that
    were made for another step size dt′ it is 2/(1 + dt/dt′), which makes the error of the matrix as small as possible
    at both ends of the spectrum (Hindmarsh et al., *SUNDIALS*, 2005). With `refresh`, which factorises anew at some
    states, slow iterations go on with a new Jacobian in each, and such that do not converge start again at y0.
    """
    increments, rows = guess, [sparse(row) for row in a]
    base = torch.stack(list(starts))
    worst, before, rate = 0.0, math.inf, None
    carried, full = carried**0.8, False
    count = 0
    for k in range(criterion.iterations):
        count = k + 1
        states = base + increments
        if full and refresh is not None:
            new = refresh(states)
            if new is None:
                break
            factors = new
        slopes = [evaluate(j, y) for j, y in enumerate(states)]
        residual = torch.stack([scaled_sum(dt, row, slopes) for row in rows]) - increments
        flat = factors.solve(torch.stack([to_real(x) for x in residual]))
        update = torch.stack([from_real(x, starts[0]) for x in flat])
        if damping != 1.0:
            update = update * damping
        increments = increments + update
        size = criterion.size(update, states)
        if size == math.inf and (refresh is None or full):
            return Iterated(increments, False, k + 1, math.inf, carried)
        if k > 0:
            rate = size / before if 0.0 < before < math.inf else math.inf if size == math.inf else 0.0
            worst = max(worst, rate)
        if size == 0.0 or criterion.done(size, rate, carried):
            factor = carried if rate is None else max(min(remaining(rate), 1e3), torch.finfo(torch.float64).eps)
            return Iterated(increments, True, k + 1, worst, factor)
        if rate is not None and not full and criterion.hopeless(size, rate, criterion.iterations - 1 - k):
            if refresh is None or y0 is None:
                break
            increments, damping, full, size, rate = y0 - base, 1.0, True, math.inf, None
        elif refresh is not None and rate is not None and k > 2 and rate > SLOW:
            damping, full = 1.0, True
        before = size
    return Iterated(increments, False, count, worst, carried)


def reach_of_updates(evaluate: ImplicitEvaluate, block: Block, dt: float, y0: Tensor, factors: StageFactors) -> float:
    """The part of a small error that one update removes, of the entry where that is least; 1 with an exact Jacobian.

    Where a Jacobian that was passed by the user is too large, updates are too short. They look as if Newton's method
    had converged, so that its own test cannot notice that. Errors of random signs are tried twice, since in one of
    them the effects of several entries may cancel.
    """
    magnitude = y0.abs()
    size = math.sqrt(evaluate.eps) * (magnitude + 1e-3 * magnitude.amax().clamp(min=1e-3))
    if evaluate.norm is not None:
        size = torch.maximum(size, evaluate.norm.allowed(magnitude))
    generator = torch.Generator().manual_seed(0)
    start = [evaluate(c, y0, stage=None) for c in block.nodes]
    removed: list[Tensor] = []
    for _ in range(2):
        error = (torch.randint(0, 2, (len(start), *y0.shape), generator=generator).to(y0) * 2.0 - 1.0) * size
        states = zip(block.nodes, error, start, strict=True)
        slopes = [evaluate(c, y0 + x, stage=None) - k for c, x, k in states]
        residual = error - torch.stack([scaled_sum(dt, sparse(row), slopes) for row in block.a])
        flat = factors.solve(torch.stack([to_real(x) for x in residual]))
        removed.append(torch.stack([from_real(x, y0) for x in flat]).abs() / error.abs())
    least = float(torch.maximum(*removed).amin())
    return min(least, 1.0) if math.isfinite(least) else 1.0  # a field that is NaN beside the solution is not judged


class Linear(NamedTuple):
    """The Jacobian and its factorisation for steps of length dt.

    `current`: evaluated at the start of this step; `rate`: how fast Newton's method has converged with it.
    """

    jacobian: Jacobian
    factors: StageFactors | None = None
    dt: float = 0.0
    current: bool = True
    rate: float = 0.0

    def damping(self, dt: float) -> float:
        return 2.0 / (1.0 + dt / self.dt)

    def mismatch(self, dt: float) -> float:
        """The rate of convergence if nothing but the step size were wrong."""
        ratio = dt / self.dt if self.dt else -1.0
        return abs(ratio - 1.0) / (ratio + 1.0) if ratio > 0.0 else 1.0

    def aged(self, dt: float) -> Linear | None:
        """For the next step; `None` if convergence was slow. An old Jacobian is not worth another factorisation."""
        limit = SLOW if self.mismatch(dt) <= MISMATCH else AGED
        return None if self.rate > limit else self._replace(current=False)

    def factorised(self, counter: IterationCounter, spectrum: Spectrum, dt: float, grows: bool) -> Linear:
        """With a factorisation that is good enough for this step. If steps grow, it is made for a longer one."""
        if self.factors is not None and self.mismatch(dt) <= MISMATCH:
            return self
        ahead = dt * (AHEAD if grows else 1.0)
        counter.factorisations += len(spectrum)
        return self._replace(factors=StageFactors.of(self.jacobian, spectrum, ahead), dt=ahead)

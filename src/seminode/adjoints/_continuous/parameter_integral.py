"""The parameter integral ∫ a_zᵀ ∂f/∂θ dt, summed separately from the state over the steps of an adjoint solve."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._stepping.interpolation import weights_at
from ..._stepping.observers import Observer
from ..._stepping.schedule import Plan
from ..._stepping.step import Step
from ...solvers.base import Solver
from .._sums import Sums
from .system import Integrand

#: About how many entries of each gradient are used, at most, to estimate the error of their integral.
SAMPLED = 4096
#: The norms of how many steps are read together: each read of the host waits for an accelerator.
READ = 64


class Folded(NamedTuple):
    """What a program makes of the parameter gradients at its evaluations, one tensor for each of the targets."""

    total: Sequence[Tensor | None]  # weighted and summed
    difference: Sequence[Tensor | None]  # the same for the error estimate, of a sample of the entries
    last: Sequence[Tensor | None] | None  # at the last of them


class ParameterIntegral(Observer):
    """Computes ∫ a_zᵀ ∂f/∂θ dt along an adjoint solve. It observes the steps and is told about their evaluations.

    To write one, provide:

    1. `total`: the sum so far; `error`: an estimate of its relative error, or `None`;
    2. `begin(plan)`: a step is about to be tried, its first slope is known;
    3. `wanted(stage)`: whether to compute the VJP of an evaluation for the parameters now, and whether to keep its
       graph. Stage 0 is the first slope of a step, the number of stages stands for the end slope, `None` for an
       evaluation that belongs to no step;
    4. `stage(stage, grads, kept)`: what was wanted;
    5. `accepted(step, ratio)` and `rejected(step, ratio)`: what became of the step.

    Where whole steps are compiled, `weights` and `fold` take the place of `stage`.
    """

    total: Sums
    #: A step that runs past this time counts up to there only.
    end: float = math.nan

    @property
    def error(self) -> float | None:
        return None

    @abstractmethod
    def begin(self, plan: Plan) -> None: ...

    @abstractmethod
    def wanted(self, stage: int | None) -> tuple[bool, bool]: ...

    @abstractmethod
    def stage(self, stage: int | None, grads: Sequence[Tensor | None], kept: Integrand | None) -> None: ...

    def abandon(self) -> None:
        """The step that has begun is not computed after all; another attempt will begin."""

    def weights(self) -> Sequence[float]:
        """The weights of the stages after the first, in the sum that a compiled step makes of their gradients."""
        return ()

    def fold(self, folded: Folded) -> None:
        """The sums that a compiled step has made of its gradients."""


def sample_stride(x: Tensor) -> int:
    """One of how many entries of a gradient is looked at."""
    return max(1, math.ceil(x.numel() / SAMPLED))


def sampled(grads: Sequence[Tensor | None], strides: Sequence[int]) -> list[Any]:
    pairs = zip(grads, strides, strict=True)
    return [g if g is None or s == 1 else g.reshape(-1)[::s] for g, s in pairs]


class ErrorSample:
    """An estimate of the error of the parameter integral, from a sample of its entries."""

    def __init__(self, targets: Sequence[Tensor]):
        self._strides = [sample_stride(x) for x in targets]
        self._whole = all(stride == 1 for stride in self._strides)
        self._total, self._trial, self._step = (Sums(len(targets)) for _ in range(3))
        self._bound = self._covered = self._length = 0.0
        self._unread: list[tuple[UnreadNorms, float]] = []  # of steps, with the sharpening of their rules

    def add(self, grads: Sequence[Tensor | None], difference: float, weight: float = 0.0) -> None:
        """A contribution to the step that is being tried: to the difference of two rules, and to the better one."""
        if difference != 0.0:
            self._trial.add(self._sampled(grads), difference)
        if weight != 0.0:
            self._step.add(self._sampled(grads), weight)

    def add_sampled(self, difference: Sequence[Tensor | None], totals: Sequence[Tensor | None] = ()) -> None:
        """A difference of which only the sample was computed, and the better rule's sum."""
        self._trial.adopt(difference)
        if totals:
            self._step.add(self._sampled(totals))

    def accept(self, dt: float, complete: bool = True, sharpening: float = 1.0) -> None:
        """The step is taken; one whose estimate is not complete is represented by the others.

        Differences of steps add up as they are, so that what cancels in the integral cancels here. Where the better
        rule is much better than the difference tells, its error is a power of that, relative to the step's integral.
        """
        self._length += abs(dt)
        if complete:
            self._covered += abs(dt)
            if sharpening > 1.0:
                self._unread.append((UnreadNorms(self._trial.values, self._step.values), sharpening))
                if len(self._unread) >= READ:
                    self._read()
            else:
                self._total.absorb(self._trial)
        self.drop()

    def _read(self) -> None:
        """Add what the steps since the last read contribute to the bound."""
        norms = read_norms([unread for unread, _ in self._unread])
        for (difference, size), (_, sharpening) in zip(norms, self._unread, strict=True):
            self._bound += difference * min(1.0, difference / size if size > 0.0 else 1.0) ** (sharpening - 1.0)
        self._unread = []

    def drop(self) -> None:
        self._trial.clear()
        self._step.clear()

    def take_over(self, other: ErrorSample, dt: float) -> None:
        """The trial of another sample, which is accepted."""
        self._trial.absorb(other._trial)
        self.accept(dt)

    def sizes(self, *others: Sequence[Tensor | None]) -> list[float]:
        """Root mean squares of the estimate for the step that is being tried and of samples of gradients."""
        groups = [self._trial.values, *map(self._sampled, others)]
        (norms,) = read_norms([UnreadNorms(*groups)])
        counts = [sum(x.numel() for x in group if x is not None) for group in groups]
        return [norm / math.sqrt(max(1, count)) for norm, count in zip(norms, counts, strict=True)]

    def relative_to(self, totals: Sequence[Tensor | None]) -> float | None:
        """The error relative to the integral; `None` if no step could be looked at."""
        if self._covered == 0.0:
            return None
        self._read()
        ((total, size),) = read_norms([UnreadNorms(self._total.values, self._sampled(totals))])
        error = (total + self._bound) * self._length / self._covered
        return error / size if size > 0.0 else 0.0 if error == 0.0 else math.inf

    def _sampled(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return grads if self._whole else sampled(grads, self._strides)


class UnreadNorms:
    """Euclidean norms of several groups of tensors, still on the device of the tensors."""

    def __init__(self, *groups: Sequence[Tensor | None]):
        self.counts = [sum(x is not None for x in group) for group in groups]
        norms = [torch.linalg.vector_norm(x) for group in groups for x in group if x is not None]
        self.values = torch.stack([x.to(norms[0].device) for x in norms]) if norms else torch.empty(0)


def read_norms(unread: Sequence[UnreadNorms]) -> list[list[float]]:
    """The norms of the groups of each, by one read of the host."""
    if not unread:
        return []
    device = unread[0].values.device
    values = iter(torch.cat([each.values.to(device) for each in unread]).tolist())
    return [[math.hypot(*(next(values) for _ in range(count))) for count in each.counts] for each in unread]


class StageSums(ParameterIntegral):
    """The integral with the weights b of the solver itself, on accepted steps only.

    This is what a solver would compute for a_θ as a part of its state, to rounding, without its being there. Alive are
    the total, the sum of the step that is being tried, and the gradient of its first stage, which the next try needs
    again if this one is rejected. A step that runs past `end` counts up to there: with the weights of its polynomial.
    """

    def __init__(self, solver: Solver, targets: Sequence[Tensor], idle: bool = False):
        idle = idle or not targets
        self._solver = solver
        self._b = [*solver.weights, 0.0]
        self._e = solver.error_weights
        self.total = Sums(len(targets))
        self._sample = ErrorSample(targets) if self._e is not None and not idle else None
        self._trial = Sums(len(targets))
        self._first: Sequence[Tensor | None] = ()
        self._next: Sequence[Tensor | None] = ()
        self._weights = self._b
        self._dt = 0.0
        self._breaks = False
        self._due = False  # whether the first stage of this step is still to be added
        self._idle = idle

    @property
    def error(self) -> float | None:
        return None if self._sample is None else self._sample.relative_to(self.total.values)

    def begin(self, plan: Plan) -> None:
        self._dt, self._breaks = plan.dt, plan.breaks
        x = (self.end - plan.t0) / plan.dt
        self._weights = self._b if not x < 1.0 else self._padded(weights_at(self._solver.interpolant, x))
        self._due = not self._idle

    def _add_first(self) -> None:
        """The contribution of the first stage, once there is a sum to add it to."""
        if self._due:
            self._due = False
            self._add(0, self._first)

    def _padded(self, weights: list[float]) -> list[float]:
        return weights + [0.0] * (len(self._b) - len(weights))

    def wanted(self, stage: int | None) -> tuple[bool, bool]:
        if stage is None or self._idle:
            return False, False
        if stage == len(self._b) - 1:
            # Where the next first slope is evaluated again, this one is not needed.
            return self._weights[stage] != 0.0 or not self._breaks, False
        return stage == 0 or self._weights[stage] != 0.0 or (self._e is not None and self._e[stage] != 0.0), False

    def stage(self, stage: int | None, grads: Sequence[Tensor | None], kept: Integrand | None) -> None:
        if not grads:
            return
        assert stage is not None
        if stage == 0:
            self._first = grads
            return
        if stage == len(self._b) - 1:
            self._next = grads
        self._add_first()
        self._add(stage, grads)

    def _add(self, stage: int, grads: Sequence[Tensor | None]) -> None:
        # dt has the sign of the direction of time, and a_θ′ has the minus.
        self._trial.add(grads, -self._dt * self._weights[stage])
        if self._sample is not None and self._e is not None:
            self._sample.add(grads, -self._dt * self._e[stage])

    def weights(self) -> list[float]:
        return [-self._dt * w for w in self._weights[1:]]

    def fold(self, folded: Folded) -> None:
        self._trial.adopt(folded.total)
        if self._sample is not None:
            self._sample.add_sampled(folded.difference)
        self._add_first()
        self._next = folded.last or ()

    def accepted(self, step: Step, ratio: float) -> None:
        if self._idle:
            return
        if self._weights[-1] != 0.0:
            step.end_slope()  # which may not have been evaluated yet, and is told to `stage`
        self._add_first()
        self.total.absorb(self._trial)
        if self._sample is not None and self._e is not None:
            self._sample.accept(self._dt, bool(self._next) or self._e[-1] == 0.0)
        self._first, self._next = self._next, ()

    def rejected(self, step: Step, ratio: float) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._due = False
        self._trial.clear()
        self._next = ()
        if self._sample is not None:
            self._sample.drop()

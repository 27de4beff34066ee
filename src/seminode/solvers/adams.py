"""Adams methods: explicit (Adams–Bashforth) and implicit (Adams–Moulton, by a predictor and corrections).

They integrate the polynomial through the latest slopes. Earlier slopes are kept in the memory, with the time that has
passed since each of them. Weights follow from these times, so that steps of different length keep their order.

Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), III.1 and III.5.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._compile.torch_private import transforms_active
from .._stepping.combination import MovingStep, SparseWeights, StepSize, combine, length, sparse
from .._stepping.interpolation import weights_at
from .._untyped import numbers, tensordot
from .base import Evaluate, Solver, StepResult

#: The highest order. Beyond it, the weights of the explicit methods exceed a thousand.
MAX_ORDER = 12
#: Slopes are reused while a step is at most so many times as long as each step between them.
MAX_GROWTH = 2.0
#: Times that differ from those of equal steps by less than this part of a step do so by rounding.
ROUNDING = 1e-11

Number = TypeVar("Number", float, Fraction)


def integrated_basis(nodes: Sequence[Number]) -> list[list[Number]]:
    """The integrals from 0 to x of the Lagrange polynomials of some nodes: one row per node, one column per power of x.

    The polynomial through slopes kᵢ at the nodes has the integral Σ Bᵢ(x)·kᵢ. In exact rationals, the nodes 0, −1, …
    give the Adams–Bashforth methods, and 1, 0, −1, … the Adams–Moulton methods (Hairer, Nørsett and Wanner I, III.1).

    >>> [str(sum(row)) for row in integrated_basis([Fraction(0), Fraction(-1), Fraction(-2)])]
    ['23/12', '-4/3', '5/12']
    """
    rows: list[list[Number]] = []
    for i, node in enumerate(nodes):
        one = node * 0 + 1
        basis = [one]
        for other in (*nodes[:i], *nodes[i + 1 :]):
            scale = one / (node - other)
            shifted = [one * 0, *basis]  # the product with x
            basis = [(a - other * b) * scale for a, b in zip(shifted, [*basis, one * 0], strict=True)]
        rows.append([c / (m + 1) for m, c in enumerate(basis)])
    return rows


class Rule(NamedTuple):
    """How slopes at some nodes make a step: the matrix of the step's polynomial, and its value at the end."""

    matrix: tuple[tuple[float, ...], ...]
    weights: SparseWeights


def rule(nodes: tuple[float, ...], columns: int) -> Rule:
    """The rule of some nodes. Those of equal steps are computed once, in exact rationals."""
    whole = tuple(round(x) for x in nodes)
    if all(abs(x - n) < ROUNDING for x, n in zip(nodes, whole, strict=True)):
        return _of_equal_steps(whole, columns)
    return _rule(integrated_basis(nodes), columns)


@functools.cache
def _of_equal_steps(nodes: tuple[int, ...], columns: int) -> Rule:
    return _rule(integrated_basis([Fraction(n) for n in nodes]), columns)


def _rule(rows: Sequence[Sequence[Number]], columns: int) -> Rule:
    matrix = tuple((*map(float, row), *[0.0] * (columns - len(row))) for row in rows)
    return Rule(matrix, sparse(float(sum(row)) for row in rows))


@functools.cache
def within_step(count: int, columns: int) -> Rule:
    """The rule of equidistant nodes from 0 to 1, both included."""
    return _rule(integrated_basis(_equidistant(count)), columns)


@functools.cache
def refinement(count: int) -> tuple[SparseWeights, ...]:
    """The rule of equidistant nodes, evaluated at those of one more, of which the first is left out.

    In exact rationals: the powers of x have large coefficients of both signs.
    """
    rows = integrated_basis(_equidistant(count))
    values = ([sum(c * x ** (m + 1) for m, c in enumerate(row)) for row in rows] for x in _equidistant(count + 1)[1:])
    return tuple(sparse(map(float, value)) for value in values)


def _equidistant(count: int) -> list[Fraction]:
    return [Fraction(i, count - 1) for i in range(count)]


class Nodes(NamedTuple):
    """Where slopes were evaluated: 0 is the start of the step and 1 its end.

    `shifts`, one per node, are zero and carry derivatives where the nodes move with the times of the solve.
    """

    places: tuple[float, ...]
    shifts: Tensor | None = None

    def with_end(self) -> Nodes:
        shifts = None if self.shifts is None else torch.cat([self.shifts, torch.zeros(1, dtype=torch.float64)])
        return Nodes((*self.places, 1.0), shifts)

    def fixed(self, slopes: list[Tensor]) -> list[Tensor]:
        """The same slopes with the derivative with respect to the nodes, so that rules may take these for constants.

        If nodes move, the polynomial through the slopes has other values at the places where they have been:
        Σⱼ ℓⱼ(xᵢ)·kⱼ, where the ℓⱼ belong to the moving nodes. This matrix is the identity; only its derivative matters.
        """
        if self.shifts is None:
            return slopes
        places = torch.tensor(self.places, dtype=torch.float64)
        moving = places + self.shifts
        rows: list[Tensor] = []
        for j in range(len(slopes)):
            others = [m for m in range(len(slopes)) if m != j]
            ratios = [(places - moving[m]) / (moving[j] - moving[m]) for m in others]
            rows.append(functools.reduce(torch.mul, ratios, torch.ones_like(places)))
        matrix = torch.stack(rows, -1).to(slopes[0].device, slopes[0].dtype)
        return list(tensordot(matrix, torch.stack(slopes), 1).unbind())


class AdamsMemory(NamedTuple):
    """Slopes of earlier steps, the latest first, and how long before the next step each was evaluated (0: unknown).

    `times` are the same times as a tensor, where they are differentiated. `slope` is the first slope of the next step,
    if it is known.
    """

    slopes: tuple[Tensor, ...]
    past: tuple[float, ...]
    times: Tensor | None = None
    slope: Tensor | None = None


class Adams(Solver):
    """What the two Adams methods share: the history of slopes, and how it is begun.

    With too little history (at the start, after a jump, and where a step is more than twice as long as one before it)
    a step is bootstrapped. The polynomial through the known slopes predicts states inside the step; the slopes there
    make a polynomial of one order more, and so on. Such a step has a local error of the order of the method.
    """

    error_order = None
    error_needs_end_slope = False
    weights: Sequence[float] = ()  # they differ from step to step
    error_weights = None
    general = False  # the adjoint equation has integrals that need constant weights
    steady = False

    def __init__(self, max_order: int, history: int):
        self.order = self.max_order = _check_order(max_order)
        self._history = history
        # Slopes are as many as a bootstrapped step may evaluate: its end slope has a number of its own.
        self.stages = 1 + self.order * (self.order - 1) // 2
        self.interpolant_order = self.order
        self.interpolant = rule(tuple(-float(i) for i in range(self.order)), self.order).matrix

    @abstractmethod
    def _follow(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, nodes: Nodes, slopes: list[Tensor]) -> StepResult:
        """A step with a full history: the slopes at the first node, which is 0, and at earlier ones."""

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: AdamsMemory) -> StepResult:
        first = evaluate(0.0, y0, stage=0) if memory.slope is None else memory.slope
        h = float(dt.value if isinstance(dt, MovingStep) else dt)
        known = _usable(memory.past, h)
        nodes = Nodes((0.0, *(-t / h for t in memory.past[:known])))
        if isinstance(dt, MovingStep) and known:
            moving = torch.cat([torch.zeros(1, dtype=torch.float64), -_times(memory)[:known] / _length(dt)])
            nodes = nodes._replace(shifts=moving - moving.detach())
        take = self._follow if known == self._history else self._bootstrap
        result = take(evaluate, dt, y0, nodes, [first, *memory.slopes[:known]])
        return result._replace(memory=self._next(memory, first, known, dt, h))

    def _bootstrap(
        self, evaluate: Evaluate, dt: StepSize, y0: Tensor, nodes: Nodes, slopes: list[Tensor]
    ) -> StepResult:
        """A step whose polynomial is improved from the order of the known slopes to that of the method."""
        known, slopes, stage = len(slopes), nodes.fixed(slopes), 1
        present = rule(nodes.places, self.order)
        inside = [sparse(weights_at(present.matrix, i / known)) for i in range(1, known + 1)]
        for count in range(known + 1, self.order + 1):
            later: list[Tensor] = []
            for i, weights in enumerate(inside, 1):
                later.append(evaluate(i / (count - 1), combine(y0, dt, weights, slopes), stage=stage))
                stage += 1
            slopes, present, inside = [slopes[0], *later], within_step(count, self.order), refinement(count)
        return StepResult(combine(y0, dt, present.weights, slopes), slopes, interpolant=present.matrix)

    def _next(self, memory: AdamsMemory, first: Tensor, known: int, dt: StepSize, h: float) -> AdamsMemory:
        """The memory after a step from which `known` earlier slopes were of use."""
        count = self._history
        if not count:
            return memory._replace(slope=None)
        past = (h, *(t + h for t in memory.past[:known]))[:count]
        unknown = [0.0] * (count - len(past))
        times = memory.times
        if times is not None or isinstance(dt, MovingStep):
            moved = _length(dt)
            new = [moved.reshape(1), _times(memory)[:known] + moved, torch.zeros(count, dtype=torch.float64)]
            times = torch.cat(new)[:count]
        return AdamsMemory((first, *memory.slopes)[:count], (*past, *unknown), times)

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError(f"{self.name} has no error estimate")

    def start(self, y0: Tensor) -> AdamsMemory:
        count = self._history
        return AdamsMemory((torch.zeros_like(y0),) * count, (0.0,) * count)

    def with_slope(self, memory: AdamsMemory, slope: Tensor) -> AdamsMemory:
        return memory._replace(slope=slope)

    def across_jump(self, memory: AdamsMemory) -> AdamsMemory:
        return AdamsMemory(memory.slopes, (0.0,) * self._history)

    def carried(self, memory: AdamsMemory) -> tuple[Tensor, ...]:
        return (*memory.slopes, _times(memory)) if self._history else ()

    def recall(self, carried: Sequence[Tensor]) -> AdamsMemory:
        if not self._history:
            return AdamsMemory((), ())
        *slopes, times = carried
        return AdamsMemory(tuple(slopes), tuple(numbers(times)), times)

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


class ExplicitAdams(Adams):
    """The Adams–Bashforth method with fixed steps: one evaluation per step for any order up to 12.

        y₁ = y₀ + dt·Σᵢ bᵢ·f(t₋ᵢ, y₋ᵢ),    i = 0, …, p − 1

    Where steps have equal lengths, the bᵢ are the classical coefficients. The higher the order, the smaller the steps
    must be: for y′ = −λy the method of order p is stable up to λ·dt = 2, 1, 0.55, 0.3 for p = 1, …, 4, and about half
    of that with each further order. Above order 10, outputs inside of the first p steps have rounding errors of about
    1e-10; outputs at the ends of steps have not.

    Arguments:
        max_order: the order p, from 1 to 12. The first p − 1 steps build up the history; they cost more evaluations and
            keep the order.

    Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), III.1.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], solver=sn.ExplicitAdams(6), controller=sn.FixedStep(0.02))
        >>> bool((sol.ys[-1] - torch.exp(torch.tensor(-1.0))).abs() < 1e-7)
        True
    """

    def __init__(self, max_order: int = 4):
        super().__init__(max_order, _check_order(max_order) - 1)

    @property
    def name(self) -> str:
        return "explicit_adams"

    @property
    def evaluations(self) -> int:
        return 1

    def _follow(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, nodes: Nodes, slopes: list[Tensor]) -> StepResult:
        matrix, weights = rule(nodes.places, self.order)
        slopes = nodes.fixed(slopes)
        return StepResult(combine(y0, dt, weights, slopes), slopes, interpolant=matrix)

    def __repr__(self) -> str:
        return f"ExplicitAdams(max_order={self.max_order})"


class ImplicitAdams(Adams):
    """The Adams–Moulton method with fixed steps, as a predictor with corrections, P(EC)ᵐE.

        y₁ = y₀ + dt·(b₁·f(t₁, y₁) + Σᵢ b₋ᵢ·f(t₋ᵢ, y₋ᵢ)),    i = 0, …, p − 2

    The Adams–Bashforth method of one order less predicts y₁. Each correction inserts the latest y₁ on the right-hand
    side, until it changes by less than the tolerance or `max_iters` is reached. One correction is enough for the order
    p; more bring the method closer to the implicit one. Corrections that grow are a
    [`StepFailure`][seminode.StepFailure]: the step is too long for this iteration.

    Arguments:
        max_order: the order p, from 1 to 12; see `ExplicitAdams`.
        max_iters: the largest number of corrections, each of which costs an evaluation.
        rtol, atol: corrections end when no entry of y₁ changes by more than atol + rtol·|y₁|. With both at zero there
            are always `max_iters` of them, and the host does not wait for the device.

    Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), III.1.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], solver=sn.ImplicitAdams(4), controller=sn.FixedStep(0.02))
        >>> round(sol.ys[-1].item(), 6)  # e⁻¹
        0.367879
    """

    def __init__(self, max_order: int = 4, max_iters: int = 4, rtol: float = 1e-7, atol: float = 1e-9):
        super().__init__(max_order, max(_check_order(max_order) - 2, 0))
        self.max_iters = _check_iterations(max_iters)
        self.rtol, self.atol = _check_tolerance("rtol", rtol), _check_tolerance("atol", atol)

    @property
    def name(self) -> str:
        return "implicit_adams"

    @property
    def evaluations(self) -> int:
        return 1 + self.max_iters

    def _follow(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, nodes: Nodes, slopes: list[Tensor]) -> StepResult:
        y1 = combine(y0, dt, rule(nodes.places, self.order).weights, nodes.fixed(slopes))
        matrix, weights = self._corrector(nodes)
        corrected, failure, before = slopes, None, math.inf
        for i in range(1, self.max_iters + 1):
            end = evaluate(1.0, y1, stage=i)
            corrected = nodes.with_end().fixed([*slopes, end])
            y, y1 = y1, combine(y0, dt, weights, corrected)
            change = self._change(y, y1)
            if change <= 1.0:
                break
            if change > before:
                failure = f"correction {i} changed y1 by {change / before:.3g} times as much as the one before it"
                break
            before = change
        return StepResult(y1, corrected, failure=failure, interpolant=matrix)

    def _corrector(self, nodes: Nodes) -> Rule:
        """The rule of the known slopes and, as the last, the one at the end."""
        if self.order == 1:  # which does not read the first slope
            return Rule(((0.0,), (1.0,)), ((1, 1.0),))
        return rule(nodes.with_end().places, self.order)

    def _change(self, y: Tensor, y1: Tensor) -> float:
        """By how many tolerances a correction has changed y1; infinite if nobody looks at it."""
        if self.rtol == self.atol == 0.0 or transforms_active():
            return math.inf
        y, y1 = y.detach(), y1.detach()
        allowed = self.atol + self.rtol * torch.maximum(y.abs(), y1.abs())
        return float(((y1 - y).abs() / allowed).amax())

    def __repr__(self) -> str:
        options = f"max_iters={self.max_iters}, rtol={self.rtol:g}, atol={self.atol:g}"
        return f"ImplicitAdams(max_order={self.max_order}, {options})"


def _usable(past: Sequence[float], h: float) -> int:
    """How many earlier slopes a step of length h can use: all that are known, or none if it is too long for them."""
    before = 0.0
    for count, t in enumerate(past):
        if t == 0.0:
            return count
        if not abs(h) <= MAX_GROWTH * abs(t - before) * (1.0 + ROUNDING):
            return 0
        before = t
    return len(past)


def _times(memory: AdamsMemory) -> Tensor:
    return torch.tensor(memory.past, dtype=torch.float64) if memory.times is None else memory.times


def _length(dt: StepSize) -> Tensor:
    return torch.as_tensor(length(dt), dtype=torch.float64).cpu()


def _check_order(order: Any) -> int:
    if isinstance(order, bool) or not isinstance(order, int) or not 1 <= order <= MAX_ORDER:
        raise ValueError(f"max_order: expected a whole number from 1 to {MAX_ORDER}, found {order!r}")
    return order


def _check_iterations(max_iters: Any) -> int:
    if isinstance(max_iters, bool) or not isinstance(max_iters, int) or max_iters < 1:
        raise ValueError(f"max_iters: expected a whole number of at least 1, found {max_iters!r}")
    return max_iters


def _check_tolerance(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0.0 <= value < math.inf:
        raise ValueError(f"{name}: expected a finite number of at least 0, found {value!r}")
    return float(value)

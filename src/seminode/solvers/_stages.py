"""The stages of an implicit Runge–Kutta step, and their derivatives by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function

from .._field.linearisation import Linearisation, from_real, to_real
from .._stepping.combination import MovingStep, StepSize, combine, length, scaled_sum, sparse
from .._untyped import unpack_dual
from ..tableaux_implicit import ImplicitTableau
from ._linear import Jacobian, LinearSolver, StageSystem, jacobian_of
from .base import ImplicitEvaluate


class Block(NamedTuple):
    """Stages that are solved for together: the first of them, and their part of the tableau's matrix."""

    first: int
    nodes: tuple[float, ...]
    a: tuple[tuple[float, ...], ...]


class SolveBlock(Protocol):
    """Finds the increments Zᵢ of the stages of a block, which start from wᵢ; `None` if it cannot."""

    def __call__(self, block: Block, starts: Sequence[Tensor], slopes: Sequence[Tensor]) -> Sequence[Tensor] | None: ...


class Stages(NamedTuple):
    """The end of a step, its slopes, and the increments of its blocks."""

    y1: Tensor
    slopes: list[Tensor]
    increments: list[Sequence[Tensor]]


def blocks_of(tableau: ImplicitTableau) -> tuple[Block, ...]:
    """One block for each implicit stage of a diagonally implicit method, or one for all stages."""
    if not tableau.diagonal:
        return (Block(0, tableau.c, tableau.a),)
    first = int(tableau.explicit_start)
    return tuple(Block(i, (tableau.c[i],), ((tableau.gamma,),)) for i in range(first, tableau.stages))


def run_stages(
    tableau: ImplicitTableau, dt: StepSize, y0: Tensor, k1: Tensor | None, solve: SolveBlock
) -> Stages | None:
    """An implicit Runge–Kutta step, by blocks of stages: with aᵢⱼ of a block and w of the stages before it,

        Zᵢ = dt·Σⱼ aᵢⱼ f(wⱼ + Zⱼ),    k = a⁻¹ Z / dt,    y1 = y0 + dt·Σᵢ bᵢkᵢ,

    where y1 is the last stage if the method is stiffly accurate. `k1` is the slope of an explicit first stage.
    """
    slopes = [] if k1 is None or not tableau.explicit_start else [k1]
    found: list[Sequence[Tensor]] = []
    start = y0
    for block in blocks_of(tableau):
        if tableau.diagonal:
            start = combine(y0, dt, sparse(tableau.a[block.first][: block.first]), slopes)
        increments = solve(block, [start] * len(block.nodes), slopes)
        if increments is None:
            return None
        found.append(increments)
        if tableau.diagonal:
            slopes.append(increments[0] / (tableau.gamma * length(dt)))
        else:
            rows = (scaled_sum(1.0, sparse(row), increments) for row in tableau.inverse)
            slopes += [row / length(dt) for row in rows]
    if tableau.stiffly_accurate:
        return Stages(start + found[-1][-1], slopes, found)
    return Stages(combine(y0, dt, sparse(tableau.b), slopes), slopes, found)


class Differentiated:
    """Gives known increments their derivatives: dZ = (I − dt·[aᵢⱼJⱼ])⁻¹ d(dt·Σⱼ aᵢⱼ f(wⱼ + Zⱼ)) at constant Z.

    This is one step of Newton's method from the solution, of which only the derivative is kept: values stay the same to
    the last bit. The derivative of such a step with respect to its start is zero, so each of them adds an order:
    `orders` steps give derivatives up to that order.
    """

    def __init__(
        self,
        evaluate: ImplicitEvaluate,
        known: Sequence[Sequence[Tensor]],
        dt: StepSize,
        linear_solver: LinearSolver,
    ):
        self._evaluate, self._known, self._dt = evaluate, iter(known), dt
        self._linear_solver: LinearSolver = linear_solver

    def __call__(self, block: Block, starts: Sequence[Tensor], slopes: Sequence[Tensor]) -> Sequence[Tensor]:
        values = next(self._known)
        increments: Sequence[Tensor] = values
        system = None
        for _ in range(self._evaluate.orders):
            states = [_tracked(w + z) for w, z in zip(starts, increments, strict=True)]
            fs = [
                self._evaluate(c, y, stage=block.first + j)
                for j, (c, y) in enumerate(zip(block.nodes, states, strict=True))
            ]
            moved = [scaled_sum(self._dt, sparse(row), fs) - z for row, z in zip(block.a, increments, strict=True)]
            if not any(x.requires_grad for x in moved):
                return values
            if system is None:
                system = self._system(block, fs, states)
            flat = torch.stack([to_real(x) for x in moved])
            shifts = cast(Tensor, Shift.apply(flat, system, False, self._evaluate.orders))  # type: ignore[misc]
            increments = [z + from_real(x, z) for z, x in zip(increments, shifts.unbind(), strict=True)]
        return increments

    def _system(self, block: Block, fs: Sequence[Tensor], states: Sequence[Tensor]) -> StageSystem:
        evaluate, choice = self._evaluate, self._linear_solver
        jacobians: list[Jacobian] = []
        for f, y in zip(fs, states, strict=True):
            evaluate.counter.jacobians += 1
            jacobians.append(jacobian_of(Linearisation(f, y), choice, evaluate.count_product))
        evaluate.counter.factorisations += 1
        tolerance = 1e2 * torch.finfo(states[0].dtype).eps
        dt = float(self._dt.value if isinstance(self._dt, MovingStep) else self._dt)
        return StageSystem(jacobians, block.a, dt, tolerance)


def _tracked(y: Tensor) -> Tensor:
    return y if y.requires_grad else y.detach().requires_grad_()


class Shift(Function):
    """M⁻¹r as a derivative only: its value is zero. Its VJP is one solve with Mᵀ."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, system: StageSystem, transposed: bool, orders: int) -> Tensor:
        ctx.system, ctx.transposed, ctx.orders = system, transposed, orders
        return torch.zeros_like(r)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Solved.apply(grad, ctx.system, not ctx.transposed, ctx.orders - 1), None, None, None  # type: ignore[misc]


class Solved(Function):
    """M⁻¹r or M⁻ᵀr. M counts as a constant; `orders` is how often the result may be differentiated."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, system: StageSystem, transposed: bool, orders: int) -> Tensor:
        ctx.system, ctx.transposed, ctx.orders = system, transposed, orders
        return system.solve(r, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.orders <= 0:
            raise RuntimeError(
                "solver: implicit steps have derivatives up to the second order; this would be a higher one. Use an "
                "explicit solver such as 'dopri5' for higher derivatives."
            )
        return Solved.apply(grad, ctx.system, not ctx.transposed, ctx.orders - 1), None, None, None  # type: ignore[misc]


def lagrange(nodes: Sequence[float], x: float) -> list[float]:
    """The weights of the polynomial through values at the nodes, at x."""
    weights: list[float] = []
    for i, node in enumerate(nodes):
        weight = 1.0
        for j, other in enumerate(nodes):
            weight *= 1.0 if i == j else (x - other) / (node - other)
        weights.append(weight)
    return weights


def predictors(tableau: ImplicitTableau) -> dict[int, tuple[tuple[int, float], ...]]:
    """For each implicit stage of a diagonally implicit method, a guess of its slope from the slopes before it.

    It is extrapolated from the nearest three nodes at most.
    """
    found: dict[int, tuple[tuple[int, float], ...]] = {}
    for i in range(tableau.stages):
        by_node = {tableau.c[j]: j for j in range(i)}
        nearest = sorted(by_node, key=lambda c: abs(c - tableau.c[i]))[:3]
        weights = lagrange(nearest, tableau.c[i])
        found[i] = tuple((by_node[c], w) for c, w in zip(nearest, weights, strict=True))
    return found


def without_tangent(f: Tensor) -> Tensor:
    """A state or an evaluation; where it carries a tangent, that of a solution of equations would be wrong."""
    if unpack_dual(f)[1] is not None:
        raise ValueError(
            "solver: implicit solvers have no forward-mode derivative; use an explicit one such as 'dopri5'"
        )
    return f

"""Programs of reversible solvers that carry a second copy z of the state: their steps, and VJPs that undo a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._error_norm import ErrorNorm
from ..._stepping.schedule import Plan
from ..._stepping.step import attempt
from ...solvers.reversible import CoupledSolver, Increment, PairMemory, State
from ..graph import Capture
from ..inductor import compile_graph
from .steps import (
    Layouts,
    StepNodes,
    Tuned,
    Wanted,
    chosen_of,
    dense,
    no_sums,
    ratio_of,
    replaced,
    step_key,
    tolerances,
)


class CoupledStepProgram:
    """(y, z, k1) ↦ (y1, z1, error ratio, k2, k3, …), where k1 = f(t0, z)."""

    def __init__(self, capture: Capture, solver: CoupledSolver, error: ErrorNorm | None, y: Tensor):
        self.nodes = nodes = StepNodes(solver, y)

        def step(
            clock: Tensor, y: Tensor, z: Tensor, k1: Tensor, rtol: Tensor, atol: Tensor, *rest: Tensor
        ) -> list[Tensor]:
            def evaluate(c: float, x: Tensor, *, stage: int) -> Tensor:
                return capture.evaluate(nodes.time(clock, c), x, rest)

            memory, controlled = PairMemory(z, k1), error is not None
            taken = attempt(solver, evaluate, nodes.length(clock), y, memory, end_slope=False, error=controlled)
            result = taken.result
            return [result.y1, result.memory.z, ratio_of(error, taken, y, [rtol, atol]), *result.slopes[1:]]

        y = capture.example(dense(y))
        self._layouts = Layouts([y] * 3, capture.axis)
        # One tensor each: a tracer tells its inputs apart by their identity.
        start = y, torch.zeros_like(y), torch.zeros_like(y)
        self._run = compile_graph(step, [nodes.example(), *start, *tolerances(error, y), *capture.rest], capture.axis)

    def __call__(
        self, plan: Plan, y: Tensor, z: Tensor, k1: Tensor, allowed: Sequence[Tensor], rest: list[Tensor]
    ) -> Any:
        start = self._layouts.fitted([y, z, k1])
        return self._run([self.nodes.clock(plan), *start, *allowed, *rest])


class UndoingProgram:
    """What a step starts from and the cotangents there, from what it leads to and the cotangents there.

    It takes y1, z1 and their cotangents, and the sums of gradients so far. It returns y0, z0 and their cotangents, a
    number that is finite if all of them are, and the sums with its own part added.
    """

    def __init__(self, capture: Capture, solver: CoupledSolver, wanted: Wanted, y: Tensor):
        self.nodes = nodes = StepNodes(solver, y)
        count = len(capture.rest)

        def undo(clock: Tensor, y1: Tensor, z1: Tensor, adj_y: Tensor, adj_z: Tensor, *others: Tensor) -> list[Tensor]:
            rest, totals = others[:count], list(others[count:])

            def vjp(increment: Increment, source: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
                def value_of(source: Tensor, *chosen: Tensor) -> Tensor:
                    inputs = replaced(rest, wanted, chosen)

                    def evaluate(c: float, x: Tensor, *, stage: int) -> Tensor:
                        return capture.evaluate(nodes.time(clock, c), x, inputs)

                    return increment(evaluate, source)

                value, back = torch.func.vjp(value_of, source, *chosen_of(rest, wanted))  # type: ignore[misc]
                grad, *grads = back(cotangent)
                totals[:] = [total + g for total, g in zip(totals, grads, strict=True)]
                return value, grad

            before, adj = solver.step_vjp(vjp, nodes.length(clock), (y1, z1), (adj_y, adj_z))  # type: ignore[arg-type]
            alive = sum((x.sum() for x in totals), adj[0].sum() + adj[1].sum())
            return [*before, *adj, alive, *totals]

        y = capture.example(dense(y))
        ends = [y, *(torch.zeros_like(y) for _ in range(3))]
        inputs = [nodes.example(), *ends, *capture.rest, *no_sums(capture.rest, wanted)]
        self._run = Tuned(undo, inputs, capture.axis)

    def __call__(
        self, plan: Plan, end: State, adj: State, rest: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        return self._run([self.nodes.clock(plan), *end, *adj, *rest, *sums])


def coupled_step_program(capture: Capture, solver: CoupledSolver, error: ErrorNorm | None, y: Tensor) -> Any:
    key = "coupled step", step_key(capture, solver, error)
    return capture.program(key, lambda capture: CoupledStepProgram(capture, solver, error, y))


def undoing_program(capture: Capture, solver: CoupledSolver, wanted: Wanted, y: Tensor) -> Any:
    return capture.program(("undo", solver, wanted), lambda capture: UndoingProgram(capture, solver, wanted, y))

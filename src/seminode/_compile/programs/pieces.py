"""Steps in pieces: one program for an evaluation of the field, and one for its VJP.

A program for a whole step contains the field six or seven times, its VJP twice as often. For a field that is a large
graph itself (one that differentiates a network, say) that would take minutes to compile. Evaluations of such a field
also take so long that the sums between them, computed eagerly, do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._error_norm import ErrorNorm
from ..._stepping.schedule import Plan
from ...solvers.base import Solver
from ...solvers.explicit import ExplicitRungeKutta
from ..graph import Capture
from .saving import SavingEvaluation, SavingPrograms
from .steps import (
    EvaluationProgram,
    StepProgram,
    VJPProgram,
    Wanted,
    cotangents_of_parts,
    evaluation_program,
    key_of,
    nodes_of,
    step_key,
    whole_step,
)

#: From how many operations on the graph of a field is large.
LARGE = 50


def large(capture: Capture) -> bool:
    return capture.graph.size >= LARGE


class StepInPieces:
    """As `StepProgram`; what the evaluations keep comes last."""

    def __init__(
        self, solver: ExplicitRungeKutta, error: ErrorNorm | None, at: EvaluationProgram | SavingEvaluation, y: Tensor
    ):
        self._solver, self._error, self.at = solver, error, at
        self.nodes = nodes_of(solver, y)

    def __call__(self, plan: Plan, y: Tensor, k1: Tensor, allowed: Sequence[Tensor], rest: list[Tensor]) -> Any:
        kept: list[Tensor] = []

        def evaluate(c: float, z: Tensor, *, stage: int) -> Tensor:
            k, *activations = self.at(plan.stage_time(c), z, rest)
            kept.extend(activations)
            return k

        with torch.no_grad():
            return [*whole_step(self._solver, self._error, evaluate, plan.length(y), y, k1, allowed), *kept]


class SavingInPieces(StepInPieces):
    """As `SavingPrograms`."""

    at: SavingEvaluation

    def __init__(self, solver: ExplicitRungeKutta, error: ErrorNorm | None, at: SavingEvaluation, y: Tensor):
        super().__init__(solver, error, at, y)
        self.kept = (solver.stages - 1) * at.kept
        self.sizes: dict[int, Any] = {}

    step = StepInPieces.__call__

    def vjp(self, plan: Plan, kept: Sequence[Tensor], cotangents: Sequence[Tensor], sums: Sequence[Tensor]) -> Any:
        n, totals = self.at.kept, list(sums)
        finite = torch.zeros(())

        def stage_vjp(i: int, adj: Tensor) -> Tensor:
            nonlocal finite, totals
            low = (i - 1) * n if i else self.kept
            grad, finite, *totals = self.at.vjp(kept[low : low + n], adj, totals)
            return grad

        with torch.no_grad():
            end, adj_slopes, start = cotangents_of_parts(self._solver, cotangents)
            grad_y = self._solver.vjp(stage_vjp, plan.length(end), end, adj_slopes)
            grad_y = grad_y if start is None else grad_y + start
            return [grad_y, finite + grad_y.sum(), *totals]


class VJPInPieces:
    """As `VJPProgram`: the step is taken again, and its activations are kept for as long as its VJP takes."""

    def __init__(self, solver: ExplicitRungeKutta, saving: SavingInPieces, slopes: bool):
        self._solver, self._saving = solver, saving
        later = saving.nodes.evaluated[: solver.stages - 1]
        #: The nodes at which the field is evaluated.
        self.evaluated = [0.0, *later, *([1.0] if slopes and len(solver.interpolant) > solver.stages else [])]

    def __call__(
        self, plan: Plan, y: Tensor, cotangents: Sequence[Tensor], rest: list[Tensor], sums: Sequence[Tensor]
    ) -> Any:
        solver, saving = self._solver, self._saving
        kept: list[Tensor] = []

        def evaluate(c: float, z: Tensor, *, stage: int) -> Tensor:
            k, *activations = saving.at(plan.stage_time(c), z, rest)
            kept.extend(activations)
            return k

        n, (end, *parts) = saving.at.kept, cotangents
        with torch.no_grad():
            y1 = solver.step(evaluate, plan.length(y), y, None).y1
            if parts and len(parts[0]) > 2 + solver.stages:
                evaluate(1.0, y1, stage=solver.stages)
                grad, _, *sums = saving.at.vjp(kept[-n:], parts[0][-1], sums)
                end = end + grad
        ordered = [*kept[n : n * solver.stages], *kept[:n]]
        inside = [torch.zeros_like(y), *parts] if parts else []
        return saving.vjp(plan, ordered, [end, *inside], sums)


def step_program(capture: Capture, solver: ExplicitRungeKutta, error: ErrorNorm | None, y: Tensor, k1: Tensor) -> Any:
    if large(capture):
        at = evaluation_program(capture, y)
        return capture.graph.program(
            ("step", solver, key_of(error, capture.layout), at), lambda: StepInPieces(solver, error, at, y)
        )
    key = "step", step_key(capture, solver, error)
    return capture.program(key, lambda capture: StepProgram(capture, solver, error, y, k1))


def saving_evaluation(capture: Capture, wanted: Wanted, y: Tensor) -> SavingEvaluation:
    return capture.program(
        ("saving evaluation", wanted, capture.lanes), lambda capture: SavingEvaluation(capture, wanted, y)
    )


def compiled_saving_evaluation(capture: Capture, wanted: Wanted, y: Tensor) -> SavingEvaluation:
    at = saving_evaluation(capture, wanted, y)
    return capture.graph.program(("compiled saving evaluation", at), at.ready)


def saving_programs(
    capture: Capture, solver: Solver, error: ErrorNorm | None, wanted: Wanted, slopes: bool, y: Tensor
) -> Any:
    assert isinstance(solver, ExplicitRungeKutta)  # a field is captured for no others
    if large(capture):
        at = compiled_saving_evaluation(capture, wanted, y)
        key = "saving", solver, key_of(error, capture.layout), at
        return capture.graph.program(key, lambda: SavingInPieces(solver, error, at, y))

    def make(capture: Capture) -> SavingPrograms:
        at = saving_evaluation(capture, wanted, y)
        return SavingPrograms(capture, solver, error, at, wanted, slopes, y)

    return capture.program(("saving", step_key(capture, solver, error), wanted, slopes), make)


def vjp_program(capture: Capture, solver: Solver, wanted: Wanted, y: Tensor, slopes: bool) -> Any:
    assert isinstance(solver, ExplicitRungeKutta)  # a field is captured for no others
    key = "vjp", solver, wanted, slopes, capture.lanes
    if large(capture):
        at = compiled_saving_evaluation(capture, wanted, y)
        return capture.graph.program(
            (key, at), lambda: VJPInPieces(solver, SavingInPieces(solver, None, at, y), slopes)
        )
    return capture.program(key, lambda capture: VJPProgram(capture, solver, wanted, y, slopes))

"""Interpolating: the adjoint alone is solved backwards, the state comes from the forward solution."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._field.checks import check_count
from .._stepping.engine import Eager
from .._stepping.observers import CheckpointTape, PolynomialTape, Tape
from .._stepping.problem import Problem
from ._continuous.dense_state import DenseSource, WindowSource
from ._continuous.parameter_integral import StageSums
from ._continuous.solve import BackwardSolve
from ._continuous.strategy import ContinuousAdjoint, refuse_coarse_polynomials


@dataclass(frozen=True, kw_only=True, repr=False)
class DenseAdjoint(ContinuousAdjoint):
    """A continuous adjoint that may read z off the forward solution.

    Arguments:
        memory: at most about so many copies of the state are kept, at least 16; forward steps are then taken again
            where needed. By default the polynomials of all steps are.
    """

    memory: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None:
            check_count("memory", self.memory, 16)

    @property
    def reads_forward(self) -> bool:
        return True

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.reads_forward:
            refuse_coarse_polynomials(self.name, problem.solver)

    def tape(self, problem: Problem) -> Tape | None:
        if not self.reads_forward:
            return None
        return PolynomialTape() if self.memory is None else CheckpointTape(self.memory // 2)

    def source(self, solve: BackwardSolve, kept: Sequence[Tensor]) -> Callable[[float], Tensor] | None:
        forward = solve.call.forward
        tape = forward.tape
        if isinstance(tape, PolynomialTape) and tape.plans:
            return DenseSource(tape.plans, kept)
        if not isinstance(tape, CheckpointTape) or not tape.plans:
            return None
        assert self.memory is not None
        problem = forward.problem
        degree = len(problem.solver.interpolant[0])
        width = max(1, self.memory // 2 // (degree + 1))
        log = None if solve.recorder is None else solve.recorder.evaluations
        engine = Eager(solve.field, problem.solver, solve.y0, forward.purity, solve.tally, None, log)
        return WindowSource(tape.plans, tape.checkpoints, width, engine)

    def first_step(self, solve: BackwardSolve, t: float) -> float | None:
        # The forward solve has found out how fast things change there: no need to probe.
        if not self.reads_forward or not solve.controller.adaptive or solve.controller.first()[0] is not None:
            return None
        plans = solve.call.forward.plans
        sign = 1.0 if plans[-1].dt > 0.0 else -1.0
        j = min(bisect_left(plans, sign * t, key=lambda plan: sign * plan.t1), len(plans) - 1)
        return plans[j].proposal

    def places(self, source: Any) -> Sequence[float]:
        return () if source is None else source.places


@dataclass(frozen=True, kw_only=True, repr=False)
class Interpolating(DenseAdjoint):
    """Solve a_z backwards alone, with z read off the dense forward solution.

        a_z′ = −a_zᵀ ∂f/∂z(t, z(t)),    ∂L/∂θ = ∫ a_zᵀ ∂f/∂θ dt

    Since z is not solved backwards, contracting and chaotic problems are no danger. Memory grows with the steps: the
    polynomial of each, five copies of the state for dopri5, unless `memory` bounds it.
    """

    def watch(self, solve: BackwardSolve) -> Any:
        return StageSums(solve.solver, solve.targets)

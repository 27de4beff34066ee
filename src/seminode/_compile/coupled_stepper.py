"""Steps of reversible solvers, by one program each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._stepping.engine import EagerStepper, EvaluationLog, Evaluator
from .._stepping.problem import Problem
from .._stepping.schedule import Plan
from .._stepping.step import Attempt, Step
from ..solvers.base import StepResult
from ..solvers.reversible import CoupledSolver, PairMemory
from .programs import coupled_step_program, tolerances

if TYPE_CHECKING:
    from torch import Tensor

    from .engine import Programs


class CoupledStepper:
    """Takes steps of a reversible solver, which carries a second copy of the state, by one program each."""

    def __init__(
        self, problem: Problem, solver: CoupledSolver, programs: Programs, evaluate: Evaluator, log: EvaluationLog
    ):
        self._solver, self._norm, self._programs = solver, problem.error, programs
        self._evaluate, self._log = evaluate, log
        self._allowed = tolerances(problem.error, problem.y0)
        # Its evaluations are compiled all the same, where a program for a whole step would be too large.
        self._in_pieces = EagerStepper(solver, evaluate, problem.error is not None)

    def __call__(self, plan: Plan, y0: Tensor, memory: PairMemory) -> Step:
        solver, z = self._solver, memory.z
        k1 = self._evaluate(plan.stage_time(0.0), z, stage=0) if memory.slope is None else memory.slope
        memory = PairMemory(z, k1)
        program = None if self._programs.large else self._programs.find(coupled_step_program, solver, self._norm, y0)
        if program is None:
            return self._in_pieces(plan, y0, memory)
        self._log.add_nodes(plan, program.nodes.evaluated)
        y1, z1, ratio, *slopes = program(plan, y0, z, k1, self._allowed, self._programs.rest)
        # The second slope of Heun's method is the first one of the next step.
        ahead = PairMemory(z1, slopes[-1] if solver.last_slope_is_next else None)
        attempted = Attempt(StepResult(y1, [k1, *slopes], ahead), None, None)

        def evaluate_end(step: Step) -> Tensor:
            return self._evaluate(plan.stage_time(1.0), step.end_anchor(), stage=solver.stages)

        return Step(solver, plan, y0, memory, attempted, evaluate_end, dt=plan.dt, ratio=ratio)

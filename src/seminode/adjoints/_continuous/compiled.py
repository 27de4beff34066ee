"""Compiled evaluators and steppers of the adjoint equation, behind the same protocols as the eager ones."""

from __future__ import annotations

import math

from torch import Tensor

from ..._compile.engine import compiled_step
from ..._compile.graph import NotCompiled
from ..._stepping.engine import Begun, EvaluationLog, Evaluator, Stepper
from ..._stepping.schedule import Plan
from ..._stepping.step import Step
from ...solvers.base import Memory, Solver
from .parameter_integral import ParameterIntegral
from .programs import AdjointPrograms
from .system import AdjointSystem


class CompiledAdjointEvaluator:
    """Evaluates the slope of an adjoint system by a program.

    `times` says that the slope of the field itself is needed where a stretch begins, for the gradient of its time.
    """

    def __init__(
        self,
        programs: AdjointPrograms,
        system: AdjointSystem,
        integral: ParameterIntegral,
        eager: Evaluator,
        log: EvaluationLog,
        times: bool,
    ):
        self._programs, self._system, self._integral = programs, system, integral
        self._eager, self._log = eager, log
        self._times = times

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        programs, integral = self._programs, self._integral
        if not programs.usable or (stage == 0 and self._times):
            return self._eager(t, y, stage=stage)
        now, _ = integral.wanted(stage)
        try:
            k, grads = programs.start(t, y, now)
        except NotCompiled as reason:
            programs.give_up(reason)
            return self._eager(t, y, stage=stage)
        self._log.add(t)
        self._system.count_vjps(1, int(now))
        integral.stage(stage, grads, None)
        return k


class CompiledAdjointStarter:
    """Starts an interval of an adjoint system by one program."""

    def __init__(
        self, programs: AdjointPrograms, system: AdjointSystem, integral: ParameterIntegral, log: EvaluationLog
    ):
        self._programs, self._system, self._integral, self._log = programs, system, integral, log

    def __call__(self, near: Plan, far: Plan, shortest: float, y0: Tensor) -> Begun | None:
        programs, integral = self._programs, self._integral
        if not programs.usable or not programs.begins:
            return None
        now, _ = integral.wanted(0)
        try:
            started, grads = programs.begin(near, far, shortest, y0, now)
        except NotCompiled as reason:
            programs.give_up(reason)
            return None
        self._log.add(near.stage_time(0.0), started.probed)
        self._system.count_vjps(2, int(now))
        integral.stage(0, grads, None)
        return Begun(started.slope, started.finite, started.length)


class CompiledAdjointStepper:
    """Takes a whole step of an adjoint system by one program."""

    def __init__(
        self,
        solver: Solver,
        programs: AdjointPrograms,
        system: AdjointSystem,
        integral: ParameterIntegral,
        evaluate: Evaluator,
        eager: Stepper,
        log: EvaluationLog,
    ):
        self._solver, self._programs, self._system, self._integral = solver, programs, system, integral
        self._evaluate, self._eager, self._log = evaluate, eager, log

    def __call__(self, plan: Plan, y0: Tensor, memory: Memory) -> Step:
        k1 = self._evaluate(plan.stage_time(0.0), y0, stage=0) if memory is None else memory
        programs, integral = self._programs, self._integral
        if not programs.usable or programs.pieces:
            return self._eager(plan, y0, k1)
        integral.begin(plan)
        wanted = self._wanted(plan)
        try:
            taken = programs.step(plan, y0, k1, integral.weights() if any(wanted) else (), wanted)
        except NotCompiled as reason:
            programs.give_up(reason)
            integral.abandon()
            return self._eager(plan, y0, k1)
        self._log.add(*taken.evaluated)
        self._system.count_vjps(len(taken.evaluated), sum(wanted[: len(taken.evaluated)]))
        if taken.folded is not None:
            integral.fold(taken.folded)
        return compiled_step(self._solver, plan, y0, k1, taken.y1, taken.ratio, taken.slopes, self._evaluate)

    def _wanted(self, plan: Plan) -> tuple[bool, ...]:
        """Of which later stages, the end slope included, the gradients are computed.

        A gradient too many in the last step of a solve is better than another program for it.
        """
        integral, stages = self._integral, self._solver.stages
        wanted = [integral.wanted(stage)[0] for stage in range(1, stages + 1)]
        if not any(wanted):
            return tuple(wanted)
        cut = not math.isnan(integral.end)  # where a step ends early, stages count that do not count elsewhere
        return *(each or cut for each in wanted[:-1]), wanted[-1] or not plan.crosses_jump

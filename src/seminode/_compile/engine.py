"""Compiled evaluators and steppers: evaluations, steps and their kept activations come from compiled programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._error_norm import ErrorNorm
from .._field.determinism import Determinism
from .._stepping.budget import Budget, storages
from .._stepping.engine import Begun, EagerEvaluator, EagerStepper, Engine, EvaluationLog, Evaluator, Stepper
from .._stepping.problem import Problem
from .._stepping.schedule import Plan
from .._stepping.step import Attempt, Step
from ..solvers.base import Solver, StepResult
from ..solvers.reversible import CoupledSolver
from .ahead import AheadStepper
from .capturing import warn_not_compiled
from .coupled_stepper import CoupledStepper
from .graph import Capture, NotCompiled
from .programs import (
    SavingEvaluation,
    Wanted,
    compiled_saving_evaluation,
    evaluation_program,
    large,
    saving_programs,
    start_program,
    step_program,
    tolerances,
)

P = TypeVar("P")


class Programs:
    """The programs of one solve, each looked up once; none at all as soon as one of them cannot be made."""

    def __init__(self, captured: Capture):
        self._capture: Capture | None = captured
        self._ready: dict[Callable[..., Any], Any] = {}
        self.rest = captured.rest
        self.large = large(captured)

    def build(self, *programs: tuple[Any, ...]) -> None:
        """Have the programs that the first solve of a field will need built in parallel.

        One that cannot be made is reported when it is asked for.
        """
        capture = self._capture
        if capture is None or self.large:
            return
        with capture.graph.ahead():
            for program, *args in programs:
                with contextlib.suppress(NotCompiled):
                    program(capture, *args)

    def find(self, program: Callable[..., P], *args: Any) -> P | None:
        """A program, or `None` if the solve has to continue eagerly."""
        if self._capture is None:
            return None
        if program not in self._ready:
            try:
                self._ready[program] = program(self._capture, *args)
            except NotCompiled as reason:
                warn_not_compiled(reason)
                self._capture = None
                return None
        return self._ready[program]


class CompiledEvaluator:
    """Evaluates the field by a program."""

    def __init__(self, programs: Programs, eager: Evaluator, log: EvaluationLog):
        self._programs, self._eager, self._log = programs, eager, log

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        program = self._programs.find(evaluation_program, y)
        if program is None:
            return self._eager(t, y, stage=stage, shift=shift)
        self._log.add(t)
        return program(t, y, self._programs.rest)[0]


class CompiledStepper:
    """Takes a whole step, including its error norm, with one program."""

    def __init__(
        self,
        solver: Solver,
        norm: ErrorNorm | None,
        allowed: Sequence[Tensor],
        programs: Programs,
        evaluate: Evaluator,
        eager: Stepper,
        log: EvaluationLog,
    ):
        self.solver, self._norm, self._programs = solver, norm, programs
        self._evaluate, self._eager, self.log = evaluate, eager, log
        self.allowed, self.rest = allowed, programs.rest
        self.reads = False  # whether programs return the size of an error as one number

    def program(self, y0: Tensor, k1: Tensor) -> Any:
        return self._programs.find(step_program, self.solver, self._norm, y0, k1)

    def evaluation(self, y: Tensor) -> Any:
        return self._programs.find(evaluation_program, y)

    def __call__(self, plan: Plan, y0: Tensor, memory: Tensor | None) -> Step:
        if plan.failing is not None:
            y0, memory = plan.enter(y0), None
        k1 = self._evaluate(plan.stage_time(0.0), y0, stage=0) if memory is None else memory
        program = self.program(y0, k1)
        if program is None:
            return self._eager(plan, y0, k1)
        y1, ratio, *slopes = program(plan, y0, k1, self.allowed, self.rest)
        self.reads = program.nodes.reads(ratio)
        return self.finished(plan, y0, k1, program.nodes.evaluated, y1, ratio, slopes)

    def finished(
        self,
        plan: Plan,
        y0: Tensor,
        k1: Tensor,
        nodes: Sequence[float],
        y1: Tensor,
        ratio: Tensor | float,
        slopes: Sequence[Tensor],
    ) -> Step:
        """A step that evaluated the field at these nodes, from what a program has returned. Counts."""
        self.log.add_nodes(plan, nodes)
        return compiled_step(self.solver, plan, y0, k1, y1, ratio, slopes, self._evaluate)


def compiled_step(
    solver: Solver,
    plan: Plan,
    y0: Tensor,
    k1: Tensor,
    y1: Tensor,
    ratio: Tensor | float,
    slopes: Sequence[Tensor],
    evaluate: Evaluator,
    saved: Any = None,
) -> Step:
    """A step from what a program returns: y1, its error ratio, and the slopes, first k_end if the estimate reads it."""
    ends = int(solver.error_needs_end_slope)
    attempted = Attempt(StepResult(y1, [k1, *slopes[ends:]]), slopes[0] if ends else None, None)

    def evaluate_end(step: Step) -> Tensor:
        return evaluate(plan.stage_time(1.0), step.end_anchor(), stage=solver.stages)

    return Step(solver, plan, y0, k1, attempted, evaluate_end, dt=plan.dt, ratio=ratio, saved=saved)


class CompiledStarter:
    """Makes the first two evaluations by one program. With `saving`, activations of the first one are kept."""

    def __init__(
        self,
        problem: Problem,
        allowed: Sequence[Tensor],
        programs: Programs,
        log: EvaluationLog,
        saving: SavingEvaluator | None = None,
        wanted: Wanted | None = None,
    ):
        self._solver, self._error, self._ranks = problem.solver, problem.error, problem.ranks
        self._allowed, self._programs, self._log = allowed, programs, log
        self._saving, self._wanted = saving, wanted

    def __call__(self, near: Plan, far: Plan, shortest: float, y0: Tensor) -> Begun | None:
        if self._error is None or self._programs.large or self._ranks.several:
            return None
        program = self._programs.find(start_program, self._solver, self._error, self._wanted, y0)
        if program is None:
            return None
        begun = program(near, far, shortest, y0, self._allowed, self._programs.rest)
        self._log.add(near.stage_time(0.0), begun.probed)
        if self._saving is not None:
            self._saving.first_slopes = [(begun.slope, begun.kept)]
        return Begun(begun.slope, begun.finite, begun.length)


class SavedKind(NamedTuple):
    """The programs that keep activations, and for which tensors that the field uses they compute gradients."""

    programs: Any
    wanted: Wanted


class Saved(NamedTuple):
    """The activations that a step keeps for its VJP: of itself, of its first slope, and of its end slope."""

    step: list[Tensor]
    first: list[Tensor]
    end: list[Tensor]
    sizes: SavedSizes
    kind: SavedKind


class SavedSizes(NamedTuple):
    """The bytes of the activations of a step, those of its first slope included, and with those of its end slope too.

    A program returns tensors of the same sizes for states of the same size, so that they are measured once.
    """

    own: int
    total: int

    @classmethod
    def of(cls, step: list[Tensor], first: list[Tensor], end: list[Tensor], rest: Sequence[Tensor]) -> SavedSizes:
        """Each storage once; those of `rest`, the parameters, are there anyway."""
        own = storages([*step, *first])
        total = own | storages(end)
        shared = storages(rest).keys()
        own_size, total_size = (sum(n for key, n in each.items() if key not in shared) for each in (own, total))
        return cls(own_size, total_size)


class SavingPrograms:
    """Finds the programs whose steps keep their activations.

    `wanted` says for which tensors that the field uses a gradient may be asked for, `slopes` whether outputs may lie
    inside of steps.
    """

    def __init__(self, programs: Programs, problem: Problem, wanted: Wanted, slopes: bool):
        self._programs = programs
        self._options = problem.solver, problem.error, wanted, slopes
        self.wanted = wanted
        self.rest = programs.rest

    def find(self, y: Tensor) -> Any:
        return self._programs.find(saving_programs, *self._options, y)

    def find_evaluation(self, y: Tensor) -> SavingEvaluation | None:
        return self._programs.find(compiled_saving_evaluation, self.wanted, y)


class SavingEvaluator:
    """Evaluates the field by the program that also keeps activations: one program less to compile."""

    def __init__(self, programs: SavingPrograms, eager: Evaluator, log: EvaluationLog):
        self._programs, self._eager, self._log = programs, eager, log
        #: The latest first slopes, with the activations that were kept of them.
        self.first_slopes: list[tuple[Tensor, list[Tensor]]] = []

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        at = self._programs.find_evaluation(y)
        if at is None:
            return self._eager(t, y, stage=stage, shift=shift)
        self._log.add(t)
        k, *kept = at(t, y, self._programs.rest)
        if stage == 0:
            self.first_slopes = [(k, kept)]
        return k


class SavingStepper:
    """Takes a whole step by one program, which also keeps the activations that the VJP of the step needs.

    When the budget has no room for another step, this and all later steps are taken by `plain`.
    """

    def __init__(
        self,
        solver: Solver,
        allowed: Sequence[Tensor],
        programs: SavingPrograms,
        evaluate: SavingEvaluator,
        plain: Stepper,
        log: EvaluationLog,
        budget: Budget,
    ):
        self._solver, self._allowed, self._programs = solver, allowed, programs
        self._evaluate, self._plain, self._log, self._budget = evaluate, plain, log, budget
        self._exhausted = False

    def __call__(self, plan: Plan, y0: Tensor, memory: Tensor | None) -> Step:
        if self._exhausted:
            return self._plain(plan, y0, memory)
        solver, evaluate = self._solver, self._evaluate
        k1 = evaluate(plan.stage_time(0.0), y0, stage=0) if memory is None else memory
        programs = self._programs.find(y0)
        if programs is None or not self._has_room(programs.sizes.get(y0.numel())):
            return self._plain(plan, y0, k1)
        first = next(kept for k, kept in evaluate.first_slopes if k is k1)
        self._log.add_nodes(plan, programs.nodes.evaluated)
        values = programs.step(plan, y0, k1, self._allowed, self._programs.rest)
        ends = int(solver.error_needs_end_slope)
        count = 2 + ends + solver.stages - 1
        (y1, ratio, *slopes), kept = values[:count], list(values[count:])
        parts = kept[: programs.kept], first, kept[programs.kept :]
        sizes = programs.sizes.get(y0.numel())
        if sizes is None:
            sizes = programs.sizes[y0.numel()] = SavedSizes.of(*parts, self._programs.rest)
            if not self._has_room(sizes):
                return compiled_step(solver, plan, y0, k1, y1, ratio, slopes, evaluate)
        saved = Saved(*parts, sizes, SavedKind(programs, self._programs.wanted))
        # A rejected step starts again from k1, an accepted one is followed by one that starts from its end.
        evaluate.first_slopes = [(k1, first)]
        if ends:
            evaluate.first_slopes.append((slopes[0], saved.end))
        return compiled_step(solver, plan, y0, k1, y1, ratio, slopes, evaluate, saved)

    def _has_room(self, sizes: SavedSizes | None) -> bool:
        """Whether another step may be kept. The first time that there is no room, what is not needed is dropped."""
        self._exhausted = sizes is not None and not self._budget.fits(sizes.total)
        if self._exhausted:
            self._evaluate.first_slopes = []
        return not self._exhausted


def _eager(problem: Problem, determinism: Determinism, log: EvaluationLog) -> tuple[EagerEvaluator, EagerStepper]:
    """The eager stepper that compiled steps fall back to."""
    evaluate = EagerEvaluator(problem.field, problem.y0, determinism, log)
    return evaluate, EagerStepper(problem.solver, evaluate, problem.error is not None)


def _first_slopes(problem: Problem, wanted: Wanted | None) -> list[tuple[Any, ...]]:
    """The programs for slopes with which steps begin: the one that also selects the length of the first step, and an
    evaluation, where it is not known from the step before: at jumps, or if steps do not compute their end slopes."""
    y0, solver, error = problem.y0.detach(), problem.solver, problem.error
    evaluation = (evaluation_program, y0) if wanted is None else (compiled_saving_evaluation, wanted, y0)
    selects = error is not None and error.in_programs and problem.lanes is None and not problem.ranks.several
    if not selects or problem.controller.first()[0] is not None:
        return [evaluation]
    start = start_program, solver, error, wanted, y0
    return [start] if solver.error_needs_end_slope and not problem.jumps else [start, evaluation]


def compiled_engine(
    problem: Problem,
    determinism: Determinism,
    log: EvaluationLog,
    captured: Capture,
    later: Sequence[tuple[Any, ...]] = (),
) -> Engine:
    """An engine that takes compiled steps, or eager ones as soon as a program cannot be made.

    `later` are programs that will be needed after the solve, with their arguments.
    """
    solver, programs = problem.solver, Programs(captured)
    eager_evaluate, eager_step = _eager(problem, determinism, log)
    evaluate = CompiledEvaluator(programs, eager_evaluate, log)
    if isinstance(solver, CoupledSolver):
        coupled = CoupledStepper(problem, solver, programs, evaluate, log)
        return Engine(solver, problem.field.layout, log.counter, evaluate, coupled)
    allowed = tolerances(problem.error, problem.y0)
    if captured.graph.unused:
        # Two tensors: a tracer tells its inputs apart by their identity.
        y0, k1 = problem.y0.detach(), torch.empty_like(problem.y0, requires_grad=False)
        # The one that takes longest comes first, so that as much as possible is done in parallel with it.
        programs.build(*later, (step_program, solver, problem.error, y0, k1), *_first_slopes(problem, None))
    step = CompiledStepper(solver, problem.error, allowed, programs, evaluate, eager_step, log)
    if captured.lanes is not None:
        return Engine(solver, problem.field.layout, log.counter, evaluate, step)
    start = CompiledStarter(problem, allowed, programs, log)
    along = None if programs.large or problem.ranks.several else partial(AheadStepper, step)
    return Engine(solver, problem.field.layout, log.counter, evaluate, step, start=start, along=along)


def saving_engine(
    problem: Problem,
    determinism: Determinism,
    log: EvaluationLog,
    captured: Capture,
    wanted: Wanted,
    slopes: bool,
    budget: Budget,
) -> Engine:
    """An engine whose compiled steps keep the activations that their VJPs need, while the budget lasts."""
    shared, solver = Programs(captured), problem.solver
    programs = SavingPrograms(shared, problem, wanted, slopes)
    eager_evaluate, eager_step = _eager(problem, determinism, log)
    evaluate = SavingEvaluator(programs, eager_evaluate, log)
    allowed = tolerances(problem.error, problem.y0)
    if captured.graph.unused:
        saving = saving_programs, solver, problem.error, wanted, slopes, problem.y0.detach()
        shared.build(saving, *_first_slopes(problem, wanted))
    plain = CompiledStepper(solver, problem.error, allowed, shared, evaluate, eager_step, log)
    step = SavingStepper(solver, allowed, programs, evaluate, plain, log, budget)
    start = CompiledStarter(problem, allowed, shared, log, evaluate, wanted)
    return Engine(solver, problem.field.layout, log.counter, evaluate, step, start=start)

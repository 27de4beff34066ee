"""An engine takes steps: an evaluator calls the field, a stepper makes a step of its slopes. Here, the eager ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .._field.determinism import Determinism
from .._field.field import Field, as_time
from .._field.pytree import Layout, real_dtype
from ..solvers.base import Memory, Solver
from .combination import MovingStep, StepSize
from .observers import Counter
from .schedule import Plan
from .step import Shifts, Step, attempt


class Evaluator(Protocol):
    """Evaluates the field at a time and a state, and counts the evaluation.

    `stage` is the number of the evaluation within a step, `None` outside of steps; `shift` carries the derivative with
    respect to the time.
    """

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor: ...


class Stepper(Protocol):
    """Takes the planned step from a state and the solver's memory."""

    def __call__(self, plan: Plan, y0: Tensor, memory: Memory) -> Step: ...


@dataclass(frozen=True)
class Engine:
    """What the loop steps with. `layout` names the leaves of the state in error messages."""

    solver: Solver
    layout: Layout
    counter: Counter
    evaluate: Evaluator
    step: Stepper
    shifts: Shifts | None = None

    def start_slope(self, plan: Plan, y: Tensor, memory: Memory) -> Tensor:
        """f at the start of a step, on the right side of a jump there."""
        shift = None if self.shifts is None else self.shifts.of(plan)[0]
        return self.evaluate(plan.stage_time(0.0), self.solver.anchor(y, memory), stage=0, shift=shift)


class EvaluationLog:
    """Counts evaluations and, where a record is wanted, notes their times."""

    __slots__ = ("counter", "times")

    def __init__(self, counter: Counter, times: list[float] | None = None):
        self.counter = counter
        self.times = times

    def add(self, *times: float) -> None:
        self.counter.nfe += len(times)
        if self.times is not None:
            self.times.extend(times)

    def add_nodes(self, plan: Plan, nodes: Sequence[float]) -> None:
        """The same for evaluations at nodes of a step."""
        self.counter.nfe += len(nodes)
        if self.times is not None:
            self.times.extend(map(plan.stage_time, nodes))


class EagerEvaluator:
    """Calls the field itself, on the live tensors that it uses."""

    __slots__ = ("_determinism", "_device", "_dtype", "_field", "_log", "handed")

    def __init__(self, field: Field, like: Tensor, determinism: Determinism, log: EvaluationLog):
        self._field = field
        self._determinism = determinism
        self._log = log
        self._dtype = real_dtype(like)
        self._device = like.device
        #: Times and states that the field was given, where a check of the graph needs to know them.
        self.handed: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        self._log.add(t)
        if self._determinism.stateful:
            self._determinism.prepare()
        time = as_time(t, self._dtype, self._device)
        if self.handed is not None:
            self.handed.append((time, y))
        return self._field(time if shift is None else time + shift, y)


class EagerStepper:
    """Takes steps eagerly. `controlled`: whether an error estimate will be asked for."""

    __slots__ = ("_controlled", "_evaluate", "_shifts", "_solver")

    def __init__(self, solver: Solver, evaluate: Evaluator, controlled: bool = False, shifts: Shifts | None = None):
        self._solver, self._evaluate = solver, evaluate
        self._controlled = controlled
        self._shifts = shifts

    def __call__(self, plan: Plan, y0: Tensor, memory: Memory) -> Step:
        solver, shift = self._solver, None if self._shifts is None else self._shifts.of(plan)
        if plan.failing is not None:
            y0, memory = plan.enter(y0), None
        dt: StepSize = plan.length(y0)
        if shift is not None:
            moves = shift[1] - shift[0]
            dt = MovingStep(dt, moves if moves.ndim == 0 else moves.reshape(-1, *(1,) * (y0.ndim - 1)))
        # A field may return one and the same constant, but must not write into what it has returned before.
        answers = [(memory, memory._version)] if isinstance(memory, Tensor) else []

        def evaluate(c: float, y: Tensor, *, stage: int) -> Tensor:
            moved = None if shift is None else _moved(shift, c, stage, solver.stages)
            k = self._evaluate(plan.stage_time(c), y, stage=stage, shift=moved)
            answers.append((k, k._version))
            return k

        def evaluate_end(step: Step) -> Tensor:
            k = evaluate(1.0, step.end_anchor(), stage=solver.stages)
            check_untouched(answers)
            return k

        controlled = self._controlled
        end_slope = controlled and solver.error_needs_end_slope
        attempted = attempt(solver, evaluate, dt, y0, memory, end_slope=end_slope, error=controlled)
        check_untouched(answers)
        return Step(solver, plan, y0, memory, attempted, evaluate_end, dt=dt, shift=shift)


def _moved(shift: tuple[Tensor, Tensor], c: float, stage: int, stages: int) -> Tensor:
    """What carries the derivative with respect to the time at node c, between the ends of the step."""
    if stage == 0:
        return shift[0]
    return shift[1] if stage == stages else (1.0 - c) * shift[0] + c * shift[1]


def check_untouched(answers: Sequence[tuple[Tensor, int]]) -> None:
    """Refuse a field that has written into a slope which the solver still uses."""
    for k, version in answers:
        if k._version != version:
            raise ValueError(
                "field: wrote into a tensor that it had returned before, which is still in use; expected a new tensor "
                "from every evaluation"
            )


def eager_engine(
    field: Field,
    solver: Solver,
    like: Tensor,
    determinism: Determinism,
    log: EvaluationLog,
    *,
    controlled: bool = False,
    shifts: Shifts | None = None,
) -> Engine:
    """An engine that evaluates the field and takes steps eagerly."""
    evaluate = EagerEvaluator(field, like, determinism, log)
    step = EagerStepper(solver, evaluate, controlled, shifts)
    return Engine(solver, field.layout, log.counter, evaluate, step, shifts)

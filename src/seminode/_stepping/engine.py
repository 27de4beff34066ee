"""An engine takes steps: an evaluator calls the field, a stepper makes a step of its slopes. Here, the eager ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from .._error_norm import ErrorNorm
from .._field.accounting import Evaluation
from .._field.determinism import Determinism
from .._field.field import Field, as_time
from .._field.linearisation import Linearisation
from .._field.pytree import Layout, real_dtype
from ..solvers._linear import Jacobian, LinearSolver, given_jacobian, jacobian_of
from ..solvers.base import Evaluate, Memory, Solver
from .combination import MovingStep, StepSize
from .known_plans import KnownPlans
from .observers import Counter, Observer
from .schedule import Plan, Schedule
from .step import Shifts, Step, attempt


class Evaluator(Protocol):
    """Evaluates the field at a time and a state, and counts the evaluation.

    `stage` is the number of the evaluation within a step, `None` outside of steps; `shift` carries the derivative with
    respect to the time.
    """

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor: ...


class JacobianEvaluator(Evaluator, Protocol):
    """An evaluator for implicit solvers, which also need the Jacobian of the field."""

    counter: Counter

    @property
    def eps(self) -> float:
        """The rounding error of the field's answers."""
        ...

    def jacobian(
        self, t: float, y: Tensor, linear_solver: LinearSolver, function: Callable[..., Tensor] | None
    ) -> Jacobian:
        """The Jacobian at a time and a state, by the user's function if there is one. Counts."""
        ...


class Stepper(Protocol):
    """Takes the planned step from a state and the solver's memory."""

    def __call__(self, plan: Plan, y0: Tensor, memory: Memory) -> Step: ...


class Begun(NamedTuple):
    """The first slope of a solve, and how long its first step is to be."""

    slope: Tensor
    finite: bool  # the sums of y0 and of the slope
    length: float


class Starter(Protocol):
    """Makes the first two evaluations of a solve, from which the length of the first step follows, at once.

    `near` is some plan that starts where the solve does, `far` one to the next place; the second evaluation is made at
    least `shortest` away from the first, and at most as far as `far`. `None` if it cannot be done at once.
    """

    def __call__(self, near: Plan, far: Plan, shortest: float, y0: Tensor) -> Begun | None: ...


@dataclass(frozen=True)
class Engine:
    """Takes the steps of the loop. `layout` names the leaves of the state in error messages.

    `along` makes a stepper that may take several steps at once, since their plans are known or can be predicted.
    """

    solver: Solver
    layout: Layout
    counter: Counter
    evaluate: Evaluator
    step: Stepper
    shifts: Shifts | None = None
    start: Starter | None = None
    along: Callable[[KnownPlans | Schedule], Stepper] | None = None

    def following(self, plans: KnownPlans | Schedule) -> Engine:
        """An engine for the steps of these plans only."""
        return self if self.along is None else replace(self, step=self.along(plans))

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

    @contextlib.contextmanager
    def as_checks(self) -> Iterator[None]:
        """Evaluations inside count as checks."""
        counter, count, listed = self.counter, self.counter.nfe, 0 if self.times is None else len(self.times)
        try:
            yield
        finally:
            counter.checks += counter.nfe - count
            counter.nfe = count
            if self.times is not None:
                del self.times[listed:]

    def add_nodes(self, plan: Plan, nodes: Sequence[float]) -> None:
        """The same for evaluations at nodes of a step."""
        self.counter.nfe += len(nodes)
        if self.times is not None:
            self.times.extend(map(plan.stage_time, nodes))


class EagerEvaluator:
    """Calls the field itself, on the live tensors that it uses."""

    __slots__ = ("_determinism", "_device", "_dtype", "_field", "_log", "watched")

    def __init__(self, field: Field, like: Tensor, determinism: Determinism, log: EvaluationLog):
        self._field = field
        self._determinism = determinism
        self._log = log
        self._dtype = real_dtype(like)
        self._device = like.device
        #: The evaluations, where their graphs are to be checked.
        self.watched: list[Evaluation] | None = None

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        self._log.add(t)
        time = as_time(t, self._dtype, self._device)
        moved = time if shift is None else time + shift
        if self._determinism.stateful:
            k = self._determinism.evaluate(self._field, moved, y, repeated=self.counter.check)
        else:
            k = self._field(moved, y)
        if self.watched is not None:
            self.watched.append(Evaluation(time, y, k))
        return k

    @property
    def counter(self) -> Counter:
        return self._log.counter

    @property
    def eps(self) -> float:
        return self._field.eps

    def jacobian(
        self, t: float, y: Tensor, linear_solver: LinearSolver, function: Callable[..., Tensor] | None
    ) -> Jacobian:
        self.counter.jacobians += 1
        if function is not None:
            time = as_time(t, self._dtype, self._device)
            state = self._field.layout.unpack(y.to(self._field.dtype))
            return given_jacobian(function(time, state, *self._field.args), y, linear_solver)
        linearisation = Linearisation.of(partial(self, t), y)
        return jacobian_of(linearisation, linear_solver, partial(count_product, self.counter))


def count_product(counter: Counter) -> None:
    counter.products += 1


class StageEvaluate:
    """The field and its Jacobian at the nodes of a step, for an implicit solver."""

    def __init__(
        self, evaluate: Evaluate, evaluator: JacobianEvaluator, plan: Plan, norm: ErrorNorm | None, orders: int
    ):
        self._evaluate, self._evaluator, self._plan = evaluate, evaluator, plan
        self.norm, self.orders = norm, orders
        self.counter, self.eps = evaluator.counter, evaluator.eps

    def __call__(self, c: float, y: Tensor, *, stage: int | None) -> Tensor:
        return cast(Any, self._evaluate)(c, y, stage=stage)

    def jacobian(
        self, c: float, y: Tensor, linear_solver: LinearSolver, function: Callable[..., Tensor] | None
    ) -> Jacobian:
        return self._evaluator.jacobian(self._plan.stage_time(c), y, linear_solver, function)

    def count_product(self) -> None:
        count_product(self.counter)


class EagerStepper:
    """Takes steps eagerly.

    `controlled`: whether an error estimate will be asked for. For implicit solvers, `norm` measures it, and `orders` is
    how often steps may be differentiated.
    """

    __slots__ = ("_controlled", "_evaluate", "_norm", "_orders", "_shifts", "_solver")

    def __init__(
        self,
        solver: Solver,
        evaluate: Evaluator,
        controlled: bool = False,
        shifts: Shifts | None = None,
        *,
        norm: ErrorNorm | None = None,
        orders: int = 2,
    ):
        self._solver, self._evaluate = solver, evaluate
        self._controlled = controlled
        self._shifts = shifts
        self._norm, self._orders = norm, orders

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

        def evaluate(c: float, y: Tensor, *, stage: int | None) -> Tensor:
            moved = None if shift is None else _moved(shift, c, stage, solver)
            k = self._evaluate(plan.stage_time(c), y, stage=stage, shift=moved)
            answers.append((k, k._version))
            return k

        def evaluate_end(step: Step) -> Tensor:
            k = evaluate(1.0, step.end_anchor(), stage=solver.stages)
            check_untouched(answers)
            return k

        controlled = self._controlled
        if solver.implicit:
            evaluator = cast(JacobianEvaluator, self._evaluate)
            evaluate = StageEvaluate(cast(Evaluate, evaluate), evaluator, plan, self._norm, self._orders)
        end_slope = controlled and solver.error_needs_end_slope
        attempted = attempt(solver, evaluate, dt, y0, memory, end_slope=end_slope, error=controlled)
        check_untouched(answers)
        return Step(solver, plan, y0, memory, attempted, evaluate_end, dt=dt, shift=shift)


class AnnouncedStepper:
    """Tells observers about every step before it is tried."""

    def __init__(self, step: Stepper, observers: Sequence[Observer]):
        self._step, self._observers = step, observers

    def __call__(self, plan: Plan, y0: Tensor, memory: Memory) -> Step:
        for observer in self._observers:
            observer.tried(plan, y0)
        return self._step(plan, y0, memory)


def announced(engine: Engine, observers: Sequence[Observer]) -> Engine:
    """The engine, with its steps announced to the observers that a user has passed."""
    # One step at a time: an observer may change what the next one depends on.
    return replace(engine, step=AnnouncedStepper(engine.step, observers), along=None) if observers else engine


def _moved(shift: tuple[Tensor, Tensor], c: float, stage: int | None, solver: Solver) -> Tensor:
    """What carries the derivative with respect to the time at node c, between the ends of the step."""
    if stage == 0 and not (solver.implicit and c):
        return shift[0]
    return shift[1] if stage == solver.stages else (1.0 - c) * shift[0] + c * shift[1]


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
    norm: ErrorNorm | None = None,
    shifts: Shifts | None = None,
) -> Engine:
    """An engine that evaluates the field and takes steps eagerly; `norm` measures their errors."""
    evaluate = EagerEvaluator(field, like, determinism, log)
    step = EagerStepper(solver, evaluate, norm is not None, shifts, norm=norm)
    return Engine(solver, field.layout, log.counter, evaluate, step, shifts)

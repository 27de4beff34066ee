"""What `solve` expects of an adjoint, and the forward pass that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._compile.capturing import captured
from .._compile.engine import compiled_engine
from .._compile.graph import Capture
from .._compile.torch_private import transforms_active
from .._field.determinism import Determinism
from .._field.field import Field
from .._field.pytree import is_finite, real_dtype, shares_memory
from .._integrals.auto_norm import Recheck
from .._stepping.beginning import begin_at_once, check_start, select_first_step
from .._stepping.budget import Budget
from .._stepping.engine import Engine, EvaluationLog, announced, eager_engine
from .._stepping.event_search import EventSearch
from .._stepping.known_plans import ForeseenSchedule, RecordedSchedule
from .._stepping.lane_event_search import LaneEventSearch
from .._stepping.lane_outputs import LaneOutputs, LaneSampler
from .._stepping.lane_step import AnyFinite, LaneShifts, LaneStepper, begin_lanes, check_ends, check_independent
from .._stepping.lanes import LaneSchedule, mean_interval
from .._stepping.loop import integrate, place_of
from .._stepping.observers import Counter, Observer, PolynomialTape, Recorder, Samples, Tape
from .._stepping.outputs import AtTimes, EveryStep, LastOnly, Sampler
from .._stepping.problem import Problem
from .._stepping.progress import Progress
from .._stepping.schedule import Plan, Schedule
from .._stepping.scipy_steps import SciPySteps
from .._stepping.step import Shifts, Step
from .._stepping.step import time_shifts as step_shifts
from .._untyped import unpack_dual
from ..errors import NonFiniteState, SolveError
from ..events import Occurrences
from ..grids import Grid
from ..solution import BackwardReport, PerSample, Record, Stats
from ..solvers.scipy import SciPy


class EventResult(NamedTuple):
    """What a solve with events adds to its result: over flat tensors, except for the occurrences."""

    occurrences: tuple[Occurrences[Any], ...]
    ended: bool  # by an event
    ts: Tensor  # of the outputs
    knots: Tensor  # the ends of the steps


class ForwardResult(NamedTuple):
    """A finished forward pass over flat tensors: what an adjoint hands back to `solve`."""

    ys: Tensor
    coefficients: Tensor | None  # of the polynomials, with dense output
    plans: Sequence[Plan]  # the accepted steps, where they are kept
    stats: Stats
    record: Record | None
    error: SolveError | None
    events: EventResult | None = None
    arrange: Callable[[Tensor], Tensor] | None = None  # of a batched solve: from its rows to the outputs


class Adjoint(ABC):
    """A way to differentiate a solve. It runs the forward pass and makes its result differentiable."""

    #: Whether it differentiates solves in which every sample has its own steps.
    batches: ClassVar[bool] = False

    @abstractmethod
    def run(self, problem: Problem) -> ForwardResult: ...


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation is going on with respect to this tensor."""
    return unpack_dual(x)[1] is not None


def outputs_of(problem: Problem) -> tuple[Any, int]:
    """Which outputs the problem wants, and how many of them are y0 itself, before the first step."""
    times = problem.times
    if problem.lanes is not None:
        outputs = LaneOutputs(problem.lanes, last=problem.save == "last", ends=bool(problem.events))
        return outputs, outputs.begun
    if problem.trivial:
        return LastOnly(), len(times) if problem.save == "ts" else 1
    if problem.save == "ts":
        return AtTimes(times), 1
    return (LastOnly(), 0) if problem.save == "last" else (EveryStep(), 1)


def time_shifts(problem: Problem, ts: Tensor, y0: Tensor) -> Shifts:
    """Shifts that follow `ts` itself."""
    if problem.lanes is not None:
        return LaneShifts(ts, y0)  # type: ignore[return-value]
    return step_shifts(problem.controller, ts, y0)


class ForwardPass:
    """One forward pass over a problem, and what its backward pass needs to know of it.

    `tape` keeps what the backward pass needs of the steps; `samples`, some evaluations to recognise the field by.
    """

    def __init__(self, problem: Problem, determinism: Determinism):
        self.problem = problem
        self.determinism = determinism
        self.counter = Counter()
        self.report = BackwardReport()
        self.recorder = Recorder(self.controlled) if problem.record else None
        # Without a backward pass a long solve keeps no list of its steps unless the outputs need it.
        self.tape: Tape | None = Tape() if problem.dense or problem.save == "steps" else None
        self.samples: Samples | None = None
        self.ranges: list[tuple[int, int]] = []
        self.count = self.begun = 0  # how many outputs there are, and how many of them are y0 itself
        self.k1: Tensor | None = None  # the first slope, once it is known
        self.mark: tuple[Tensor, Tensor] | None = None  # what the outputs are recognised by
        self.detected: Any = None  # what is known about the field, from a stretch before this one
        self.schedule: Any = None
        self.search: Any = None  # for events
        self.bar: Progress | None = None  # of the whole solve
        self._first = True  # whether no stretch came before this one
        self.outputs: Any = None
        self.per_sample: PerSample | None = None  # of a batched solve
        self.budget: Budget | None = None  # for activations; stretches share it

    def following(self, problem: Problem) -> ForwardPass:
        """The next stretch of a solve that goes on after an event: the same function, counters and step sizes."""
        following = ForwardPass(problem, self.determinism)
        following.counter, following.recorder, following.detected = self.counter, self.recorder, self.detected
        following.schedule, following.search, following.bar = self.schedule, self.search, self.bar
        following._first, following.budget = False, self.budget
        following.__dict__["capture"] = self.capture  # a cached property
        return following

    @property
    def plans(self) -> list[Plan]:
        """The steps that were taken, if they are kept."""
        return [] if self.tape is None else self.tape.plans

    @property
    def log(self) -> EvaluationLog:
        return EvaluationLog(self.counter, None if self.recorder is None else self.recorder.evaluations)

    @property
    def controlled(self) -> bool:
        """Whether the loop controls the error of the steps."""
        return self.problem.error is not None and not self.problem.solver.external

    def keep_samples(self) -> None:
        self.samples = Samples(*outputs_of(self.problem))

    @cached_property
    def capture(self) -> Capture | None:
        """The field as a graph, where the solve is to be compiled and can be."""
        problem = self.problem
        if not problem.compile or problem.trivial:
            return None
        return captured(problem, self.start_plan.stage_time(0.0), self.determinism)

    def engine(
        self, field: Field | None = None, shifts: Shifts | None = None, later: Sequence[tuple[Any, ...]] = ()
    ) -> Engine:
        """The engine that takes the steps, compiled if requested and possible. `later`: see `compiled_engine`."""
        problem, norm = self.problem, self.problem.error if self.controlled else None
        if field is None and shifts is None and self.capture is not None:
            return compiled_engine(problem, self.determinism, self.log, self.capture, later)
        field, solver, like = problem.field if field is None else field, problem.solver, problem.y0
        return eager_engine(field, solver, like, self.determinism, self.log, norm=norm, shifts=shifts)

    def first_slope(self, engine: Engine, y0: Tensor) -> Tensor:
        """The first evaluation of the solve."""
        plan, memory = self.start_plan, engine.solver.start(y0)
        # A field that could be compiled draws no random numbers and changes no buffers.
        if self.capture is not None or not self._first:
            return engine.start_slope(plan, y0, memory)
        k = self.determinism.first(lambda: engine.start_slope(plan, y0, memory), self.log.as_checks)
        if transforms_active() or not shares_memory(k):
            return k
        self.problem.field.copy_answers()
        return k.clone()

    def run(
        self,
        engine: Engine,
        y0: Tensor,
        *,
        shifts: Shifts | None = None,
        plans: Sequence[Plan] | None = None,
    ) -> ForwardResult:
        """Integrate; with `plans`, along steps taken before."""
        problem = self.problem
        outputs, begun = self.outputs, self.begun = outputs_of(problem)
        if isinstance(outputs, LaneOutputs):
            sampler = LaneSampler(outputs, y0, problem.solver, shifts)
        else:
            sampler = Sampler(outputs, [y0] * begun, shifts)
        dense = PolynomialTape() if problem.dense else None
        observers: list[Observer] = [self.counter, sampler]
        observers += [o for o in (self.tape, dense, self.recorder, self.samples) if o is not None]
        if problem.progress:
            self.bar = self.bar or Progress(problem.times if problem.lanes is None else mean_interval(problem.lanes))
            observers.append(self.bar)
        if plans is None:  # steps that are taken again are no news
            observers += problem.observers
            engine = announced(engine, problem.observers)
        if problem.reader is not None and any(problem.integrals):
            observers.append(Recheck(problem))
        error = None
        try:
            with self.determinism.solving():
                self._integrate(engine, y0, observers, plans)
        except SolveError as failure:
            if failure.stats is not None:
                raise  # of a solve inside the field
            failure.stats = self._stats(BackwardReport())
            if problem.throw:
                raise
            error = failure.with_traceback(None)  # which would hold on to every tensor of every frame
        finally:
            self.determinism.restore_buffers()
            for observer in observers:
                if observer is not self.bar or self.search is None:
                    observer.close()
        if self.search is not None and self.search.landing is not None and isinstance(sampler, Sampler):
            self._end_before(self.search.landing.step, sampler)
        with self.determinism.solving():  # outputs may be computed only now
            ys = sampler.stacked(y0)
        self.ranges, self.count = sampler.ranges, sampler.count
        return ForwardResult(
            ys=ys,
            coefficients=None if dense is None else dense.stacked(y0),
            plans=self.plans,
            stats=self._stats(self.report),
            record=None if self.recorder is None else self.recorder.record(self.report),
            error=error,
            arrange=outputs.arranged if isinstance(outputs, LaneOutputs) else None,
        )

    def _integrate(self, engine: Engine, y0: Tensor, observers: list[Observer], plans: Sequence[Plan] | None) -> None:
        problem, solver = self.problem, self.problem.solver
        check, layout = not transforms_active(), problem.field.layout
        if problem.trivial:
            if check and problem.lanes is None:
                check_start(y0, None, layout, problem.times[0], problem.ranks)
            return
        memory = solver.start(y0)
        if plans is not None:
            # The same solve once more, not a new one: nothing is inspected or drawn afresh.
            known = RecordedSchedule(plans)
            integrate(engine.following(known), known, y0, observers, memory=memory, check=False)
            return
        schedule = self.schedule = self.schedule or self._begun_schedule()
        if problem.events and self.search is None:
            if isinstance(schedule, LaneSchedule):
                self.search = LaneEventSearch(problem.events, schedule, y0)
            else:
                self.search = EventSearch(problem.events, schedule, y0, problem.ranks)
        error = problem.error
        begun = None if self.k1 is not None else begin_at_once(engine, schedule, y0, layout, problem.times[0])
        k1, self.k1 = begun if begun is not None else self.k1, None
        k1 = self.first_slope(engine, y0) if k1 is None else k1
        if isinstance(schedule, LaneSchedule):
            self._integrate_lanes(engine, schedule, y0, k1, observers)
            return
        if check and begun is None:
            check_start(y0, k1, layout, problem.times[0], problem.ranks)
        memory = solver.with_slope(memory, k1)
        if isinstance(solver, SciPy):
            schedule = memory = SciPySteps(problem, solver, engine.evaluate, y0, k1)
            error = None
        elif isinstance(problem.controller, Grid) and self.search is None:
            schedule = RecordedSchedule(schedule.landings())
        elif not problem.controller.adaptive and engine.along is not None and self.search is None:
            schedule = ForeseenSchedule(schedule)
        elif schedule.unset:
            assert error is not None
            select_first_step(engine, schedule, y0, k1, error, solver.error_order or solver.order)
        if self.search is None and not isinstance(schedule, SciPySteps):
            engine = engine.following(schedule)
        end, memory = integrate(
            engine,
            schedule,
            y0,
            observers,
            memory=memory,
            error=error,
            max_steps=problem.max_steps,
            check=check and problem.controller.check,
            # Without an exception, the outputs must end at the step that failed.
            together=problem.throw,
            search=self.search,
            ranks=problem.ranks,
        )
        if check:
            self._check_end(end, solver.carried(memory))

    def _check_end(self, end: Tensor, carried: Sequence[Tensor]) -> None:
        """Refuse a NaN or an infinity where the norm does not read the leaf that went wrong."""
        problem = self.problem
        if not problem.ranks.every(all(map(is_finite, (end, *carried)))):
            leaf, t1 = problem.field.layout.non_finite_leaf(end.detach()), problem.times[-1]
            said = f"the solution at t = {t1:g} holds a NaN or an infinity ({place_of(leaf)})"
            raise NonFiniteState(said, t=t1, leaf=leaf)

    def _end_before(self, landing: Step, sampler: Sampler) -> None:
        """Make this a solve that ends where the step that lands on an event begins, with the state there as an output.

        The end moves as the start of that step does: with ts[0], or not at all.
        """
        problem, plan = self.problem, landing.plan
        count = sampler.count if problem.save == "ts" else 1
        if problem.save != "steps":
            sampler.append(landing.y0)
        ts, start = problem.ts, problem.times[0]
        with torch.enable_grad():
            end = ts[:1] + (plan.t0 - start) if plan.floating else ts.new_tensor([plan.t0])
            ts = torch.cat([ts[:count], end])
        self.problem = replace(problem, times=(*problem.times[:count], plan.t0), ts=ts)
        self.outputs, self.begun = outputs_of(self.problem)  # for the backward pass
        if self.plans:
            self.plans[-1] = self.plans[-1]._replace(final=True, landing=True)

    def _integrate_lanes(
        self, engine: Engine, schedule: LaneSchedule, y0: Tensor, k1: Tensor, observers: list[Observer]
    ) -> None:
        problem, solver = self.problem, self.problem.solver
        begin_lanes(schedule, y0, k1)
        if self._first:
            check_independent(engine, schedule, y0, k1)
        if schedule.unset:
            assert problem.error is not None
            order = solver.error_order or solver.order
            select_first_step(engine, schedule, y0, k1, problem.error, order)  # type: ignore[arg-type]
        error: Any = AnyFinite() if problem.error is None else problem.error
        engine = replace(engine, step=LaneStepper(solver, engine.step))
        memory = solver.with_slope(solver.start(y0), k1)
        search = self.search
        end, _ = integrate(engine, schedule, y0, observers, memory=memory, error=error, search=search)  # type: ignore[arg-type]
        check_ends(schedule, end)
        self.per_sample = schedule.per_sample()
        if search is not None:  # the other lanes may wait at events
            return
        if (failure := schedule.error()) is not None:
            raise failure

    def _stats(self, report: BackwardReport) -> Stats:
        stats = self.counter.stats(report=report)
        return stats if self.per_sample is None else replace(stats, per_sample=self.per_sample)

    def _schedule(self, run: bool = True) -> Schedule | LaneSchedule:
        problem, controller, dtype = self.problem, self.problem.controller, real_dtype(self.problem.y0)
        order = problem.solver.error_order or problem.solver.order
        if problem.lanes is not None:
            limits = problem.max_steps, self.capture is not None and not problem.events if run else False
            return LaneSchedule(controller, order, problem.lanes, problem.jumps, dtype, *limits)
        return Schedule(controller, order, problem.times, problem.jumps, dtype, controller.land)

    def _begun_schedule(self) -> Schedule | LaneSchedule:
        """A new schedule. A grid is constructed once only, so the first plan is taken from here."""
        schedule = self._schedule()
        if isinstance(schedule, Schedule):
            self.__dict__.setdefault("start_plan", schedule.plan(1.0))  # a cached property
        return schedule

    @cached_property
    def start_plan(self) -> Plan:
        """Some plan that starts where the solve does: the first evaluation needs its time."""
        schedule = self._schedule(run=False)
        if self.schedule is None and isinstance(schedule, Schedule):
            self.schedule = schedule
        return schedule.plan(1.0)  # type: ignore[return-value]

    @property
    def output_times(self) -> list[float]:
        """The times of the outputs as numbers."""
        problem = self.problem
        if problem.save == "steps":
            return [problem.times[0], *(plan.t1 for plan in self.plans)]
        if isinstance(self.outputs, LaneOutputs):
            return self.outputs.row_times()
        return list(problem.times if problem.save == "ts" else problem.times[-1:])[: self.count]

"""Solves with events: a chain of ordinary solves, each of which ends where the step that lands on an event begins.

Every stretch between events is differentiated by the adjoint of the solve, and the landing step is a graph of its own
(`_landing.py`). The times of a stretch move with the event at its start. Autograd chains stretches, steps and resets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compile.torch_private import transforms_active
from .._field.determinism import Determinism
from .._field.event_function import EventFunction
from .._field.pytree import is_finite, real_dtype, wide_dtype
from .._field.reach import reachable
from .._stepping.event_search import Landing
from .._stepping.problem import Problem
from .._stepping.roots import sign
from .._stepping.step import TimeShifts
from ..errors import NonFiniteState, SolveError, ZenoBehaviour
from ..events import Occurrences
from ..solution import BackwardReport
from ._autograd import FunctionAdjoint
from ._knots import knots_of
from ._landing import differentiable_landing, landing_engine
from .base import Adjoint, EventResult, ForwardPass, ForwardResult, has_tangent

#: An event that occurs this often in a row after an ever shorter time, below CLOSE times that since the start, gets
#: nowhere.
ZENO, CLOSE = 3, 1e-9


def run_with_events(problem: Problem, adjoint: Adjoint) -> ForwardResult:
    """Run a problem that has events."""
    if not isinstance(adjoint, FunctionAdjoint):
        raise ValueError(f"event: adjoint {type(adjoint).__name__} does not support events; pass adjoint=sn.Replay()")
    if transforms_active() or has_tangent(problem.y0):
        raise ValueError(
            "event: finding an event reads values of its function, which torch.func and forward mode do not allow"
        )
    return EventSolve(problem, adjoint).run()


def reaches_gradients(problem: Problem) -> bool:
    """Whether the field or an event function may use a tensor that requires a gradient."""
    field = problem.field
    reach = reachable((field.reach, [function.event.fn for function in problem.events]))
    return any(x.requires_grad for x in (*field.arg_tensors, *reach.leaves(), *reach.computed()))


def check_differentiable(forward: ForwardPass, t: Tensor) -> list[Tensor]:
    """Before the solve: do event functions have a graph, if there is something to differentiate? Their values."""
    problem = forward.problem
    tensors = problem.y0, problem.ts, *problem.field.arg_tensors, *forward.determinism.reach.leaves()
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    y = problem.y0.detach().requires_grad_(wanted)
    time = t.to(device=y.device, dtype=real_dtype(y)).requires_grad_(wanted)
    values = []
    for function in problem.events:
        value = function(time, y)
        if wanted and not value.requires_grad:
            raise ValueError(
                f"{function.name}.fn: depends on neither t nor y in a way that autograd can follow (detach, item, "
                "numpy, a comparison?), so that gradients through the event would be lost. Write it with "
                "differentiable operations, or solve under torch.no_grad()."
            )
        values.append(value.detach())
    return values


@contextlib.contextmanager
def whole_solve(forward: ForwardPass) -> Iterator[None]:
    """Around all stretches of a solve: without autocast, and with one progress bar."""
    try:
        with forward.determinism.solving():
            yield
    finally:
        if forward.bar is not None:
            forward.bar.close()


class LandedStep(NamedTuple):
    """The step that lands on an event, differentiable where that was asked for."""

    t: Tensor  # the event time, in wide precision
    shift: Tensor  # zero, with the derivative of the event time
    y: Tensor
    outputs: Tensor  # those inside the step and at its end
    coefficients: Tensor | None


class EventSolve:
    """One solve with events: its stretches, and what is known of the events so far."""

    def __init__(self, problem: Problem, adjoint: FunctionAdjoint):
        self._problem, self._adjoint = problem, adjoint
        self._functions = problem.events
        self._sign = -1.0 if problem.times[-1] < problem.times[0] else 1.0
        self._forward = ForwardPass(problem, Determinism(problem.y0.device, reachable(problem.field.reach)))
        self._report = BackwardReport()
        self._reports: list[BackwardReport] = []
        self._rows: list[Tensor] = []  # outputs
        self._coefficients: list[Tensor] = []
        self._knots: list[Tensor] = []  # the ends of the steps
        self._row_times: list[Tensor] = []  # the times of the outputs, with save="steps"
        self._times: list[list[Tensor]] = [[] for _ in self._functions]
        self._states: list[list[Tensor]] = [[] for _ in self._functions]
        # When each event occurred, how long that was after the time before, and how often in a row that gap was tiny.
        self._latest = [(-math.inf, math.inf, 0)] * len(self._functions)
        self._ended = self._was_reset = False
        self._end = problem.ts[-1]

    def run(self) -> ForwardResult:
        with whole_solve(self._forward):
            self._check_functions()
            return self._stretches()

    def _stretches(self) -> ForwardResult:
        """One stretch after the other, until the end or an event that ends the solve."""
        problem, y, first = self._problem, self._problem.y0, True
        while True:
            forward = self._forward
            result = self._adjoint.bind(forward)
            landing = None if forward.search is None else forward.search.landing
            y = self._keep_stretch(forward, result, y, first, landing is not None)
            if landing is None or result.error is not None:
                return self._result(result, result.error)
            try:
                landed = self._land(forward, landing, y)
                y = self._occur(landing, landed)
            except SolveError as failure:
                return self._result(result, self._caught(failure, forward))
            cursor = self._cursor(landing.step.plan.t1)
            if self._ended or cursor == len(problem.times):
                return self._result(result, None)
            self._forward, first = self._next(forward, landing, landed, y, cursor), False

    def _caught(self, failure: SolveError, forward: ForwardPass) -> SolveError:
        if failure.stats is None:
            failure.stats = forward.counter.stats()
        if self._problem.throw:
            raise failure
        return failure.with_traceback(None)

    def _cursor(self, t: float) -> int:
        """How many output times there are up to a time."""
        return sum(self._sign * x <= self._sign * t for x in self._problem.times)

    def _check_functions(self) -> None:
        t = self._problem.times[0]
        for function, value in zip(
            self._functions, check_differentiable(self._forward, torch.tensor(t, dtype=torch.float64)), strict=True
        ):
            if not math.isfinite(value.item()):
                raise NonFiniteState(f"{function.name}.fn: returned a NaN or an infinity at t0", t=t)

    def _keep_stretch(self, forward: ForwardPass, result: ForwardResult, y: Tensor, first: bool, cut: bool) -> Tensor:
        """Collect the outputs of a stretch; the state at its end."""
        self._reports.append(forward.report)
        problem, steps = forward.problem, len(forward.ranges)
        rows = result.ys
        if cut and not steps:
            end, rows = y, rows[:1]
        else:
            end = rows[-1] if len(rows) else y
            rows = rows[:-1] if cut and problem.save != "steps" else rows
        if problem.save != "last" and not first:
            # The first row is where the stretch starts, which is worth an output of its own after a reset only.
            rows = rows if problem.save == "steps" and self._was_reset else rows[1:]
        self._rows.append(rows)
        if problem.dense or problem.save == "steps":
            knots = knots_of(problem, forward.plans) if steps else problem.ts[:1].to(y.device, wide_dtype(y))
            self._knots.append(knots if first else knots[1:])
            self._row_times.append(knots if first or self._was_reset else knots[1:])
        if result.coefficients is not None and steps:
            self._coefficients.append(result.coefficients)
        return end

    def _next(self, forward: ForwardPass, landing: Landing, landed: LandedStep, y: Tensor, cursor: int) -> ForwardPass:
        """The stretch after an event."""
        problem, t = self._problem, landing.step.plan.t1
        assert forward.schedule is not None
        assert forward.search is not None
        forward.schedule.resume(t, self._was_reset)
        forward.search.resume()
        start = landed.t
        if t in problem.jumps and landed.shift.requires_grad:
            # The next stretch starts at the jump, which does not move. Between the event and the jump, an interval
            # without length, the state follows the field before the jump.
            with torch.no_grad():
                slope = landing_engine(forward, y, None).evaluate(landing.step.plan.stage_time(1.0), y.detach())
            y, start = y - landed.shift * slope, start.detach()
        ts = torch.cat([start.reshape(1).to(problem.ts.device), problem.ts[cursor:].to(landed.t.dtype)])
        return forward.following(replace(problem, y0=y, ts=ts, times=(t, *problem.times[cursor:])))

    # The event itself

    def _land(self, forward: ForwardPass, landing: Landing, y: Tensor) -> LandedStep:
        """The landing step, as a graph where there is something to differentiate."""
        step, plan = landing.step, landing.step.plan
        forward.counter.accepted(step, landing.ratio)
        for observer in (forward.recorder, forward.bar):
            if observer is not None:
                observer.accepted(step, landing.ratio)
        problem = self._problem
        low, high = sum(map(len, self._rows)), self._cursor(plan.t1)
        times = problem.times[low:high] if problem.save == "ts" else ()
        t = torch.tensor(plan.t1, dtype=wide_dtype(y), device=y.device)
        shift = t.new_zeros((), dtype=real_dtype(y))
        moved = None
        if self._differentiated(forward, landing, y):
            start = TimeShifts(forward.problem.ts, y).of(plan)[0]
            function = self._functions[landing.fired[0]]
            shift, step = differentiable_landing(forward, landing, function, y, start)
            self._report.of_events += 2 * problem.solver.evaluations
            moved = TimeShifts(problem.ts, y).outputs(low, high)
        outputs = step.at(times, moved) if times else step.y1.new_empty(0, *y.shape)
        coefficients = step.coefficients() if problem.dense else None
        return LandedStep(t + shift, shift, step.y1, outputs, coefficients)

    def _differentiated(self, forward: ForwardPass, landing: Landing, y: Tensor) -> bool:
        """Whether anything that the landing step depends on requires a gradient."""
        problem, plan = self._problem, landing.step.plan
        if not torch.is_grad_enabled():
            return False
        if self._reaches_gradients or any(x.requires_grad for x in (y, forward.problem.ts, problem.ts)):
            return True
        time = torch.full((), plan.t1, dtype=real_dtype(y), device=y.device)
        return self._functions[landing.fired[0]](time, y).requires_grad

    @cached_property
    def _reaches_gradients(self) -> bool:
        return reaches_gradients(self._problem)

    def _occur(self, landing: Landing, landed: LandedStep) -> Tensor:
        """Record the events of a landing and apply their resets; the state to go on with."""
        t, y = landing.step.plan.t1, landed.y
        save = self._problem.save
        if save == "ts":
            self._rows.append(landed.outputs)
        elif save == "steps":
            self._rows.append(y.unsqueeze(0))
        if landed.coefficients is not None:
            self._coefficients.append(landed.coefficients.unsqueeze(0))
        for times in (self._knots, self._row_times):
            times.append(landed.t.reshape(1))
        self._was_reset, self._end = False, landed.t
        fired, past = list(landing.fired), set[int]()
        while fired:
            self._note(fired, landed.t, y)
            if self._ended:
                break
            past |= set(fired)
            before, y = y, self._apply_resets(fired, t, landed.shift, y)
            fired = self._carried_across(t, before, y, past) if self._was_reset else []
        if self._ended and save == "last":
            self._rows.append(y.unsqueeze(0))
        return y

    def _note(self, fired: Sequence[int], t: Tensor, y: Tensor) -> None:
        """Some events occur."""
        self._forward.counter.events += len(fired)
        for i in fired:
            last = self._functions[i].event.last
            self._times[i].append(t)
            self._states[i].append(y)
            self._ended |= last is not None and len(self._times[i]) >= last

    def _apply_resets(self, fired: Sequence[int], t: float, shift: Tensor, y: Tensor) -> Tensor:
        for i in fired:
            self._check_zeno(i, t)
            if self._functions[i].resets:
                y, self._was_reset = self._reset(self._functions[i], t, shift, y), True
        return y

    def _carried_across(self, t: float, before: Tensor, after: Tensor, past: set[int]) -> list[int]:
        """Events whose function a reset has carried across zero: they occur at once, each of them once."""
        found = []
        time = torch.full((), t, dtype=real_dtype(after), device=after.device)
        with torch.no_grad():
            for i, function in enumerate(self._functions):
                if i not in past:
                    start, end = (sign(function(time, y.detach()).item()) for y in (before, after))
                    if start * end < 0 and function.event.direction in (0, end):
                        found.append(i)
        return found

    def _reset(self, function: EventFunction, t: float, shift: Tensor, y: Tensor) -> Tensor:
        time = torch.full((), t, dtype=real_dtype(y), device=y.device) + shift
        after = function.reset(time, y)
        if not is_finite(after):
            leaf = self._problem.field.layout.non_finite_leaf(after.detach())
            raise NonFiniteState(
                f"{function.name}.reset: returned a NaN or an infinity (leaf {leaf}, t = {t:g})", t=t, leaf=leaf
            )
        return after

    def _check_zeno(self, i: int, t: float) -> None:
        """Refuse to follow an event that repeats ever faster, while the clock can still tell its occurrences apart."""
        latest, gap, count = self._latest[i]
        now = abs(t - latest)
        shrinks = now < 0.999 * gap and now <= CLOSE * abs(t - self._problem.times[0])
        self._latest[i] = t, now, count + 1 if shrinks else 0
        if self._latest[i][2] >= ZENO or now <= 64.0 * math.ulp(t):
            raise ZenoBehaviour(
                f"{self._functions[i].name} has occurred {len(self._times[i])} times up to t = {t:g}, the last time "
                f"only {now:.3g} after the one before: the solve cannot get past this point (Zeno behaviour). End it "
                "before that, by max_count or by a terminal event (when the speed becomes small, say).",
                t=t,
            )

    # The result

    def _result(self, result: ForwardResult, error: SolveError | None) -> ForwardResult:
        problem, forward = self._problem, self._forward
        rows = [x for x in self._rows if len(x)]
        ys = torch.cat(rows) if rows else problem.y0.new_empty(0, *problem.y0.shape)
        coefficients = torch.cat(self._coefficients) if self._coefficients else result.coefficients
        knots = torch.cat(self._knots) if self._knots else problem.ts[:1]
        if len(knots) == 1:  # no step was taken: an interval without length, as of a solve without events
            knots = knots.expand(2)
        self._report.parts = self._reports
        record = None if forward.recorder is None else forward.recorder.record(self._report)
        stats = forward.counter.stats(report=self._report)
        occurrences = tuple(map(self._occurrences, range(len(self._functions))))
        events = EventResult(occurrences, self._ended, self._output_times(len(ys)), knots)
        return ForwardResult(ys, coefficients, forward.plans, stats, record, error, events)

    def _output_times(self, count: int) -> Tensor:
        problem = self._problem
        if problem.save == "ts":
            return problem.ts[:count]
        if problem.save == "last":
            return (self._end.reshape(1) if self._ended else problem.ts[-1:])[:count]
        return torch.cat(self._row_times).to(device=problem.ts.device)

    def _occurrences(self, i: int) -> Occurrences[Any]:
        problem = self._problem
        layout, y0, count = problem.field.layout, problem.y0, len(self._times[i])
        times = torch.stack(self._times[i]) if count else torch.empty(0, dtype=wide_dtype(y0), device=y0.device)
        states = torch.stack(self._states[i]) if count else y0.new_empty(0, *y0.shape)
        return Occurrences(times, layout.unpack(states.to(problem.field.dtype), lead=1), count)

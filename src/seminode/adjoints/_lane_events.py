"""Batched solves with events: a chain of batched solves, each of which ends where its lanes wait for their events.

As in `_events`, with another event in every lane: a stretch ends when every lane waits, has ended or has failed. One
step of all lanes that wait then lands on their events, and defines their event times.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._field.batch_checks import check_separable
from .._field.determinism import Determinism
from .._field.pytree import real_dtype, wide_dtype
from .._field.reach import reachable
from .._stepping.lane_event_search import LaneLandings, ulp
from .._stepping.lane_outputs import LaneOutputs, Rows
from .._stepping.lane_plan import LanePlan, mask
from .._stepping.lane_step import LaneShifts, LaneStep, finite_lanes
from .._stepping.lanes import ERRORS, LaneSchedule
from .._stepping.problem import Problem
from .._stepping.step import Step
from ..errors import NonFiniteState, SolveError, ZenoBehaviour
from ..events import Occurrences
from ..solution import BackwardReport
from ._autograd import FunctionAdjoint
from ._events import CLOSE, ZENO, check_differentiable, reaches_gradients, whole_solve
from ._landing import landing_engine
from .base import Adjoint, EventResult, ForwardPass, ForwardResult


def run_lanes_with_events(problem: Problem, adjoint: Adjoint) -> ForwardResult:
    """Run a batched problem that has events."""
    assert isinstance(adjoint, FunctionAdjoint)  # as all that solve batches are
    return LaneEventSolve(problem, adjoint).run()


class LandedLanes(NamedTuple):
    """A step that lands on the events of some lanes, differentiable where that was asked for."""

    plan: LanePlan
    t: Tensor  # the event times, in wide precision
    shift: Tensor  # zeros, with the derivatives of the event times
    y: Tensor


class LaneLandingShifts:
    """Shifts of the two ends of a landing step, and of the outputs in it. Lanes that do not land do not move."""

    def __init__(self, start: Tensor, end: Tensor, outputs: LaneShifts):
        self._start, self._end, self._outputs = start, end, outputs

    def of(self, plan: LanePlan) -> tuple[Tensor, Tensor]:
        return self._start, torch.where(plan.moved.to(self._end.device), self._end, self._start)

    def rows(self, rows: Rows) -> Tensor:
        return self._outputs.rows(rows)


class LaneEventTimes(Function):
    """Zeros, with the derivatives of event times: dtₑ = −dr / (dr/dτ) in the lanes that land."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, slope: Tensor, landed: Tensor, tangential: Tensor, where: str) -> Tensor:
        ctx.event = slope, landed, tangential, where
        return torch.zeros_like(r)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slope, landed, tangential, where = ctx.event
        if torch.is_grad_enabled():
            raise RuntimeError(f"{where}: events give first derivatives only; leave out create_graph=True")
        lost = tangential & (grads[0] != 0.0)
        if bool(lost.any()):
            samples = lost.nonzero().flatten().tolist()
            raise RuntimeError(
                f"{where}, samples {samples[:8]}: the event function is tangential to zero along the solution, so that "
                "the event time has no derivative. Use an event function that crosses zero, or leave these samples out "
                "of the loss."
            )
        defined = landed & ~tangential
        return torch.where(defined, -grads[0] / torch.where(defined, slope, 1.0), 0.0), None, None, None, None


class LaneEventSolve:
    """One batched solve with events: its stretches, and what is known of the events so far."""

    def __init__(self, problem: Problem, adjoint: FunctionAdjoint):
        assert problem.lanes is not None
        self._problem, self._adjoint = problem, adjoint
        self._functions, self._lanes = problem.events, problem.lanes
        self._sign = -1.0 if problem.times[-1] < problem.times[0] else 1.0
        self._forward = ForwardPass(problem, Determinism(problem.y0.device, reachable(problem.field.reach)))
        self._report = BackwardReport()
        self._reports: list[BackwardReport] = []
        self._rows: list[Tensor] = []
        self._places: list[tuple[Tensor, Tensor]] = []  # the lane and the number of each output in them
        self._numbers: tuple[Tensor, Tensor] | None = None  # lanes in a later stretch, and their outputs before it
        shape = len(problem.events), len(problem.lanes)
        self._occurred: list[list[tuple[Tensor, Tensor, Tensor, Tensor]]] = [[] for _ in problem.events]
        self._counts = torch.zeros(shape, dtype=torch.int64)
        self._latest = torch.full(shape, -torch.inf, dtype=torch.float64)  # when each occurred
        self._gap = torch.full_like(self._latest, torch.inf)  # how long that was after the time before
        self._shrinks = torch.zeros_like(self._counts)  # and how often in a row that gap was tiny
        self._ended = torch.zeros(shape[1], dtype=torch.bool)
        ts = problem.ts if problem.ts.ndim == 1 else problem.ts.T
        self._end = ts[-1].to(problem.y0.device, wide_dtype(problem.y0)).expand(shape[1])

    def run(self) -> ForwardResult:
        with whole_solve(self._forward):
            self._check_functions()
            return self._stretches()

    def _check_functions(self) -> None:
        """Before the solve: event functions must be differentiable, and must not couple samples."""
        y, t = self._problem.y0.detach(), self._lanes[:, 0]
        values = check_differentiable(self._forward, t)
        for function, value in zip(self._functions, values, strict=True):
            _check_coupling(function.name + ".fn", "value", function, t, y, value)

    def _stretches(self) -> ForwardResult:
        """One stretch after the other, until all lanes have ended."""
        y = self._problem.y0
        while True:
            forward = self._forward
            result = self._adjoint.bind(forward)
            y = self._keep_stretch(forward, result, y)
            schedule: LaneSchedule | None = forward.schedule
            if schedule is None or not bool(schedule.held.any()):
                return self._result(forward, result)
            landings: LaneLandings = forward.search.landings
            landed = self._land(forward, schedule.landing_plan(), landings, y)
            y, reset = self._occur(schedule, landings, landed)
            schedule.resume(landed.plan, self._ended, reset)
            forward.search.resume(landed.plan, landed.y)
            if not bool(schedule.running.any()):
                return self._result(forward, result)
            self._forward = self._next(forward, schedule, landed, y)
            y = self._forward.problem.y0

    def _keep_stretch(self, forward: ForwardPass, result: ForwardResult, y: Tensor) -> Tensor:
        """Collect the outputs of a stretch; the states at its end, at rest where a lane has failed."""
        self._reports.append(forward.report)
        lanes, number = forward.outputs.passed()
        rows, end = result.ys[: len(lanes)], result.ys[len(lanes) :] if forward.ranges else y
        if self._numbers is not None:
            active, before = self._numbers
            kept = active[lanes]
            if self._problem.save == "ts":
                number = before[lanes] + number - 1
                kept = kept & (number >= before[lanes]) & (number < self._lanes.shape[1])
            rows, lanes, number = rows[kept.to(rows.device)], lanes[kept], number[kept]
        self._rows.append(rows)
        self._places.append((lanes, number))
        schedule: LaneSchedule | None = forward.schedule
        if schedule is None or schedule.rest is None or not schedule.failures:
            return end
        return torch.where(mask(schedule.failed, end), schedule.rest.y, end)

    def _next(self, forward: ForwardPass, schedule: LaneSchedule, landed: LandedLanes, y: Tensor) -> ForwardPass:
        """The stretch after events. Lanes that do not go on are at rest: their interval is a single time."""
        problem, lanes, running = self._problem, self._lanes, schedule.running
        assert schedule.rest is not None
        start, count = schedule.start, lanes.shape[1]
        before = (self._sign * lanes <= self._sign * start.unsqueeze(1)).sum(1)
        columns = torch.full((len(lanes), 1), count - 1)
        if problem.save == "ts":
            width = int((count - before)[running].max())
            columns = (before.unsqueeze(1) + torch.arange(width)).clamp(max=count - 1)
        still = start.unsqueeze(1)
        times = torch.where(running.unsqueeze(1), torch.cat([still, lanes.gather(1, columns)], 1), still)
        ts = problem.ts if problem.ts.ndim == 2 else problem.ts.expand(len(lanes), -1)
        device = ts.device
        ts = ts.to(landed.t.dtype).gather(1, columns.to(device))
        t, on_jump = landed.t, torch.isin(landed.plan.t1, torch.tensor(problem.jumps, dtype=torch.float64)) & running
        if landed.shift.requires_grad and bool(on_jump.any()):  # as in a solve that is not batched
            with torch.no_grad():
                slope = landing_engine(forward, y, None).evaluate(landed.plan.stage_time(1.0), y.detach())  # type: ignore[arg-type]
            moved = y - landed.shift.reshape(-1, *(1 for _ in y.shape[1:])) * slope
            y, t = torch.where(mask(on_jump, y), moved, y), torch.where(on_jump.to(t.device), t.detach(), t)
        ts = torch.cat([t.unsqueeze(1).to(device), ts], 1)
        ts = torch.where(running.unsqueeze(1).to(device), ts, times.to(ts))
        hull = float(times.min()), float(times.max())
        self._numbers = running, before
        y = torch.where(mask(running, y), y, schedule.rest.y)
        hull = hull if self._sign > 0 else hull[::-1]
        return forward.following(replace(problem, y0=y, ts=ts, times=hull, lanes=times))

    # The events themselves

    def _land(self, forward: ForwardPass, plan: LanePlan, landings: LaneLandings, y: Tensor) -> LandedLanes:
        """The landing step, as a graph where there is something to differentiate."""
        problem, shifts = self._problem, None
        t = plan.t1.to(y.device, wide_dtype(y))
        shift = torch.zeros_like(t, dtype=real_dtype(y))
        if self._differentiated(forward, landings, plan, y):
            shift, step, shifts = self._differentiable_step(forward, plan, landings, y)
        else:
            engine = landing_engine(forward, y, None)
            memory = engine.solver.with_slope(engine.solver.start(y), engine.start_slope(plan, y, None))  # type: ignore[arg-type]
            step = engine.step(plan, y, memory)  # type: ignore[arg-type]
        taken: Any = LaneStep(step, plan, y, problem.solver, lambda: step)
        for observer in (forward.counter, forward.bar):
            if observer is not None:
                observer.accepted(taken, 0.0)
        if problem.save == "ts":
            outputs = LaneOutputs(self._lanes)
            outputs.inside = True
            outputs.go_on(plan.t0)
            rows, (count,) = outputs.claim([plan], 0)
            if count:
                self._keep(outputs.of(step, 0, count, shifts), rows.lanes, rows.number)
        return LandedLanes(plan, t + shift, shift, step.y1)

    def _keep(self, rows: Tensor, lanes: Tensor, number: Tensor) -> None:
        self._rows.append(rows)
        self._places.append((lanes, number))

    def _differentiated(self, forward: ForwardPass, landings: LaneLandings, plan: LanePlan, y: Tensor) -> bool:
        """Whether anything that the landing step depends on requires a gradient."""
        if not torch.is_grad_enabled():
            return False
        tensors = y, forward.problem.ts, self._problem.ts
        if self._reaches_gradients or any(x.requires_grad for x in tensors):
            return True
        return self._residual(landings, plan.t1.to(y.device, real_dtype(y)), y).requires_grad

    @cached_property
    def _reaches_gradients(self) -> bool:
        return reaches_gradients(self._problem)

    def _residual(self, landings: LaneLandings, t: Tensor, y: Tensor) -> Tensor:
        """In each lane the event function that defines its event time; zero in lanes that do not land."""
        total = torch.zeros_like(t)
        for i in landings.event.unique().tolist():
            if i >= 0:
                total = torch.where((landings.event == i).to(t.device), self._functions[i](t, y).to(t.dtype), total)
        return total

    def _differentiable_step(
        self, forward: ForwardPass, plan: LanePlan, landings: LaneLandings, y: Tensor
    ) -> tuple[Tensor, Step, LaneLandingShifts]:
        """The landing step twice: to fixed times, which define the event times, and to the event times."""
        start, outputs = LaneShifts(forward.problem.ts, y).of(plan)[0], LaneShifts(self._problem.ts, y)
        end = torch.zeros_like(start, requires_grad=True)

        def engine_to(end: Tensor) -> tuple[Any, LaneLandingShifts]:
            shifts = LaneLandingShifts(start, end, outputs)
            return landing_engine(forward, y, shifts), shifts

        engine, _ = engine_to(end)
        memory = engine.solver.with_slope(engine.solver.start(y), engine.start_slope(plan, y, None))
        fixed = engine.step(plan, y, memory)
        r = self._residual(landings, plan.t1.to(y.device, real_dtype(y)) + end, fixed.y1)
        slope = torch.autograd.grad(r.sum(), end, retain_graph=True, allow_unused=True)[0] if r.requires_grad else None
        slope = torch.zeros_like(r) if slope is None else slope.detach()
        landed = plan.moved.to(y.device)
        scale = landings.slope_scale.to(slope)
        tangential = landed & ~(slope.abs() > torch.finfo(start.dtype).eps ** 0.4 * scale)
        names = [self._functions[i].name for i in landings.event.unique().tolist() if i >= 0]
        shift = LaneEventTimes.apply(r, slope, landed, tangential, ", ".join(names))  # type: ignore[misc]
        engine, shifts = engine_to(shift)
        step = engine.step(plan, y, memory)
        self._report.of_events += 2 * engine.solver.evaluations
        return shift, step, shifts

    def _occur(self, schedule: LaneSchedule, landings: LaneLandings, landed: LandedLanes) -> tuple[Tensor, Tensor]:
        """Record the events of a landing and apply their resets; the states to go on with, and which were reset."""
        plan, y = landed.plan, landed.y
        device = y.device
        fired, past = landings.fired & plan.moved, torch.zeros_like(landings.fired)
        reset = torch.zeros_like(plan.moved)
        while bool(fired.any()):
            self._note(fired, landed.t, y)
            past = past | fired
            before, (y, now) = y, self._apply_resets(schedule, fired & ~self._ended, landed, y)
            reset = reset | now
            going_on = now & ~self._ended & ~schedule.failed
            fired = self._carried_across(plan.t1, before, y) & going_on & ~past
        if self._problem.save == "last":
            end = plan.moved & (self._ended | (self._sign * plan.t1 >= self._sign * schedule.end))
            lanes = end.nonzero().flatten()
            self._keep(landed.y[lanes.to(device)], lanes, torch.zeros_like(lanes))
            self._end = torch.where((end & self._ended).to(device), landed.t, self._end)
        return y, reset

    def _note(self, fired: Tensor, t: Tensor, y: Tensor) -> None:
        """Some events occur in some lanes."""
        self._forward.counter.events += int(fired.sum())
        for i, function in enumerate(self._functions):
            lanes = fired[i].nonzero().flatten()
            if not len(lanes):
                continue
            at = lanes.to(y.device)
            self._occurred[i].append((self._counts[i, lanes], lanes, t[at], y[at]))
            self._counts[i, lanes] += 1
            last = function.event.last
            if last is not None:
                self._ended[lanes] |= self._counts[i, lanes] >= last

    def _apply_resets(
        self, schedule: LaneSchedule, fired: Tensor, landed: LandedLanes, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The states after the resets of events, and in which lanes there was one."""
        reset, times = torch.zeros_like(self._ended), landed.plan.t1
        for i, function in enumerate(self._functions):
            self._check_zeno(schedule, i, fired[i] & ~schedule.failed, times)
            lanes = fired[i] & ~schedule.failed
            if not function.resets or not bool(lanes.any()):
                continue
            after = function.reset(times.to(y.device, real_dtype(y)) + landed.shift, y)
            if not bool((self._counts[i] > 1).any()):
                _check_coupling(function.name + ".reset", "state", function.reset, times, y.detach(), after.detach())
            broken = lanes & ~finite_lanes(after)
            schedule.fail(broken, ERRORS.index(NonFiniteState), times)
            lanes = lanes & ~broken
            y, reset = torch.where(mask(lanes, y), after, y), reset | lanes
        return y, reset

    def _carried_across(self, times: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Events whose functions a reset has carried across zero, (E, B): they occur at once."""
        rows = []
        with torch.no_grad():
            t = times.to(after.device, real_dtype(after))
            for function in self._functions:
                start, end = (function(t, y.detach()).sign().cpu() for y in (before, after))
                direction = function.event.direction
                rows.append(
                    (start * end < 0.0) & (torch.ones_like(self._ended) if direction == 0 else end == direction)
                )
        return torch.stack(rows)

    def _check_zeno(self, schedule: LaneSchedule, i: int, lanes: Tensor, times: Tensor) -> None:
        """Fail lanes that get nowhere."""
        gap = (times - self._latest[i]).abs()
        shrinks = (gap < 0.999 * self._gap[i]) & (gap <= CLOSE * (times - self._lanes[:, 0]).abs())
        count = torch.where(shrinks, self._shrinks[i] + 1, 0)
        self._latest[i] = torch.where(lanes, times, self._latest[i])
        self._gap[i] = torch.where(lanes, gap, self._gap[i])
        self._shrinks[i] = torch.where(lanes, count, self._shrinks[i])
        schedule.fail(lanes & ((count >= ZENO) | (gap <= 64.0 * ulp(times))), ERRORS.index(ZenoBehaviour), times)

    # The result

    def _result(self, forward: ForwardPass, result: ForwardResult) -> ForwardResult:
        problem, schedule = self._problem, forward.schedule
        self._report.parts = self._reports
        stats = forward.counter.stats(report=self._report)
        error: SolveError | None = None
        if schedule is not None:
            stats = replace(stats, per_sample=schedule.per_sample(self._ended))
            error = schedule.error()
        if error is not None:
            error.stats = stats
            if problem.throw:
                raise error
        occurrences = tuple(map(self._occurrences, range(len(self._functions))))
        ts = problem.ts if problem.ts.ndim == 1 else problem.ts.T
        ts = ts if problem.save == "ts" else self._end.unsqueeze(0).to(ts.device)
        events = EventResult(occurrences, bool(self._ended.any()), ts, ts)
        return ForwardResult(self._arranged(), None, (), stats, None, error, events)

    def _arranged(self) -> Tensor:
        """All outputs, (T, B, ...), from their rows; NaN after an event that ends a sample, or where it has failed."""
        y0, count = self._problem.y0, self._lanes.shape[1] if self._problem.save == "ts" else 1
        lanes, number = (torch.cat(each).to(y0.device) for each in zip(*self._places, strict=True))
        return y0.new_full((count, *y0.shape), torch.nan).index_put((number, lanes), torch.cat(self._rows))

    def _occurrences(self, i: int) -> Occurrences[Any]:
        field, y0, counts = self._problem.field, self._problem.y0, self._counts[i]
        shape = int(counts.max()), len(counts)
        times = torch.full(shape, torch.nan, dtype=wide_dtype(y0), device=y0.device)
        states = y0.new_full((shape[0], *y0.shape), torch.nan)
        if self._occurred[i]:
            number, lanes, at, y = (torch.cat(each) for each in zip(*self._occurred[i], strict=True))
            places = number.to(y0.device), lanes.to(y0.device)
            times, states = times.index_put(places, at), states.index_put(places, y)
        return Occurrences(times, field.layout.unpack(states.to(field.dtype), lead=1), counts)


def _check_coupling(name: str, what: str, function: Any, t: Tensor, y: Tensor, value: Tensor) -> None:
    """Change the time and the state of one lane: the results of the others must stay as they are."""
    if len(y) < 2:
        return
    times, states = t.to(y.device, real_dtype(y), copy=True), y.clone()
    times[0] = 1.01 * times[0] + 0.01
    states[0] = 1.01 * states[0] + 0.01
    with torch.no_grad():
        check_separable(value, function(times, states), 0, name, what)

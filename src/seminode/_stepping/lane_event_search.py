"""Events of batched solves: every lane lands on its own.

The search is that of `event_search`, for all lanes at once: numbers of a lane are entries of float64 tensors of shape
(B,) on the host. A lane that has landed waits at the start of its landing step, until all others wait or have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._field.event_function import EventFunction
from .._field.pytree import real_dtype
from .event_search import CORRECTIONS, NODES
from .interpolation import weights_at
from .lane_plan import LanePlan, column, mask
from .lanes import LaneSchedule
from .roots import Bracket, Search, parabola, run_together, search_bracket, search_root, vertex
from .step import Step

if TYPE_CHECKING:
    from .lane_step import LaneStep

#: In the place of the number of an event where there is none.
NONE = -1


class LaneLandings(NamedTuple):
    """The events on which the lanes that wait will land: all of shape (B,), but `fired`."""

    event: Tensor  # the number of the event that defines the event time
    fired: Tensor  # which events occur there, (E, B)
    slope_scale: Tensor  # mean size of the slope of its function over the step


class Polynomial:
    """The states along a step, at another place in every lane."""

    def __init__(self, step: Step):
        self.plan: LanePlan = step.plan  # type: ignore[assignment]
        self.y0, self.y1 = step.y0.detach(), step.y1.detach()
        self.k1 = step.slopes[0].detach()
        self._slopes = torch.stack([k.detach() for k in step.interpolated()])
        self._matrix = step.solver.interpolant
        self._length = self.plan.length(self.y0)

    @cached_property
    def _powers(self) -> Tensor:
        matrix = torch.tensor(self._matrix, dtype=torch.float64).T
        return torch.tensordot(matrix.to(self._slopes), self._slopes, 1)

    def inner_nodes(self) -> Tensor:
        """The states at the nodes inside the step, which are the same in all lanes, stacked."""
        weights = torch.tensor([weights_at(self._matrix, x) for x in NODES[1:-1]], dtype=torch.float64)
        return self.y0 + self._length * torch.tensordot(weights.to(self._slopes), self._slopes, 1)

    def time(self, x: Tensor) -> Tensor:
        plan = self.plan
        return torch.where(x == 1.0, plan.t1, plan.t0 + x * plan.dt)

    def at(self, x: Tensor) -> Tensor:
        """The states at x = (t − t0)/dt."""
        at = column(x, self.y0)
        total = torch.zeros_like(self.y0)
        for power in self._powers.flip(0):
            total = (total + power) * at
        return torch.where(mask(x == 1.0, self.y1), self.y1, self.y0 + self._length * total)


class LaneEventSearch:
    """Looks for events in the steps of all lanes, and lets each lane land on its first one."""

    landing: None = None  # the loop ends when no lane is running

    def __init__(self, functions: Sequence[EventFunction], schedule: LaneSchedule, like: Tensor):
        self._functions, self._schedule = functions, schedule
        self._dtype, self._device = real_dtype(like), like.device
        self._eps = torch.finfo(self._dtype).eps
        lanes, shape = len(like), (len(functions), len(like))
        numbers = torch.zeros(lanes, dtype=torch.float64)
        self._span = (schedule.start - schedule.end).abs()
        self._known = torch.full_like(numbers, torch.nan)  # the times at which `_values` are those of the functions
        self._values = torch.zeros(shape, dtype=torch.float64)
        self._end = torch.full_like(numbers, torch.nan), self._values  # the same at the ends of the latest steps
        self._zero = torch.full(
            shape, -1.0, dtype=torch.float64
        )  # how small functions are whose events have just fired
        self._begun = torch.zeros(lanes, dtype=torch.bool)  # whether a step was accepted, or an event found
        self._aim, self._event = self._known, torch.full((lanes,), NONE)
        self._previous, self._corrections = torch.full_like(numbers, torch.inf), numbers
        self.landings = LaneLandings(self._event, torch.zeros(shape, dtype=torch.bool), numbers)

    def resume(self, plan: LanePlan, y: Tensor) -> None:
        """Go on after a landing, whose step ended with y; the state may be another one now."""
        fired, landed = self.landings.fired, plan.moved
        with torch.no_grad():
            values = self._all_values(plan.t1, y.detach()).abs()
        self._zero = torch.where(fired, values, torch.where(landed, -1.0, self._zero))
        self._begun = self._begun | landed
        self._known = torch.full_like(self._known, torch.nan)
        self._end = self._known, self._values
        self._forget(landed)
        self.landings = LaneLandings(
            torch.full_like(self._event, NONE), torch.zeros_like(fired), torch.zeros_like(self._known)
        )

    def _forget(self, lanes: Tensor) -> None:
        """These lanes aim at nothing any more."""
        self._aim = torch.where(lanes, torch.nan, self._aim)
        self._event = torch.where(lanes, NONE, self._event)
        self._restart(lanes)

    def _restart(self, lanes: Tensor) -> None:
        self._previous = torch.where(lanes, torch.inf, self._previous)
        self._corrections = torch.where(lanes, 0.0, self._corrections)

    def intercepts(self, step: LaneStep, ratio: Tensor) -> bool:
        """Tell the schedule which lanes must not take a step, since an event comes first or is at its end."""
        schedule, plan = self._schedule, step.plan
        looked_at = schedule.acceptable(plan, ratio)
        if not bool(looked_at.any()):
            return False
        step.tried.interpolated()  # evaluates the end slopes, if need be, in the grad mode of the solve
        with torch.no_grad():
            path = Polynomial(step.tried)
            self._begin(plan, path)
            samples = self._samples(path)
            time, event, broken = self._first_crossings(path, samples, looked_at)
            crosses = (event != NONE) & ~broken
            aimed = looked_at & ~broken & plan.lands & (plan.t1 == self._aim)
            other = crosses & (event != self._event) & ((time - plan.t1).abs() > self._resolution(plan))
            at_aim = aimed & ~other
            found = crosses & ~at_aim
            landed = missed = torch.zeros_like(found)
            discarded = found
            if bool(at_aim.any()):
                landed, missed, corrected, place = self._landed(path, samples, at_aim, crosses, time)
                discarded = discarded | corrected
                time, event = torch.where(corrected, place, time), torch.where(at_aim, self._event, event)
            self._restart(found)
            self._forget(missed)
            if bool(discarded.any()):
                self._aim = torch.where(discarded, schedule.aim(discarded, time), self._aim)
                self._event = torch.where(discarded, event, self._event)
            if bool((discarded | landed | missed).any()):
                schedule.withhold(plan, discarded, landed, missed)
            accepted = looked_at & ~discarded & ~landed & ~broken
            self._restart(accepted)
            self._end = torch.where(accepted, plan.t1, torch.nan), samples[:, -1]
            schedule.fail(broken, 0)
        return False

    def _begin(self, plan: LanePlan, path: Polynomial) -> None:
        """The values at the start of the step."""
        at_end, known = self._end[0] == plan.t0, self._known == plan.t0
        first = ~at_end & ~known
        self._values = torch.where(at_end, self._end[1], self._values)
        moved = at_end & ~known
        self._zero, self._begun = torch.where(moved, -1.0, self._zero), self._begun | moved
        if bool(first.any()):
            self._values = torch.where(first, self._all_values(plan.t0, path.y0), self._values)
        self._known = plan.t0

    def _samples(self, path: Polynomial) -> Tensor:
        """The event functions at the nodes of the step, (E, nodes, B)."""
        plan = path.plan
        times = [torch.add(plan.t0, plan.dt, alpha=x) for x in NODES[1:-1]]
        later = [self._all_values(t, y) for t, y in zip(times, path.inner_nodes().unbind(0), strict=True)]
        return torch.stack([self._values, *later, self._all_values(plan.t1, path.y1)], 1)

    def _first_crossings(self, path: Polynomial, samples: Tensor, looked_at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first root of any event function in each lane: its time and event; lanes in which one is not finite."""
        plan = path.plan
        time, event = torch.full_like(plan.t0, torch.nan), torch.full_like(self._event, NONE)
        broken = torch.zeros_like(looked_at)
        values, divided = self._along(path, samples, looked_at)
        suspect = looked_at & (may_cross(values) | ~torch.isfinite(values).all(1))
        for i in _indices(suspect.any(1)):
            columns, direction = values[i].T.tolist(), self._functions[i].event.direction
            searches = {lane: search_crossing(columns[lane], direction) for lane in _indices(suspect[i])}
            for lane, crossing in run_together(searches, self._evaluation(i, path, divided[i], values[i, 0])).items():
                last = 1.0 if crossing is None else crossing[0]
                if not all(math.isfinite(v) for x, v in zip(NODES, columns[lane], strict=True) if x <= last):
                    broken[lane] = True
                elif crossing is not None:
                    t0, t1, dt = (float(x[lane]) for x in (plan.t0, plan.t1, plan.dt))
                    t = t1 if crossing[1] == 1.0 else t0 + crossing[1] * dt
                    if int(event[lane]) == NONE or (t - float(time[lane])) * dt < 0.0:
                        time[lane], event[lane] = t, i
        return time, event, broken

    def _evaluation(
        self, i: int, path: Polynomial, divided: Tensor, first: Tensor
    ) -> Callable[[Mapping[int, float]], Mapping[int, float]]:
        """An event function as a function of x = (t − t0)/dt in some lanes, which are evaluated together.

        `first` are the values at x = 0, where a zero is divided out.
        """
        start = self._values[i]

        def evaluate(places: Mapping[int, float]) -> Mapping[int, float]:
            x = torch.full_like(start, 0.5)
            x[list(places)] = torch.tensor(list(places.values()), dtype=x.dtype)
            value = self._value(i, path.time(x), path.at(x))
            quotient = torch.where(x == 0.0, first, (value - start) / x)
            numbers = torch.where(divided, quotient, value).tolist()
            return {lane: numbers[lane] for lane in places}

        return evaluate

    def _along(self, path: Polynomial, samples: Tensor, looked_at: Tensor) -> tuple[Tensor, Tensor]:
        """The event functions at the nodes, (E, nodes, B), and where a zero at the start, which is no event, is divided
        out: the sign there is that of the slope."""
        start, dt = samples[:, 0], path.plan.dt
        divided = looked_at & self._zero_at_start(path.plan, (samples[:, 1] - start) / (NODES[1] * dt))
        if not bool(divided.any()):
            return samples, divided
        quotients = (samples - start.unsqueeze(1)) / torch.tensor(NODES, dtype=samples.dtype).unsqueeze(1)
        for i in _indices(divided.any(1)):
            quotients[i, 0] = dt * self._start_slope(i, path)
        return torch.where(divided.unsqueeze(1), quotients, samples), divided

    def _zero_at_start(self, plan: LanePlan, slope: Tensor) -> Tensor:
        """Where an event that has just fired, or any at the start of the solve, is at its zero still, (E, B)."""
        start, zero = self._values.abs(), self._zero
        scale = torch.minimum(self._span, 1e3 * plan.dt.abs())
        near = start <= 2.0 * zero.clamp(min=0.0) + slope.abs() * 16.0 * self._eps * scale
        return (start == 0.0) | (near & (~self._begun | (zero >= 0.0)))

    def _landed(
        self, path: Polynomial, samples: Tensor, at_aim: Tensor, crosses: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of lanes whose steps end where they aimed: which have landed, which have missed the event, and which correct
        the place, to what."""
        plan, event = path.plan, self._event.clamp(min=0)
        slopes = torch.stack([self._slope(i, path, samples[i, -1]) for i in range(len(self._functions))])
        # What is left of a zero at the start may hide one that follows at once.
        ends = samples[:, -1] - torch.where(self._zero_at_start(plan, slopes), self._values, 0.0)
        value, slope = (x.gather(0, event.unsqueeze(0))[0] for x in (ends, slopes))
        correction = torch.where(slope == 0.0, torch.inf, -value / slope)
        size, previous = correction.abs(), self._previous
        self._previous = torch.where(at_aim, size, previous)
        self._corrections = self._corrections + at_aim
        resolution = 4.0 * spacing(plan)
        near = size < 0.1 * plan.dt.abs() + resolution
        missed = at_aim & ~near & ~crosses
        settled = near & ((size <= resolution) | (size >= 0.5 * previous))
        landed = at_aim & ~missed & ((value == 0.0) | settled | (self._corrections >= CORRECTIONS))
        if bool(landed.any()):
            scale = samples[:, :-1].abs().amax(1).gather(0, event.unsqueeze(0))[0] / plan.dt.abs()
            fired = self._fired(plan, samples[:, -1], slopes) & landed
            fired[event, torch.arange(len(event))] |= landed
            old = self.landings
            self.landings = LaneLandings(
                torch.where(landed, event, old.event),
                torch.where(landed, fired, old.fired),
                torch.where(landed, scale, old.slope_scale),
            )
        place = torch.where(near | ~crosses, plan.t1 + correction, time)
        return landed, missed, at_aim & ~missed & ~landed, place

    def _fired(self, plan: LanePlan, values: Tensor, slopes: Tensor) -> Tensor:
        """Which events are at the ends of the steps, (E, B)."""
        directions = torch.tensor([function.event.direction for function in self._functions]).unsqueeze(1)
        near = values.abs() <= slopes.abs() * self._resolution(plan)
        passes = (directions == 0) | (slopes * plan.dt * directions > 0.0)
        return (slopes != 0.0) & near & passes & ~self._zero_at_start(plan, slopes)

    def _resolution(self, plan: LanePlan) -> Tensor:
        """Event times that are closer than this are the same."""
        return 8.0 * self._eps * plan.dt.abs() + 8.0 * spacing(plan)

    def _slope(self, i: int, path: Polynomial, end: Tensor) -> Tensor:
        """dg/dt at the ends of the steps, by a difference of second order along their polynomials."""
        h = self._eps ** (1.0 / 3.0)
        values = []
        for x in (1.0 - 2.0 * h, 1.0 - h):
            at = torch.full_like(path.plan.t0, x)
            values.append(self._value(i, path.time(at), path.at(at)))
        return (3.0 * end - 4.0 * values[1] + values[0]) / (2.0 * h * path.plan.dt)

    def _start_slope(self, i: int, path: Polynomial) -> Tensor:
        """dg/dt at the starts of the steps. The next zero may follow at once, so a difference is the last resort."""
        plan = path.plan
        with torch.enable_grad():
            t, y = self._times(plan.t0).requires_grad_(), path.y0.clone().requires_grad_()
            total = self._functions[i](t, y).sum()
        if total.requires_grad:
            of_t, of_y = torch.autograd.grad(total, [t, y], allow_unused=True)
            slope = torch.zeros_like(t) if of_t is None else of_t
            if of_y is not None:
                products = (of_y.conj() * path.k1).reshape(len(t), -1).sum(1)
                slope = slope + (products.real if products.is_complex() else products)
            return slope.to("cpu", torch.float64)
        h = torch.full_like(plan.t0, math.sqrt(self._eps))
        return (self._value(i, path.time(h), path.at(h)) - self._values[i]) / (h * plan.dt)

    def _times(self, t: Tensor) -> Tensor:
        return t.to(self._device, self._dtype, copy=True)

    def _value(self, i: int, t: Tensor, y: Tensor) -> Tensor:
        return self._functions[i](self._times(t), y).to("cpu", torch.float64)

    def _all_values(self, t: Tensor, y: Tensor) -> Tensor:
        times = self._times(t)
        return torch.stack([function(times, y) for function in self._functions]).to("cpu", torch.float64)


def search_crossing(values: Sequence[float], direction: int) -> Search[tuple[float, float] | None]:
    """Where the bracket of the first root ends, and the root."""
    bracket: Bracket | None = yield from search_bracket(NODES, values, direction)
    if bracket is None:
        return None
    x = yield from search_root(bracket)
    return bracket.b, x


def may_cross(values: Tensor) -> Tensor:
    """Where samples, (E, nodes, B), change their sign or may have an extremum across zero between them."""
    changes = ~((values > 0.0).all(1) | (values < 0.0).all(1))
    nodes = torch.tensor(NODES, dtype=values.dtype).unsqueeze(1)
    xs: Any = nodes[:-2], nodes[1:-1], nodes[2:]
    near = values[:, :-2], values[:, 1:-1], values[:, 2:]
    slope, bend = parabola(xs, near)
    x, value = vertex(xs, near[0], slope, bend)
    inside = (bend * near[1] > 0.0) & (x > xs[0]) & (x < xs[2])
    close = value * near[1].sign() < 0.25 * torch.stack(near).abs().amin(0)
    return changes | (inside & close).any(1)


def _indices(condition: Tensor) -> list[int]:
    return condition.nonzero().flatten().tolist()


def ulp(x: Tensor) -> Tensor:
    """The distance of neighbouring floats."""
    size = x.abs()
    return torch.nextafter(size, torch.full_like(size, torch.inf)) - size


def spacing(plan: LanePlan) -> Tensor:
    """The distance of neighbouring floats at the times of a step."""
    return ulp(torch.maximum(plan.t0.abs(), plan.t1.abs()))

"""Events are landing places found on the way: where event functions change their sign along a step.

An event function g is sampled along the polynomial of every acceptable step. Where it changes its sign, the root on the
polynomial becomes a place to land on, and the step is discarded. A step that ends there has an end state of its own, so
that g is not quite zero: the place is corrected by Newton's method until it no longer moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._field.event_function import EventFunction
from .._field.pytree import real_dtype
from .._ranks import ALONE, Alone
from ..errors import NonFiniteState
from .roots import first_bracket, root
from .schedule import Schedule
from .step import Step

#: Where event functions are sampled in a step.
NODES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
#: Corrections of a landing place; two are usual.
CORRECTIONS = 12


class Crossing(NamedTuple):
    """A root of an event function on the polynomial of a step."""

    t: float
    event: int  # its number


class Landing(NamedTuple):
    """The step that ends on an event, and the numbers of the events there."""

    step: Step
    ratio: float  # the size of its error
    fired: tuple[int, ...]
    #: The mean size of the slope of the first event function over the step, to recognise a tangential crossing by.
    slope_scale: float


class EventSearch:
    """Looks for events in the steps of one solve, and lands on the first of them.

    Several ranks that take the same steps must land on the same events, so that event functions must have the same
    values on all of them.
    """

    def __init__(self, functions: Sequence[EventFunction], schedule: Schedule, like: Tensor, ranks: Alone = ALONE):
        self._functions, self._schedule, self._ranks = functions, schedule, ranks
        self._dtype, self._device = real_dtype(like), like.device
        self._eps = torch.finfo(self._dtype).eps
        self.landing: Landing | None = None
        self._start: float | None = None  # the time at which `_values` are those of the event functions
        self._values: list[float] = []
        self._end: tuple[float, list[float]] | None = None  # the same at the end of the latest step
        self._zero: dict[int, float] = {}  # events that have just fired: how small their functions are there
        self._begun = False  # whether a step has been accepted, or an event has been found
        self._aim: Crossing | None = None
        self._corrections: list[float] = []

    def resume(self) -> None:
        """Go on after a landing, from the same time and maybe another state."""
        assert self.landing is not None
        step = self.landing.step
        with torch.no_grad():
            t, y = step.plan.t1, step.y1.detach()
            self._zero = {i: abs(self._value(i, t, y)) for i in self.landing.fired}
        self.landing = self._aim = self._start = self._end = None
        self._begun = True
        self._corrections = []

    def intercepts(self, step: Step, ratio: float) -> bool:
        """Whether a step must not be accepted, since an event comes first or is at its end: see `landing`."""
        if not self._schedule.accepts(step.plan, ratio):
            return False
        step.interpolated()  # evaluates the end slope, if need be, in the grad mode of the solve
        with torch.no_grad():
            self._begin(step)
            plan = step.plan
            crossing, values = self._first_crossing(step)
            if self._aim is not None and plan.landing and plan.t1 == self._aim.t:
                earlier = crossing if crossing is not None and crossing.event != self._aim.event else None
                if earlier is None or abs(earlier.t - plan.t1) <= self._resolution(step):
                    return self._landed(step, ratio, crossing)
            if crossing is not None:
                self._corrections = []
                self._aim_at(crossing)
                return True
            self._end, self._corrections = (plan.t1, values), []
            return False

    def _begin(self, step: Step) -> None:
        """The values at the start of the step."""
        t0 = step.plan.t0
        if self._start == t0:
            return
        if self._end is not None and self._end[0] == t0:
            self._values, self._zero, self._begun = self._end[1], {}, True
        else:
            if self._start is not None:
                self._zero, self._begun = {}, True
            self._values = [self._value(i, t0, step.y0) for i in range(len(self._functions))]
        self._start = t0

    def _first_crossing(self, step: Step) -> tuple[Crossing | None, list[float]]:
        """The first root of any event function on the polynomial of the step, and the values at its end."""
        plan = step.plan
        times = [plan.t0 + x * plan.dt for x in NODES[1:-1]]
        states = [*step.along(NODES[1:-1]).detach().unbind(0), step.y1.detach()]
        found: Crossing | None = None
        ends: list[float] = []
        for i, function in enumerate(self._functions):
            later = [self._value(i, t, y) for t, y in zip([*times, plan.t1], states, strict=True)]
            ends.append(later[-1])
            g, values = self._along(i, step, later)
            bracket = first_bracket(NODES, values, function.event.direction, g)
            if bracket is None:
                self._check_finite(i, step, values)
                continue
            self._check_finite(i, step, [v for x, v in zip(NODES, values, strict=True) if x <= bracket.b])
            x = root(g, bracket)
            t = plan.t1 if x == 1.0 else plan.t0 + x * plan.dt
            if found is None or (t - found.t) * plan.dt < 0.0:
                found = Crossing(t, i)
        return found, ends

    def _along(self, i: int, step: Step, later: list[float]) -> tuple[Callable[[float], float], list[float]]:
        """An event function as a function of x = (t − t0)/dt, and its values at the nodes.

        A zero at the start is divided out, since it is no event: the sign there is that of the slope.
        """
        t0, dt = step.plan.t0, step.plan.dt
        start = self._values[i]

        def g(x: float) -> float:
            return self._value(i, t0 + x * dt, step.along([x])[0].detach())

        if not self._zero_at_start(i, step, (later[0] - start) / (NODES[1] * dt)):
            return g, [start, *later]
        slope = dt * self._start_slope(i, step)
        values = [slope, *((v - start) / x for x, v in zip(NODES[1:], later, strict=True))]
        return (lambda x: (g(x) - start) / x if x != 0.0 else slope), values

    def _zero_at_start(self, i: int, step: Step, slope: float) -> bool:
        """Whether an event that has just fired, or any at the start of the solve, is at its zero still."""
        start = abs(self._values[i])
        if start == 0.0:
            return True
        if self._begun and i not in self._zero:
            return False
        # What rounding makes of a zero: neither the first step nor the end of the solve alone gives the scale of time.
        scale = min(self._schedule.span, 1e3 * abs(step.plan.dt))
        return start <= 2.0 * self._zero.get(i, 0.0) + abs(slope) * 16.0 * self._eps * scale

    def _landed(self, step: Step, ratio: float, crossing: Crossing | None) -> bool:
        """Whether a step to the place aimed at is there, or the place has to be corrected; else it is no event."""
        assert self._aim is not None
        plan, index = step.plan, self._aim.event
        value, slope = self._value(index, plan.t1, step.y1.detach()), self._slope(index, step)
        if self._zero_at_start(index, step, slope):
            value -= self._values[index]  # what is left of the zero at the start may hide one that follows at once
        correction = -value / slope if slope != 0.0 else math.inf
        previous = self._corrections[-1] if self._corrections else math.inf
        self._corrections.append(abs(correction))
        resolution = 4.0 * math.ulp(max(abs(plan.t0), abs(plan.t1)))
        near = abs(correction) < 0.1 * abs(plan.dt) + resolution
        if not near and crossing is None:
            # The shorter step does not reach zero: it is an ordinary one.
            self._aim, self._corrections, self._end = None, [], None
            return False
        settled = near and (abs(correction) <= resolution or abs(correction) >= 0.5 * previous)
        if value == 0.0 or settled or len(self._corrections) >= CORRECTIONS:
            self.landing = Landing(step, ratio, self._fired(step, index), self._slope_scale(index, step))
        else:
            self._aim_at(Crossing(plan.t1 + correction, index) if near or crossing is None else crossing)
        return True

    def _aim_at(self, crossing: Crossing) -> None:
        self._aim = crossing._replace(t=self._schedule.land_on(crossing.t))

    def _fired(self, step: Step, first: int) -> tuple[int, ...]:
        """The event that was aimed at, and all others at the same time, in the order in which they were passed."""
        plan, fired = step.plan, []
        for i, function in enumerate(self._functions):
            if i != first:
                value, slope = self._value(i, plan.t1, step.y1.detach()), self._slope(i, step)
                near = abs(value) <= abs(slope) * self._resolution(step)
                rising = slope * plan.dt > 0.0
                if (
                    slope == 0.0
                    or not near
                    or self._zero_at_start(i, step, slope)
                    or function.event.direction not in (0, 1 if rising else -1)
                ):
                    continue
            fired.append(i)
        return tuple(fired)

    def _resolution(self, step: Step) -> float:
        """Event times that are closer than this are the same."""
        plan = step.plan
        return 8.0 * self._eps * abs(plan.dt) + 8.0 * math.ulp(max(abs(plan.t0), abs(plan.t1)))

    def _slope(self, i: int, step: Step) -> float:
        """dg/dt at the end of the step, by a difference of second order along its polynomial."""
        plan, h = step.plan, self._eps ** (1.0 / 3.0)
        xs = (1.0 - 2.0 * h, 1.0 - h, 1.0)
        states = step.along(xs).detach()
        a, b, c = (self._value(i, plan.t0 + x * plan.dt, y) for x, y in zip(xs, states, strict=True))
        return (3.0 * c - 4.0 * b + a) / (2.0 * h * plan.dt)

    def _start_slope(self, i: int, step: Step) -> float:
        """dg/dt at the start of the step. The next zero may follow at once, so that a difference is the last resort."""
        t0, dt = step.plan.t0, step.plan.dt
        if not self._ranks.several:  # a derivative by the state of this rank is only a part of it
            with torch.enable_grad():
                t = torch.full((), t0, dtype=self._dtype, device=self._device, requires_grad=True)
                y = step.y0.detach().clone().requires_grad_()
                value = self._functions[i](t, y)
            if value.requires_grad:
                of_t, of_y = torch.autograd.grad(value, [t, y], allow_unused=True)
                total = 0.0 if of_t is None else of_t.item()
                k1 = step.slopes[0].detach()
                return total if of_y is None else total + torch.vdot(of_y.reshape(-1), k1.reshape(-1)).real.item()
        h = math.sqrt(self._eps)
        return (self._value(i, t0 + h * dt, step.along([h])[0].detach()) - self._values[i]) / (h * dt)

    def _slope_scale(self, i: int, step: Step) -> float:
        plan, inner = step.plan, NODES[1:-1]
        states = step.along(inner).detach()
        values = [
            self._values[i],
            *(self._value(i, plan.t0 + x * plan.dt, y) for x, y in zip(inner, states, strict=True)),
        ]
        return max(map(abs, values)) / abs(step.plan.dt)

    def _value(self, i: int, t: float, y: Tensor) -> float:
        time = torch.full((), t, dtype=self._dtype, device=self._device)
        return self._ranks.same(self._functions[i](time, y.detach()).item(), f"{self._functions[i].name}.fn")

    def _check_finite(self, i: int, step: Step, values: Sequence[float]) -> None:
        if not all(map(math.isfinite, values)):
            x = next(x for x, v in zip(NODES, values, strict=False) if not math.isfinite(v))
            t = step.plan.t0 + x * step.plan.dt
            raise NonFiniteState(f"{self._functions[i].name}.fn: returned a NaN or an infinity at t = {t:g}", t=t)

"""Where each step starts and ends: a controller's proposals become plans that land where they must.

Times here are host floats (float64) in the solve's own direction: s = t for increasing times, s = −t for
decreasing ones.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..controllers import Controller, Integral, Verdict
from ..grids import Grid


class Plan(NamedTuple):
    """One step before it is taken. Times are host floats in the user's own direction of time.

    A step that lands on a fixed place (a jump, a step-to time, the end) ends exactly there. What moves with what
    decides the gradient with respect to times: `floating` means that t0 is ts[0] plus a constant; a step that does
    not land has a constant dt, so that t1 moves with t0; a `final` one ends on ts[-1].

    Attributes:
        t0, t1, dt: the start, the end, and the signed length.
        proposal: the length that the controller proposed; the step is shorter if it had to land.
        floating: whether t0 moves with ts[0].
        landing: whether the step ends on a fixed place.
        final: whether it ends on the last output time.
        crosses_jump: whether the field jumps at its end.
        lowest, highest: times handed to the field are kept between them: on the correct side of a jump at either end.

    Example:
        >>> import torch, seminode as sn
        >>> field = lambda t, y: torch.where(t < 0.5, -y, y)
        >>> sol = sn.solve(field, torch.ones(1, dtype=torch.float64), [0.0, 1.0], jumps=[0.5], record=True)
        >>> [(plan.t1, plan.crosses_jump) for plan in sol.record.accepted if plan.landing]
        [(0.5, True), (1.0, False)]
    """

    t0: float
    t1: float
    dt: float
    proposal: float
    floating: bool = True
    landing: bool = False
    final: bool = False
    crosses_jump: bool = False
    lowest: float = float("-inf")
    highest: float = float("inf")

    #: Which samples fail in this step: none, where all have one step size.
    failing = None

    def length(self, like: Tensor) -> float:
        """The step size, as the arithmetic of the state takes it."""
        return self.dt

    def enter(self, y: Tensor) -> Tensor:
        """The state from which the step starts."""
        return y

    @property
    def time(self) -> float:
        """Its start, for messages."""
        return self.t0

    @property
    def end_floats(self) -> bool:
        """Whether t1, like t0, is ts[0] plus a constant."""
        return self.floating and not self.landing

    @property
    def breaks(self) -> bool:
        """Whether the slope at its end is not the first one of a next step."""
        return self.final or self.crosses_jump

    def stage_time(self, c: float) -> float:
        """The time of a stage at node c, exactly t1 for c = 1 and never across a jump."""
        t = self.t1 if c == 1.0 else self.t0 + c * self.dt
        if t < self.lowest:
            return self.lowest
        return t if t <= self.highest else self.highest

    def stage_times(self, nodes: Iterable[float]) -> list[float]:
        """The times of several stages."""
        t0, t1, dt, _, _, _, _, _, lowest, highest = self
        if lowest == -math.inf and highest == math.inf:  # no jump near by; one call instead of many
            return [t1 if c == 1.0 else t0 + c * dt for c in nodes]
        return [self.stage_time(c) for c in nodes]


class GridPlan(Plan):
    """A step between times of a grid whose inner times are computed as the grid was: in single precision, say.

    Libraries that step on tensors of times do so, and some take t0 + dt for t1, which may differ in the last bit.
    """

    single: ClassVar[bool] = False
    sums_ends: ClassVar[bool] = False

    def stage_times(self, nodes: Iterable[float]) -> list[float]:
        return [self.stage_time(c) for c in nodes]

    def stage_time(self, c: float) -> float:
        # Only the ends can be jumps; a step as short as the rounding error has none of its inner times moved.
        if c in (0.0, 1.0):
            beside = self.lowest if (c == 0.0) == (self.dt > 0.0) else self.highest
            if math.isfinite(beside):
                return beside
            if c == 0.0:
                return self.t0
        if c == 1.0 and not self.sums_ends:
            return self.t1
        if self.single:
            return single(self.t0 + single(single(c) * single(self.dt)))
        return self.t0 + c * self.dt


class SinglePlan(GridPlan):
    single = True


class SummedPlan(GridPlan):
    sums_ends = True


class SingleSummedPlan(GridPlan):
    single = True
    sums_ends = True


#: Types of plans by (single precision, t0 + dt for t1).
PLANS = {
    (False, False): GridPlan,
    (True, False): SinglePlan,
    (False, True): SummedPlan,
    (True, True): SingleSummedPlan,
}


class Place(NamedTuple):
    """Somewhere a step must end."""

    s: float
    is_jump: bool
    is_end: bool
    is_event: bool = False


class Schedule:
    """Turns a controller's proposals into plans: where each step starts and ends.

    A step that would reach the next place, or stop short of it by rounding only, ends exactly on it. With
    `land=False` the end is no such place: the last step runs past it, as far as it likes.
    """

    def __init__(
        self,
        controller: Controller,
        order: int,
        times: Sequence[float],
        jumps: Sequence[float],
        dtype: torch.dtype,
        land: bool = True,
        step_to: Sequence[float] = (),
    ):
        self.controller = controller
        grid = controller if isinstance(controller, Grid) else None
        self._plan_type = Plan if grid is None else PLANS[grid.dtype == torch.float32, grid.sums_ends]
        landings = controller.landings(times)
        if grid is not None and grid.perturb:
            jumps = (*jumps, *landings)
        self._order = order
        self._sign = -1.0 if times[-1] < times[0] else 1.0
        self._dtype = dtype
        self._s, self._end = self._sign * times[0], self._sign * times[-1]
        marks = {self._sign * t: False for t in (*landings, *step_to)} | {self._sign * t: True for t in jumps}
        self._on_jump = marks.get(self._s, False)
        if land:
            marks.setdefault(self._end, False)
        last = self._end if land else math.inf
        self._places = [
            Place(s, is_jump, land and s == self._end) for s, is_jump in sorted(marks.items()) if self._s < s <= last
        ]
        if not land:
            self._places.append(Place(math.inf, is_jump=False, is_end=False))
        self.span = self._end - self._s
        # A clock that began at 1 cannot end on 0 to the last digit of a number near 0.
        self._resolution = _rounding(self._s, self._end)
        self._carry = 0.0  # what rounding has kept from the clock so far
        self._next = 0
        self._floating = True
        self._proposal, self._history = controller.first()
        self._start_history = self._history
        self._carried = self._proposal

    @property
    def unset(self) -> bool:
        """Whether the first step is still to be selected."""
        return self._proposal is None

    @property
    def carried(self) -> float | None:
        """The step to continue with after a restart; one that was shortened to land somewhere does not increase it."""
        return self._carried

    @property
    def smallest(self) -> float:
        """Below this a step cannot move the clock, or is not wanted."""
        return max(self.finest, self.controller.dt_min * (1.0 - 1e-12))

    @property
    def finest(self) -> float:
        """Below this a step cannot move the clock."""
        # Near s = 0 the clock resolves any step, but steps so much shorter than the interval are useless.
        return max(_rounding(self._s, self._s + (self._proposal or 0.0)), 1e-30 * self.span)

    def probe_length(self, h: float) -> float:
        """A step to probe the field with. It must move the clock, which is coarse where times are large."""
        return max(h, 2.0 * self.finest)

    def begin(self, proposal: float) -> None:
        """Set the first step."""
        self._proposal = min(max(proposal, 2.0 * self.finest, self.controller.dt_min), self.controller.dt_max)

    def next(self) -> Plan | None:
        """The next step, or `None` at the end."""
        if self._s >= self._end:
            return None
        assert self._proposal is not None
        return self.plan(self._proposal)

    def plan(self, proposal: float) -> Plan:
        """A step of the proposed length from where we are, landing on the next place if it would reach it.

        Its dt is what the clock really moves by; what rounding took from it is added to the next (Kahan's sum), so
        that a thousand steps of 0.01 make 10.
        """
        place = self._places[self._next]
        s1 = self._s + (proposal + self._carry)
        near = max(_rounding(self._s, place.s), self._resolution)
        landing = place.s < math.inf and s1 >= place.s - near
        if landing:
            s1 = place.s
        t0, t1 = self._sign * self._s, self._sign * s1
        plan = self._plan_type(t0, t1, t1 - t0, proposal, self._floating, landing, landing and place.is_end)
        if self._on_jump or (landing and place.is_jump):
            return self._guarded(plan, landing and place.is_jump)
        return plan

    def accepts(self, plan: Plan, ratio: float) -> bool:
        """Whether `judge` would accept a step."""
        return self._verdict(plan, ratio).accept

    def land_on(self, t: float) -> float:
        """Make steps land on an event, which comes before all other places. Returns where they will land."""
        if self._places[self._next].is_event:
            del self._places[self._next]
        place = self._places[self._next]
        s = max(self._sign * t, self._s + _rounding(self._s, self._sign * t))
        if place.s - s <= max(_rounding(self._s, place.s), self._resolution):
            return self._sign * place.s
        self._places.insert(self._next, Place(s, is_jump=False, is_end=False, is_event=True))
        return self._sign * s

    def resume(self, t: float, reset: bool) -> None:
        """Go on from an event, with the step size so far; a reset ends the trend of the error."""
        self._s, self._carry, self._floating = self._sign * t, 0.0, True
        self._on_jump = False
        while self._next < len(self._places) and self._places[self._next].s <= self._s:
            self._on_jump = self._places[self._next].is_jump
            self._next += 1
        if reset and self.controller.adaptive:
            self._history = self._start_history

    def _verdict(self, plan: Plan, ratio: float) -> Verdict:
        assert self._history is not None
        # The proposal itself, not what the clock made of it: near its resolution the two may differ forever.
        taken = abs(plan.dt) if plan.landing else plan.proposal
        return self.controller.judge(taken, plan.proposal, ratio, self._order, self._history)

    def forecast(self) -> list[float] | None:
        """The numbers from which the coming plans follow, together with the error ratios of the steps.

        Programs that take several steps before the first one is judged predict plans from them, in the order of
        `Forecast` in `_compile/chain.cpp`. `None` if nothing can be predicted.
        """
        controller, place = self.controller, self._places[self._next]
        if type(controller) is not Integral or controller.at_dt_min != "raise" or self._on_jump:
            return None
        assert self._proposal is not None
        clock = self._s, self._carry, self._sign, place.s, float(place.is_jump), self._end, self._resolution
        rule = controller.safety, controller.factor_min, controller.factor_max, controller.dt_max
        return [*clock, self._proposal, float(self._order), *rule]

    def judge(self, plan: Plan, ratio: float) -> bool:
        """Accept or reject a step, and move on if it is accepted."""
        verdict = self._verdict(plan, ratio)
        self._proposal, self._history = verdict.proposal, verdict.history
        if verdict.accept:
            self._carried = min(verdict.proposal, plan.proposal) if plan.landing else verdict.proposal
            self._carry = 0.0 if plan.landing else plan.proposal + self._carry - abs(plan.dt)
            self._s = self._sign * plan.t1
            self._on_jump = False
            if plan.landing:
                self._on_jump = self._places[self._next].is_jump
                self._next += 1
                self._floating = False
            if self._on_jump and self.controller.adaptive:
                self._history = self._start_history  # the trend of the error ends at a jump
        return verdict.accept

    def landings(self) -> list[Plan]:
        """All steps of a solve that lands on every place, as on a grid: planning them one by one would cost more."""
        plans: list[Plan] = []
        t0, floating = self._sign * self._s, self._floating
        for place in self._places:
            t1 = self._sign * place.s
            plan = self._plan_type(t0, t1, t1 - t0, math.inf, floating, True, place.is_end)
            plans.append(self._guarded(plan, place.is_jump) if self._on_jump or place.is_jump else plan)
            t0, floating, self._on_jump = t1, False, place.is_jump
        return plans

    def _guarded(self, plan: Plan, ends_on_jump: bool) -> Plan:
        """Keep the times of the field's evaluations on the right side of jumps at the ends of the step."""
        lowest, highest = plan.lowest, plan.highest
        if self._on_jump:
            below, above = neighbours(plan.t0, self._dtype)
            lowest, highest = (above, highest) if self._sign > 0 else (lowest, below)
        if ends_on_jump:
            below, above = neighbours(plan.stage_time(1.0), self._dtype)
            lowest, highest = (lowest, below) if self._sign > 0 else (above, highest)
        crosses = ends_on_jump and not plan.final
        return plan._replace(lowest=lowest, highest=highest, crosses_jump=crosses)


def single(x: float) -> float:
    """A number rounded to single precision."""
    return ctypes.c_float(x).value


def _rounding(a: float, b: float) -> float:
    """A few times the distance of neighbouring floats between a and b."""
    return 4.0 * math.ulp(max(abs(a), abs(b)))


def neighbours(t: float, dtype: torch.dtype) -> tuple[float, float]:
    """The floats just below and just above t in the dtype in which the field sees time."""
    if dtype == torch.float64:
        return math.nextafter(t, -math.inf), math.nextafter(t, math.inf)
    at = torch.tensor(t, dtype=dtype)
    ends = torch.tensor([-math.inf, math.inf], dtype=dtype)
    below, above = torch.nextafter(at.expand(2), ends).tolist()
    return below, above

"""Schedules of batched solves: every sample (lane) has its own clock, step size and verdict.

Numbers of a lane are entries of float64 tensors of shape (B,) on the host, for every dtype and device of the state. A
lane that has finished or failed stays where it is: its steps have length 0. Times are in the solve's own direction, as
in `schedule`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..controllers import Controller
from ..errors import MaxStepsReached, NonFiniteState, SolveError, StepSizeUnderflow, ZenoBehaviour
from ..solution import PerSample, Status
from .elementwise import select
from .lane_control import CompiledControl, Proposed, advance, compiled_control, each_lane, propose
from .lane_places import Marks, Stops, rounding
from .lane_plan import LanePlan, Rest

#: What fails a lane. The order is that of severity, for the error that names all of them.
ERRORS = (NonFiniteState, StepSizeUnderflow, MaxStepsReached, ZenoBehaviour)
#: How many steps are counted at once.
COUNTED = 256
#: How many samples an error message names.
NAMED = 8


class LaneSchedule:
    """Turns proposals of a controller into plans, lane by lane; as [`Schedule`][seminode._stepping.schedule.Schedule].

    `times` are the output times, one row per lane. It also decides which lanes fail, and keeps the others going.
    """

    smallest = 0.0  # the loop need not look

    def __init__(
        self,
        controller: Controller,
        order: int,
        times: Tensor,
        jumps: tuple[float, ...],
        dtype: torch.dtype,
        max_steps: float,
        compiled: bool = False,
    ):
        self.controller, self._judge = controller, each_lane(controller)
        self._order, self._dtype, self._max_steps = order, dtype, max_steps
        self._sign = -1.0 if bool((times[:, -1] < times[:, 0]).any()) else 1.0
        start, end = self._sign * times[:, 0], self._sign * times[:, -1]
        self._s, self._end = start, end
        self.start = times[:, 0]
        self._span = end - start
        # As in `Schedule`; times of the solve are between its ends, so that no clock is coarser than at one of them.
        self._near = rounding(start, end)
        self._coarsest = torch.maximum(self._near, 1e-30 * self._span).clamp(min=controller.dt_min * (1.0 - 1e-12))
        self._last = self._end - self._near
        self._carry = torch.zeros_like(start)
        self._jumps = jumps
        self._marks = Marks.of(controller, jumps, self._sign, start)
        proposal, first = controller.first()
        self._history: tuple[Any, ...] = first
        self._start_history = self._history
        self._running = self._s < self._end
        self._idle, self._zero = torch.full_like(start, torch.inf), torch.zeros_like(start)
        self._proposal: Any = None if proposal is None else select(self._running, proposal, self._idle)
        self._largest_coarse = float(self._coarsest.max())
        self._ratio = torch.zeros_like(start)
        self._failing: Tensor | None = None  # from the next plan on
        self.rest: Rest | None = None
        self._rounds = 0
        self.accepted = torch.zeros_like(start, dtype=torch.int64)
        self.attempted = torch.zeros_like(self.accepted)
        self._control = self._compiled(len(start)) if compiled else None
        self._prepared: LanePlan | None = None
        self._shortest = 0.0
        self._counts: list[tuple[Tensor, Tensor]] = []  # which lanes ran and which were accepted, not yet counted
        self.failures: dict[int, tuple[int, float]] = {}  # by sample: which of `ERRORS`, and when
        self._stops: Stops | None = None  # of a solve with events

    def _compiled(self, lanes: int) -> CompiledControl | None:
        controller = self.controller
        if not (controller.adaptive and self._marks is None and self._judge == controller.judge):
            return None
        self._history = tuple(torch.full((lanes,), x, dtype=torch.float64) for x in self._history)
        return compiled_control(controller, self._order, lanes, len(self._history))

    @property
    def running(self) -> Tensor:
        """Which lanes have neither reached their end nor failed."""
        return self._running

    @property
    def end(self) -> Tensor:
        """The ends of the intervals."""
        return self._sign * (self._end if self._stops is None else self._stops.end)

    @property
    def failed(self) -> Tensor:
        failed = torch.zeros_like(self._running)
        failed[list(self.failures)] = True
        return failed

    @property
    def unset(self) -> bool:
        """Whether the first steps are still to be selected."""
        return self._proposal is None

    def begin(self, proposal: Tensor) -> None:
        """Set the first steps. Those of lanes that do not run are infinite, so that they land where they are."""
        proposal = torch.maximum(proposal, 2.0 * self._finest(0.0))
        proposal = proposal.clamp(min=self.controller.dt_min).clamp(max=self.controller.dt_max)
        self._proposal = torch.where(self._running, proposal, self._idle)

    def _finest(self, proposal: Tensor | float) -> Tensor:
        return torch.maximum(rounding(self._s, self._s + proposal), 1e-30 * self._span)

    def _smallest(self, proposal: Tensor | float) -> Tensor:
        return self._finest(proposal).clamp(min=self.controller.dt_min * (1.0 - 1e-12))

    def probe_length(self, h: Tensor) -> Tensor:
        """A step to probe the field with: one that moves the clock."""
        return torch.maximum(h, 2.0 * self._finest(0.0))

    def next(self) -> LanePlan | None:
        """The next step of all lanes, or `None` if no lane is running."""
        assert self._proposal is not None
        if self._rounds >= self._max_steps:  # no lane has tried more steps than there were rounds
            self._count()
            self.fail(self._running & (self.attempted >= self._max_steps), 2)
        prepared, self._prepared = self._prepared, None
        shortest = float(self._proposal.min()) if prepared is None else self._shortest
        if shortest < self._largest_coarse:
            self._check_lengths()
            shortest, prepared = float(self._proposal.min()), None
        if shortest == torch.inf and not bool(self._running.any()):
            return None
        self._rounds += 1
        return self.plan(self._proposal) if prepared is None else prepared

    def _check_lengths(self) -> None:
        """Fail the lanes whose steps are too short to move their clocks, unless they land."""
        plan = self.plan(self._proposal)
        short = self._running & ~plan.lands & (plan.dt.abs() < self._smallest(self._proposal))
        broken = ~torch.isfinite(self._ratio)
        self.fail(short & broken, 0)
        self.fail(short & ~broken, 1)

    def plan(self, proposal: Tensor | float) -> LanePlan:
        """Steps of the proposed lengths from where the lanes are, landing on the next place if they would reach it."""
        s, marks = self._s, self._marks
        if marks is None:
            proposed = propose(s, self._carry, proposal, self._end, self._last, self._running)
        else:
            place, at_end = marks.places(self._end)
            proposed = propose(s, self._carry, proposal, place, place - self._near, self._running)
            proposed = proposed._replace(final=proposed.final & at_end)
        plan = self._planned(proposed, proposal, proposed.s1 - s)
        if marks is not None:
            plan.floating = marks.floating
            self._guard(plan, marks)
        if self._failing is not None:
            assert self.rest is not None
            plan.fail(self._failing, self.rest)
        return plan

    def _planned(self, proposed: Proposed, proposal: Any, length: Tensor) -> LanePlan:
        s, s1, dt = self._s, proposed.s1, length
        if self._sign < 0:
            s, s1, dt = -s, -s1, -dt
        return LanePlan(s, s1, dt, proposal, proposed, self._running)

    def _guard(self, plan: LanePlan, marks: Marks) -> None:
        """Keep the times of the field's evaluations on the right side of jumps at the ends of the steps."""
        ends = marks.next_is_jump(self._end) & plan.lands & self._running
        if not bool((ends | marks.on_jump).any()):
            return
        inf = torch.full_like(plan.t0, torch.inf)
        past_start, before_end = self._neighbour(plan.t0, inf), self._neighbour(plan.t1, -inf)
        first = torch.where(marks.on_jump, past_start, -self._sign * inf)
        last = torch.where(ends, before_end, self._sign * inf)
        plan.bounds = (first, last) if self._sign > 0 else (last, first)
        plan.crosses_jump = bool((ends & ~plan.final).any())

    def _neighbour(self, t: Tensor, infinity: Tensor) -> Tensor:
        """The next time in the direction of the solve (against it, for −∞) in the dtype that the field sees."""
        return torch.nextafter(t.to(self._dtype), (self._sign * infinity).to(self._dtype)).to(t.dtype)

    def judge(self, plan: LanePlan, ratio: Tensor) -> bool:
        """Accept or reject the step of every running lane. Whether any lane has moved or failed."""
        if self._control is not None and plan.failing is None:
            return self._judge_compiled(self._control, plan, ratio)
        running = self._running
        verdict = self._judge(self._taken(plan), plan.proposal, ratio, self._order, self._history)
        self._ratio = ratio
        accept = running & verdict.accept
        stops = self._stops
        if stops is not None:
            accept, verdict = stops.withhold(plan, accept, verdict, self._history)
            self._running = running & ~stops.held
        if plan.failing is not None:
            self._failing = None  # they are in this plan
        if not self.controller.adaptive:
            broken = running & ~torch.isfinite(ratio)
            if bool(broken.any()):
                accept = accept & ~broken
                self.fail(broken, 0, plan.t1)
        unanimous = self._failing is None and torch.equal(accept, running)
        self._counts.append((running, accept if stops is None else accept | (running & stops.held)))
        if len(self._counts) >= COUNTED:
            self._count()
        moved = unanimous or self._failing is not None or plan.failing is not None or bool(accept.any())
        self._history = verdict.history
        if moved:
            self._advance(plan, accept, unanimous, verdict.proposal)
        else:
            self._proposal = select(self._running, verdict.proposal, self._idle)
        return moved

    def _judge_compiled(self, control: CompiledControl, plan: LanePlan, ratio: Tensor) -> bool:
        """The same by one program, which also plans the next step."""
        running = self._running
        clocks = self._s, self._carry, running, self._end, self._last
        decision = control([ratio, plan.proposal, *plan.proposed, *clocks, *self._history])
        unanimous, moved, self._shortest = decision.facts.tolist()
        self._ratio, self._history = ratio, decision.history
        self._counts.append((running, decision.accept))
        if len(self._counts) >= COUNTED:
            self._count()
        if moved or unanimous:
            plan.moved, plan.unanimous = decision.accept, bool(unanimous)
            plan.dt = decision.dt if self._sign > 0 else -decision.dt
            plan.t1 = decision.clocks.s if self._sign > 0 else -decision.clocks.s
            plan.final = plan.final & decision.accept
        self._s, self._carry, self._running, self._proposal = decision.clocks
        self._prepared = self._planned(decision.proposed, self._proposal, decision.next_dt)
        return bool(moved or unanimous)

    def _taken(self, plan: LanePlan) -> Tensor:
        """The lengths of the steps: those proposed, where no running lane lands."""
        lands = plan.proposed.lands
        taken = torch.where(lands, plan.dt.abs(), plan.proposal) if bool((lands & self._running).any()) else None
        return plan.proposal if taken is None else taken

    def _count(self) -> None:
        if not self._counts:
            return
        running, accepted = (torch.stack(masks).sum(0) for masks in zip(*self._counts, strict=True))
        self.attempted, self.accepted = self.attempted + running, self.accepted + accepted
        self._counts.clear()

    def _advance(self, plan: LanePlan, accept: Tensor, unanimous: bool, proposal: Any) -> None:
        constants = self._zero, self._idle
        clocks = advance(plan.proposed, accept, self._s, self._carry, self._end, proposal, *constants)
        plan.settle(accept, unanimous)
        if self._failing is not None:
            assert self.rest is not None
            plan.fail(self._failing, self.rest)
            self._failing = None
        self._s, self._carry, self._running, self._proposal = clocks
        if self._marks is not None:
            reached = self._marks.pass_on(accept, accept & plan.lands, self._end)
            if self.controller.adaptive:  # the trend of the error ends at a jump
                pairs = zip(self._start_history, self._history, strict=True)
                self._history = tuple(select(reached, first, now) for first, now in pairs)

    def fail(self, lanes: Tensor, error: int, times: Tensor | None = None) -> None:
        """Stop lanes for good, and set them aside where the field is finite."""
        if not bool(lanes.any()):
            return
        at = self._sign * self._s if times is None else times
        for i in lanes.nonzero().flatten().tolist():
            self.failures[i] = error, float(at[i])
        self._failing = lanes if self._failing is None else self._failing | lanes
        self._running = self._running & ~lanes
        if self.rest is not None:
            s = self._sign * self.rest.times
            self._s, self._end = torch.where(lanes, s, self._s), torch.where(lanes, s, self._end)
            self._last = torch.where(lanes, s, self._last)
        self._carry = torch.where(lanes, 0.0, self._carry)
        if self._proposal is not None:
            self._proposal = torch.where(lanes, self._idle, self._proposal)

    # Events: places on the way at which a lane stops until all other lanes have stopped or ended, too

    @property
    def held(self) -> Tensor:
        """Which lanes wait at the start of a step that lands on an event."""
        return torch.zeros_like(self._running) if self._stops is None else self._stops.held

    def acceptable(self, plan: LanePlan, ratio: Tensor) -> Tensor:
        """Which lanes `judge` would accept."""
        verdict = self._judge(self._taken(plan), plan.proposal, ratio, self._order, self._history)
        return self._running & verdict.accept & torch.isfinite(ratio)

    def aim(self, lanes: Tensor, times: Tensor) -> Tensor:
        """Let the next steps of lanes end on events. Returns where they will end: on a close place, if there is one."""
        if self._stops is None:
            self._stops = Stops(self._end)
        end = self._stops.end
        place = end if self._marks is None else self._marks.places(end)[0]
        s = torch.maximum(self._sign * times, self._s + rounding(self._s, self._sign * times))
        close = place - s <= self._near
        self._move_ends(lanes, torch.where(close, end, s))
        return self._sign * torch.where(close, place, s)

    def _move_ends(self, lanes: Tensor, s: Tensor) -> None:
        self._end = torch.where(lanes, s, self._end)
        self._last = self._end - self._near

    def withhold(self, plan: LanePlan, discarded: Tensor, landed: Tensor, missed: Tensor) -> None:
        """Before a step is judged: some lanes discard it, some wait at its start, some miss the event they aimed at.

        For the last ones it is a step like any other: its length is a constant.
        """
        stops = self._stops = self._stops or Stops(self._end)
        stops.withheld, stops.held = discarded | landed, stops.held | landed
        stops.place = torch.where(landed, self._sign * plan.t1, stops.place)
        stops.proposal = torch.where(landed, plan.proposal, stops.proposal)
        ordinary = ~(missed & (self._end < stops.end))
        plan.lands, plan.final = plan.lands & ordinary, plan.final & ordinary
        self._move_ends(landed, self._s)
        self._move_ends(missed, stops.end)

    def landing_plan(self) -> LanePlan:
        """The step of all lanes that wait: it ends on their events."""
        stops = self._stops
        assert stops is not None
        self._failing = None
        self._running, self._proposal = stops.held, torch.where(stops.held, stops.proposal, self._idle)
        self._move_ends(stops.held, stops.place)
        plan = self.plan(self._proposal)
        plan.settle(stops.held, unanimous=False)
        plan.final = torch.zeros_like(plan.final)
        return plan

    def resume(self, plan: LanePlan, ended: Tensor, reset: Tensor) -> None:
        """Go on after events, each lane with its step size so far; a reset ends the trend of the error.

        All others are put to rest where this stretch began: the field and its derivatives are known to be finite there.
        """
        stops = self._stops
        assert stops is not None
        assert self.rest is not None
        running = stops.held & ~ended & ~self.failed & (self._sign * plan.t1 < stops.end)
        self.start = torch.where(running, plan.t1, self.rest.times)
        self._s = s = self._sign * self.start
        self._failing = None
        self._end = torch.where(running, stops.end, s)
        self._last = self._end - self._near
        self._carry = torch.where(stops.held, 0.0, self._carry)
        self._marks = Marks.of(self.controller, self._jumps, self._sign, s)
        if self.controller.adaptive:
            pairs = zip(self._start_history, self._history, strict=True)
            self._history = tuple(select(reset, first, now) for first, now in pairs)
        self._running, self._proposal = running, torch.where(running, stops.proposal, self._idle)
        stops.held = torch.zeros_like(stops.held)

    def per_sample(self, ended: Tensor | None = None) -> PerSample:
        """What each lane did, and how it ended; `ended` are those that an event has ended."""
        self._count()
        statuses = list(Status)
        codes = torch.zeros_like(self.accepted)
        if ended is not None:
            codes[ended] = statuses.index(Status.EVENT)
        for i, (error, _) in self.failures.items():
            codes[i] = statuses.index(Status(ERRORS[error].status))
        return PerSample(self.accepted, self.attempted - self.accepted, codes)

    def error(self) -> SolveError | None:
        """An error that names the lanes that failed; `None` if none has."""
        if not self.failures:
            return None
        ordered = sorted(self.failures.items())
        named = [f"sample {i} ({ERRORS[e].status} at t = {t:g})" for i, (e, t) in ordered[:NAMED]]
        more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
        kind = ERRORS[min(e for e, _ in self.failures.values())]
        count, total = len(ordered), len(self.accepted)
        return kind(
            f"{count} of {total} samples failed: {', '.join(named)}{more}. All other samples have reached the end of "
            "their intervals; throw=False returns them, with NaN for the failed ones and the status of each in "
            "sol.stats.per_sample. Solve a failed sample alone to see details.",
            t=ordered[0][1][1],
            samples=tuple(i for i, _ in ordered),
        )


def mean_interval(times: Tensor) -> tuple[float, float]:
    """An interval as long as those of the lanes on average."""
    return 0.0, float((times[:, -1] - times[:, 0]).mean())

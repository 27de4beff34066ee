"""Takes several steps at a time along known plans: C++ calls the programs, and the loop gets the finished steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._stepping.known_plans import KnownPlans
from .._stepping.schedule import Plan, Schedule
from .._stepping.step import Step
from .chain import Chain, Foretold

if TYPE_CHECKING:
    from .engine import CompiledStepper
    from .programs.steps import StepNodes

#: How many steps are taken at once, at most.
MANY = 16
#: The largest state for which this is done: of a larger one, a step takes long and its slopes need memory.
LARGEST = 1 << 14


class Links(NamedTuple):
    """The chains that take several steps: one of steps and, if first slopes are evaluated separately, one of these."""

    step: Chain
    slope: Chain | None
    end: int | None  # which output of a step is the first slope of the next
    nodes: StepNodes
    layouts: tuple[tuple[int, ...], ...]  # of the states and slopes that are taken: their strides


class Taken(NamedTuple):
    """A step that was taken: its first slope, if it was evaluated for this step, and the results of the program."""

    plan: Plan | tuple[float, float, float]  # or t0, t1 and dt
    slope: Tensor | None
    y1: Tensor
    ratio: Tensor | float
    slopes: Sequence[Tensor]

    def is_that_of(self, plan: Plan) -> bool:
        # Next to a jump, the times differ from those that these three numbers give.
        return self.plan is plan or (self.plan == plan[:3] and plan.lowest == -math.inf and plan.highest == math.inf)


class AheadStepper:
    """Takes steps whose plans are known or predicted, several at a time, and hands them out one by one.

    A step counts when it is handed out. If another one is asked for than the one that is next, those that were taken
    are dropped; so a wrong forecast costs time, but changes no number. The first step of all is taken alone: it shows
    whether the memory layouts of what a step returns are those that the next one takes.
    """

    def __init__(self, plain: CompiledStepper, plans: KnownPlans | Schedule):
        self._plain, self._plans = plain, plans
        self._taken: deque[Taken] = deque()
        self._before: tuple[Tensor, Tensor] | None = None  # the last step that was handed out, where it may go on
        self._links: Links | None = None

    def __call__(self, plan: Plan, y0: Tensor, memory: Tensor | None) -> Step:
        plain = self._plain
        if self._before is None or not any(y0 is y for y in self._before):
            self._taken.clear()
            step = plain(plan, y0, memory)
            self._links = self._links_after(step) if y0.numel() <= LARGEST and not plan.breaks else None
        else:
            if not self._taken or not self._taken[0].is_that_of(plan):
                try:
                    self._take(plan, y0, memory)
                except RuntimeError:  # of a step that may never be asked for; taken alone, it raises its error then
                    self._links = None
            taken = self._taken.popleft() if self._taken else None
            step = plain(plan, y0, memory) if taken is None else self._finished(plan, taken, y0, memory)
        self._before = None if plan.breaks else (step.y0, step.y1)
        return step

    def _links_after(self, step: Step) -> Links | None:
        """The chains for the steps after this one, if these can be taken in a chain."""
        plain, solver, k1 = self._plain, self._plain.solver, step.slopes[0]
        ends = solver.error_needs_end_slope
        program = plain.program(step.y0, k1)
        if program is None:
            return None
        outputs, k_next = 1 + int(ends) + solver.stages, step.end_slope() if ends else k1
        chain, layouts = program.chain(step.y1, k_next, plain.rest, outputs), (step.y1.stride(), k_next.stride())
        if chain is None:
            return None
        if ends:
            return Links(chain, None, 2, program.nodes, layouts)
        evaluation = plain.evaluation(step.y0)
        slope = None if evaluation is None else evaluation.chain(step.y1, plain.rest)
        return None if slope is None else Links(chain, slope, None, program.nodes, layouts)

    def _take(self, plan: Plan, y0: Tensor, memory: Tensor | None) -> None:
        plans = self._plans
        if self._taken and isinstance(plans, Schedule):  # the prediction was wrong, and the next one may be too
            self._links = None
        self._taken.clear()
        links = self._links
        if links is None or (links.slope is None and memory is None):
            return
        start = [y0] if memory is None else [y0, memory]
        # A rejected first step starts again from the state of the user, whose memory may have gaps.
        if any(x.stride() != expected for x, expected in zip(start, links.layouts, strict=False)):
            return
        if isinstance(plans, Schedule):
            self._foretell(links, plans, start)
        elif len(known := until_break([plan, *plans.ahead(MANY - 1)])) > 1:
            found, _ = self._chain(links, links.nodes.clocks(known), links.nodes.starts(known), start)
            ratios = [values[1 - links.step.outputs] for values in found]
            # Read all at once: each of them would take longer than a step of a small field.
            self._add(links, known, found, torch.stack(ratios).tolist() if self._plain.reads else ratios)

    def _foretell(self, links: Links, schedule: Schedule, start: Sequence[Tensor]) -> None:
        forecast = schedule.forecast() if self._plain.reads else None
        if forecast is None:
            self._links = None
            return
        clocks, times = links.nodes.blank(MANY)
        found, report = self._chain(links, clocks, times, start, Foretold(forecast, links.nodes.places))
        plans = zip(report[::4], report[1::4], report[2::4], strict=True)
        self._add(links, [*plans], found, report[3::4])

    def _chain(
        self,
        links: Links,
        clocks: Sequence[Tensor],
        times: Sequence[Tensor],
        start: Sequence[Tensor],
        *foretold: Foretold,
    ) -> tuple[list[list[Tensor]], list[float]]:
        rest, times = self._plain.rest, [] if links.slope is None else times
        shared = [*self._plain.allowed, *rest]
        return links.step.steps(clocks, start, shared, links.end, links.slope, times, rest, *foretold)

    def _add(self, links: Links, plans: Sequence[Any], found: list[list[Tensor]], ratios: Sequence[Any]) -> None:
        for plan, values, ratio in zip(plans, found, ratios, strict=True):
            first = len(values) - links.step.outputs
            self._taken.append(Taken(plan, values[0] if first else None, values[first], ratio, values[first + 2 :]))

    def _finished(self, plan: Plan, taken: Taken, y0: Tensor, memory: Tensor | None) -> Step:
        _, k1, y1, ratio, slopes = taken
        if memory is None:
            self._plain.log.add(plan.stage_time(0.0))
        else:
            k1 = memory
        assert k1 is not None
        assert self._links is not None
        return self._plain.finished(plan, y0, k1, self._links.nodes.evaluated, y1, ratio, slopes)


def until_break(plans: Sequence[Plan]) -> Sequence[Plan]:
    """The plans up to the first one whose end slope is not the first slope of the next step."""
    for i, plan in enumerate(plans):
        if plan.breaks:
            return plans[: i + 1]
    return plans

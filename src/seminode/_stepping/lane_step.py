"""Steps of batched solves as the loop and its observers see them, and their derivatives with respect to times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._error_norm import ErrorNorm
from .._field.batch_checks import check_separable
from .._field.pytree import real_dtype
from ..solvers.base import Memory, Solver
from .engine import Engine
from .lane_outputs import Rows
from .lane_plan import LanePlan, Rest, mask
from .lanes import LaneSchedule
from .step import Step


class AnyFinite:
    """In the place of an error norm where there is no error control: is the new state of a lane finite?"""

    def of(self, y1: Tensor) -> Tensor:
        """Finite where the state is."""
        y1 = y1.detach()
        sizes = y1.reshape(len(y1), -1).sum(1).abs()
        if not bool(torch.isfinite(sizes).all()):  # a sum may overflow where no entry does
            sizes = torch.where(torch.isfinite(y1).reshape(len(y1), -1).all(1), 0.0, torch.nan)
        return sizes.to("cpu", torch.float64)


class LaneStepper:
    """Takes a step of all lanes by another stepper."""

    def __init__(self, solver: Solver, step: Callable[[Any, Tensor, Memory], Step]):
        self._solver, self._step = solver, step

    def __call__(self, plan: Any, y0: Tensor, memory: Memory) -> LaneStep:
        tried = self._step(plan, y0, memory)
        return LaneStep(tried, plan, y0, self._solver, lambda: self._step(plan, y0, None))


class LaneStep:
    """A step that every lane has tried. Once its plan has been judged, only some of them take it."""

    failure: None = None
    saved: None = None

    def __init__(self, tried: Step, plan: LanePlan, y0: Tensor, solver: Solver, again: Callable[[], Step]):
        self._tried, self._again = tried, again
        self._failing = plan.failing  # before it was judged
        self.plan, self.y0, self.solver = plan, y0, solver

    @property
    def tried(self) -> Step:
        """The step of all lanes, whether they take it or not."""
        return self._tried

    def ratio(self, norm: ErrorNorm | AnyFinite) -> Tensor:
        """The size of the error in each lane relative to what is allowed, on the host."""
        ratio: Any = norm.of(self._tried.y1) if isinstance(norm, AnyFinite) else self._tried.ratio(norm)
        self._ratio = ratio
        return ratio

    @cached_property
    def _taken(self) -> Step:
        """The step of the lanes that take it.

        With a graph it is computed again if a lane has left the range of numbers: a cotangent of zero times infinity
        would be NaN.
        """
        plan = self.plan
        if plan.failing is not self._failing:
            return self._again()
        if plan.unanimous or not torch.is_grad_enabled() or bool((self._ratio < torch.inf).all()):
            return self._tried
        return self._again()

    @cached_property
    def y1(self) -> Tensor:
        plan, y1 = self.plan, self._taken.y1
        if plan.unanimous or self._taken is not self._tried:
            return y1
        return torch.where(mask(plan.moved, y1), y1, self._tried.y0)

    @property
    def before(self) -> tuple[Tensor, ...]:
        return (self.y0,)

    @property
    def after(self) -> tuple[Tensor, ...]:
        return (self.y1,)

    @property
    def slopes(self) -> list[Tensor]:
        return self._taken.slopes

    def interpolated(self) -> list[Tensor]:
        return self._taken.interpolated()

    def next_memory(self) -> Memory:
        """The first slopes of the next step, where they are known: of rejected lanes, those of this step."""
        plan, slope = self.plan, self._taken.next_memory()
        if plan.unanimous or self._taken is not self._tried or slope is None:
            return slope
        return torch.where(mask(plan.moved, slope), slope, self._tried.slopes[0])

    def retry_memory(self) -> Memory:
        return self._tried.retry_memory()


def begin_lanes(schedule: LaneSchedule, y0: Tensor, k1: Tensor) -> None:
    """Before the first step: where failed lanes rest, and which lanes have failed already.

    A lane that fails goes back to its start, where the field is known to be finite. A lane that is not finite there
    takes the place of one that is.
    """
    healthy = finite_lanes(y0) & finite_lanes(k1)
    rest = y0.detach()
    if not bool(healthy.all()) and bool(healthy.any()):
        stand_in = int(healthy.nonzero()[0])
        rest = torch.where(mask(healthy, rest), rest, rest[stand_in : stand_in + 1])
    schedule.rest = Rest(rest, schedule.start)
    schedule.fail(~healthy & schedule.running, 0)


def check_independent(engine: Engine, schedule: LaneSchedule, y0: Tensor, k1: Tensor) -> None:
    """Change the time and the state of one lane: the slopes of the others must stay as they are."""
    if len(y0) < 2 or not bool(schedule.running.any()):
        return
    changed = int(schedule.running.nonzero()[0])
    plan = schedule.plan(torch.full_like(schedule.start, torch.inf))
    t, y = plan.stage_time(0.0).clone(), y0.detach().clone()
    t[changed] += 1e-2 * plan.dt[changed]
    y[changed] = 1.01 * y[changed] + 0.01
    counter = engine.counter
    count = counter.nfe
    again = engine.evaluate(t, y).detach()  # type: ignore[arg-type]
    counter.checks += counter.nfe - count
    counter.nfe = count
    check_separable(k1.detach(), again, changed)


def check_ends(schedule: LaneSchedule, y: Tensor) -> None:
    """After the last step: a norm may not have read the leaf that went wrong."""
    schedule.fail(~finite_lanes(y) & ~schedule.failed, 0)


def finite_lanes(y: Tensor) -> Tensor:
    """Which lanes of a state are finite, on the host."""
    return torch.isfinite(AnyFinite().of(y))


class LaneShifts:
    """As [`TimeShifts`][seminode._stepping.step.TimeShifts], for `ts` of shape (T,) or (B, T)."""

    def __init__(self, ts: Tensor, like: Tensor):
        shifts = (ts - ts.detach()).to(device=like.device, dtype=real_dtype(like))
        self._shifts = shifts if ts.ndim == 2 else shifts.expand(len(like), -1)

    def of(self, plan: LanePlan) -> tuple[Tensor, Tensor]:
        return ends(plan, self._shifts[:, 0], self._shifts[:, -1])

    def rows(self, rows: Rows) -> Tensor:
        device = self._shifts.device
        return self._shifts[rows.lanes.to(device), rows.number.to(device)]


def ends(plan: LanePlan, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """What the two ends of a step move with, if the first and the last time of each lane move with these."""
    start = first if plan.floating is None else torch.where(plan.floating.to(first.device), first, 0.0)
    floats = ~plan.lands if plan.floating is None else plan.floating & ~plan.lands
    end = torch.where(plan.final.to(first.device), last, torch.where(floats.to(first.device), first, 0.0))
    return start, torch.where(plan.moved.to(first.device), end, start)

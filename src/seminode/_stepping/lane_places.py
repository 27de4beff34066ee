"""Where steps of batched solves must end besides the ends of the intervals: places of all lanes, and events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..controllers import Controller, Verdict
from .elementwise import select

if TYPE_CHECKING:
    from .lane_plan import LanePlan


class Marks:
    """Places other than the ends at which steps must end: jumps and step-to times, the same for all lanes."""

    def __init__(self, marks: dict[float, bool], start: Tensor):
        ordered = sorted(marks)
        self._s = torch.tensor([*ordered, torch.inf], dtype=torch.float64)
        self._is_jump = torch.tensor([*(marks[s] for s in ordered), False])
        self._next = torch.searchsorted(self._s, start, right=True)
        self.on_jump = (self._s[(self._next - 1).clamp(min=0)] == start) & self._is_jump[(self._next - 1).clamp(min=0)]
        self.floating = torch.ones_like(start, dtype=torch.bool)

    @classmethod
    def of(cls, controller: Controller, jumps: tuple[float, ...], sign: float, start: Tensor) -> Marks | None:
        marks = {sign * t: False for t in controller.step_to} | {sign * t: True for t in jumps}
        return cls(marks, start) if marks else None

    def places(self, end: Tensor) -> tuple[Tensor, Tensor]:
        """Where the next step of each lane must end, and whether that is the end of its interval."""
        mark = self._s[self._next]
        return torch.minimum(mark, end), mark >= end

    def next_is_jump(self, end: Tensor) -> Tensor:
        return self._is_jump[self._next] & (self._s[self._next] <= end)

    def pass_on(self, accept: Tensor, landed: Tensor, end: Tensor) -> Tensor:
        """Move on to the next places. Which lanes are on a jump now."""
        reached = landed & self.next_is_jump(end)
        self.on_jump = torch.where(accept, reached, self.on_jump)
        self._next = torch.where(landed, self._next + 1, self._next).clamp(max=len(self._s) - 1)
        self.floating = self.floating & ~landed
        return reached


class Stops:
    """What a schedule knows about lanes that stop at events: their ends are moved to the places where they stop."""

    def __init__(self, end: Tensor):
        self.end = end  # of the intervals
        self.withheld: Tensor | None = None  # lanes that do not take the step which is judged next
        self.held = torch.zeros_like(end, dtype=torch.bool)
        self.place, self.proposal = end, torch.full_like(end, torch.inf)  # of lanes that are held

    def withhold(
        self, plan: LanePlan, accept: Tensor, verdict: Any, history: tuple[Any, ...]
    ) -> tuple[Tensor, Verdict]:
        """A verdict that leaves lanes which do not take the step as they are."""
        lanes, self.withheld = self.withheld, None
        if lanes is None:
            return accept, verdict
        proposal = select(lanes, plan.proposal, verdict.proposal)
        past = tuple(select(lanes, old, new) for old, new in zip(history, verdict.history, strict=True))
        return accept & ~lanes, Verdict(verdict.accept, proposal, past)


def rounding(a: Tensor, b: Tensor) -> Tensor:
    """A few times the distance of neighbouring floats between a and b."""
    size = torch.maximum(a.abs(), b.abs())
    return 4.0 * (torch.nextafter(size, torch.full_like(size, torch.inf)) - size)

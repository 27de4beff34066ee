"""Outputs of a solve: which of them lie in which step, and their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .observers import Observer
from .output_blocks import WaitingOutputs, shares
from .schedule import Plan

if TYPE_CHECKING:
    from .step import Shifts, Step


class Outputs(Protocol):
    """Which outputs lie in which step, and their values; adjoints that take the steps again ask it too."""

    def claim(self, plan: Plan, cursor: int) -> int:
        """How many outputs are done after this step, if `cursor` were done before it."""
        ...

    def of(self, step: Step, low: int, high: int, shifts: Shifts | None) -> Tensor:
        """Outputs low … high − 1, which lie in this step, stacked."""
        ...

    def inside(self, plan: Plan, low: int, high: int) -> list[float]:
        """The positions in the step, from 0 to 1, of those outputs that are not at its end; they come first."""
        ...


class AtTimes:
    """The solution at given times, by the step's polynomial; at the end of a step, the state itself."""

    def __init__(self, times: Sequence[float]):
        self._times = times
        self._sign = -1.0 if times[-1] < times[0] else 1.0

    def claim(self, plan: Plan, cursor: int) -> int:
        end = self._sign * plan.t1
        while cursor < len(self._times) and self._sign * self._times[cursor] <= end:
            cursor += 1
        return cursor

    def inside(self, plan: Plan, low: int, high: int) -> list[float]:
        return [(t - plan.t0) / plan.dt for t in self._times[low : self._inner(plan, low, high)]]

    def _inner(self, plan: Plan, low: int, high: int) -> int:
        while high > low and self._times[high - 1] == plan.t1:
            high -= 1
        return high

    def of(self, step: Step, low: int, high: int, shifts: Shifts | None) -> Tensor:
        # A time that is differentiated may be at the end by chance only.
        moving = high - 1 if step.plan.final and high == len(self._times) else high
        inner = self._inner(step.plan, low, high) if shifts is None else moving
        ends = [step.y1.unsqueeze(0)] * (high - inner)
        if inner == low:
            return torch.cat(ends) if len(ends) > 1 else ends[0]
        moved = None if shifts is None else shifts.outputs(low, inner)
        inside = step.at(self._times[low:inner], moved)
        return torch.cat([inside, *ends]) if ends else inside


class LastOnly:
    """The state at the end of the interval only."""

    def claim(self, plan: Plan, cursor: int) -> int:
        return cursor + plan.final

    def of(self, step: Step, low: int, high: int, shifts: Shifts | None) -> Tensor:
        return step.y1.unsqueeze(0)

    def inside(self, plan: Plan, low: int, high: int) -> list[float]:
        return []


class EveryStep:
    """The state at the end of every accepted step."""

    def claim(self, plan: Plan, cursor: int) -> int:
        return cursor + 1

    def of(self, step: Step, low: int, high: int, shifts: Shifts | None) -> Tensor:
        return step.y1.unsqueeze(0)

    def inside(self, plan: Plan, low: int, high: int) -> list[float]:
        return []


class Sampler(Observer):
    """Collects the outputs, and which of them lie in which step."""

    def __init__(self, outputs: Outputs, first: Sequence[Tensor], shifts: Shifts | None = None):
        self._outputs = outputs
        self._shifts = shifts
        self._pieces = [y.unsqueeze(0) for y in first]
        self._cursor = len(self._pieces)
        self._begins = bool(self._pieces)  # with y0 itself, which must not be handed back
        self._waiting: WaitingOutputs | None = None
        self.ranges: list[tuple[int, int]] = []

    def accepted(self, step: Step, ratio: float) -> None:
        low, high = self._cursor, self._outputs.claim(step.plan, self._cursor)
        if high > low:
            waiting = self._wait(step, low, high) if self._shares(step.y1) else 0
            if low + waiting < high:
                self._pieces.append(self._outputs.of(step, low + waiting, high, self._shifts))
            self._cursor = high
        self.ranges.append((low, high))

    def _shares(self, y: Tensor) -> bool:
        """Whether outputs inside of steps are computed for several steps together."""
        return self._shifts is None and not torch.is_grad_enabled() and shares(y)

    def _wait(self, step: Step, low: int, high: int) -> int:
        """Have the outputs inside of a step computed later. Returns how many they are."""
        xs = self._outputs.inside(step.plan, low, high)
        if not xs:
            return 0
        if self._waiting is None or not self._waiting.has_room(step.matrix, len(xs)):
            self._compute_waiting()
            self._waiting = WaitingOutputs(step.matrix)
        self._waiting.add(len(self._pieces), step.y0, step.plan.dt, step.interpolated(), xs, not step.compiled)
        self._pieces.append(step.y0)  # in the place of what is to come
        return len(xs)

    def _compute_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        # The last ones first, since pieces become fewer.
        for places, values in [] if waiting is None else reversed(waiting.compute()):
            self._pieces[places] = [values]

    def append(self, y: Tensor) -> None:
        """One more output: the state at the end of the last step."""
        if self.ranges:
            self._pieces.append(y.unsqueeze(0))
            self._cursor += 1
            self.ranges[-1] = self.ranges[-1][0], self._cursor

    @property
    def count(self) -> int:
        return self._cursor

    def stacked(self, like: Tensor) -> Tensor:
        self._compute_waiting()
        if not self._pieces:
            return like.new_empty((0, *like.shape))
        # A state that is the only output is handed over as it is: a large one should not be there twice.
        return torch.cat(self._pieces) if len(self._pieces) > 1 or self._begins else self._pieces[0]

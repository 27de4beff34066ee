"""Where the states before the steps come from on a backward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ..._stepping.observers import Observer, State
from ..._stepping.step import Step
from .step_vjp import StepGradients

if TYPE_CHECKING:
    from .sweep import Sweep


class States(ABC):
    """Where the state before each step comes from on a backward pass. Asked with falling j."""

    #: Whether the states are those of the forward pass to the last bit, so that steps must arrive at them.
    exact: ClassVar[bool] = True
    #: Whether `own_vjp` may have a VJP.
    special: ClassVar[bool] = False

    @abstractmethod
    def before(self, j: int, sweep: Sweep) -> State:
        """The state before step j, and what the solver carries in addition."""

    def after(self, j: int) -> State | None:
        """The same after step j, where it was kept."""
        return None

    def beyond(self, j: int) -> tuple[int, State] | None:
        """The first state that was kept of those after step j, and before which step it is. Asked before `before`."""
        return None

    def end(self) -> State:
        """What the state after the last step is recognised by, where that was kept."""
        return ()

    def own_vjp(self, j: int, sweep: Sweep, adj: State) -> StepGradients | None:
        """The VJP of step j, which holds no output, where there is a special one."""
        return None

    def finish(self, sweep: Sweep) -> None:  # noqa: B027
        """The first step has been reached."""


class SparseStates(States):
    """Every k-th state was kept; those between are computed again, a segment at a time."""

    def __init__(self, kept: Sequence[Tensor], every: int, steps: int):
        stored = 1 + (steps + every - 1) // every  # as many tensors each: fingerprints of the end, then states
        width = len(kept) // stored if steps else 1
        self._end = tuple(kept[:width])
        self._kept = [tuple(kept[i : i + width]) for i in range(width, len(kept), width)]
        self._every = every
        self._segment: list[State] = []  # the states before its steps, up to the one asked for next
        self._index = -1

    def before(self, j: int, sweep: Sweep) -> State:
        index, offset = divmod(j, self._every)
        if index != self._index or len(self._segment) != offset + 1:
            self._index = index
            self._segment = sweep.states_between(index * self._every, j, self._kept[index])
        return self._segment.pop()

    def after(self, j: int) -> State | None:
        index, offset = divmod(j + 1, self._every)
        return self._kept[index] if offset == 0 and index < len(self._kept) else None

    def beyond(self, j: int) -> tuple[int, State] | None:
        index = j // self._every + 1
        return (index * self._every, self._kept[index]) if index < len(self._kept) else None

    def end(self) -> State:
        return self._end


class StatesBefore(Observer):
    """The states before each step."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def accepted(self, step: Step, ratio: float) -> None:
        self.states.append(step.before)

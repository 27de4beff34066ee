"""Checkpointed: keep a few states, however many steps there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._field.checks import check_count
from .._stepping.checkpoints import Checkpoints
from .._stepping.observers import CheckpointTape, Observer
from .._stepping.problem import Problem
from ._autograd import Asked
from ._discrete.sweep import States, Sweep
from .replay import DiscreteAdjoint


@dataclass(frozen=True)
class Checkpointed(DiscreteAdjoint):
    """Replay with at most `n` states kept, placed while the number of steps is still unknown.

    The gradient is that of `Replay`. States that are not kept are computed again from the last one that is, more than
    once if need be: the fewer states, the more work. With n = 10, a thousand steps cost about 2.7 more evaluations of
    every step, ten thousand 4.8. See `seminode.checkpoints` for where they are put.

    Arguments:
        n: the number of states, the initial one included.
    """

    n: int

    def __post_init__(self) -> None:
        check_count("n", self.n)

    def tape(self, problem: Problem) -> CheckpointTape:
        return CheckpointTape(self.n)

    def states(self, asked: Asked) -> CheckpointedStates:
        tape = asked.call.forward.tape
        assert isinstance(tape, CheckpointTape)
        return CheckpointedStates(tape.checkpoints)


class CheckpointedStates(States):
    """A few states were kept; on the way to a missing one others are kept in the places that have become free.

    The checkpoints belong to the solve, not to autograd, which would hold on to all of them until the end of the
    backward pass. They are used up by it; a second one starts from the first state.
    """

    def __init__(self, checkpoints: Checkpoints[Tensor]):
        self._checkpoints = checkpoints

    def before(self, j: int, sweep: Sweep) -> Tensor:
        i, state = self._checkpoints.recall(j)
        return state if i == j else sweep.advance(i, j, state, [Offer(self._checkpoints, i)])


class Offer(Observer):
    """Offers the states after each step to be kept."""

    def __init__(self, checkpoints: Checkpoints[Tensor], start: int):
        self._checkpoints = checkpoints
        self._step = start

    def accepted(self, step: Any, ratio: float) -> None:
        self._step += 1
        self._checkpoints.offer(self._step, step.end)

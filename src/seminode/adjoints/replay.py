"""Replay: keep the accepted steps, take each again on the way back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .._field.checks import check_count
from .._stepping.observers import StateTape
from .._stepping.problem import Problem
from ._autograd import Asked, FunctionAdjoint, Gradients
from ._discrete.sweep import SparseStates, States, Sweep, second_order


class DiscreteAdjoint(FunctionAdjoint):
    """An adjoint that pulls back through the steps that were taken."""

    @abstractmethod
    def states(self, asked: Asked) -> States:
        """Where the state before each step comes from."""

    def backward(self, asked: Asked) -> Gradients:
        return Sweep(asked, self.states(asked)).run()

    def twice(self, asked: Asked, cotangents: Sequence[Tensor | None]) -> Gradients:
        return second_order(asked, cotangents)


@dataclass(frozen=True)
class Replay(DiscreteAdjoint):
    """Tape the accepted steps; going back, take each again and pull back through it. The default.

    The gradient is exactly that of the discrete solution, as with `Direct`, at the memory of one state a step: the
    activations of one step at a time are alive. Outputs inside a step are pulled back through the step's polynomial
    and cost one evaluation a step, however many there are. A step costs its stages once more, 6 for dopri5.

    Arguments:
        every: keep the state before each `every`-th step only; those between are computed once more.
    """

    every: int = 1

    def __post_init__(self) -> None:
        check_count("every", self.every)

    def tape(self, problem: Problem) -> StateTape:
        return StateTape(self.every)

    def states(self, asked: Asked) -> SparseStates:
        return SparseStates(asked.kept, self.every)

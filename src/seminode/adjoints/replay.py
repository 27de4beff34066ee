"""Replay: keep the accepted steps, take each again on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..arguments import check_count
from ..observers import StateTape
from ..problem import Problem
from .binding import Call, FunctionAdjoint, Gradients
from .sweep import SparseStates, Sweep, second_order


class DiscreteAdjoint(FunctionAdjoint):
    """An adjoint that pulls back through the steps that were taken."""

    def twice(
        self,
        call: Call,
        needs: Sequence[bool],
        cotangents: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> Gradients:
        return second_order(call, needs, cotangents, inputs, grads)


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

    def backward(
        self,
        call: Call,
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        needs: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> Gradients:
        return Sweep(call, inputs, needs, SparseStates(kept, self.every)).run(*grads)

"""Replay: keep the accepted steps, take each of them again on the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .._field.checks import check_count
from .._stepping.observers import StateTape
from .._stepping.problem import Problem
from ._autograd import BackwardRequest
from ._discrete.states import SparseStates
from ._discrete.sweep import DiscreteAdjoint


@dataclass(frozen=True)
class Replay(DiscreteAdjoint):
    """Keep the state before every accepted step; on the backward pass, take each step again and differentiate it.

    This is the default. The gradient is exactly that of the discrete solution, as with `Direct`, with the memory of
    one state per step: only the activations of one step at a time are alive. Outputs inside a step are differentiated
    through the step's polynomial and cost one evaluation per step, however many there are. A step costs its stages once
    more, 6 for dopri5. Also known as the adaptive checkpoint adjoint (ACA): Zhuang et al. (2020).

    Arguments:
        every: keep the state before each `every`-th step only; those between are computed once more.

    Reference: Zhuang, Dvornek, Li, Tatikonda, Papademetris and Duncan, *Adaptive Checkpoint Adjoint Method for Gradient
    Estimation in Neural ODE*, ICML 2020, arXiv:2006.02493.

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], adjoint=sn.Replay())  # the default
        >>> sol.ys[-1].sum().backward()
        >>> round(y0.grad.item(), 4)  # e⁻¹
        0.3679
        >>> sol.stats.backward.accepted == sol.stats.accepted
        True
    """

    batches: ClassVar[bool] = True

    every: int = 1

    def __post_init__(self) -> None:
        check_count("every", self.every)

    def tape(self, problem: Problem) -> StateTape:
        return StateTape(self.every)

    def states(self, request: BackwardRequest) -> SparseStates:
        return SparseStates(request.kept, self.every, len(request.forward.plans))

"""Checkpointed: keep a few states, however many steps there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .._field.checks import check_count
from .._stepping.checkpoints import Checkpoints
from .._stepping.observers import CheckpointTape, Offer, State
from .._stepping.problem import Problem
from ._autograd import BackwardRequest
from ._discrete.states import States
from ._discrete.sweep import DiscreteAdjoint, Sweep


@dataclass(frozen=True)
class Checkpointed(DiscreteAdjoint):
    """Replay with at most `n` states kept, placed while the number of steps is still unknown.

    The gradient is that of `Replay`. States that are not kept are computed again from the last one that is, if
    necessary more than once: the fewer states, the more work. With n = 10, a thousand steps cost about 2.7 more
    evaluations of every step, ten thousand 4.8. [`Checkpoints`][seminode._stepping.checkpoints.Checkpoints] says where
    they are put.

    Arguments:
        n: the number of states, including the initial one.

    References: Griewank and Walther, *Algorithm 799: Revolve*, ACM TOMS 26 (2000); with an unknown number of steps:
    Wang, Moin and Iaccarino, SIAM J. Sci. Comput. 31 (2009); Stumm and Walther, SIAM J. Sci. Comput. 32 (2010).

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], adjoint=sn.Checkpointed(3))
        >>> sol.ys[-1].sum().backward()
        >>> sol.stats.backward.nfe > 6 * sol.stats.accepted  # some steps are computed more than once
        True
    """

    batches: ClassVar[bool] = True

    n: int

    def __post_init__(self) -> None:
        check_count("n", self.n)

    def tape(self, problem: Problem) -> CheckpointTape:
        return CheckpointTape(self.n)

    def states(self, request: BackwardRequest) -> CheckpointedStates:
        tape = request.forward.tape
        assert isinstance(tape, CheckpointTape)
        return CheckpointedStates(tape.checkpoints, request.kept)


class CheckpointedStates(States):
    """A few states were kept. When a missing one is computed, others are kept in the freed slots.

    The checkpoints belong to the solve, not to autograd, which would hold on to all of them until the end of the
    backward pass. They are used up by it; a second backward pass starts from the first state.
    """

    def __init__(self, checkpoints: Checkpoints[State], end: Sequence[Tensor]):
        self._checkpoints = checkpoints
        self._end = tuple(end)

    def before(self, j: int, sweep: Sweep) -> State:
        i, state = self._checkpoints.recall(j)
        return state if i == j else sweep.advance(i, j, state, [Offer(self._checkpoints, i)])

    def beyond(self, j: int) -> tuple[int, State] | None:
        return self._checkpoints.beyond(j)

    def end(self) -> State:
        return self._end

"""The paper's way to count steps, beside what a solver knows itself.

Its solver was not asked which steps it accepted. The times at which the field was evaluated were written down, and
every sixth of them taken for the end of an attempted step: dopri5 makes six evaluations a step, after two to choose the
first one. That is right for one solve without interruption. After every restart, at a jump or at an output, further
evaluations shift the stride, and what it finds are no longer ends of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import seminode as sn

#: Evaluations of one step of dopri5, and where the first step ends if its size was chosen by the solver or prescribed.
STRIDE = 6
FIRST_END, FIRST_END_PRESCRIBED = 7, 5


def evaluations(back: sn.Stats) -> int:
    """Of a backward pass. Usually one is of the field and of its pull-back together. `Direct` has kept what it needs of
    the former and makes the latter only, which counts just the same.

    Example:
        >>> evaluations(sn.Stats(nfe=80, vjp_y=80)), evaluations(sn.Stats(nfe=0, vjp_y=66))
        (80, 66)
    """
    return max(back.nfe, back.vjp_y)


class Strided(NamedTuple):
    """Times of steps that the paper's counter calls accepted and rejected."""

    accepted: list[float]
    rejected: list[float]


def strided(times: Sequence[float], prescribed: bool = False) -> Strided:
    """Accepted and rejected steps of a backward pass, as published: from the times of its evaluations in order.

    Every sixth time is the end of a step. A step is rejected if the next one ends later, which in backward time means
    closer to the start; the last one is accepted.

    Example:
        >>> times = [1.0, 0.9, *[0.8] * 5, 0.5, *[0.8] * 5, 0.7, *[0.6] * 5, 0.4]
        >>> strided(times)
        Strided(accepted=[0.7, 0.4], rejected=[0.5])
    """
    ends = list(times[FIRST_END_PRESCRIBED if prescribed else FIRST_END :: STRIDE])
    found = Strided([], [])
    for i, end in enumerate(ends):
        rejected = i + 1 < len(ends) and ends[i + 1] > end
        (found.rejected if rejected else found.accepted).append(end)
    return found


def accumulated(evaluations: Sequence[int], every: int = 10) -> int:
    """Backward evaluations "throughout training", as published: ten times those of the passes over the training set
    at every tenth epoch and at the last one, as if each stood for ten epochs. Where a schedule evaluates at every k-th
    epoch, k takes the place of ten.

    Example:
        >>> accumulated([98 * 79] * 6)  # the pendulum's 50 epochs, counted as 60
        464520
    """
    return every * sum(evaluations)

"""Evaluations and steps, counted as the paper counts them.

The code of the paper does not ask its solver which steps it accepted. It records the times at which the field is
evaluated and takes every sixth time for the end of an attempted step, because dopri5 makes six evaluations per step,
after two to choose the first step. That is correct for one uninterrupted solve. After a restart, at a jump or at an
output, additional evaluations shift the stride, and the times that it selects are no longer ends of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import seminode as sn

#: Evaluations per step of dopri5, and the index of the evaluation at which the first step ends, if the solver chooses
#: its size and if it is prescribed.
STRIDE = 6
FIRST_END, FIRST_END_PRESCRIBED = 7, 5


def evaluations(back: sn.Stats) -> int:
    """Evaluations of a backward pass.

    Usually one consists of the field and its VJP. `Direct` keeps what it needs from the forward pass and computes only
    VJPs; each of them counts as one evaluation.

    Example:
        >>> evaluations(sn.Stats(nfe=80, vjp_y=80)), evaluations(sn.Stats(nfe=0, vjp_y=66))
        (80, 66)
    """
    return max(back.nfe, back.vjp_y)


class Strided(NamedTuple):
    """The end times of steps that the paper's counter calls accepted and rejected."""

    accepted: list[float]
    rejected: list[float]


def strided(times: Sequence[float], prescribed: bool = False) -> Strided:
    """Accepted and rejected steps of a backward pass, computed as published from the times of its evaluations.

    Every sixth time is the end of a step. A step counts as rejected if the next one ends at a later time, which in
    backward time is closer to the start. The last step counts as accepted.

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
    """Backward evaluations "throughout training", computed as published.

    The paper evaluates the model on the training set at every tenth epoch and at the last one, and multiplies the
    evaluations of these passes by ten, as if each represented ten epochs. For a schedule that evaluates the model at
    every k-th epoch, the factor is k.

    Example:
        >>> accumulated([98 * 79] * 6)  # the pendulum's 50 epochs, counted as 60
        464520
    """
    return every * sum(evaluations)

"""What can stop a solve, and what a solve may warn of."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any


class SolveError(RuntimeError):
    """A solve that cannot go on.

    Attributes:
        t: the time at which it stopped.
        dt: the (signed) step that was being tried, or ``None`` before the first step.
        stats: the [`Stats`][seminode.Stats] up to that point.
        leaf: the name of the leaf of the state to blame, where one stands out.
        backward: whether it happened on the backward pass.
    """

    #: Which `Status` it stands for.
    status = "failed"

    def __init__(
        self,
        message: str,
        *,
        t: float,
        dt: float | None = None,
        stats: Any = None,
        leaf: str | None = None,
        backward: bool = False,
    ):
        super().__init__(message)
        self.message = message
        self.t = t
        self.dt = dt
        self.stats = stats
        self.leaf = leaf
        self.backward = backward

    def __str__(self) -> str:
        return f"on the backward pass: {self.message}" if self.backward else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it survives the way from another process."""
        details = {name: getattr(self, name) for name in ("t", "dt", "stats", "leaf", "backward")}
        return partial(type(self), **details), (self.message,)


class StepSizeUnderflow(SolveError):
    """The step that meets the tolerance is too small to move the clock."""

    status = "step size underflow"


class MaxStepsReached(SolveError):
    """The limit on the number of attempted steps was reached before the end of the interval."""

    status = "max steps reached"


class NonFiniteState(SolveError):
    """A NaN or an infinity appeared in the state, in the field or in the gradient."""

    status = "non-finite state"


class StepFailure(SolveError):
    """The solver could not compute a step, and a shorter one does not help or is not allowed."""

    status = "step failure"


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called into this package."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "seminode",
        "seminode_lab",
    ):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)


class ToleranceWarning(UserWarning):
    """A tolerance that the dtype of the state cannot honour."""


class CompileWarning(UserWarning):
    """A field or solver that could not be compiled, and runs op by op instead."""


class DriftWarning(UserWarning):
    """A state recovered on the way back is far from the one that was there: the gradient is not to be trusted."""


class StatefulFieldWarning(UserWarning):
    """A field whose evaluation changes a buffer, such as batch normalisation in training mode."""

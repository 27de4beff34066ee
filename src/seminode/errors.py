"""Exceptions and warnings of a solve."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any


class SolveError(RuntimeError):
    """A solve failed.

    Attributes:
        t: the time at which the solve stopped.
        dt: the (signed) step that was attempted, or ``None`` before the first step.
        stats: the [`Stats`][seminode.Stats] up to that point.
        leaf: the name of the leaf of the state that caused the failure, if there is a single one.
        backward: whether the solve failed on the backward pass.
        samples: the samples of a batched solve that failed.
    """

    #: The value of the corresponding `Status`.
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
        samples: tuple[int, ...] = (),
    ):
        super().__init__(message)
        self.message = message
        self.t = t
        self.dt = dt
        self.stats = stats
        self.leaf = leaf
        self.backward = backward
        self.samples = samples

    def __str__(self) -> str:
        return f"on the backward pass: {self.message}" if self.backward else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, so that the error can be sent between processes."""
        details = {name: getattr(self, name) for name in ("t", "dt", "stats", "leaf", "backward", "samples")}
        return partial(type(self), **details), (self.message,)


class StepSizeUnderflow(SolveError):
    """The step that meets the tolerance is too small: t + dt rounds to t, or dt is below `dt_min`."""

    status = "step size underflow"


class MaxStepsReached(SolveError):
    """The solve attempted `max_steps` steps before it reached the end of the interval."""

    status = "max steps reached"


class NonFiniteState(SolveError):
    """A NaN or an infinity appeared in the state, in the field or in the gradient."""

    status = "non-finite state"


class StepFailure(SolveError):
    """The solver could not compute a step, and a shorter one does not help or is not allowed."""

    status = "step failure"


class NewtonDivergence(StepFailure):
    """The stages of an implicit step could not be solved for, however small the step, or with a fixed step."""

    status = "newton divergence"


class ZenoBehaviour(SolveError):
    """An event occurs again and again within ever shorter times: the solve cannot get past that point."""

    status = "Zeno behaviour"


#: Categories of warnings that are not issued at present.
_silenced: ContextVar[frozenset[type[Warning]]] = ContextVar("silenced", default=frozenset())


@contextmanager
def without(*categories: type[Warning]) -> Generator[None, None, None]:
    """Do not issue these warnings inside; unlike `warnings.catch_warnings`, in this thread only."""
    token = _silenced.set(_silenced.get() | set(categories))
    try:
        yield
    finally:
        _silenced.reset(token)


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that called into this package."""
    if category in _silenced.get():
        return
    # Private, but documented, and nothing else gets a frame without the cost of a traceback.
    depth, frame = 2, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "seminode",
        "seminode_lab",
    ):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)


class ToleranceWarning(UserWarning):
    """A tolerance is too tight for the precision of the state's dtype."""


class CompileWarning(UserWarning):
    """A field or solver could not be compiled and runs eagerly instead."""


class DriftWarning(UserWarning):
    """A state that the backward pass recovered differs much from the forward state: the gradient is unreliable."""


class StatefulFieldWarning(UserWarning):
    """Evaluating the field changes a buffer, as batch normalisation does in training mode."""

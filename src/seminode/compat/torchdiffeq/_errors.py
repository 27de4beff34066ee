"""Errors of the types that torchdiffeq raises and of those that seminode raises, at once."""

from __future__ import annotations

from ...errors import MaxStepsReached, NonFiniteState, SolveError, StepFailure, StepSizeUnderflow


class ArgumentError(ValueError, AssertionError):
    """An invalid argument, for which torchdiffeq has an assertion."""


class FieldShapeError(ValueError, RuntimeError):
    """A result of the field that does not match y0; in torchdiffeq, torch raises an error."""


class UnderflowInDt(StepSizeUnderflow, AssertionError):
    """The step that meets the tolerance is too small to move the clock."""


class NonFiniteValues(NonFiniteState, AssertionError):
    """A NaN or an infinity appeared in the state, in the field or in the gradient."""


class MaxNumStepsExceeded(MaxStepsReached, AssertionError):
    """More than `max_num_steps` steps were tried between two output times."""


class FailedStep(StepFailure, AssertionError):
    """The solver could not compute a step, and a shorter one does not help or is not allowed."""


#: The error that stands for each of seminode's, and the words of torchdiffeq for it.
_TYPES: dict[type[SolveError], tuple[type[SolveError], str]] = {
    StepSizeUnderflow: (UnderflowInDt, "underflow in dt"),
    NonFiniteState: (NonFiniteValues, "non-finite values in state `y`"),
    MaxStepsReached: (MaxNumStepsExceeded, "max_num_steps exceeded"),
    StepFailure: (FailedStep, "step failed"),
}


def translated(error: SolveError) -> SolveError:
    """The same error, which `except AssertionError` catches too."""
    if isinstance(error, AssertionError) or type(error) not in _TYPES:
        return error
    kind, words = _TYPES[type(error)]
    details = {"t": error.t, "dt": error.dt, "stats": error.stats, "leaf": error.leaf, "backward": error.backward}
    return kind(f"{words}: {error.message}", **details)

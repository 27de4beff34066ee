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

    Example:
        >>> import torch, seminode as sn
        >>> try:
        ...     sn.solve(lambda t, y: y**2, torch.ones(1, dtype=torch.float64), [0.0, 2.0])  # infinite at t = 1
        ... except sn.SolveError as error:
        ...     print(error.status, f"{error.t:.3f}", error.backward)
        step size underflow 1.000 False
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
    """The step that meets the tolerance is too small: t + dt rounds to t, or dt is below `dt_min`.

    Example:
        >>> import torch, seminode as sn
        >>> field = lambda t, y: torch.where(t < 0.7, -y, 100 - y)
        >>> problem, controller = (field, torch.ones(1), [0.0, 1.0]), sn.Integral(dt_min=1e-3)
        >>> try:
        ...     sn.solve(*problem, controller=controller)
        ... except sn.StepSizeUnderflow as error:
        ...     print(f"{error.t:.2f}")  # something happens there
        0.70
        >>> sn.solve(*problem, controller=controller, jumps=[0.7]).status.value
        'success'
    """

    status = "step size underflow"


class MaxStepsReached(SolveError):
    """The solve attempted `max_steps` steps before it reached the end of the interval.

    Example:
        >>> import torch, seminode as sn
        >>> sol = sn.solve(lambda t, y: -1000 * y, torch.ones(1), [0.0, 1.0], max_steps=50, throw=False)
        >>> isinstance(sol.error, sn.MaxStepsReached), sol.error.stats.accepted + sol.error.stats.rejected
        (True, 50)
        >>> 0.0 < sol.error.t < 0.3  # far from the end: it is stiff, so another solver is needed
        True
    """

    status = "max steps reached"


class NonFiniteState(SolveError):
    """A NaN or an infinity appeared in the state, in the field or in the gradient.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = {"height": torch.tensor([0.0]), "mass": torch.tensor([1.0])}
        >>> try:
        ...     sn.solve(lambda t, y: {"height": y["height"].log(), "mass": -y["mass"]}, y0, [0.0, 1.0])
        ... except sn.NonFiniteState as error:
        ...     print(error.leaf, error.t)
        y0['height'] 0.0
    """

    status = "non-finite state"


class StepFailure(SolveError):
    """The solver could not compute a step, and a shorter one does not help or is not allowed.

    Example:
        A solver that cannot compute a step gives the reason in `failure` of its result:

        >>> import torch, seminode as sn
        >>> class Positive(sn.Euler):
        ...     def step(self, evaluate, dt, y0, memory):
        ...         result = super().step(evaluate, dt, y0, memory)
        ...         return result._replace(failure="y < 0") if bool((result.y1 < 0).any()) else result
        >>> try:
        ...     sn.solve(
        ...         lambda t, y: -4 * y, torch.ones(1), [0.0, 1.0], solver=Positive(), controller=sn.FixedStep(0.5)
        ...     )
        ... except sn.StepFailure as error:
        ...     print(error)
        at t = 0 the solver could not take a step of 0.5: y < 0. Try smaller steps, ...
    """

    status = "step failure"


class NewtonDivergence(StepFailure):
    """The stages of an implicit step could not be solved for, however small the step, or with a fixed step.

    Example:
        >>> import torch, seminode as sn
        >>> options = {"solver": "implicit_euler", "controller": sn.FixedStep(1.0)}
        >>> try:
        ...     sn.solve(lambda t, y: 1 + y**2, torch.ones(1), [0.0, 1.0], **options)  # y = 1 + 1 + y² has no solution
        ... except sn.NewtonDivergence as error:
        ...     print(error.t, error.dt)
        0.0 1.0
    """

    status = "newton divergence"


class ZenoBehaviour(SolveError):
    """An event occurs again and again within ever shorter times: the solve cannot get past that point.

    Example:
        A ball that keeps half of its speed at each bounce comes to rest at t = 3√(2/9.81):

        >>> import torch, seminode as sn
        >>> fall = lambda t, y: torch.stack([y[1], torch.full_like(y[1], -9.81)])
        >>> bounce = sn.Event(lambda t, y: y[0], direction=-1, reset=lambda t, y: torch.stack([0 * y[0], -0.5 * y[1]]))
        >>> ball = torch.tensor([1.0, 0.0], dtype=torch.float64)
        >>> sol = sn.solve(fall, ball, [0.0, 2.0], event=bounce, throw=False)
        >>> isinstance(sol.error, sn.ZenoBehaviour), round(sol.error.t, 3)
        (True, 1.355)
    """

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
    """A tolerance is too tight for the precision of the state's dtype.

    Example:
        >>> import torch, seminode as sn, warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", sn.ToleranceWarning)
        ...     sol = sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0], rtol=1e-9)
        >>> print(caught[0].message)
        rtol = 1e-09 is below 4.8e-07, four times the rounding error of torch.float32: ...
    """


class CompileWarning(UserWarning):
    """A field or solver could not be compiled and runs eagerly instead.

    Example:
        >>> import torch, seminode as sn, warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", sn.CompileWarning)
        ...     sol = sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0], solver="kvaerno3", compile=True)
        >>> print(caught[0].message)
        compile: the solve runs eagerly, since solver 'kvaerno3' is not an explicit Runge–Kutta method ...
    """


class DriftWarning(UserWarning):
    """A state that the backward pass recovered differs much from the forward state: the gradient is unreliable.

    Example:
        To stop instead of training with such gradients:

        >>> import torch, seminode as sn, warnings
        >>> y0 = torch.ones(1, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -30 * y, y0, [0.0, 1.0], adjoint=sn.Backsolve())  # contracts
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", sn.DriftWarning)
        ...     sol.ys[-1].sum().backward()
        Traceback (most recent call last):
        ...
        seminode.errors.DriftWarning: ...
    """


class StatefulFieldWarning(UserWarning):
    """Evaluating the field changes a buffer, as batch normalisation does in training mode.

    Example:
        >>> import torch, seminode as sn, warnings
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", sn.StatefulFieldWarning)
        ...     sol = sn.solve(lambda t, y: norm(y), torch.randn(8, 2), [0.0, 1.0], params=norm)
        >>> caught[0].category.__name__  # call norm.eval(), or use another normalisation
        'StatefulFieldWarning'
    """

"""A step that has been computed, as the loop and its observers see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._error_norm import ErrorNorm
from .._field.pytree import is_finite, real_dtype
from .._untyped import numbers
from ..controllers import Controller
from ..grids import Grid
from ..solvers.base import Evaluate, Memory, Solver, StepResult
from .combination import MovingStep, StepSize, length
from .interpolation import coefficients, coefficients_by_product, evaluate
from .schedule import Plan


class Shifts(Protocol):
    """Zero-valued tensors that carry the derivative with respect to times.

    A plan's times are host floats. Where the gradient with respect to `ts` is wanted, a tensor is added to each time
    whose value is zero and whose derivative is that of the time. Values stay exact, and constants stay constants.
    """

    def of(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """For the two ends of a step."""
        ...

    def outputs(self, low: int, high: int) -> Tensor:
        """For the output times low … high − 1."""
        ...


class TimeShifts:
    """Shifts that follow `ts` itself: autograd backpropagates through them."""

    def __init__(self, ts: Tensor, like: Tensor):
        self._shifts = (ts - ts.detach()).to(device=like.device, dtype=real_dtype(like))
        self._fixed = torch.zeros((), device=like.device, dtype=real_dtype(like))

    def of(self, plan: Plan) -> tuple[Tensor, Tensor]:
        start = self._shifts[0] if plan.floating else self._fixed
        if plan.final:
            return start, self._shifts[-1]
        return start, self._shifts[0] if plan.end_floats else self._fixed

    def outputs(self, low: int, high: int) -> Tensor:
        return self._shifts[low:high]


class GridShifts:
    """Shifts of steps on a grid: each of its times moves with `ts` as the grid does."""

    def __init__(self, grid: Tensor, ts: Tensor, like: Tensor):
        like_times = {"device": like.device, "dtype": real_dtype(like)}
        self._outputs = (ts - ts.detach()).to(**like_times)
        self._shifts = (grid - grid.detach()).to(**like_times)
        self._index = {t: i for i, t in enumerate(numbers(grid))}

    def of(self, plan: Plan) -> tuple[Tensor, Tensor]:
        return self._shifts[self._index[plan.t0]], self._shifts[self._index[plan.t1]]

    def outputs(self, low: int, high: int) -> Tensor:
        return self._outputs[low:high]


def time_shifts(controller: Controller, ts: Tensor, like: Tensor) -> Shifts:
    """What carries the derivative with respect to `ts` through the steps of a controller."""
    if isinstance(controller, Grid):
        return GridShifts(controller.moving(ts), ts, like)
    return TimeShifts(ts, like)


class Attempt(NamedTuple):
    """A solver's result, f(t1, y1) where it was asked for, and the estimate of the local error where there is one."""

    result: StepResult
    end_slope: Tensor | None
    error: Tensor | None


def attempt(
    solver: Solver, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Memory, *, end_slope: bool, error: bool
) -> Attempt:
    """Take a step; with `end_slope` also evaluate f(t1, y1), with `error` estimate the local error.

    Eager steps and compiled programs are made of this one function.
    """
    result = solver.step(evaluate, dt, y0, memory)
    return Attempt(result, None, None) if result.failure else completed(solver, result, evaluate, dt, end_slope, error)


def completed(
    solver: Solver, result: StepResult, evaluate: Evaluate, dt: StepSize, end_slope: bool, error: bool
) -> Attempt:
    """A step's result with its end slope and its error estimate."""
    slopes, end = result.slopes, None
    if end_slope:
        end = evaluate(1.0, result.y1, stage=solver.stages)
        slopes = [*slopes, end]
    if not error:
        return Attempt(result, end, None)
    # The estimate is only read, so it carries no derivative, not even with respect to dt.
    plain = dt.value if isinstance(dt, MovingStep) else dt
    if result.error is not None:
        return Attempt(result, end, result.error)
    if not torch.is_grad_enabled():
        return Attempt(result, end, solver.error(plain, slopes))
    with torch.no_grad():
        return Attempt(result, end, solver.error(plain, slopes))


class Step:
    """A step that has been computed. f(t1, y1) is evaluated when it is first asked for."""

    __slots__ = (
        "_end_slope",
        "_error",
        "_evaluate_end",
        "_memory0",
        "_ratio",
        "_result",
        "_shift",
        "_solver",
        "dt",
        "matrix",
        "plan",
        "saved",
        "slopes",
        "y0",
        "y1",
    )

    def __init__(
        self,
        solver: Solver,
        plan: Plan,
        y0: Tensor,
        memory: Memory,
        attempted: Attempt,
        evaluate_end: Callable[[Step], Tensor],
        *,
        dt: StepSize,
        shift: tuple[Tensor, Tensor] | None = None,
        ratio: Tensor | float | None = None,
        saved: Any = None,
    ):
        self._solver, self._memory0 = solver, memory
        self._result, self._end_slope, self._error = attempted
        self._evaluate_end = evaluate_end
        self._shift, self._ratio = shift, ratio
        self.plan, self.dt = plan, dt
        self.y0, self.y1, self.slopes = y0, self._result.y1, self._result.slopes
        #: The weights of the slopes in its polynomial.
        self.matrix = self._result.interpolant or solver.interpolant
        #: What a compiled step keeps for its VJP.
        self.saved = saved

    @property
    def solver(self) -> Solver:
        return self._solver

    @property
    def failure(self) -> str | None:
        """Why the solver could not compute the step, if it could not."""
        return self._result.failure

    @property
    def compiled(self) -> bool:
        """Whether a program has returned it, so that nobody writes into its slopes."""
        return self._ratio is not None

    @property
    def before(self) -> tuple[Tensor, ...]:
        """What determines this step and all later ones: the state, and what the solver carries in addition."""
        return (self.y0, *self._solver.carried(self._memory0))

    @property
    def after(self) -> tuple[Tensor, ...]:
        """The same at the end of the step."""
        return (self.y1, *self._solver.carried(self._memory1()))

    def next_memory(self) -> Memory:
        """The solver's memory for the next step. Across a jump, the slope at the end says nothing about that one."""
        memory = self._memory1()
        if self._end_slope is None or self.plan.crosses_jump:
            return memory
        return self._solver.with_slope(memory, self._end_slope)

    def _memory1(self) -> Memory:
        memory = self._result.memory
        return self._solver.across_jump(memory) if self.plan.crosses_jump else memory

    def retry_memory(self) -> Memory:
        """The solver's memory for another attempt from the same state."""
        return self._solver.retry(self._memory0, self._result)

    def sample(self) -> tuple[float, Tensor, Tensor]:
        """An evaluation of this step: its time, its state and its slope."""
        if self._solver.implicit:  # whose slopes are no evaluations
            return self.plan.stage_time(1.0), self.end_anchor(), self.end_slope()
        c, y, slope = self._solver.sampled(self.plan.dt, self.y0, self._memory0, self._result)
        return self.plan.stage_time(c), y, slope

    def end_anchor(self) -> Tensor:
        """Where f at the end of the step is evaluated."""
        return self._solver.anchor(self.y1, self._result.memory)

    def end_slope(self) -> Tensor:
        """f at the end of the step."""
        if self._end_slope is None:
            self._end_slope = self._evaluate_end(self)
        return self._end_slope

    def ratio(self, norm: ErrorNorm) -> float:
        """The size of the error relative to what is allowed; infinite if the solver failed."""
        if self.failure is not None:
            return norm.failed(self.y0)
        if self._ratio is not None:
            return norm.of_program(self._ratio) if isinstance(self._ratio, Tensor) else self._ratio
        error, y0, y1 = self.error(), self.y0, self.y1
        if torch.is_grad_enabled():
            error, y0, y1 = error.detach(), y0.detach(), y1.detach()
        return norm.ratio(error, y0, y1)

    def error(self) -> Tensor:
        """The estimate of the local error."""
        if self._error is None:  # a compiled step hands out its size only
            solver = self._solver
            slopes = [*self.slopes, self.end_slope()] if solver.error_needs_end_slope else self.slopes
            self._error = solver.error(self.plan.length(self.y0), slopes)
        return self._error

    def is_finite(self) -> bool:
        """Whether the new state is."""
        ratio = self._ratio
        if ratio is not None and (bool(torch.isfinite(ratio)) if isinstance(ratio, Tensor) else math.isfinite(ratio)):
            return True  # which holds a sum over the state
        return is_finite(self.y1)

    def at(self, times: Sequence[float], moved: Tensor | None = None) -> Tensor:
        """The step's polynomial at several times, stacked; `moved` carries the derivative with respect to them."""
        t0, dt = self.plan.t0, self.plan.dt
        if self._shift is None:
            xs: Sequence[float] | Tensor = [(t - t0) / dt for t in times]
        else:
            ahead = torch.tensor([t - t0 for t in times], dtype=self._shift[0].dtype, device=self.y0.device)
            xs = (ahead - self._shift[0] + (0.0 if moved is None else moved)) / length(self.dt)
        return evaluate(self.matrix, self.y0, self.dt, self.interpolated(), xs)

    def along(self, xs: Sequence[float]) -> Tensor:
        """The step's polynomial at positions x from 0 to 1, stacked; finer than times can tell apart."""
        return evaluate(self._solver.interpolant, self.y0, self.plan.dt, self.interpolated(), xs)

    def coefficients(self) -> Tensor:
        """The step's polynomial in x = (t − t0)/dt, constant first."""
        return coefficients(self.matrix, self.y0, self.dt, self.interpolated())

    def quick_coefficients(self) -> Tensor:
        """The same to rounding, without a graph."""
        return coefficients_by_product(self.matrix, self.y0, self.dt, self.interpolated())

    def interpolated(self) -> list[Tensor]:
        """The slopes that the step's polynomial reads."""
        reads_end = len(self.matrix) > len(self.slopes)
        return [*self.slopes, self.end_slope()] if reads_end else self.slopes

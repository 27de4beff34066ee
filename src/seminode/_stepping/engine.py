"""Execution of a pure step: how a plan on the host becomes tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .._field.determinism import Purity
from .._field.field import Field
from .._field.pytree import is_finite, real_dtype
from ..norms import ErrorNorm
from ..solvers import ReversibleSolver, Solver
from .combination import MovingStep, StepSize, length
from .interpolation import coefficients, evaluate
from .observers import Tally
from .problem import Plan


class Shifts(Protocol):
    """Zero-valued tensors that carry the derivative with respect to times.

    A plan's times are host floats. Where the gradient with respect to `ts` is wanted, each time gets a tensor added
    that is zero and whose derivative is that of the time: so values stay exact, and what is constant stays a constant.
    """

    def of(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """For the two ends of a step."""
        ...

    def outputs(self, low: int, high: int) -> Tensor:
        """For the output times low … high − 1."""
        ...


class TimeShifts:
    """Shifts that follow `ts` itself: autograd carries them back to it."""

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


class Step:
    """A step that has been computed, as observers see it. f(t1, y1) is evaluated when it is first asked for."""

    __slots__ = ("_end_slope", "_engine", "_evaluated", "_shift", "dt", "end", "plan", "stages", "start", "y0", "y1")

    def __init__(
        self,
        engine: Eager,
        plan: Plan,
        shift: tuple[Tensor, Tensor] | None,
        dt: StepSize,
        start: Tensor,
        end: Tensor,
        stages: list[Tensor],
        evaluated: list[tuple[Tensor, int]],
    ):
        self._engine = engine
        self._shift = shift
        self._end_slope: Tensor | None = None
        self.plan = plan
        self.dt = dt
        self.start, self.end = start, end  # all that the solver carries from step to step
        paired = engine.solver.paired
        self.y0, self.y1 = (start[0], end[0]) if paired else (start, end)
        if paired:
            # Not all slopes that were evaluated are handed on.
            self._end_slope = stages.pop() if engine.solver.ends_on_stage else None
            evaluated = [(k, k._version) for k in stages]
        self.stages = stages
        self._evaluated = evaluated  # the field's answers, with their versions then
        self._check_untouched()

    @property
    def known_end_slope(self) -> Tensor | None:
        """f(t1, y1) if it has been needed so far."""
        return self._end_slope

    def slopes(self) -> list[Tensor]:
        """The stages and f(t1, y1)."""
        if self._end_slope is None:
            shift = None if self._shift is None else self._shift[1]
            self._end_slope = self._engine.slope(self.plan.stage_time(1.0), self._engine.anchor(self.end), shift)
            self._check_untouched()
        return [*self.stages, self._end_slope]

    def _check_untouched(self) -> None:
        """A field may return one and the same constant, but not write into what it has returned before."""
        if any(k._version != version for k, version in self._evaluated):
            raise ValueError(
                "field: wrote into a tensor that it had returned before, which is still in use; expected a new tensor "
                "from every evaluation"
            )

    def error(self) -> Tensor:
        """The estimate of the local error."""
        solver = self._engine.solver
        return solver.error(self.plan.dt, self.slopes() if solver.error_needs_end_slope else self.stages)

    def ratio(self, error: ErrorNorm) -> float:
        """The size of the error relative to what is allowed."""
        estimate, y0, y1 = self.error(), self.y0, self.y1
        if torch.is_grad_enabled():
            estimate, y0, y1 = estimate.detach(), y0.detach(), y1.detach()
        return error.ratio(estimate, y0, y1)

    def is_finite(self) -> bool:
        """Whether the new state is."""
        return is_finite(self.y1)

    def at(self, times: Sequence[float], moved: Tensor | None = None) -> Tensor:
        """The step's polynomial at several times, stacked; `moved` carries the derivative with respect to them."""
        matrix = self._engine.solver.interpolant
        t0, dt = self.plan.t0, self.plan.dt
        if self._shift is None:
            xs: Sequence[float] | Tensor = [(t - t0) / dt for t in times]
        else:
            ahead = torch.tensor([t - t0 for t in times], dtype=self._shift[0].dtype, device=self.y0.device)
            xs = (ahead - self._shift[0] + (0.0 if moved is None else moved)) / length(self.dt)
        return evaluate(matrix, self.y0, self.dt, self.interpolated(), xs)

    def coefficients(self) -> Tensor:
        """The step's polynomial in x = (t − t0)/dt, constant first."""
        return coefficients(self._engine.solver.interpolant, self.y0, self.dt, self.interpolated())

    def interpolated(self) -> list[Tensor]:
        """The slopes that the step's polynomial reads."""
        reads_end = len(self._engine.solver.interpolant) > len(self.stages)
        return self.slopes() if reads_end else self.stages


class Eager:
    """Runs steps op by op, on the live tensors that the field uses."""

    def __init__(
        self,
        field: Field,
        solver: Solver,
        like: Tensor,
        purity: Purity,
        tally: Tally,
        shifts: Shifts | None = None,
        log: list[float] | None = None,
    ):
        self.field = field
        self.layout = field.layout
        self.solver = solver
        self.tally = tally
        self._purity = purity
        self._shifts = shifts
        self._log = log
        self._dtype = real_dtype(like)
        self._device = like.device
        self.handed: list[Tensor] | None = None  # the times, where somebody wants to know them again in a graph

    def slope(self, t: float, y: Tensor, shift: Tensor | None = None) -> Tensor:
        """One evaluation of the field, counted."""
        self._count((t,))
        return self._evaluate(t, y, shift)

    def _count(self, times: Sequence[float], prepare: bool = True) -> None:
        """Before an evaluation, or a batch of them."""
        self.tally.nfe += len(times)
        if self._log is not None:
            self._log.extend(times)
        if prepare:
            self.prepare()

    def prepare(self) -> None:
        """Before an evaluation: the same random numbers and buffers as for any other."""
        if self._purity.impure:
            self._purity.prepare()

    def _evaluate(self, t: float, y: Tensor, shift: Tensor | None) -> Tensor:
        time = torch.full((), t, dtype=self._dtype, device=self._device)
        if self.handed is not None:
            self.handed.append(time)
        return self.field(time if shift is None else time + shift, y)

    def lift(self, y: Tensor) -> Tensor:
        """What the solver carries from step to step, out of a state."""
        return torch.stack([y, y]) if self.solver.paired else y

    def anchor(self, carried: Tensor) -> Tensor:
        """Where the first slope of a step is evaluated."""
        return carried[1] if self.solver.paired else carried

    def first_slope(self, plan: Plan, y: Tensor) -> Tensor:
        """The first evaluation of a solve; made again if it turns out to change the field's buffers."""
        self._purity.begin()
        k = self.start_slope(plan, y)
        return self.start_slope(plan, y) if self._purity.inspect() else k

    def start_slope(self, plan: Plan, y: Tensor) -> Tensor:
        """f at the start of a step, on the right side of a jump there."""
        shift = None if self._shifts is None else self._shifts.of(plan)[0]
        return self.slope(plan.stage_time(0.0), self.anchor(y), shift)

    def step(self, plan: Plan, y0: Tensor, k1: Tensor | None) -> Step:
        """Take the step from what the solver carries; without k1 that is evaluated first."""
        if k1 is None:
            k1 = self.start_slope(plan, y0)
        evaluated = [(k1, k1._version)]
        shift = None if self._shifts is None else self._shifts.of(plan)
        dt = plan.dt if shift is None else MovingStep(plan.dt, shift[1] - shift[0])

        def slope(c: float, y: Tensor) -> Tensor:
            moved = None if shift is None else (1.0 - c) * shift[0] + c * shift[1]
            k = self.slope(plan.stage_time(c), y, moved)
            evaluated.append((k, k._version))
            return k

        y1, stages = self.solver.step(slope, dt, y0, k1)
        return Step(self, plan, shift, dt, y0, y1, stages, evaluated)

    def undo(self, plan: Plan, end: Tensor) -> Tensor:
        """What the solver carried before a step, from what it carried after it."""
        assert isinstance(self.solver, ReversibleSolver)
        return self.solver.invert(lambda c, y: self.slope(plan.stage_time(c), y), plan.dt, end)

"""Where z comes from when it is not solved for: the polynomials of the forward solution."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._stepping.checkpoints import Checkpoints
from ..._stepping.engine import Engine
from ..._stepping.known_plans import RecordedSchedule
from ..._stepping.loop import integrate
from ..._stepping.observers import Offer, PolynomialTape, State
from ..._stepping.schedule import Plan


class DenseState:
    """z(t) by the polynomials of the steps, all of which were kept."""

    #: Times that a step of the backward solve should not cross.
    places: Sequence[float] = ()

    def __init__(self, plans: Sequence[Plan], coefficients: Sequence[Tensor]):
        self._plans = plans
        self._coefficients = coefficients
        self._sign = -1.0 if plans[-1].dt < 0.0 else 1.0
        self._ends = [self._sign * plan.t1 for plan in plans]

    def __call__(self, t: float) -> Tensor:
        plan, coefficients = self._step_at(t)
        return _polynomial(coefficients.unbind(0), (t - plan.t0) / plan.dt)

    def polynomials(self, times: Sequence[float]) -> tuple[list[Tensor], list[float]]:
        """For each time the coefficients of its step, constant first, and its place x from 0 to 1 in that step.

        Programs evaluate them themselves: to hand z over would take three operations for every step that is touched.
        """
        found = [self._step_at(t) for t in times]
        places = [(t - plan.t0) / plan.dt for t, (plan, _) in zip(times, found, strict=True)]
        return [coefficients for _, coefficients in found], places

    def slope(self, t: float) -> Tensor:
        """z′(t) by the polynomial of the step."""
        plan, coefficients = self._step_at(t)
        terms = [m * x for m, x in enumerate(coefficients.unbind(0))]
        return _polynomial(terms[1:], (t - plan.t0) / plan.dt) / plan.dt

    def _step_at(self, t: float) -> tuple[Plan, Tensor]:
        """The step that contains a time, and its polynomial."""
        j = self._index(t)
        return self._plans[j], self._coefficients[j]

    def first_step(self, t: float) -> float:
        """How long a step the forward solve has taken at a time."""
        return self._plans[self._index(t)].proposal

    def _index(self, t: float) -> int:
        # A time past either end belongs to the nearest step.
        return min(bisect_left(self._ends, self._sign * t), len(self._ends) - 1)


def _polynomial(coefficients: Sequence[Tensor], x: float) -> Tensor:
    y = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        y = torch.add(coefficient, y, alpha=x)
    return y


class WindowedState(DenseState):
    """The same with a bound on memory: the polynomials of a few steps at a time, from steps taken again.

    Half of the memory is for checkpoints, half for the polynomials of a window of consecutive steps. The backward solve
    lands on the ends of windows, so that no step of it needs two of them.
    """

    def __init__(self, plans: Sequence[Plan], checkpoints: Checkpoints[State], width: int, engine: Engine):
        super().__init__(plans, ())
        self._checkpoints = checkpoints
        self._width = width
        self._engine = engine
        self._low = len(plans)  # the first step of the window
        self._window: list[Tensor] = []
        self.places = [plans[j].t0 for j in range(len(plans) - width, 0, -width)]

    def _step_at(self, t: float) -> tuple[Plan, Tensor]:
        if self._window and self._sign * t >= self._sign * self._plans[self._low].t0:
            low, high = self._low, self._low + len(self._window)
            j = min(bisect_left(self._ends, self._sign * t, low, high), high - 1)
        else:
            j = self._index(t)
            self._load(j)
        return self._plans[j], self._window[j - self._low]

    def _load(self, j: int) -> None:
        """The window whose last step is j, or one that was begun before."""
        count = len(self._plans)
        low = max(0, count - self._width * (1 + (count - 1 - j) // self._width))
        self._window = []  # before the next ones come
        i, state = self._checkpoints.recall(low)
        with torch.no_grad():
            if i < low:
                state = self._take(i, low, state, [Offer(self._checkpoints, i)])
            polynomials = PolynomialTape(quick=True)
            high = min(count, self._window_end(low))
            self._take(low, high, state, [polynomials])
        self._low, self._window = low, polynomials.hand_over()

    def _window_end(self, low: int) -> int:
        count = len(self._plans)
        return low + self._width if low > 0 else count - self._width * ((count - 1) // self._width)

    def _take(self, i: int, j: int, state: State, observers: list[Any]) -> State:
        solver, schedule = self._engine.solver, RecordedSchedule(self._plans[i:j])
        memory = solver.recall(state[1:])
        y, memory = integrate(self._engine, schedule, state[0], observers, memory=memory, check=False)
        return (y, *solver.carried(memory))

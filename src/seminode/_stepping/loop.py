"""The one stepping loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from .._error_norm import ErrorNorm
from .._field.pytree import is_finite
from .._ranks import ALONE, Alone
from ..errors import MaxStepsReached, NewtonDivergence, NonFiniteState, StepFailure, StepSizeUnderflow
from ..solvers.base import Memory
from .engine import Engine
from .observers import Observer
from .schedule import Plan
from .step import Step
from .stiffness import stiffness


class Plans(Protocol):
    """The source of the loop's plans."""

    @property
    def smallest(self) -> float: ...
    def next(self) -> Plan | None: ...
    def judge(self, plan: Plan, ratio: float) -> bool: ...


class Search(Protocol):
    """Searches the steps of the loop for events."""

    @property
    def landing(self) -> object | None: ...
    def intercepts(self, step: Step, ratio: float) -> bool: ...


def integrate(
    engine: Engine,
    schedule: Plans,
    y: Tensor,
    observers: Sequence[Observer],
    *,
    memory: Memory = None,
    error: ErrorNorm | None = None,
    max_steps: float = math.inf,
    check: bool = True,
    together: bool = False,
    search: Search | None = None,
    ranks: Alone = ALONE,
) -> tuple[Tensor, Memory]:
    """Step from y to the end of the schedule; observers see every step. Returns the last state and memory.

    `error=None` accepts every step; `check` then tests each one for NaN and infinity, which the error norm does
    otherwise, and with `together` tests may come later than the steps (see `StateChecks`). `max_steps` limits the
    attempts that the engine's counter has seen, over several calls if it is the same. `search` discards steps
    that cross an event, and ends the loop before a step that lands on one. `ranks` take the same steps, and all of
    them fail if one does.
    """
    ratio, last = math.nan, None
    checks = StateChecks(engine, together and (ranks.several or not on_host(y)), ranks)
    while (plan := schedule.next()) is not None:
        if engine.counter.attempts >= max_steps:
            _too_many_steps(engine, plan, y, max_steps, error)
        if not plan.landing and abs(plan.dt) < schedule.smallest:
            _underflow(engine, plan, y, last, error, ratio)
        last = None  # like an accepted step, a rejected one must not stay alive while the next is computed
        step = engine.step(plan, y, memory)
        if error is not None:
            ratio = step.ratio(error)
        elif check or step.failure is not None:
            checks.add(step)
        intercepted = search is not None and search.intercepts(step, ratio)
        if intercepted and search is not None and search.landing is not None:
            break
        if not intercepted and schedule.judge(plan, ratio):
            for observer in observers:
                observer.accepted(step, ratio)
            y, memory = step.y1, step.next_memory()
        else:
            for observer in observers:
                observer.rejected(step, ratio)
            memory, last = step.retry_memory(), step
        del step  # its slopes must not stay alive while those of the next one are computed
    checks.close()
    return y, memory


def place_of(leaf: str | None) -> str:
    """Where a value is not finite: in a leaf on this rank, or on another rank."""
    return "on another rank" if leaf is None else f"leaf {leaf}"


def on_host(x: Tensor) -> bool:
    """Whether reading a value does not wait for a device."""
    return x.device.type == "cpu"


class PendingTests:
    """Tests of steps, read all at once: reading each of them would wait for a device, or for the other ranks."""

    MANY = 1000

    def __init__(self, ranks: Alone = ALONE) -> None:
        self._ranks = ranks
        self._tests: list[tuple[Plan, Tensor]] = []

    def add(self, plan: Plan, passed: Tensor) -> Plan | None:
        """Keep a test, a 0-d tensor of bools. Every `MANY` tests, return the first step that has failed."""
        self._tests.append((plan, passed))
        return self.failed() if len(self._tests) == self.MANY else None

    def failed(self) -> Plan | None:
        """The first step that has failed on any rank, of those since the last call."""
        if not self._tests:
            return None
        plans, passed = zip(*self._tests, strict=True)
        self._tests = []
        good = self._ranks.all(*torch.stack(passed).tolist())
        return None if all(good) else plans[good.index(False)]


class StateChecks:
    """Refuses steps whose new states are not finite: at once, or all together if reading would have to wait."""

    def __init__(self, engine: Engine, together: bool, ranks: Alone):
        self._engine, self._together, self._ranks = engine, together, ranks
        self._pending = PendingTests(ranks)

    def add(self, step: Step) -> None:
        refuse_failure(self._engine, step)
        if self._together:
            self._refuse(self._pending.add(step.plan, torch.isfinite(step.y1.detach()).all()))
        elif not self._ranks.every(step.is_finite()):
            _not_finite(step.plan, self._engine.layout.non_finite_leaf(step.y1.detach()))

    def close(self) -> None:
        """Read the tests that are left."""
        self._refuse(self._pending.failed())

    @staticmethod
    def _refuse(plan: Plan | None) -> None:
        if plan is not None:
            _not_finite(plan, None)


def refuse_failure(engine: Engine, step: Step) -> None:
    """Raise an error if the solver could not compute a step that has to be taken."""
    plan = step.plan
    if step.failure is not None:
        raise _failure_of(engine)(
            f"at t = {plan.t0:g} the solver could not take a step of {plan.dt:.3g}: {step.failure}. Try smaller steps, "
            "or an adaptive controller, which shortens such steps.",
            t=plan.t0,
            dt=plan.dt,
        )


def _not_finite(plan: Plan, leaf: str | None) -> NoReturn:
    where = "" if leaf is None else f"leaf {leaf}, "
    raise NonFiniteState(
        f"the state became NaN or infinite at t = {plan.t1:g} ({where}dt = {plan.dt:g}). "
        "Try smaller steps, or an adaptive solver.",
        t=plan.t1,
        dt=plan.dt,
        leaf=leaf,
    )


def _failure_of(engine: Engine) -> type[StepFailure]:
    return NewtonDivergence if engine.solver.implicit else StepFailure


def _too_many_steps(engine: Engine, plan: Plan, y: Tensor, max_steps: float, error: ErrorNorm | None) -> NoReturn:
    advice = stiffness(engine, plan, y, ALONE if error is None else error.ranks) or (
        "The problem may be stiff or the tolerance too tight: raise rtol and atol, or max_steps, or check whether the "
        "field grows without bound."
    )
    raise MaxStepsReached(
        f"{max_steps:.0f} steps were tried and the solve has only reached t = {plan.t0:g} (dt = {plan.dt:.3g}). "
        f"{advice}",
        t=plan.t0,
        dt=plan.dt,
    )


def _underflow(
    engine: Engine, plan: Plan, y: Tensor, last: Step | None, error: ErrorNorm | None, ratio: float
) -> NoReturn:
    """`last` is the step that has just been rejected, if one was."""
    layout, leaf = engine.layout, None
    if last is not None and last.failure is not None:
        raise _failure_of(engine)(
            f"at t = {plan.t0:g} the solver could not take a step, however small (dt = {plan.dt:.3g}): {last.failure}",
            t=plan.t0,
            dt=plan.dt,
        )
    if last is not None and not math.isfinite(ratio):
        ranks = ALONE if error is None else error.ranks
        bad = last.y1 if not ranks.every(is_finite(last.y1)) else last.end_slope()
        leaf = layout.non_finite_leaf(bad.detach())
        raise NonFiniteState(
            f"just after t = {plan.t0:g} the field or the state is NaN or infinite, however small the step "
            f"({place_of(leaf)}, dt = {plan.dt:.3g}). The solution may blow up there, or the field is not defined.",
            t=plan.t0,
            dt=plan.dt,
            leaf=leaf,
        )
    if error is None:
        raise StepSizeUnderflow(
            f"at t = {plan.t0:g} a step of {plan.dt:.3g} is too small to move the clock; take a larger dt",
            t=plan.t0,
            dt=plan.dt,
        )
    misses = "has an error right at the tolerance"
    if last is not None:
        leaf = error.worst_leaf(last.error().detach(), last.y0.detach(), last.y1.detach())
        plan = last.plan
        misses = f"of {plan.dt:.3g} misses the tolerance by a factor of {ratio:.3g}"
    advice = stiffness(engine, plan, y, error.ranks) or (
        "Try a looser rtol or atol, float64, a `jumps=` entry if the field is discontinuous here, or check that the "
        "solution does not blow up."
    )
    raise StepSizeUnderflow(
        f"at t = {plan.t0:g} a step {misses}{f' (leaf {leaf} is worst)' if leaf else ''}, and the next would be too "
        f"small to move the clock or below dt_min. {advice}",
        t=plan.t0,
        dt=plan.dt,
        leaf=leaf,
    )

"""The start of a solve: the field there, a check that it is finite, and the length of the first step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._error_norm import ErrorNorm
from .._field.pytree import Layout, is_finite
from .._ranks import ALONE, Alone
from ..errors import NonFiniteState
from .combination import combine
from .engine import Engine
from .first_step import first_step
from .schedule import Schedule

#: The weight of the only slope of an Euler step.
WHOLE = ((0, 1.0),)


def begin_at_once(
    engine: Engine, schedule: Any, y: Tensor, layout: Layout, t: float, check: bool = True
) -> Tensor | None:
    """Begin with one program, if the engine has one: make the checks, set the first step, and return the slope."""
    if engine.start is None or not isinstance(schedule, Schedule) or not schedule.unset:
        return None
    begun = engine.start(schedule.plan(1.0), schedule.plan(2.0 * schedule.span), schedule.probe_length(0.0), y)
    if begun is None:
        return None
    if check and not begun.finite:  # of large numbers only the sum is not
        check_start(y, begun.slope, layout, t)
    schedule.begin(begun.length)
    return begun.slope


def select_first_step(engine: Engine, schedule: Schedule, y: Tensor, k1: Tensor, error: ErrorNorm, order: int) -> None:
    """Set the first step of the schedule from the problem, at the cost of one evaluation."""

    def probe(h: float) -> tuple[float, Tensor]:
        plan = schedule.plan(schedule.probe_length(h))
        return abs(plan.dt), engine.evaluate(plan.stage_time(1.0), combine(y, plan.length(y), WHOLE, [k1])).detach()

    # Under the grad mode of the solve, since the field may cache a weight in any evaluation.
    y, k1 = y.detach(), k1.detach()
    schedule.begin(first_step(y, k1, error, order, probe))


def check_start(y: Tensor, k1: Tensor | None, layout: Layout, t: float, ranks: Alone = ALONE) -> None:
    """Refuse a NaN or an infinity in y0 or in the field there, before any step is tried; on all ranks."""
    for what, x in (("y0", y), ("field(t0, y0)", k1)):
        if x is not None and not ranks.every(is_finite(x)):
            leaf = layout.non_finite_leaf(x)
            where = "on another rank" if leaf is None else f"leaf {leaf}"
            raise NonFiniteState(f"{what} holds a NaN or an infinity ({where}, t = {t:g})", t=t, leaf=leaf)

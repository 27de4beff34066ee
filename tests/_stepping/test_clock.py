"""The clock of a schedule: what rounding takes from one step is given to the next, and what a landing leaves behind."""

from __future__ import annotations

import math

import pytest
import torch
from stubs import StubController, number

import seminode as sn
from seminode._stepping.schedule import Plan, Schedule
from seminode.controllers import Controller


def taken(schedule: Schedule, ratio: float = 0.5) -> list[Plan]:
    """All steps of a schedule, each accepted."""
    plans = []
    while (plan := schedule.next()) is not None:
        assert schedule.judge(plan, ratio)
        plans.append(plan)
    return plans


def schedule(controller: Controller, *times: float) -> Schedule:
    return Schedule(controller, 1, times, (), torch.float64)


@pytest.mark.parametrize(
    ("dt", "times", "count"),
    [
        (0.01, (0.0, 10.0), 1_000),
        (0.01, (10.0, 0.0), 1_000),
        (0.1, (0.0, 100.0), 1_000),
        (0.001, (0.0, 10.0), 10_000),
        (0.01, (1000.0, 1010.0), 1_000),
        (1.0 / 3.0, (0.0, 1000.0), 3_000),
        (0.03, (0.0, 1.0), 34),  # 33 and a shorter one
    ],
)
def test_fixed_steps_are_as_many_as_fit(dt: float, times: tuple[float, float], count: int) -> None:
    plans = taken(schedule(sn.FixedStep(dt), *times))
    assert len(plans) == count
    assert plans[-1].t1 == times[-1]
    # No step but the last is shorter than the others, up to the resolution of the clock.
    resolution = 2 * math.ulp(max(map(abs, times)))
    assert all(abs(abs(plan.dt) - dt) <= resolution for plan in plans[:-1])


def test_the_clock_is_where_exact_arithmetic_has_it() -> None:
    """Within one unit in the last place after every one of a thousand steps; a plain sum is off by hundreds."""
    plans = taken(schedule(sn.FixedStep(0.01), 0.0, 10.0))
    for i, plan in enumerate(plans, 1):
        assert abs(plan.t1 - i * 0.01) <= math.ulp(plan.t1)


def test_a_solve_with_fixed_steps_takes_as_many_as_fit() -> None:
    sol = sn.solve(lambda t, y: -y, number(1.0), [0.0, 10.0], solver="euler", controller=sn.FixedStep(0.01))
    assert sol.stats.accepted == 1_000


def test_a_landing_step_does_not_enlarge_the_step_to_go_on_with() -> None:
    """A short step lands with next to no error, for which the controller proposes a much longer one."""
    made = schedule(StubController([3.0, 3.0, 500.0]), 0.0, 4.0)
    first, landing = taken(made)
    assert (first.landing, landing.landing, landing.dt, landing.proposal) == (False, True, 1.0, 3.0)
    assert made.carried == 3.0


def test_a_landing_step_may_shorten_the_step_to_go_on_with() -> None:
    made = schedule(StubController([3.0, 3.0, 0.5]), 0.0, 4.0)
    taken(made)
    assert made.carried == 0.5


def test_any_other_step_may_enlarge_the_step_to_go_on_with() -> None:
    made = schedule(StubController([1.0, 2.0]), 0.0, 4.0)
    plan = made.next()
    assert plan is not None
    made.judge(plan, 0.5)
    assert made.carried == 2.0


def test_a_rejected_landing_leaves_the_step_to_go_on_with_alone() -> None:
    made = schedule(StubController([3.0, 3.0, 500.0]), 0.0, 4.0)
    for ratio in (0.5, 4.0):
        plan = made.next()
        assert plan is not None
        made.judge(plan, ratio)
    assert made.carried == 3.0

"""Schedules against each other: of all samples against each alone, of steps planned together against one by one."""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch

import seminode as sn
from seminode._stepping.lanes import LaneSchedule
from seminode._stepping.problem import Problem
from seminode._stepping.schedule import Schedule

F64 = torch.float64

CONTROLLERS: dict[str, Any] = {
    "Integral": sn.Integral(),
    "bounded": sn.Integral(dt_min=0.02, dt_max=0.3, at_dt_min="accept"),
    "PID": sn.PID.preset("H312PID"),
    "step_to": sn.Integral(step_to=(0.35, 0.9, -0.4)),
    "fixed": sn.FixedStep(0.07, step_to=(0.35, -0.4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("jumps", [(), (0.0, 0.5, 0.75, 1.5, -0.5, -0.75)], ids=["", "jumps"])
@pytest.mark.parametrize("name", CONTROLLERS)
def test_plans_of_samples_are_those_of_each_alone(
    name: str, jumps: tuple[float, ...], sign: float, dtype: torch.dtype
) -> None:
    """With the same errors: intervals of different lengths, of which two begin or end on a jump."""
    controller = CONTROLLERS[name]
    times = sign * torch.tensor([[0.0, 1.0], [0.2, 0.75], [-0.3, 1.7], [0.5, 0.6]], dtype=F64)
    lanes = LaneSchedule(controller, 5, times, jumps, dtype, 10_000)
    alone = [Schedule(controller, 5, tuple(row), jumps, dtype) for row in times.tolist()]
    assert lanes.unset is alone[0].unset
    if lanes.unset:
        lanes.begin(torch.tensor([0.05, 0.5, 1e-3, 0.02], dtype=F64))
        for schedule, dt in zip(alone, (0.05, 0.5, 1e-3, 0.02), strict=True):
            schedule.begin(dt)
    chance, infinite = random.Random(0), 30.0 if controller.dt_min else math.inf  # which may be too short for dt_min
    singles: list[Any] = []
    for _ in range(10_000):
        plan = lanes.next()
        singles = [schedule.next() for schedule in alone]
        if plan is None:
            break
        assert lanes.running.tolist() == [each is not None for each in singles]
        ratios = [
            chance.choice([0.0, 1e-3, 0.01, 0.3, 0.3, 1.0, 1.1, 30.0, infinite]) if controller.adaptive else 0.0
            for _ in alone
        ]
        for i, each in enumerate(singles):
            if each is None:
                assert float(plan.dt[i]) == 0.0
                continue
            same = pytest.approx([each.t0, each.t1], rel=1e-12, abs=1e-15)
            assert [float(plan.t0[i]), float(plan.t1[i])] == same
            assert float(plan.dt[i]) == pytest.approx(each.dt, rel=1e-9)
            assert (bool(plan.final[i]), bool(plan.lands[i])) == (each.final, each.landing)
            assert bool(True if plan.floating is None else plan.floating[i]) is each.floating
            bounds = [-math.inf, math.inf] if plan.bounds is None else [float(x[i]) for x in plan.bounds]
            assert bounds == [each.lowest, each.highest]
        crossing = [each.crosses_jump for each in singles if each is not None]
        assert plan.crosses_jump is any(crossing)
        moved = lanes.judge(plan, torch.tensor(ratios, dtype=F64))
        accepted = [each is not None and s.judge(each, r) for s, each, r in zip(alone, singles, ratios, strict=True)]
        assert moved is any(accepted)
        if moved:
            assert plan.moved.tolist() == accepted
    assert singles == [None] * len(alone)
    assert not lanes.failures


@pytest.mark.parametrize("controller", [sn.Integral(), sn.Integral(dt_min=0.2), sn.Integral(dt_max=0.01)], ids=str)
def test_first_steps_of_samples_are_within_the_bounds_of_each_alone(controller: Any) -> None:
    """However short or long they should be: they move the clock, by twice the least that it can tell apart."""
    times = torch.tensor([[0.0, 1.0], [1.0, 9.0], [-1e6, 0.0]], dtype=F64)
    for dt in (0.0, 1e-12, 0.05, 100.0):
        lanes = LaneSchedule(controller, 5, times, (), F64, 100)
        lanes.begin(torch.full((3,), dt, dtype=F64))
        for i, row in enumerate(times.tolist()):
            alone = Schedule(controller, 5, row, (), F64)
            assert float(lanes.probe_length(torch.full((3,), dt, dtype=F64))[i]) == alone.probe_length(dt)
            alone.begin(dt)
            plan = alone.next()
            assert plan is not None
            assert float(lanes.plan(lanes._proposal).dt[i]) == plan.dt


@pytest.mark.parametrize("perturb", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_steps_of_a_grid_together_are_those_one_by_one(sign: float, perturb: bool) -> None:
    times, grid = (
        [0.0, 0.5 * sign, sign],
        sn.Grid(lambda ts: sign * torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=F64), perturb=perturb),
    )
    for jumps in ((), (0.2 * sign, 0.4 * sign, 7.0), (0.0, sign)):
        options: Any = grid, 4, times, jumps, F64
        together, schedule, singles = Schedule(*options).landings(), Schedule(*options), []
        while (plan := schedule.next()) is not None:
            singles.append(plan)
            schedule.judge(plan, math.nan)
        assert together == singles
        assert [type(plan) for plan in together] == [type(plan) for plan in singles]
        assert len(together) == 3 + (0.4 * sign in jumps)


def test_defaults_of_a_problem_are_those_of_solve() -> None:
    options = inspect.signature(sn.solve).parameters
    shared = [each for each in fields(Problem) if each.name in options and each.default is not MISSING]
    assert {each.name for each in shared} >= {"save", "dense", "throw", "max_steps", "compile", "progress", "record"}
    for each in shared:
        assert options[each.name].default in (each.default, None), each.name

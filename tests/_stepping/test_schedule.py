"""Discontinuities in time: steps end on them, and the field is asked on the right side."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._stepping.schedule import PLANS, GridPlan, Plan, Schedule, SinglePlan


def switched(jump: float, seen: list[float] | None = None, inclusive: bool = False) -> Any:
    """y' = −y + 1 before the jump, −y − 1 after it."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        if seen is not None:
            seen.append(float(t))
        before = t <= jump if inclusive else t < jump
        return -y + torch.where(before, 1.0, -1.0).to(y.dtype)

    return field


def exact(jump: float, end: float, start: float = 2.0) -> float:
    at_jump = 1.0 + (start - 1.0) * math.exp(-jump)
    return -1.0 + (at_jump + 1.0) * math.exp(-(end - jump))


@pytest.mark.parametrize("inclusive", [False, True], ids=["<", "<="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("jump", [0.3, 0.5, 1.0 / 3.0])
def test_solution_across_a_jump(jump: float, dtype: torch.dtype, inclusive: bool) -> None:
    y0 = torch.full((1,), 2.0, dtype=dtype)
    rtol = 1e-9 if dtype == torch.float64 else 1e-5
    sol = sn.solve(switched(jump, inclusive=inclusive), y0, [0.0, 1.0], jumps=[jump], rtol=rtol, atol=rtol)
    assert sol.stats.rejected <= 1  # after the jump the solution moves faster than before it
    assert sol.stats.jumps == 1
    assert float(sol.ys[-1]) == pytest.approx(exact(jump, 1.0), rel=10 * rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backwards_in_time(dtype: torch.dtype) -> None:
    jump, end = 0.3, torch.full((1,), exact(0.3, 1.0), dtype=dtype)
    rtol = 1e-9 if dtype == torch.float64 else 1e-5
    sol = sn.solve(switched(jump), end, [1.0, 0.0], jumps=[jump], rtol=rtol, atol=rtol)
    assert sol.stats.rejected == 0
    assert float(sol.ys[-1]) == pytest.approx(2.0, rel=100 * rtol)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["forwards", "backwards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_field_is_asked_just_beside_the_jump(dtype: torch.dtype, sign: float) -> None:
    seen: list[float] = []
    jump = 0.5 * sign
    sol = sn.solve(
        switched(jump, seen),
        torch.ones(1, dtype=dtype),
        [0.0, sign],
        jumps=[jump],
        solver="dopri5",
        controller=sn.FixedStep(0.5),
    )
    at = torch.tensor(jump, dtype=dtype)
    before = float(torch.nextafter(at, torch.tensor(-sign * math.inf, dtype=dtype)))
    after = float(torch.nextafter(at, torch.tensor(sign * math.inf, dtype=dtype)))
    # Six stages per step: nobody reads the slope at the end. The sixth is at c = 1, the first one at c = 0.
    first, second = seen[:6], seen[6:]
    assert len(second) == 6
    assert first[-1] == before
    assert second[0] == after
    assert all(sign * t < sign * jump for t in first)
    assert all(sign * t > sign * jump for t in second)
    assert sol.stats.jumps == 1


def test_a_step_that_lands_on_a_jump_by_itself() -> None:
    """An integer grid and steps of exactly 1: every jump is honoured, each costs one evaluation."""
    jumps = [float(i) for i in range(1, 21)]

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.floor(t) % 2 - 0.5 + 0 * y

    y0 = torch.zeros(1, dtype=torch.float64)
    sol = sn.solve(field, y0, [0.0, 20.0], jumps=jumps, controller=sn.Integral(dt0=1.0, dt_max=1.0))
    assert (sol.stats.accepted, sol.stats.rejected, sol.stats.jumps) == (20, 0, 19)
    assert sol.stats.nfe == 1 + 6 * 20 + 19
    assert float(sol.ys[-1]) == pytest.approx(0.0, abs=1e-14)


def test_many_jumps_on_a_wiggly_control() -> None:
    """The NFE identity with 160 jumps, as in a neural CDE on 161 observations."""
    generator = torch.Generator().manual_seed(0)
    knots = torch.randn(160, 3, generator=generator)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y + knots[min(int(t), 159)])

    for ts in ([0.0, 160.0], [160.0, 0.0]):
        sol = sn.solve(field, torch.zeros(3), ts, jumps=range(161), rtol=1e-3, atol=1e-6)  # type: ignore[arg-type]
        stats = sol.stats
        assert stats.jumps == 159
        assert stats.nfe == 2 + 6 * (stats.accepted + stats.rejected) + 159


def test_jumps_at_the_ends_and_outside() -> None:
    seen: list[float] = []
    sol = sn.solve(
        switched(0.0, seen), torch.ones(1, dtype=torch.float64), [0.0, 1.0], jumps=[-3.0, 0.0, 1.0, 7.0], rtol=1e-6
    )
    assert sol.stats.jumps == 0
    assert sol.stats.nfe == 2 + 6 * (sol.stats.accepted + sol.stats.rejected)
    assert min(seen) == math.nextafter(0.0, 1.0)
    assert max(seen) == math.nextafter(1.0, 0.0)


def test_without_a_jump_the_solver_has_to_search() -> None:
    """What jumps= is for: the same problem costs more steps without it."""
    y0 = torch.full((1,), 2.0, dtype=torch.float64)
    told = sn.solve(switched(0.3), y0, [0.0, 1.0], jumps=[0.3])
    untold = sn.solve(switched(0.3), y0, [0.0, 1.0])
    assert untold.stats.rejected > 3
    assert told.stats.nfe < 0.5 * untold.stats.nfe


def test_a_cut_step_grows_back_at_once() -> None:
    """A sliver before a jump must not cost a series of tenfold growths."""
    y0 = torch.ones(1, dtype=torch.float64)
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], jumps=[0.5, 0.5 + 1e-9], rtol=1e-4, record=True)
    assert sol.record is not None
    lengths = [plan.dt for plan in sol.record.accepted]
    sliver = min(range(len(lengths)), key=lengths.__getitem__)
    assert lengths[sliver] == pytest.approx(1e-9, rel=1e-3)
    assert lengths[sliver + 1] > 0.1


def test_an_event_within_rounding_of_a_place_lands_on_it() -> None:
    """Four times the distance of neighbouring floats is rounding, more is not."""
    ulp = math.ulp(1.0)
    for distance, lands in ((0.0, True), (4.0 * ulp, True), (4.5 * ulp, False), (100.0 * ulp, False)):
        schedule = Schedule(sn.FixedStep(2.0), 4, (0.0, 1.0), (), torch.float64)
        assert schedule.land_on(1.0 - distance) == (1.0 if lands else 1.0 - distance)


def test_a_step_that_stops_short_by_rounding_lands() -> None:
    ulp = math.ulp(1.0)
    for distance, lands in ((4.0 * ulp, True), (4.5 * ulp, False)):
        schedule = Schedule(sn.FixedStep(1.0 - distance), 4, (0.0, 1.0), (), torch.float64)
        plan = schedule.next()
        assert plan is not None
        assert (plan.landing, plan.t1) == ((True, 1.0) if lands else (False, 1.0 - distance))


def test_the_smallest_step_is_dt_min_to_rounding() -> None:
    schedule = Schedule(sn.Integral(dt_min=0.1), 4, (0.0, 1.0), (), torch.float64)
    assert 0.1 * (1.0 - 1e-11) < schedule.smallest < 0.1


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_of_a_grid_between_two_jumps_evaluates_inside(sign: float) -> None:
    inside = (0.3 + 1e-9, 0.7 - 1e-9)
    t0, t1 = (0.3, 0.7) if sign > 0 else (0.7, 0.3)
    plan = GridPlan(t0, t1, t1 - t0, t1 - t0, lowest=inside[0], highest=inside[1])
    first, last = inside if sign > 0 else inside[::-1]
    assert [plan.stage_time(c) for c in (0.0, 1.0)] == [first, last]


def test_the_end_of_an_interval_is_no_jump() -> None:
    sol = sn.solve(lambda t, y: -y, torch.ones(1, dtype=torch.float64), [0.0, 1.0], record=True)
    assert sol.record is not None
    assert max(sol.record.evaluations) == 1.0
    assert all(math.isinf(plan.highest) for plan in sol.record.accepted)


@pytest.mark.parametrize("kind", [Plan, *PLANS.values()])
def test_times_of_stages_together_are_those_one_by_one(kind: type[Plan]) -> None:
    nodes = [0.0, 0.161, 0.9, 1.0]
    for lowest, highest in ((-math.inf, math.inf), (0.1001, math.inf), (-math.inf, 0.3999), (0.1001, 0.3999)):
        plan = kind(0.1, 0.4, 0.4 - 0.1, 0.3, lowest=lowest, highest=highest)
        assert plan.stage_times(nodes) == [plan.stage_time(c) for c in nodes]


@pytest.mark.parametrize("t1", [0.75, 0.25])
def test_times_of_stages_in_single_precision_are_those_of_single_precision_arithmetic(t1: float) -> None:
    t0, nodes = 0.5, [0.0, 0.2, 1.0 / 3.0, 0.9, 1.0]
    plan = SinglePlan(t0, t1 / 3.0, t1 / 3.0 - t0, 1.0)
    start, dt, c = (torch.tensor(x, dtype=torch.float32) for x in (t0, plan.dt, nodes))
    assert plan.stage_times(nodes)[:-1] == (start + c * dt).tolist()[:-1]
    assert plan.stage_times(nodes)[-1] == plan.t1


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_that_begins_at_time_zero_may_be_a_tiny_part_of_the_interval(sign: float) -> None:
    """The clock itself could tell far smaller steps apart there."""
    schedule = Schedule(sn.Integral(), 4, (0.0, 50.0 * sign), (), torch.float64)
    assert schedule.finest == 50.0 * 1e-30
    assert schedule.probe_length(0.0) == 100.0 * 1e-30
    schedule.begin(0.0)
    plan = schedule.next()
    assert plan is not None
    assert plan.dt == sign * 100.0 * 1e-30

"""Plans and outputs of batched solves: numbers of one step, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._stepping import lane_control, lane_outputs, lanes
from seminode._stepping.event_search import NODES
from seminode._stepping.interpolation import evaluate
from seminode._stepping.lane_control import Proposed
from seminode._stepping.lane_event_search import Polynomial, spacing, ulp
from seminode._stepping.lane_outputs import LaneOutputs, LaneSampler
from seminode._stepping.lane_places import Marks, rounding
from seminode._stepping.lane_plan import SMALL, LanePlan, Rest, column, mask
from seminode._stepping.lane_step import AnyFinite, LaneShifts, ends, finite_lanes
from seminode._stepping.lanes import LaneSchedule
from seminode.solvers import BY_NAME

F64 = torch.float64


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def plan_of(t0: Tensor, t1: Tensor, *, lands: tuple[bool, ...] = (), final: tuple[bool, ...] = ()) -> LanePlan:
    flags = [torch.tensor(each or (False,) * len(t0)) for each in (lands, final)]
    proposed = Proposed((t1 - t0).abs(), t1, *flags)
    return LanePlan(t0, t1, t1 - t0, (t1 - t0).abs(), proposed, torch.ones(len(t0), dtype=torch.bool))


# ── Plans ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_times_of_stages_are_between_the_ends() -> None:
    plan = plan_of(numbers(1.0, 0.1), numbers(3.0, -0.2))
    assert plan.stage_time(0.0) is plan.t0
    assert plan.stage_time(1.0) is plan.t1
    assert plan.stage_time(0.25).tolist() == pytest.approx([1.5, 0.025])
    plan.bounds = numbers(1.2, -0.1), numbers(2.0, 0.05)
    assert [plan.stage_time(c).tolist() for c in (0.0, 0.25, 1.0)] == [
        [1.2, 0.05],
        pytest.approx([1.5, 0.025]),
        [2.0, -0.1],
    ]


def test_the_clock_of_a_plan_for_programs() -> None:
    plan = plan_of(numbers(1.0, 2.0), numbers(3.0, 2.5))
    inf = math.inf
    assert plan.clock().tolist() == [[2.0, 0.5], [1.0, 2.0], [3.0, 2.5], [-inf, -inf], [inf, inf]]
    plan.bounds = numbers(1.5, -inf), numbers(inf, 2.25)
    assert plan.clock()[3:].tolist() == [[1.5, -inf], [inf, 2.25]]


def test_samples_that_do_not_move_stay_at_their_start() -> None:
    plan = plan_of(numbers(1.0, 2.0, 3.0), numbers(2.0, 4.0, 6.0), final=(True, True, False))
    plan.settle(torch.tensor([True, False, True]), unanimous=False)
    assert plan.t1.tolist() == [2.0, 2.0, 6.0]
    assert plan.dt.tolist() == [1.0, 0.0, 3.0]
    assert plan.final.tolist() == [True, False, False]
    assert plan.moved.tolist() == [True, False, True]
    assert not plan.unanimous


def test_samples_that_fail_go_to_rest() -> None:
    plan = plan_of(numbers(1.0, 2.0), numbers(2.0, 4.0), final=(True, True))
    y = torch.tensor([[1.0, math.nan], [3.0, 4.0]], dtype=F64)
    assert plan.enter(y) is y
    rest = Rest(torch.full((2, 2), 7.0, dtype=F64), numbers(0.5, 0.25))
    plan.fail(torch.tensor([True, False]), rest)
    assert (plan.t0.tolist(), plan.t1.tolist(), plan.dt.tolist()) == ([0.5, 2.0], [0.5, 4.0], [0.0, 2.0])
    assert plan.final.tolist() == [False, True]
    assert plan.enter(y).tolist() == [[7.0, 7.0], [3.0, 4.0]]
    plan.fail(torch.tensor([False, True]), rest)
    assert plan.enter(y).tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert plan.failing is not None
    assert plan.failing.tolist() == [True, True]


@pytest.mark.parametrize(("entries", "whole"), [(SMALL, True), (SMALL + 1, False)])
def test_step_sizes_of_small_samples_are_expanded(entries: int, whole: bool) -> None:
    plan = plan_of(numbers(0.0, 0.0, 0.0), numbers(1.0, 2.0, 3.0))
    found = plan.length(torch.zeros(3, entries, dtype=F64))
    assert found.shape == ((3, entries) if whole else (3, 1))
    assert torch.equal(found.expand(3, entries), numbers(1.0, 2.0, 3.0)[:, None].expand(3, entries))


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 1, 4)], ids=str)
def test_numbers_of_samples_as_columns(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.zeros(shape, dtype=dtype)
    found = column(numbers(1.0, 2.0), like)
    assert found.dtype == like.real.dtype
    assert found.shape == (2, *(1 for _ in shape[1:]))
    assert found.flatten().tolist() == [1.0, 2.0]
    assert mask(torch.tensor([True, False]), like).shape == found.shape


@pytest.mark.parametrize("t", [0.0, 1.0, -3.0, 1e-300, 1e15])
def test_distances_of_neighbouring_numbers(t: float) -> None:
    assert float(ulp(numbers(t))) == math.ulp(t)
    assert float(rounding(numbers(t), numbers(0.0))) == 4.0 * math.ulp(t)
    assert float(rounding(numbers(-0.5 * t), numbers(t))) == 4.0 * math.ulp(t)
    assert (
        float(spacing(plan_of(numbers(t), numbers(0.0))))
        == float(spacing(plan_of(numbers(0.0), numbers(-t))))
        == math.ulp(t)
    )


# ── Places and clocks ────────────────────────────────────────────────────────────────────────────────────────────────


def test_samples_pass_marks_one_after_the_other() -> None:
    marks = Marks({1.0: False, 2.0: True, 3.0: True}, numbers(0.0, 1.5, 3.0))
    end = numbers(2.0, 2.5, 5.0)
    assert marks.on_jump.tolist() == [False, False, True]
    assert marks.next_is_jump(end).tolist() == [False, True, False]
    places, at_end = marks.places(end)
    assert (places.tolist(), at_end.tolist()) == ([1.0, 2.0, 5.0], [False, False, True])
    yes, first = torch.tensor([True, True, True]), torch.tensor([True, False, False])
    assert marks.pass_on(yes, first, end).tolist() == [False, False, False]
    assert marks.floating.tolist() == [False, True, True]
    assert marks.on_jump.tolist() == [False, False, False]
    places, at_end = marks.places(end)
    assert (places.tolist(), at_end.tolist()) == ([2.0, 2.0, 5.0], [True, False, True])
    accept, landed = torch.tensor([True, True, False]), torch.tensor([True, True, False])
    assert marks.pass_on(accept, landed, end).tolist() == [True, True, False]  # a mark at the end is passed, too
    assert marks.on_jump.tolist() == [True, True, False]
    assert marks.places(end)[0].tolist() == [2.0, 2.5, 5.0]
    marks.pass_on(yes, yes, end)
    assert marks.places(end)[0].tolist() == end.tolist()  # beyond the last mark there is none


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_marks_are_in_the_direction_of_the_solve(sign: float) -> None:
    controller = sn.FixedStep(0.1, step_to=(sign * 0.25, sign * 0.75))
    marks = Marks.of(controller, (sign * 0.5, sign * 0.75), sign, numbers(0.0, 0.6))
    assert marks is not None
    end = numbers(1.0, 1.0)
    assert marks.places(end)[0].tolist() == [0.25, 0.75]
    assert marks.next_is_jump(end).tolist() == [False, True]
    assert Marks.of(sn.FixedStep(0.1), (), sign, numbers(0.0)) is None


def test_what_rounding_takes_from_a_step_is_added_to_the_next() -> None:
    s, carry, end = numbers(1.0, 1.0, 1.0), numbers(0.0, 1e-17, 0.25), numbers(4.0, 4.0, 1.3)
    last, running = end - 1e-15, torch.tensor([True, True, True])
    proposal = numbers(0.1, 0.1, 0.1)
    proposed = lane_control.propose(s, carry, proposal, end, last, running)
    assert proposed.ahead.tolist() == (proposal + carry).tolist()
    zero, idle = torch.zeros(3, dtype=F64), torch.full((3,), torch.inf, dtype=F64)
    accept = torch.tensor([True, False, True])
    clocks = lane_control.advance(proposed, accept, s, carry, end, 2.0 * proposal, zero, idle)
    assert clocks.s.tolist() == [1.1, 1.0, 1.3]
    assert clocks.carry.tolist() == [0.1 - (1.1 - 1.0), 1e-17, 0.0]
    assert clocks.running.tolist() == [True, True, False]
    assert clocks.proposal.tolist() == [0.2, 0.2, math.inf]


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_are_counted_however_many_there_are(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Some steps are counted together."""
    monkeypatch.setattr(lane_control, "compile_graph", lambda function, examples: lambda inputs: function(*inputs))
    lane_control.compiled_control.cache_clear()
    times = numbers(0.0, 1e6).repeat(2, 1)
    schedule = LaneSchedule(sn.Integral(dt_max=1.0), 5, times, (), F64, math.inf, compiled=compiled)
    lane_control.compiled_control.cache_clear()
    schedule.begin(numbers(1.0, 1.0))
    for i in range(300):
        plan = schedule.next()
        assert plan is not None
        schedule.judge(plan, numbers(0.5, 1e-9 if i % 3 else 2.0))
    assert lanes.COUNTED == 256
    assert len(schedule._counts) == 300 - 256
    found = schedule.per_sample()
    assert found.accepted.tolist() == [300, 200]
    assert found.rejected.tolist() == [0, 100]


def test_samples_whose_steps_cannot_be_compiled_are_controlled_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(function: Any, examples: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(lane_control, "compile_graph", refused)
    lane_control.compiled_control.cache_clear()
    try:
        assert lane_control.compiled_control(sn.Integral(), 5, 3, 0) is None
    finally:
        lane_control.compiled_control.cache_clear()


# ── Steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_samples_are_finite_where_all_of_their_entries_are() -> None:
    large = torch.tensor([[1.7e308, 1.7e308], [1.0, math.nan], [math.inf, -math.inf], [2.0, 3.0]], dtype=F64)
    assert finite_lanes(large).tolist() == [True, False, False, True]
    assert finite_lanes(large.reshape(4, 1, 2)[3:]).tolist() == [True]
    assert finite_lanes(large.to(torch.complex128)).tolist() == [True, False, False, True]
    assert AnyFinite().of(large).dtype == F64


@pytest.mark.parametrize("floating", [None, (True, False, True, False)])
def test_ends_of_steps_move_with_the_first_or_the_last_time(floating: tuple[bool, ...] | None) -> None:
    """A step that lands on a fixed place does not move, one that is not taken stays at its start."""
    plan = plan_of(
        torch.zeros(4, dtype=F64),
        torch.ones(4, dtype=F64),
        lands=(False, False, True, True),
        final=(False, False, False, True),
    )
    plan.floating = None if floating is None else torch.tensor(floating)
    plan.moved = torch.tensor([True, True, True, True])
    first, last = numbers(1.0, 2.0, 3.0, 4.0), numbers(10.0, 20.0, 30.0, 40.0)
    start, end = ends(plan, first, last)
    assert start.tolist() == ([1.0, 2.0, 3.0, 4.0] if floating is None else [1.0, 0.0, 3.0, 0.0])
    assert end.tolist() == ([1.0, 2.0, 0.0, 40.0] if floating is None else [1.0, 0.0, 0.0, 40.0])
    plan.moved = torch.tensor([False, False, False, False])
    assert ends(plan, first, last)[1].tolist() == start.tolist()


@pytest.mark.parametrize("shared", [True, False])
def test_shifts_of_times_are_zero_and_carry_the_derivative(shared: bool) -> None:
    ts = numbers(0.0, 0.5, 1.0) if shared else torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.7, 2.0]], dtype=F64)
    ts.requires_grad_()
    shifts = LaneShifts(ts, torch.zeros(2, 3, dtype=torch.float32))
    plan = plan_of(numbers(0.0, 0.0), numbers(1.0, 2.0), lands=(True, True), final=(True, True))
    start, end = shifts.of(plan)
    assert (start.dtype, start.tolist(), end.tolist()) == (torch.float32, [0.0, 0.0], [0.0, 0.0])
    rows: Any = SimpleNamespace(lanes=torch.tensor([1]), number=torch.tensor([1]))
    (grad,) = torch.autograd.grad((start + 10.0 * end).sum() + 100.0 * shifts.rows(rows).sum(), ts)
    assert grad.tolist() == ([2.0, 100.0, 20.0] if shared else [[1.0, 0.0, 10.0], [1.0, 100.0, 10.0]])


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("name", ["dopri5", "heun"])
def test_states_along_a_step_of_samples_are_those_of_its_polynomial(name: Any, dtype: torch.dtype) -> None:
    """At the end of the step the state itself, bit by bit, and the time too."""
    solver: Any = BY_NAME[name]()
    generator = torch.Generator().manual_seed(0)
    y0, y1, *slopes = (torch.randn(3, 2, dtype=dtype, generator=generator) for _ in range(2 + len(solver.interpolant)))
    plan = plan_of(numbers(0.1, -1.0, 2.0), numbers(0.7, 0.5, -4.0))
    step: Any = SimpleNamespace(plan=plan, y0=y0, y1=y1, slopes=slopes, solver=solver, interpolated=lambda: slopes)
    path = Polynomial(step)
    along = [
        torch.stack(
            [evaluate(solver.interpolant, y0[i], float(plan.dt[i]), [k[i] for k in slopes], [x])[0] for i in range(3)]
        )
        for x in NODES
    ]
    torch.testing.assert_close(path.inner_nodes(), torch.stack(along[1:-1]))
    for x, expected in zip(NODES, along, strict=True):
        at = torch.full((3,), x, dtype=F64)
        torch.testing.assert_close(path.at(at), y1 if x == 1.0 else expected)
        torch.testing.assert_close(path.time(at), plan.t0 + x * (plan.t1 - plan.t0))
    assert torch.equal(path.at(numbers(1.0, 0.0, 0.5))[0], y1[0])
    assert torch.equal(path.at(numbers(1.0, 0.0, 0.5))[1], y0[1])
    assert torch.equal(path.time(numbers(1.0, 1.0, 1.0)), plan.t1)


# ── Outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("shape", [(3, 2), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("name", ["dopri5", "tsit5", "heun"])
def test_cotangents_of_outputs_are_those_of_autograd(name: Any, shape: tuple[int, ...], sign: float) -> None:
    """Some outputs lie inside of a step, others at its end; one sample passes none."""
    solver: Any = BY_NAME[name]()
    times = sign * torch.tensor(
        [[0.0, 0.25, 0.7, 1.0, 3.0], [0.0, 1.5, 2.0, 2.5, 3.0], [0.0, 0.5, 0.6, 2.9, 3.0]], dtype=F64
    )
    torch.manual_seed(0)
    y0, y1 = (torch.randn(shape, dtype=F64, requires_grad=True) for _ in range(2))
    slopes = [torch.randn(shape, dtype=F64, requires_grad=True) for _ in solver.interpolant]
    for end in (numbers(1.0, 1.2, 2.0), numbers(1.0, 2.5, 0.1), numbers(1.1, 2.2, 0.55)):
        outputs = LaneOutputs(times)
        plan = plan_of(torch.zeros(3, dtype=F64), sign * end)
        _, (count,) = outputs.claim([plan], 3)
        step: Any = SimpleNamespace(plan=plan, y0=y0, y1=y1, solver=solver, interpolated=lambda: slopes)
        found = outputs.of(step, 3, 3 + count, None)
        assert len(found) == count == sum(int((sign * t <= e).sum()) - 1 for t, e in zip(times, end, strict=True))
        cotangents = torch.randn(found.shape, dtype=F64)
        expected = torch.autograd.grad(found, [y1, y0, *slopes], cotangents, allow_unused=True)
        at_end, at_start, of_slopes = outputs.vjp(cotangents, plan, 3, solver, y0.detach())
        zero = torch.zeros(shape, dtype=F64)
        torch.testing.assert_close(zero if at_end is None else at_end, zero if expected[0] is None else expected[0])
        torch.testing.assert_close(zero if at_start is None else at_start, expected[1])
        assert of_slopes is not None
        torch.testing.assert_close(of_slopes, torch.stack([zero if k is None else k for k in expected[2:]]))


def test_outputs_at_the_ends_of_steps_have_no_cotangents_of_slopes() -> None:
    outputs, solver = LaneOutputs(numbers(0.0, 1.0).repeat(2, 1)), BY_NAME["dopri5"]()
    plan = plan_of(numbers(0.0, 0.0), numbers(1.0, 1.0))
    outputs.claim([plan], 2)
    cotangents = torch.tensor([[1.0], [2.0]], dtype=F64)
    end, start, slopes = outputs.vjp(cotangents, plan, 2, solver, torch.zeros(2, 1, dtype=F64))
    assert end is not None
    assert end.tolist() == [[1.0], [2.0]]
    assert start is slopes is None


@pytest.mark.parametrize(("entries", "expected"), [(1, 32), (4096, 14), (10**6, 1)])
def test_how_many_steps_wait_for_their_outputs(entries: int, expected: int) -> None:
    """At most 32, whose states and slopes take four mebibytes."""
    solver, y0 = BY_NAME["dopri5"](), torch.zeros(1, entries, dtype=F64)
    sampler = LaneSampler(LaneOutputs(torch.linspace(0.0, 1.0, 5, dtype=F64)[None]), y0, solver)
    assert lane_outputs.STEPS == 32
    assert lane_outputs.BYTES == 4 * 1024 * 1024
    assert sampler._patience == expected == max(1, min(32, 2**22 // (8 * entries * (len(solver.interpolant) + 2))))


def test_outputs_of_several_steps_are_computed_together() -> None:
    """Of 32 small steps, or when they are asked for; of a step in which no output lies, there are none."""
    solver, y = BY_NAME["dopri5"](), torch.zeros(1, 1, dtype=F64)
    outputs = LaneOutputs(torch.linspace(0.0, 40.0, 81, dtype=F64)[None])
    sampler = LaneSampler(outputs, y, solver)
    for i in range(40):
        plan = plan_of(numbers(float(i)), numbers(i + 1.0))
        slopes = [torch.ones_like(y) for _ in solver.interpolant]
        step: Any = SimpleNamespace(plan=plan, y0=y + i, y1=y + i + 1, solver=solver, interpolated=lambda k=slopes: k)
        sampler.accepted(step, 0.5)
        assert (len(sampler._pieces), sampler.count) == ((1, 1) if i < 31 else (2, 65))
    found = sampler.stacked(y)
    assert (len(sampler._pieces), sampler.count, len(found)) == (3, 81, 81)
    assert sampler.ranges == [(1 + 2 * i, 3 + 2 * i) for i in range(40)]
    torch.testing.assert_close(outputs.arranged(found)[:, 0, 0], torch.linspace(0.0, 40.0, 81, dtype=F64))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_field_of_samples_is_evaluated_outside_of_its_interval(sign: float) -> None:
    """Neither in steps nor where samples are compared to see whether they depend on each other."""
    ts = sign * torch.tensor([[1.0, 1.005], [2.0, 2.5], [-3.0, -2.0]], dtype=F64)
    seen: list[Tensor] = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        seen.append(t.clone())
        return -y

    sn.solve(field, torch.ones(3, 1, dtype=F64), ts, batched=True)
    low, high = ts.amin(1), ts.amax(1)
    for t in seen:
        assert bool((t >= low - 1e-12).all())
        assert bool((t <= high + 1e-12).all())

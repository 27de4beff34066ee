"""The stepping loop: what it counts, where it evaluates, where it lands."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import seminode as sn
from seminode._field.determinism import Determinism
from seminode._field.field import Field
from seminode._field.pytree import Layout
from seminode._field.reach import reachable
from seminode._stepping.engine import EagerStepper, EvaluationLog, eager_engine
from seminode._stepping.loop import integrate
from seminode._stepping.observers import Counter, Observer
from seminode._stepping.schedule import Plan, Schedule
from seminode._stepping.step import Step
from seminode.solvers import BY_NAME, SolverName
from seminode.solvers.explicit import EXPLICIT

ADAPTIVE = [name for name, solver in BY_NAME.items() if solver.error_order is not None]


class Watched:
    """A random field, discontinuous at its jumps, that notes the time of every evaluation."""

    def __init__(self, seed: int, jumps: list[float], dtype: torch.dtype):
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.randn(3, 3, generator=generator, dtype=torch.float64).to(dtype)
        self.frequency = float(torch.rand((), generator=generator)) * 8
        self.jumps = jumps
        self.times: list[float] = []

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t))
        side = sum(1 for jump in self.jumps if float(t) > jump) % 2
        return torch.tanh(self.matrix @ y) + (1.0 if side else -0.5) * torch.sin(self.frequency * t) - 0.3 * y


@st.composite
def solves(draw: st.DrawFn) -> dict[str, Any]:
    t0 = draw(st.floats(-5, 5))
    span = draw(st.floats(0.01, 8.0)) * draw(st.sampled_from([-1.0, 1.0]))
    inside = st.floats(0.0, 1.0)
    outputs = sorted(draw(st.lists(inside, max_size=6)))
    ts = [t0, *(t0 + x * span for x in outputs), t0 + span]
    jumps = draw(st.lists(st.floats(0.001, 0.999), max_size=5, unique=True))
    return {
        "ts": [min(max(t, min(ts[0], ts[-1])), max(ts[0], ts[-1])) for t in ts],
        "jumps": sorted({t0 + x * span for x in jumps} - {ts[0], ts[-1]}),
        "rtol": 10.0 ** draw(st.floats(-7, -2)),
        "seed": draw(st.integers(0, 10**6)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
    }


@settings(max_examples=120, deadline=None)
@given(case=solves())
def test_every_evaluation_is_counted_and_explained(case: dict[str, Any]) -> None:
    """nfe = 2 + 6·(accepted + rejected) + jumps for dopri5, and the record agrees with what the field saw."""
    dtype, jumps, ts = case["dtype"], case["jumps"], case["ts"]
    field = Watched(case["seed"], jumps, dtype)
    rtol = max(case["rtol"], 1e-5 if dtype == torch.float32 else 0.0)
    sol = sn.solve(
        field, torch.ones(3, dtype=dtype), ts, rtol=rtol, atol=rtol, jumps=jumps, record=True, adjoint=sn.Direct()
    )
    stats, record = sol.stats, sol.record
    assert record is not None
    assert stats.nfe == 2 + 6 * (stats.accepted + stats.rejected) + len(jumps)
    assert stats.jumps == len(jumps)
    assert stats.nfe == len(field.times) == len(record.evaluations)
    assert (stats.accepted, stats.rejected) == (len(record.accepted), len(record.rejected))
    assert field.times == torch.tensor(record.evaluations, dtype=dtype).tolist()
    low, high = sorted((ts[0], ts[-1]))
    slack = torch.finfo(dtype).eps * max(abs(low), abs(high))
    assert all(low - slack <= t <= high + slack for t in field.times)
    # The accepted steps fill the interval, and none of them has a jump inside.
    assert record.accepted[0].t0 == ts[0]
    assert record.accepted[-1].t1 == ts[-1]
    assert all(a.t1 == b.t0 for a, b in itertools.pairwise(record.accepted))
    for plan in (*record.accepted, *record.rejected):
        left, right = sorted((plan.t0, plan.t1))
        assert not any(left < jump < right for jump in jumps)
    assert sol.ys.shape == (len(ts), 3)


@settings(max_examples=40, deadline=None)
@given(case=solves(), solver=st.sampled_from(ADAPTIVE))
def test_outputs_do_not_change_the_steps(case: dict[str, Any], solver: str) -> None:
    """Inner output times are interpolated: the steps are those of a solve without them."""
    field = Watched(case["seed"], case["jumps"], torch.float64)
    options: dict[str, Any] = {
        "solver": solver,
        "jumps": case["jumps"],
        "record": True,
        "rtol": max(case["rtol"], 1e-4),
        "atol": 1e-4,
    }
    y0 = torch.ones(3, dtype=torch.float64)
    with torch.no_grad():
        many = sn.solve(field, y0, case["ts"], **options)
        few = sn.solve(field, y0, [case["ts"][0], case["ts"][-1]], **options)
    assert many.record is not None
    assert few.record is not None
    assert many.record.accepted == few.record.accepted
    assert torch.equal(many.ys[-1], few.ys[-1])


def test_the_field_is_never_evaluated_past_the_end() -> None:
    def field(t: Tensor, y: Tensor) -> Tensor:
        return -torch.sqrt(1.0 - t) * y  # NaN for t > 1

    sol = sn.solve(field, torch.ones(1, dtype=torch.float64), [0.0, 0.5, 1.0], rtol=1e-8, atol=1e-10)
    assert float(sol.ys[-1]) == pytest.approx(math.exp(-2 / 3), rel=1e-7)


def test_an_interval_shorter_than_the_first_probe() -> None:
    seen = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        seen.append(float(t))
        return 0 * y

    sn.solve(field, torch.ones(1, dtype=torch.float64), [0.0, 1e-9])
    assert max(seen) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_times_stay_in_double_precision_on_the_host(dtype: torch.dtype) -> None:
    sol = sn.solve(lambda t, y: -y, torch.ones(2, dtype=dtype), [1000.0, 1000.1], record=True, rtol=1e-5)
    assert sol.record is not None
    lengths = [plan.dt for plan in sol.record.accepted]
    assert sum(lengths) == pytest.approx(0.1, rel=1e-12)
    expected = math.exp(-0.1)
    assert float(sol.ys[-1, 0]) == pytest.approx(expected, rel=1e-4)


def test_time_reaches_the_field_in_the_dtype_of_the_state() -> None:
    seen = set()

    def field(t: Tensor, y: Tensor) -> Tensor:
        seen.add((t.dtype, t.ndim))
        return -y

    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16):
        sn.solve(field, torch.ones(2, dtype=dtype), torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert seen == {(torch.float32, 0), (torch.float64, 0)}


def test_rejected_steps_reuse_their_first_slope() -> None:
    """A first step that is far too long: rejections cost 6, not 7."""
    calls = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        calls.append(float(t))
        return -50 * y

    sol = sn.solve(field, torch.ones(1, dtype=torch.float64), [0.0, 1.0], controller=sn.Integral(dt0=1.0))
    assert sol.stats.rejected > 0
    assert len(calls) == sol.stats.nfe == 1 + 6 * (sol.stats.accepted + sol.stats.rejected)


@pytest.mark.parametrize("solver", EXPLICIT)
def test_evaluations_of_fixed_steps(solver: SolverName) -> None:
    """s evaluations a step; the end slope is the next step's first; none is made that nobody reads."""
    stages = len(EXPLICIT[solver].tableau.c)
    sol = sn.solve(
        lambda t, y: -y,
        torch.ones(1, dtype=torch.float64),
        [0.0, 0.5, 1.0],
        solver=solver,
        controller=sn.FixedStep(0.125),
    )
    assert sol.stats.accepted == 8
    assert sol.stats.nfe == 8 * stages


def test_a_state_keeps_its_memory_layout() -> None:
    y0 = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    conv = torch.nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    seen = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        seen.append(y.is_contiguous(memory_format=torch.channels_last))
        return torch.tanh(conv(y))

    sn.solve(field, y0, [0.0, 1.0])
    assert all(seen)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
@pytest.mark.parametrize("solver", ["dopri5", "rk4"])
def test_a_field_that_writes_into_its_last_answer_is_refused(solver: SolverName, adjoint: Any) -> None:
    answer = torch.zeros(2)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return answer.copy_(-y)

    controller = sn.FixedStep(0.1) if solver == "rk4" else None
    with pytest.raises(ValueError, match="wrote into a tensor that it had returned before"):
        sn.solve(field, torch.ones(2), [0.0, 1.0], solver=solver, controller=controller, adjoint=adjoint)


@pytest.mark.parametrize("name", ["dopri5", "dopri8"])
def test_an_error_that_was_not_asked_for_is_computed_later(name: SolverName) -> None:
    """As of compiled steps, which hand out its size only; with the slope at the end where the estimate reads it."""
    solver: Any = BY_NAME[name]()

    def evaluate(t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        return torch.cos(y) * t

    y0 = torch.tensor([0.3, 0.9], dtype=torch.float64)
    plan = Plan(0.2, 0.7, 0.5, 0.5)
    at_once, later = (EagerStepper(solver, evaluate, controlled)(plan, y0, None) for controlled in (True, False))
    assert torch.equal(at_once.error(), later.error())
    assert bool(at_once.error().abs().min() > 0.0)


@pytest.mark.parametrize("name", ["rk4", "heun", "dopri5", "implicit_euler", "radauIIA3"])
def test_a_sample_of_a_step_is_an_evaluation_of_the_field(name: SolverName) -> None:
    """One that was made in any case, unless the slopes of the solver are no evaluations."""
    solver, y0 = BY_NAME[name](), torch.tensor([0.3, 0.9], dtype=torch.float64)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.cos(y) * (1.0 + t)

    class Sampling(Observer):
        def accepted(self, step: Step, ratio: float) -> None:
            t, y, slope = step.sample()
            assert step.plan.t0 <= t <= step.plan.t1
            torch.testing.assert_close(slope, field(torch.tensor(t, dtype=torch.float64), y), rtol=1e-9, atol=1e-9)

    counts = []
    for observers in ([], [Sampling()]):
        counter = Counter()
        flat = Field(field, Layout.of(y0), torch.float64)
        engine = eager_engine(flat, solver, y0, Determinism(y0.device, reachable(())), EvaluationLog(counter))
        schedule = Schedule(sn.FixedStep(0.25), solver.order, (0.0, 1.0), (), torch.float64)
        integrate(engine, schedule, y0, [counter, *observers])
        assert counter.n_accepted == 4
        counts.append(counter.nfe)
    assert solver.implicit or counts[0] == counts[1]


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
def test_states_keep_their_shape_where_times_are_differentiated(shape: tuple[int, ...]) -> None:
    ts = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    y0 = torch.ones(shape, dtype=torch.float64)
    sol = sn.solve(lambda t, y: -y, y0, ts, adjoint=sn.Direct(), rtol=1e-8, atol=1e-8)
    assert sol.ys.shape == (3, *shape)
    (grad,) = torch.autograd.grad(sol.ys[-1].sum(), ts)
    assert grad.tolist() == pytest.approx([math.exp(-1.0) * y0.numel(), 0.0, -math.exp(-1.0) * y0.numel()], abs=1e-6)


@pytest.mark.parametrize("listed", [True, False])
def test_evaluations_that_are_checks_are_counted_apart(listed: bool) -> None:
    """However many there were before, and also if a check fails."""

    def broken(log: EvaluationLog) -> None:
        log.add(4.0)
        raise RuntimeError("unwanted")

    counter = Counter()
    log = EvaluationLog(counter, [] if listed else None)
    log.add(0.5)
    with log.as_checks():
        log.add(1.0, 2.0, 3.0)
    assert (counter.nfe, counter.checks) == (1, 3)
    with pytest.raises(RuntimeError, match="unwanted"), log.as_checks():
        broken(log)
    log.add_nodes(Plan(1.0, 3.0, 2.0, 2.0), (0.0, 0.25, 1.0))
    assert (counter.nfe, counter.checks) == (4, 4)
    assert log.times == ([0.5, 1.0, 1.5, 3.0] if listed else None)

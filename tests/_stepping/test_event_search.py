"""How events are looked for: which steps are intercepted, where they land, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._field.event_function import EventFunction
from seminode._field.field import Field
from seminode._field.pytree import Layout
from seminode._stepping.engine import EvaluationLog
from seminode._stepping.event_search import NODES, Crossing, EventSearch
from seminode._stepping.lane_event_search import LaneEventSearch
from seminode._stepping.lanes import LaneSchedule
from seminode._stepping.loop import integrate
from seminode._stepping.observers import Counter, Observer
from seminode._stepping.schedule import Schedule
from seminode._stepping.step import Step

F64 = torch.float64
EPS = 2.0**-52


class Log(Observer):
    """The ends of accepted and rejected steps."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []
        self.discarded: list[tuple[float, float]] = []

    def accepted(self, step: Step, ratio: float) -> None:
        self.taken.append((step.plan.t0, step.plan.t1))

    def rejected(self, step: Step, ratio: float) -> None:
        self.discarded.append((step.plan.t0, step.plan.t1))


def searched(
    fn: Callable[[Tensor, Tensor], Tensor], dt: float, end: float = 2.0, **options: Any
) -> tuple[EventSearch, Log, Tensor]:
    """Steps of length dt for y' = y, y(0) = 1, with an event."""
    from seminode._field.determinism import Determinism
    from seminode._field.reach import reachable
    from seminode._stepping.engine import eager_engine
    from seminode.solvers import RK4

    y0 = torch.ones(1, dtype=F64)
    field = Field(lambda t, y: y, Layout.of(y0), F64)
    schedule = Schedule(sn.FixedStep(dt), 4, (0.0, end), options.pop("jumps", ()), F64)
    search = EventSearch([EventFunction(sn.Event(fn, **options), 0, field)], schedule, y0)
    engine = eager_engine(field, RK4(), y0, Determinism(y0.device, reachable(())), EvaluationLog(Counter()))
    log = Log()
    y, _ = integrate(engine, schedule, y0, [log], search=search)
    return search, log, y


def test_the_loop_ends_before_the_landing_step() -> None:
    search, log, y = searched(lambda t, y: y[0] - 2.0, 0.25)
    assert search.landing is not None
    plan, step = search.landing.step.plan, search.landing.step
    assert log.taken == [(0.0, 0.25), (0.25, 0.5)]
    assert plan.t0 == 0.5
    assert plan.landing
    assert abs(plan.t1 - 0.693147) < 1e-4
    assert torch.equal(step.y0, y)
    assert abs(float(step.y1) - 2.0) < 1e-15
    assert search.landing.fired == (0,)


def test_discarded_steps_are_not_shortened() -> None:
    """One is the step that crosses the event; the others end where the event was expected."""
    search, log, _ = searched(lambda t, y: y[0] - 2.0, 0.25)
    assert search.landing is not None
    assert log.discarded[0] == (0.5, 0.75)
    assert 1 <= len(log.discarded[1:]) <= 3
    assert all(abs(t1 - search.landing.step.plan.t1) < 1e-4 for _, t1 in log.discarded[1:])


def test_an_event_of_time_alone_is_landed_on_at_once() -> None:
    search, log, _ = searched(lambda t, y: t - 0.6, 0.25)
    assert search.landing is not None
    assert search.landing.step.plan.t1 == pytest.approx(0.6, abs=1e-16)
    assert len(log.discarded) == 1


def test_an_event_on_a_step_end_needs_no_other_step() -> None:
    search, log, _ = searched(lambda t, y: t - 0.5, 0.25)
    assert search.landing is not None
    assert search.landing.step.plan.t1 == 0.5
    assert log.taken == [(0.0, 0.25)]


def test_steps_without_a_crossing_pass() -> None:
    search, log, _ = searched(lambda t, y: y[0] + 1.0, 0.5)
    assert search.landing is None
    assert len(log.taken) == 4
    assert not log.discarded
    search, _, _ = searched(lambda t, y: y[0] - 2.0, 0.5, direction=-1)
    assert search.landing is None


def test_an_event_near_a_jump_is_landed_on_there() -> None:
    jump = 0.6
    search, _, _ = searched(lambda t, y: t - jump * (1.0 - 1e-16), 0.25, jumps=(jump,))
    assert search.landing is not None
    assert search.landing.step.plan.t1 == jump


def test_a_schedule_goes_on_from_an_event() -> None:
    schedule = Schedule(sn.FixedStep(0.25), 4, (0.0, 2.0), (0.6,), F64)
    assert schedule.land_on(0.1) == 0.1
    plan = schedule.next()
    assert plan is not None
    assert (plan.t0, plan.t1, plan.landing, plan.final) == (0.0, 0.1, True, False)
    assert schedule.land_on(0.15) == 0.15  # corrected: the first place is gone
    plan = schedule.next()
    assert plan is not None
    assert plan.t1 == 0.15
    schedule.resume(0.15, reset=True)
    plan = schedule.next()
    assert plan is not None
    assert (plan.t0, plan.t1, plan.landing, plan.floating) == (0.15, 0.4, False, True)
    schedule.resume(0.6, reset=True)  # on the jump
    plan = schedule.next()
    assert plan is not None
    assert plan.lowest > 0.6


def landing(t1: float, correction: float, crossing: Crossing | None) -> tuple[bool, Crossing | None]:
    """Whether a step from 0 to t1 is intercepted that aimed at an event at t1, which is `correction` later; and the
    next aim."""
    y0 = torch.ones(1, dtype=F64)
    schedule = Schedule(sn.FixedStep(t1), 4, (0.0, 2.0), (), F64)
    functions: Any = [SimpleNamespace(event=SimpleNamespace(direction=0))]
    search = EventSearch(functions, schedule, y0)
    search._values, search._begun = [-correction - t1], True
    search._aim = Crossing(t1, 0)
    search._value = lambda i, t, y: t - t1 - correction  # type: ignore[method-assign]
    plan = schedule.next()
    step: Any = SimpleNamespace(plan=plan, y1=y0, along=lambda xs: torch.ones(len(xs), 1, dtype=F64))
    return search._landed(step, 0.5, crossing), search._aim


def test_a_shorter_step_that_stays_away_from_zero_is_an_ordinary_one() -> None:
    """Closer than a tenth of the step, the aim is corrected."""
    intercepted, aim = landing(1.0, 0.09, None)
    assert intercepted
    assert aim is not None
    assert aim.t == pytest.approx(1.09)
    for far in (0.11, 0.5, 1.05):
        assert landing(1.0, far, None) == (False, None)
    intercepted, aim = landing(1.0, 0.5, Crossing(0.7, 0))  # which the step passes
    assert intercepted
    assert aim == Crossing(0.7, 0)


def landing_of_sample(t1: float, correction: float, crossing: float | None, previous: float, count: int) -> str | float:
    """What becomes of a sample whose step from 0 to t1 aimed at an event, which is `correction` later."""
    times, zero = torch.tensor([[0.0, 2.0]], dtype=F64), torch.zeros(1, dtype=F64)
    schedule = LaneSchedule(sn.FixedStep(t1), 4, times, (), F64, 100)
    functions: Any = [SimpleNamespace(event=SimpleNamespace(direction=0))]
    search = LaneEventSearch(functions, schedule, torch.ones(1, 1, dtype=F64))
    plan, yes = schedule.next(), torch.tensor([True])
    search._values, search._begun = torch.full((1, 1), -correction - t1, dtype=F64), yes
    search._event, search._previous = torch.tensor([0]), torch.tensor([previous], dtype=F64)
    search._corrections = torch.tensor([count], dtype=F64)
    search._value = lambda i, t, y: t - t1 - correction  # type: ignore[method-assign]
    path: Any = SimpleNamespace(plan=plan, time=lambda x: t1 * x, at=lambda x: x)
    samples = torch.tensor(NODES, dtype=F64)[None, :, None] * t1 - t1 - correction
    place = torch.full((1,), math.nan if crossing is None else crossing, dtype=F64)
    landed, missed, corrected, place = search._landed(path, samples, yes, ~place.isnan(), place + zero)
    assert int(landed) + int(missed) + int(corrected) == 1
    return "landed" if landed else "missed" if missed else float(place)


def landing_alone(t1: float, correction: float, crossing: float | None, previous: float, count: int) -> str | float:
    """The same for a solve without a batch."""
    y0 = torch.ones(1, dtype=F64)
    schedule = Schedule(sn.FixedStep(t1), 4, (0.0, 2.0), (), F64)
    functions: Any = [SimpleNamespace(event=SimpleNamespace(direction=0))]
    search = EventSearch(functions, schedule, y0)
    search._values, search._begun = [-correction - t1], True
    search._aim, search._corrections = Crossing(t1, 0), [math.inf] * (count - 1) + [previous] * (count > 0)
    search._value = lambda i, t, y: t - t1 - correction  # type: ignore[method-assign]
    step: Any = SimpleNamespace(plan=schedule.next(), y1=y0, along=lambda xs: torch.ones(len(xs), 1, dtype=F64))
    if not search._landed(step, 0.5, None if crossing is None else Crossing(crossing, 0)):
        return "missed"
    assert search._aim is not None
    return "landed" if search.landing is not None else search._aim.t


@pytest.mark.parametrize(
    ("correction", "crossing", "previous", "count", "expected"),
    [
        (0.05, None, math.inf, 0, 1.05),
        (-0.05, 0.7, math.inf, 0, 0.95),
        (0.5, None, math.inf, 0, "missed"),
        (0.5, 0.7, math.inf, 0, 0.7),
        (1e-3, None, 0.9, 1, 1.001),
        (1e-3, None, 2.1e-3, 1, 1.001),
        (1e-3, None, 1.9e-3, 1, "landed"),  # a correction that is no longer halved
        (-1e-3, None, 1e-3, 1, "landed"),
        (3.0 * EPS, None, 1.0, 1, "landed"),  # as small as the clock can tell
        (9.0 * EPS, None, 1.0, 1, 1.0 + 9.0 * EPS),
        (0.0, None, 1.0, 1, "landed"),
        (1e-3, None, 1.0, 10, 1.001),
        (1e-3, None, 1.0, 11, "landed"),  # the twelfth correction
        (0.5, 0.7, 1e-3, 11, "landed"),
        (0.5, None, 1.0, 11, "missed"),
    ],
)
def test_landings_are_corrected_until_they_settle(
    correction: float, crossing: float | None, previous: float, count: int, expected: str | float
) -> None:
    found = landing_alone(1.0, correction, crossing, previous, count)
    assert found == (expected if isinstance(expected, str) else pytest.approx(expected, abs=1e-8, rel=1e-15))
    of_sample = landing_of_sample(1.0, correction, crossing, previous, count)
    assert of_sample == (found if isinstance(found, str) else pytest.approx(found, rel=1e-14))


@pytest.mark.parametrize(("ulps", "lands"), [(0, True), (1, True), (10, True), (1000, False)])
def test_events_closer_than_the_resolution_do_not_take_the_aim_of_each_other(ulps: int, lands: bool) -> None:
    y0 = torch.ones(1, dtype=F64)
    schedule = Schedule(sn.FixedStep(1.0), 4, (0.0, 2.0), (), F64)
    functions: Any = [SimpleNamespace(event=SimpleNamespace(direction=0))] * 2
    search = EventSearch(functions, schedule, y0)
    schedule.land_on(1.0)
    search._aim, earlier = Crossing(1.0, 0), Crossing(1.0 - ulps * math.ulp(0.5), 1)
    search._begin = lambda step: None  # type: ignore[method-assign]
    search._first_crossing = lambda step: (earlier, [])  # type: ignore[method-assign]
    landed: list[Any] = []
    search._landed = lambda step, ratio, crossing: bool(landed.append(crossing)) or True  # type: ignore[method-assign]
    step: Any = SimpleNamespace(plan=schedule.next(), interpolated=lambda: None)
    assert search.intercepts(step, 0.5)
    assert landed == ([earlier] if lands else [])
    assert search._aim.event == (0 if lands else 1)


@pytest.mark.parametrize(
    ("start", "slope", "zero", "expected"),
    [
        (0.0, 0.0, None, True),
        (1.9, 0.0, 1.0, True),
        (2.1, 0.0, 1.0, False),
        (15.0 * EPS, 1.0, 0.0, True),
        (17.0 * EPS, 1.0, 0.0, False),
        (300.0 * EPS, 20.0, 0.0, True),
        (330.0 * EPS, 20.0, 0.0, False),
        (1.0, 1.0, 0.0, False),
        (EPS, 1.0, None, False),  # another event has fired
    ],
)
def test_what_is_left_of_a_zero_is_twice_its_size_and_rounding(
    start: float, slope: float, zero: float | None, expected: bool
) -> None:
    search: Any = SimpleNamespace(
        _values=[start],
        _begun=True,
        _zero={} if zero is None else {0: zero},
        _eps=EPS,
        _schedule=SimpleNamespace(span=1.0),
    )
    step: Any = SimpleNamespace(plan=SimpleNamespace(dt=0.5))
    assert EventSearch._zero_at_start(search, 0, step, slope) is expected
    lanes: Any = SimpleNamespace(
        _values=torch.tensor([[start]], dtype=F64),
        _begun=torch.tensor([True]),
        _zero=torch.tensor([[-1.0 if zero is None else zero]], dtype=F64),
        _eps=EPS,
        _span=torch.tensor([1.0], dtype=F64),
    )
    plan: Any = SimpleNamespace(dt=torch.tensor([0.5], dtype=F64))
    found = LaneEventSearch._zero_at_start(lanes, plan, torch.tensor([[slope]], dtype=F64))
    assert found.tolist() == [[expected]]


@pytest.mark.parametrize("dt", [0.5, -2.0])
@pytest.mark.parametrize("peak", NODES)
def test_the_scale_of_a_slope_is_the_largest_value_before_the_end_over_the_step(peak: float, dt: float) -> None:
    def value(i: int, t: float, y: Tensor) -> float:
        return -3.0 if t == 1.0 + peak * dt else 0.5

    search: Any = SimpleNamespace(_values=[-1.0], _value=value)
    plan = SimpleNamespace(t0=1.0, dt=dt)
    step: Any = SimpleNamespace(plan=plan, along=lambda xs: torch.ones(len(xs), 1, dtype=F64))
    inside = 0.0 < peak < 1.0
    assert EventSearch._slope_scale(search, 0, step) == (3.0 if inside else 1.0) / abs(dt)


@pytest.mark.parametrize("dt", [0.5, -0.5])
def test_the_slope_at_the_start_is_a_difference_where_there_is_no_derivative(dt: float) -> None:
    """A function that autograd does not see, and one on several ranks."""
    for several in (False, True):
        search: Any = SimpleNamespace(
            _ranks=SimpleNamespace(several=several), _functions=[lambda t, y: t.detach()], _values=[-3.0], _eps=EPS
        )
        search._dtype, search._device = F64, torch.device("cpu")
        search._value = lambda i, t, y: 4.0 * (t - 1.0) + 2.0 * float(y[0]) - 3.0
        plan = SimpleNamespace(t0=1.0, dt=dt)
        step: Any = SimpleNamespace(plan=plan, y0=torch.zeros(1, dtype=F64), slopes=[torch.ones(1, dtype=F64)])
        step.along = lambda xs: dt * torch.tensor(xs, dtype=F64).unsqueeze(1)
        assert EventSearch._start_slope(search, 0, step) == pytest.approx(6.0, rel=1e-6)


@pytest.mark.parametrize("roots", [(0.8, 0.3), (0.3, 0.8), (-0.8, -0.3), (-0.3, -0.8)])
def test_the_first_crossing_is_that_of_the_earliest_root(roots: tuple[float, float]) -> None:
    y0, end = torch.ones(1, dtype=F64), math.copysign(1.0, roots[0])
    schedule = Schedule(sn.FixedStep(1.0), 4, (0.0, 2.0 * end), (), F64)
    functions: Any = [SimpleNamespace(event=SimpleNamespace(direction=0))] * 2
    search = EventSearch(functions, schedule, y0)
    search._values, search._begun = [-root for root in roots], True
    search._value = lambda i, t, y: t - roots[i]  # type: ignore[method-assign]
    along = lambda xs: torch.ones(len(xs), 1, dtype=F64)
    step: Any = SimpleNamespace(plan=schedule.next(), y0=y0, y1=y0, along=along)
    crossing, ends = search._first_crossing(step)
    assert crossing is not None
    assert crossing.t == pytest.approx(math.copysign(0.3, end))
    assert roots[crossing.event] == pytest.approx(crossing.t)
    assert ends == [end - root for root in roots]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dt", [0.5, 0.4, 0.25])
def test_a_zero_at_the_start_to_rounding_is_no_event(dt: float, batched: bool) -> None:
    """0.1 + 0.2 is not 0.3: the state starts just beside the level, and its function has one later zero."""
    for start, level, rate in ((0.3, 0.1 + 0.2, 1.0), (0.1 + 0.2, 0.3, -1.0)):
        event = sn.Event(lambda t, y, at=level: (y[..., 0] - at) * (t - 0.7), terminal=False)
        y0 = torch.full((2, 1) if batched else (1,), start, dtype=F64)
        options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(dt), "batched": batched}
        sol = sn.solve(lambda t, y, r=rate: r + 0.0 * y, y0, [0.0, 1.0], event=event, **options)
        times = sol.events[0].times.flatten().tolist()
        assert times == [pytest.approx(0.7, abs=1e-12)] * (2 if batched else 1)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("residue", "events"), [(1e-14, 0), (-1e-14, 0), (3e-12, 0), (4e-12, 1), (-4e-12, 0)])
def test_what_is_a_zero_at_the_start_depends_on_how_fast_the_function_changes(
    residue: float, events: int, batched: bool
) -> None:
    """Sixteen units of rounding, 3.6e-15, times the slope of 1000."""
    event = sn.Event(lambda t, y: y[..., 0] - residue, terminal=False)
    y0 = torch.zeros((2, 1) if batched else (1,), dtype=F64)
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.5), "batched": batched}
    sol = sn.solve(lambda t, y: 1000.0 + 0.0 * y, y0, [0.0, 1.0], event=event, **options)
    assert sol.stats.events == events * (2 if batched else 1)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_functions_that_autograd_does_not_see_have_events_too(sign: float, batched: bool) -> None:
    """Also those that start at a zero, whose slope there is then a difference."""
    event = sn.Event(lambda t, y: y.detach()[..., 0] * (y.detach()[..., 0] - 0.5), terminal=False)
    y0 = torch.zeros((2, 1) if batched else (1,), dtype=F64)
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.3), "batched": batched}
    sol = sn.solve(lambda t, y: sign + 0.0 * y, y0, [0.0, sign], event=event, **options)
    assert sol.events[0].times.flatten().tolist() == [pytest.approx(0.5 * sign, abs=1e-12)] * (2 if batched else 1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_values_at_the_start_are_those_of_the_end_before_or_new_ones(sign: float) -> None:
    """A function is evaluated again at the start of a step only if the step before it was not accepted."""
    asked: list[float] = []

    def fn(t: Tensor, y: Tensor) -> Tensor:
        asked.append(float(t))
        return y[0] - 2.0

    y0, ts = torch.ones(1, dtype=F64), [0.0, sign]
    sol = sn.solve(lambda t, y: 0.1 * sign * y, y0, ts, event=sn.Event(fn), controller=sn.FixedStep(0.25), solver="rk4")
    assert sol.stats.accepted == 4
    inside = NODES[1:]
    expected = [0.0, *(sign * 0.25 * (n + x) for n in range(4) for x in inside)]
    assert [t for t in asked if t != 0.0] == pytest.approx([t for t in expected if t != 0.0], abs=1e-15)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_function_that_is_not_finite_is_named_with_the_time(bad: float, batched: bool) -> None:
    """Only up to the first event: what comes later is of no interest."""

    def fn(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t >= 0.55, bad, 1.0) * (y[..., 0] - 0.4)

    y0 = torch.zeros((2, 1) if batched else (1,), dtype=F64)
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(1.0), "batched": batched}
    sol = sn.solve(lambda t, y: 1.0 + 0.0 * y, y0, [0.0, 1.0], event=sn.Event(fn), **options)
    assert sol.events[0].times.flatten().tolist() == [pytest.approx(0.4)] * (2 if batched else 1)
    message = "2 of 2 samples failed" if batched else r"event\[0\]\.fn: returned a NaN or an infinity at t = 0.6$"
    with pytest.raises(sn.NonFiniteState, match=message):
        sn.solve(lambda t, y: 0.1 + 0.0 * y, y0, [0.0, 1.0], event=sn.Event(fn), **options)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("place", NODES)
def test_a_single_infinity_in_a_step_is_noticed(place: float, batched: bool) -> None:
    """Also one that looks like no change of sign."""

    def fn(t: Tensor, y: Tensor) -> Tensor:
        return torch.where((t - place).abs() < 1e-9, math.inf, 1.0) + 0.0 * y[..., 0]

    y0 = torch.zeros((2, 1) if batched else (1,), dtype=F64)
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(1.0), "batched": batched}
    message = "2 of 2 samples failed" if batched else rf"event\[0\]\.fn: .* at (t = {place:g}|t0)$"
    with pytest.raises(sn.NonFiniteState, match=message):
        sn.solve(lambda t, y: 1.0 + 0.0 * y, y0, [0.0, 1.0], event=sn.Event(fn), **options)

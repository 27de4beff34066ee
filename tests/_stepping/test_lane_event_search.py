"""Events of batched solves: every sample has its own, the same as when it is solved alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._stepping.event_search import NODES, EventSearch
from seminode._stepping.lane_event_search import LaneEventSearch, may_cross
from seminode._stepping.roots import Bracket, first_bracket, root, run_together, search_bracket, search_root

F64 = torch.float64
G = 9.81


def falling(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[..., 1], torch.full_like(y[..., 1], -G)], -1)


def balls(*heights: float) -> Tensor:
    return torch.tensor([[h, 0.0] for h in heights], dtype=F64)


def height(t: Tensor, y: Tensor) -> Tensor:
    return y[..., 0]


def random_problem(seed: int, lanes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rates = 0.5 + 2.0 * torch.rand(lanes, 2, dtype=F64, generator=generator)
    return torch.randn(lanes, 2, dtype=F64, generator=generator), rates


def pendulum(t: Tensor, y: Tensor, rates: Tensor) -> Tensor:
    x, v = y.unbind(-1)
    return torch.stack([v, -4.0 * rates[..., 0] * torch.sin(x) + torch.cos(rates[..., 1] * t)], -1)


def random_events(seed: int) -> list[sn.Event]:
    """Recorded, reset, or ending after some occurrences; of every direction."""
    direction = seed % 3 - 1
    turns = sn.Event(lambda t, y, rates: y[..., 1] - 0.1 * torch.sin(3.0 * t), direction=direction, terminal=False)
    kicks = sn.Event(
        lambda t, y, rates: y[..., 0] - 0.3 * rates[..., 0],
        direction=-1 if seed % 2 else 1,
        reset=lambda t, y, rates: torch.stack([y[..., 0], 0.8 * y[..., 1]], -1),
        max_count=2 if seed % 4 == 3 else None,
    )
    return [turns, kicks]


@pytest.mark.parametrize("seed", range(8))
def test_events_are_those_of_the_samples_alone(seed: int) -> None:
    y0, rates = random_problem(seed, 6)
    ends = torch.linspace(2.0, 4.0, 6, dtype=F64) * (-1.0 if seed % 2 else 1.0)
    ts = ends[:, None] * torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=F64)
    options: dict[str, Any] = {"event": random_events(seed), "rtol": 1e-7, "atol": 1e-7}
    with torch.no_grad():
        sol = sn.solve(pendulum, y0, ts, args=(rates,), batched=True, **options)
        assert sol.stats.per_sample is not None
        for i in range(6):
            alone = sn.solve(pendulum, y0[i], ts[i], args=(rates[i],), **options)
            for event, each in zip(sol.events, alone.events, strict=True):
                assert int(event.counts[i]) == each.counts
                n = each.counts
                torch.testing.assert_close(event.times[:n, i], each.times, rtol=0.0, atol=1e-10)
                torch.testing.assert_close(event.states[:n, i], each.states, rtol=0.0, atol=1e-9)
                assert bool(event.times[n:, i].isnan().all())
            count = len(alone.ys)
            torch.testing.assert_close(sol.ys[:count, i], alone.ys, rtol=0.0, atol=1e-9)
            assert bool(sol.ys[count:, i].isnan().all())
            assert sol.stats.per_sample.statuses[i] is alone.status
            assert int(sol.stats.per_sample.accepted[i]) == alone.stats.accepted
    assert sol.stats.events == sum(int(event.counts.sum()) for event in sol.events)


def test_one_sample_does_not_change_others() -> None:
    """A sample without events in the place of one with many: the others stay the same to the last bit."""
    y0, rates = random_problem(1, 4)
    event = random_events(0)
    ts = torch.linspace(0.0, 3.0, 4, dtype=F64)
    first = sn.solve(pendulum, y0, ts, args=(rates,), batched=True, event=event)
    y0[2] = torch.tensor([math.pi, 0.0])
    other = sn.solve(pendulum, y0, ts, args=(rates,), batched=True, event=event)
    keep = torch.tensor([0, 1, 3])
    torch.testing.assert_close(first.ys[:, keep], other.ys[:, keep], rtol=0.0, atol=1e-14)
    assert torch.equal(first.events[0].counts[keep], other.events[0].counts[keep])


def test_a_terminal_event_ends_its_sample_only() -> None:
    ts = torch.linspace(0.0, 1.0, 5, dtype=F64)
    sol = sn.solve(falling, balls(1.0, 2.0, 50.0), ts, event=sn.Event(height), batched=True)
    assert sol.status is sn.Status.EVENT
    assert sol.error is None
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.statuses == [sn.Status.EVENT, sn.Status.EVENT, sn.Status.SUCCESS]
    assert sol.stats.per_sample.failed == []
    event = sol.events[0]
    assert event.times.shape == (1, 3)
    assert event.states.shape == (1, 3, 2)
    assert event.counts.tolist() == [1, 1, 0]
    expected = torch.tensor([math.sqrt(2.0 / G), math.sqrt(4.0 / G), math.nan], dtype=F64)
    torch.testing.assert_close(event.times[0], expected, rtol=0.0, atol=1e-12, equal_nan=True)
    assert sol.ys[:, 0, 0].isnan().tolist() == [False, False, True, True, True]
    assert sol.ys[:, 1, 0].isnan().tolist() == [False, False, False, True, True]
    torch.testing.assert_close(sol.ys[:, 2, 0], 50.0 - 0.5 * G * ts**2)
    assert repr(event).startswith("Occurrences([1, 1, 0], times=[[0.45")


def test_the_last_state_is_the_one_at_the_event() -> None:
    sol = sn.solve(falling, balls(1.0, 50.0), [0.0, 1.0], event=sn.Event(height), batched=True, save="last")
    assert sol.ys.shape == (1, 2, 2)
    torch.testing.assert_close(sol.ts, torch.tensor([[math.sqrt(2.0 / G), 1.0]], dtype=F64), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(sol.ys[0, :, 0], torch.tensor([0.0, 50.0 - 0.5 * G], dtype=F64), rtol=0.0, atol=1e-12)


def test_without_occurrences_the_solve_is_the_same_as_without_events() -> None:
    y0, ts = balls(20.0, 30.0), torch.linspace(0.0, 1.0, 4, dtype=F64)
    plain = sn.solve(falling, y0, ts, batched=True)
    sol = sn.solve(falling, y0, ts, batched=True, event=sn.Event(height))
    assert torch.equal(sol.ys, plain.ys)
    assert sol.stats.nfe == plain.stats.nfe
    assert sol.status is sn.Status.SUCCESS
    assert sol.events[0].times.shape == (0, 2)
    assert sol.events[0].states.shape == (0, 2, 2)


def test_max_count_holds_for_each_sample() -> None:
    restitution = torch.tensor([0.9, 0.5], dtype=F64)
    bounce = sn.Event(
        height,
        direction=-1,
        reset=lambda t, y: torch.stack([y[:, 0], -restitution * y[:, 1]], 1),
        max_count=3,
    )
    sol = sn.solve(falling, balls(5.0, 1.0), [0.0, 3.0], event=bounce, batched=True)
    assert sol.events[0].counts.tolist() == [2, 3]
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.statuses == [sn.Status.SUCCESS, sn.Status.EVENT]


def test_zeno_behaviour_fails_its_sample_only() -> None:
    restitution = torch.tensor([0.3, 1.0], dtype=F64)
    bounce = sn.Event(height, direction=-1, reset=lambda t, y: torch.stack([y[:, 0], -restitution * y[:, 1]], 1))
    y0, ts = balls(1.0, 1.0), [0.0, 2.0]
    with pytest.raises(sn.ZenoBehaviour, match=r"1 of 2 samples failed: sample 0 \(Zeno behaviour"):
        sn.solve(falling, y0, ts, event=bounce, batched=True)
    sol = sn.solve(falling, y0, ts, event=bounce, batched=True, throw=False)
    assert sol.status is sn.Status.ZENO_BEHAVIOUR
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.failed == [0]
    assert int(sol.events[0].counts[1]) == 2
    assert not bool(sol.ys[-1, 1].isnan().any())
    assert bool(sol.ys[-1, 0].isnan().all())


def test_samples_that_fail_do_not_stop_others() -> None:
    """A field that blows up, an event function and a reset that are not finite: one sample each."""
    rates = torch.tensor([2.0, -1.0, -1.0, -1.0], dtype=F64)
    broken = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=F64)
    spoiled = torch.tensor([0.0, 0.0, 0.0, math.inf], dtype=F64)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return rates[:, None] * y**2

    event = sn.Event(
        lambda t, y: y[:, 0] - 0.7 - torch.where(broken > 0.0, torch.sqrt(0.3 - t), 0.0),
        direction=-1,
        reset=lambda t, y: y + 0.1 + torch.where(spoiled[:, None] > 0.0, spoiled[:, None], 0.0),
    )
    y0, ts = torch.ones(4, 1, dtype=F64), [0.0, 0.2, 1.0]
    with pytest.raises(sn.SolveError, match="3 of 4 samples failed"):
        sn.solve(field, y0, ts, event=event, batched=True)
    sol = sn.solve(field, y0, ts, event=event, batched=True, throw=False)
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.failed == [0, 2, 3]
    assert sol.events[0].counts.tolist()[1] >= 2
    alone = sn.solve(
        lambda t, y: -(y**2),
        torch.ones(1, dtype=F64),
        ts,
        event=sn.Event(lambda t, y: y[0] - 0.7, direction=-1, reset=lambda t, y: y + 0.1),
    )
    torch.testing.assert_close(sol.ys[:, 1], alone.ys, rtol=0.0, atol=1e-12)
    assert sol.ys[1].isnan().flatten().tolist() == [
        False,
        False,
        True,
        False,
    ]  # it fails in this step
    assert sol.ys[2].isnan().flatten().tolist() == [True, False, True, True]


def test_waiting_does_not_count_as_steps() -> None:
    """A sample that waits for others has not tried a step."""
    y0, rates = random_problem(2, 3)
    event = random_events(0)
    options: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
    free = sn.solve(pendulum, y0, [0.0, 4.0], args=(rates,), batched=True, event=event, **options)
    assert free.stats.per_sample is not None
    tried = free.stats.per_sample.accepted + free.stats.per_sample.rejected
    rounds = free.stats.accepted + free.stats.rejected
    assert int(tried.max()) < rounds
    limited = sn.solve(
        pendulum, y0, [0.0, 4.0], args=(rates,), batched=True, event=event, max_steps=int(tried.max()) + 1, **options
    )
    assert torch.equal(limited.ys, free.ys)
    short = sn.solve(
        pendulum, y0, [0.0, 4.0], args=(rates,), batched=True, event=event, max_steps=10, throw=False, **options
    )
    assert short.stats.per_sample is not None
    assert short.stats.per_sample.statuses == [sn.Status.MAX_STEPS_REACHED] * 3


def test_a_sample_that_waited_may_try_as_many_steps_as_the_others() -> None:
    """The second one uses up its steps while the first one waits, which then goes on and uses up its own."""
    late = torch.tensor([0.0, 9.0], dtype=F64)
    event = sn.Event(lambda t, y: t - 0.05 - late, reset=lambda t, y: y)
    options: dict[str, Any] = {"solver": "euler", "controller": sn.FixedStep(0.01), "batched": True, "event": event}
    sol = sn.solve(lambda t, y: -y, torch.ones(2, 1, dtype=F64), [0.0, 1.0], max_steps=20, throw=False, **options)
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.statuses == [sn.Status.MAX_STEPS_REACHED] * 2
    assert (sol.stats.per_sample.accepted + sol.stats.per_sample.rejected).tolist() == [20, 20]


def test_events_at_one_time_and_across_a_reset() -> None:
    """Two events at one time in one sample, and a reset that carries another event's function across zero."""
    level = torch.tensor([0.5, 0.3], dtype=F64)
    events = [
        sn.Event(lambda t, y: y[:, 0] - 0.5, reset=lambda t, y: y + 1.0),
        sn.Event(lambda t, y: y[:, 0] - level, terminal=False),
        sn.Event(lambda t, y: y[:, 0] - 1.2, terminal=False),
    ]
    sol = sn.solve(
        lambda t, y: torch.ones_like(y), torch.zeros(2, 1, dtype=F64), [0.0, 1.0], event=events, batched=True
    )
    assert [x.counts.tolist() for x in sol.events] == [[1, 1], [1, 1], [1, 1]]
    torch.testing.assert_close(sol.events[1].times[0], level, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(sol.events[2].times[0], torch.full((2,), 0.5, dtype=F64), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(sol.ys[-1, :, 0], torch.full((2,), 2.0, dtype=F64))


def test_a_zero_at_the_start_is_no_event() -> None:
    """One sample starts at its zero, one beside it, and one passes zero twice within a step."""
    shift = torch.tensor([0.0, 0.5, 0.2], dtype=F64)
    power = torch.tensor([1.0, 1.0, 2.0], dtype=F64)
    event = sn.Event(lambda t, y: y[:, 0].pow(power) - shift**power, terminal=False)
    y0 = torch.tensor([[0.0], [0.0], [-1.03]], dtype=F64)
    sol = sn.solve(lambda t, y: torch.ones_like(y), y0, [0.0, 2.0], event=event, batched=True)
    assert sol.events[0].counts.tolist() == [0, 1, 2]
    torch.testing.assert_close(sol.events[0].times[:, 2], torch.tensor([0.83, 1.23], dtype=F64), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bfloat16])
def test_other_dtypes_and_structures(dtype: torch.dtype) -> None:
    y0 = {"a": torch.ones(3, 2, dtype=dtype), "b": torch.tensor([1.0, 2.0, 3.0]).to(dtype)}

    def field(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": -y["a"], "b": -y["b"]}

    event = sn.Event(lambda t, y: (y["b"].real if y["b"].is_complex() else y["b"]) - 0.5, terminal=False)
    sol = sn.solve(field, y0, [0.0, 1.5], event=event, batched=True)
    assert sol.events[0].counts.tolist() == [1, 1, 0]
    assert sol.events[0].states["a"].shape == (1, 3, 2)
    assert sol.events[0].states["b"].dtype == dtype
    expected = torch.tensor([math.log(2.0), math.log(4.0)], dtype=F64)
    bound = {torch.float32: 1e-3, torch.complex128: 1e-6, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(sol.events[0].times[0, :2].double(), expected, rtol=0.0, atol=bound)


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        (
            sn.Event(lambda t, y: y[0, 0]),
            ValueError,
            r"event\[0\]\.fn: expected shape \(3,\) with one.*\(\)",
        ),
        (sn.Event(lambda t, y: y), ValueError, r"found shape \(3, 2\); with batched=True.*y\[:, 0\]"),
        (sn.Event(cast(Any, lambda t, y: 1.0)), TypeError, r"expected shape \(3,\).*found float"),
        (sn.Event(lambda t, y: y[:, 0] > 0.5), TypeError, "found torch.bool"),
        (
            sn.Event(lambda t, y: y[:, 0] - y.mean()),
            ValueError,
            r"event\[0\]\.fn: the value of sample 1 depends",
        ),
        (
            sn.Event(lambda t, y: y[:, 0] - 0.5, reset=lambda t, y: y[:, :1]),
            ValueError,
            r"event\[0\]\.reset: expected shape \(3, 2\)",
        ),
        (sn.Event(lambda t, y: y[:, 0] - 0.5, reset=lambda t, y: (y,)), TypeError, "nesting of y0"),
        (
            sn.Event(lambda t, y: y[:, 0] - 0.5, reset=lambda t, y: y - y.mean()),
            ValueError,
            r"event\[0\]\.reset: the state of sample 1 depends",
        ),
    ],
    ids=range(8),
)
def test_bad_events(event: sn.Event, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sn.solve(lambda t, y: -y, torch.ones(3, 2, dtype=F64), [0.0, 2.0], event=event, batched=True)


def test_event_functions_without_a_graph_are_refused() -> None:
    y0 = torch.ones(3, 1, dtype=F64, requires_grad=True)
    event = sn.Event(lambda t, y: y.detach()[:, 0] - 0.5)
    with pytest.raises(ValueError, match=r"event\[0\]\.fn: depends on neither t nor y"):
        sn.solve(lambda t, y: -y, y0, [0.0, 2.0], event=event, batched=True)


def test_searches_that_run_together_find_what_each_finds_alone() -> None:
    functions = [lambda x: x - 0.3, lambda x: math.cos(9.0 * x), lambda x: (x - 0.52) ** 2 - 1e-4, lambda x: x + 1.0]
    values = [[f(x) for x in NODES] for f in functions]

    def together(places: Any) -> dict[int, float]:
        return {i: functions[i](x) for i, x in places.items()}

    brackets: dict[int, Bracket | None] = run_together(
        {i: search_bracket(NODES, v, 0) for i, v in enumerate(values)}, together
    )
    assert brackets == {i: first_bracket(NODES, v, 0, functions[i]) for i, v in enumerate(values)}
    assert brackets[3] is None
    roots = run_together({i: search_root(b) for i, b in brackets.items() if b is not None}, together)
    assert roots == {i: root(functions[i], b) for i, b in brackets.items() if b is not None}
    samples = torch.tensor(values, dtype=F64).T.unsqueeze(0)
    assert may_cross(samples)[0].tolist() == [True, True, True, False]


@pytest.mark.parametrize("place", [0.05, 0.15, 0.31, 0.5, 0.69, 0.85, 0.95])
def test_an_extremum_across_zero_is_noticed_between_any_nodes(place: float) -> None:
    """Two changes of sign between neighbouring nodes; for the same function shifted away from zero, none."""
    nodes = torch.tensor(NODES, dtype=F64)
    touching, away = (nodes - place) ** 2 - 1e-4, (nodes - place) ** 2 + 0.5
    samples = torch.stack([touching, -touching, away, -away], 1).unsqueeze(0)
    assert may_cross(samples)[0].tolist() == [True, True, False, False]


def test_a_zero_at_the_start_is_divided_out_up_to_the_end_of_the_step() -> None:
    search: Any = SimpleNamespace(_values=torch.full((1, 3), 0.25, dtype=F64), _value=lambda i, t, y: 0.25 + t * y)
    path: Any = SimpleNamespace(time=lambda x: x, at=lambda x: 2.0 + x)
    first = torch.full((3,), 7.0, dtype=F64)
    evaluate = LaneEventSearch._evaluation(search, 0, path, torch.tensor([True, True, False]), first)
    assert evaluate({0: 0.0, 1: 1.0, 2: 1.0}) == {0: 7.0, 1: 3.0, 2: 3.25}
    assert evaluate({1: 0.5}) == {1: 2.5}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_of_events_at_one_time_those_with_the_other_direction_do_not_fire(sign: float) -> None:
    events = [sn.Event(lambda t, y, r: y[..., 0] - 0.5, terminal=False, direction=d) for d in (0, 1, -1)]
    y0 = torch.tensor([[0.0], [1.0]], dtype=F64)
    rate = torch.tensor([[1.0], [-1.0]], dtype=F64)
    options: dict[str, Any] = {"event": events}
    sol = sn.solve(lambda t, y, r: sign * r + 0.0 * y, y0, [0.0, sign], args=(rate,), batched=True, **options)
    # The direction is that of the solve: back in time, the first sample rises as well.
    rises, falls = [1, 0], [0, 1]
    assert [event.counts.tolist() for event in sol.events] == [[1, 1], rises, falls]
    for i in range(2):
        alone = sn.solve(lambda t, y, r: sign * r + 0.0 * y, y0[i], [0.0, sign], args=(rate[i],), **options)
        assert [event.counts for event in alone.events] == [1, rises[i], falls[i]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_event_that_only_a_shorter_step_shows_comes_first(sign: float) -> None:
    """The bump lies between places at which the long step is looked at. It is seen on the way to the later event."""
    later = sn.Event(lambda t, y: sign * t - 1.0, terminal=False)
    bump = sn.Event(lambda t, y: 0.5 - torch.exp(-(((sign * t - 0.6) / 0.02) ** 2)), terminal=False)
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(2.0)}
    y0 = torch.zeros(2, 1, dtype=F64)
    sol = sn.solve(lambda t, y: 1.0 + 0.0 * y, y0, [0.0, 2.0 * sign], event=[later, bump], batched=True, **options)
    width = 0.02 * math.sqrt(math.log(2.0))
    assert [event.counts.tolist() for event in sol.events] == [[1, 1], [2, 2]]
    expected = sign * torch.tensor([0.6 - width, 0.6 + width], dtype=F64)
    torch.testing.assert_close(sol.events[1].times[:, 0], expected, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(sol.events[0].times[0], sign * torch.ones(2, dtype=F64), rtol=0.0, atol=1e-12)


def test_a_zero_at_the_start_to_rounding_is_no_event() -> None:
    """0.1 + 0.2 is not 0.3: one sample starts just below its level, one just above. The third is far away from it."""
    level = torch.tensor([0.1 + 0.2, 0.3, 0.5], dtype=F64)
    y0 = torch.tensor([[0.3], [0.1 + 0.2], [0.3]], dtype=F64)
    rate = torch.tensor([[1.0], [-1.0], [1.0]], dtype=F64)
    event = sn.Event(lambda t, y: y[:, 0] - level, terminal=False)
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.5)}
    sol = sn.solve(lambda t, y: rate + 0.0 * y, y0, [0.0, 1.0], event=event, batched=True, **options)
    assert sol.events[0].counts.tolist() == [0, 0, 1]
    assert float(sol.events[0].times[0, 2]) == pytest.approx(0.2, abs=1e-12)


@pytest.mark.parametrize("dt", [0.5, -0.25])
def test_the_slope_at_the_end_of_a_step_is_that_of_the_function_there(dt: float) -> None:
    """A difference along the end of the step, however much the function bends before."""
    search: Any = SimpleNamespace(_eps=torch.finfo(F64).eps, _value=lambda i, t, y: torch.sin(5.0 * t) + y**3)
    t0, length = torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([dt, 2.0 * dt], dtype=F64)
    path: Any = SimpleNamespace(
        plan=SimpleNamespace(t0=t0, dt=length), time=lambda x: t0 + x * length, at=lambda x: t0 + x * length
    )
    t1 = t0 + length
    slope = LaneEventSearch._slope(search, 0, path, torch.sin(5.0 * t1) + t1**3)
    torch.testing.assert_close(slope, 5.0 * torch.cos(5.0 * t1) + 3.0 * t1**2, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dt", [0.5, -0.25])
def test_the_slope_at_the_start_of_a_step_of_a_function_without_a_graph(dt: float) -> None:
    """A difference along the start of the step, since there is nothing to differentiate."""
    function = lambda t, y: torch.sin(5.0 * t.detach()) + y.detach() ** 3
    t0, length = torch.tensor([1.0, -2.0], dtype=F64), torch.tensor([dt, 2.0 * dt], dtype=F64)
    search: Any = SimpleNamespace(
        _eps=torch.finfo(F64).eps,
        _functions=[function],
        _times=torch.clone,
        _value=lambda i, t, y: function(t, y),
        _values=[function(t0, t0)],
    )
    path: Any = SimpleNamespace(
        plan=SimpleNamespace(t0=t0, dt=length), y0=t0, time=lambda x: t0 + x * length, at=lambda x: t0 + x * length
    )
    slope = LaneEventSearch._start_slope(search, 0, path)
    torch.testing.assert_close(slope, 5.0 * torch.cos(5.0 * t0) + 3.0 * t0**2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("t0", "dt"), [(1.0, 1e-6), (-3.0, 2.5), (1e6, -1e-3), (0.0, 1.0)])
def test_events_of_a_sample_are_at_one_time_where_those_of_the_sample_alone_are(t0: float, dt: float) -> None:
    """Up to eight times what rounding leaves of a time and of a part of the step."""
    search: Any = SimpleNamespace(_eps=torch.finfo(F64).eps)
    alone: Any = SimpleNamespace(plan=SimpleNamespace(t0=t0, t1=t0 + dt, dt=dt))
    lane: Any = SimpleNamespace(**{name: torch.tensor([x], dtype=F64) for name, x in vars(alone.plan).items()})
    expected = 8.0 * (math.ulp(max(abs(t0), abs(t0 + dt))) + math.ulp(1.0) * abs(dt))
    assert EventSearch._resolution(search, alone) == pytest.approx(expected, rel=1e-12)
    assert float(LaneEventSearch._resolution(search, lane)) == pytest.approx(expected, rel=1e-12)

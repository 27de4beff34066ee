"""Events: when they occur, what they do to a solve, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import seminode as sn
from seminode._stepping.event_search import NODES

F64 = torch.float64
TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
GRAVITY = 9.81


def falling(t: Tensor, y: Tensor, *args: Any) -> Tensor:
    return torch.stack([y[1], torch.full_like(y[1], -GRAVITY)])


def height(t: Tensor, y: Tensor, *args: Any) -> Tensor:
    return y[0]


def bounce(t: Tensor, y: Tensor, *args: Any) -> Tensor:
    return torch.stack([y[0], -0.9 * y[1]])


def rotation(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], -y[0]])


BALL = torch.tensor([10.0, 0.0], dtype=F64)
WAVE = torch.tensor([0.0, 1.0], dtype=F64)  # the sine
BOUNCING = sn.Event(height, direction=-1, reset=bounce)


def bounces(count: int) -> Tensor:
    """When a ball that falls from 10 touches the ground."""
    fall = math.sqrt(2.0 * 10.0 / GRAVITY)
    gaps = [fall, *(2.0 * fall * 0.9**k for k in range(1, count))]
    return torch.tensor(gaps, dtype=F64).cumsum(0)


# When events occur


def test_event_times_agree_with_closed_forms() -> None:
    sol = sn.solve(falling, BALL, [0.0, 20.0], event=sn.Event(height, -1, reset=bounce, max_count=12), **TIGHT)
    assert (sol.events[0].times - bounces(12)).abs().max() < 1e-10
    sol = sn.solve(
        rotation,
        WAVE,
        [0.0, 20.0],
        event=sn.Event(lambda t, y: y[0] - 0.5, terminal=False),
        solver="dopri8",
        rtol=1e-12,
        atol=1e-13,
    )
    expected = sorted([math.pi * (2 * k + x) for k in range(4) for x in (1 / 6, 5 / 6) if math.pi * (2 * k + x) < 20.0])
    assert (sol.events[0].times - torch.tensor(expected, dtype=F64)).abs().max() < 1e-10
    states = torch.stack([sol.events[0].times.sin(), sol.events[0].times.cos()], 1)
    assert (sol.events[0].states - states).abs().max() < 1e-9


def test_spikes_of_neurons_agree_with_closed_forms() -> None:
    """v' = I − v from 0 reaches 1 after log(I / (I − 1)), again and again."""
    current = torch.linspace(1.5, 2.9, 8, dtype=F64)

    def neuron(i: int) -> sn.Event:
        own = torch.arange(8) == i
        return sn.Event(lambda t, v: v[i] - 1.0, 1, reset=lambda t, v: torch.where(own, torch.zeros_like(v), v))

    events = [neuron(i) for i in range(8)]
    sol = sn.solve(
        lambda t, v: current - v, torch.zeros(8, dtype=F64), [0.0, 3.0], event=events, rtol=1e-11, atol=1e-12
    )
    for i, each in enumerate(sol.events):
        period = math.log(float(current[i]) / (float(current[i]) - 1.0))
        assert each.counts == int(3.0 / period)
        assert (each.times - period * torch.arange(1, each.counts + 1, dtype=F64)).abs().max() < 1e-10


def test_the_end_may_be_far_away() -> None:
    """An interval that is chosen long enough for an event to come at all does not make it inexact."""
    start = torch.tensor([0.0, 5.0], dtype=F64)
    sol = sn.solve(falling, start, [0.0, 1e9], event=sn.Event(height, -1, reset=bounce, max_count=4))
    gaps = 10.0 / GRAVITY * 0.9 ** torch.arange(4, dtype=F64)
    assert (sol.events[0].times - gaps.cumsum(0)).abs().max() < 1e-10


def test_event_times_do_not_depend_on_how_loose_the_interpolation_is() -> None:
    """At the event, the state is the end of a step: the event function is zero there to rounding."""
    for solver in ("dopri5", "tsit5", "bosh3", "dopri8", "adaptive_heun"):
        sol = sn.solve(rotation, WAVE, [0.0, 4.0], event=sn.Event(height), solver=solver, rtol=1e-5)
        assert abs(float(sol.events[0].states[0, 0])) < 1e-14, solver
        assert abs(float(sol.events[0].times[0]) - math.pi) < 1e-3


def test_fixed_steps_land_on_events_too() -> None:
    sol = sn.solve(
        rotation, WAVE, [0.0, 8.0], event=sn.Event(height, terminal=False), solver="rk4", controller=sn.FixedStep(0.1)
    )
    assert (sol.events[0].times - math.pi * torch.tensor([1.0, 2.0])).abs().max() < 1e-5
    assert sol.events[0].states[:, 0].abs().max() < 1e-14


def test_a_double_crossing_inside_a_step_is_found() -> None:
    """Both ends of the only step are on the same side."""
    level = 0.98
    hill = sn.Event(lambda t, y: 4.0 * t * (1.0 - t) + 0.0 * y[0] - level, terminal=False)
    still = sn.solve(lambda t, y: 0.0 * y, WAVE, [0.0, 1.0], event=hill, controller=sn.FixedStep(1.0), solver="rk4")
    half = 0.5 * math.sqrt(1.0 - level)
    assert (still.events[0].times - torch.tensor([0.5 - half, 0.5 + half], dtype=F64)).abs().max() < 1e-12


def scipy_events(
    matrix: np.ndarray, y0: np.ndarray, span: tuple[float, float], events: list[tuple[np.ndarray, float, int, int]]
) -> tuple[list[np.ndarray], int]:
    functions = []
    for weights, level, direction, last in events:

        def function(t: float, y: np.ndarray, w: np.ndarray = weights, c: float = level) -> float:
            return float(w @ y - c)

        function.direction, function.terminal = direction, last  # type: ignore[attr-defined]
        functions.append(function)
    sol = solve_ivp(lambda t, y: matrix @ y, span, y0, events=functions, method="DOP853", rtol=1e-11, atol=1e-12)
    return sol.t_events, sol.status


@pytest.mark.parametrize("seed", range(30))
def test_events_are_those_of_scipy(seed: int) -> None:
    """Random linear systems; a third of the problems run backwards, some have no event, some two at one time."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(3, 3)) - 0.5 * np.eye(3)
    matrix = matrix - matrix.T - 0.1 * np.eye(3)
    y0, span = rng.normal(size=3), (0.0, -6.0 if seed % 3 == 0 else 6.0)
    events: list[tuple[np.ndarray, float, int, int]] = []
    for _ in range(1 + seed % 3):
        last = 0 if rng.random() < 0.7 else int(rng.integers(1, 4))
        events.append((rng.normal(size=3), 0.5 * rng.normal(), int(rng.integers(-1, 2)), last))
    if seed % 5 == 1:  # two events at one time
        events.append((2.0 * events[0][0], 2.0 * events[0][1], events[0][2], 0))
        events[0] = (*events[0][:3], 0)
    if seed % 7 == 2:  # never
        events.append((np.zeros(3), 1.0, 0, 0))
    at_start = seed % 6 == 4
    if at_start:
        events.append((events[0][0], float(events[0][0] @ y0), 0, 0))
    times, status = scipy_events(matrix, y0, span, events)
    if at_start:  # SciPy reports a zero at the start, which is no crossing
        times[-1] = times[-1][np.abs(times[-1]) > 1e-6]

    def event(weights: np.ndarray, level: float, direction: int, last: int) -> sn.Event:
        w = torch.from_numpy(weights)
        options = {"max_count": last} if last else {"terminal": False}
        return sn.Event(lambda t, y: w @ y - level, direction, **options)  # type: ignore[arg-type]

    a = torch.from_numpy(matrix)
    sol = sn.solve(
        lambda t, y: a @ y, torch.from_numpy(y0), list(span), event=[event(*each) for each in events], **TIGHT
    )
    assert (sol.status is sn.Status.EVENT) == (status == 1)
    for found, expected in zip(sol.events, times, strict=True):
        assert found.counts == len(expected) == len(found.times)
        np.testing.assert_allclose(found.times.numpy(), expected, rtol=0, atol=1e-8)


# What events do to a solve


def test_an_event_ends_a_solve() -> None:
    ts = torch.linspace(0.0, 8.0, 9, dtype=F64)
    fall = float(bounces(1))
    sol = sn.solve(falling, BALL, ts, event=sn.Event(height), dense=True)
    assert sol.status is sn.Status.EVENT
    assert sol.error is None
    assert sol.ts.tolist() == [0.0, 1.0]
    assert len(sol.ys) == 2
    assert sol.dense is not None
    assert math.isclose(sol.dense.t1, fall)
    assert sol.stats.events == 1
    last = sn.solve(falling, BALL, ts, event=sn.Event(height), save="last")
    assert torch.equal(last.ys[0], last.events[0].states[0])
    assert math.isclose(float(last.ts), fall)
    steps = sn.solve(falling, BALL, ts, event=sn.Event(height), save="steps")
    assert math.isclose(float(steps.ts[-1]), fall)
    assert torch.equal(steps.ys[-1], steps.events[0].states[0])
    assert len(steps.ts) == len(steps.ys)


def test_a_solve_without_occurrences_is_the_same_as_without_events() -> None:
    ts = torch.linspace(0.0, 1.0, 5, dtype=F64)
    plain, sol = (sn.solve(falling, BALL, ts, event=event) for event in (None, sn.Event(height)))
    assert sol.status is sn.Status.SUCCESS
    assert sol.events[0].counts == 0
    assert sol.events[0].times.shape == (0,)
    assert sol.events[0].states.shape == (0, 2)
    assert torch.equal(sol.ys, plain.ys)
    assert (sol.stats.nfe, sol.stats.accepted) == (
        plain.stats.nfe,
        plain.stats.accepted,
    )
    assert plain.events == ()
    assert sn.solve(falling, BALL, ts, event=[]).events == ()


def test_outputs_after_a_reset_are_those_of_the_new_state() -> None:
    ts = torch.linspace(0.0, 6.0, 25, dtype=F64)
    sol = sn.solve(falling, BALL, ts, event=BOUNCING, dense=True, **TIGHT)
    touch = bounces(3)
    speeds = torch.tensor([math.sqrt(2 * GRAVITY * 10.0) * 0.9**k for k in range(1, 4)], dtype=F64)
    expected = []
    for t in ts:
        if t <= touch[0]:
            expected.append(10.0 - 0.5 * GRAVITY * t**2)
        else:
            k = int((touch < t).sum()) - 1
            s = t - touch[k]
            expected.append(speeds[k] * s - 0.5 * GRAVITY * s**2)
    assert (sol.ys[:, 0] - torch.stack(expected)).abs().max() < 1e-9
    assert sol.dense is not None
    assert (sol.dense(ts) - sol.ys).abs().max() < 1e-9
    assert sol.status is sn.Status.SUCCESS


def test_steps_show_both_sides_of_a_reset() -> None:
    sol = sn.solve(falling, BALL, [0.0, 3.0], event=BOUNCING, save="steps")
    (twice,) = [i for i in range(len(sol.ts) - 1) if sol.ts[i] == sol.ts[i + 1]]
    assert torch.equal(sol.ys[twice], sol.events[0].states[0])
    assert torch.allclose(sol.ys[twice + 1, 1], -0.9 * sol.ys[twice, 1])


def test_max_count_ends_a_solve() -> None:
    sol = sn.solve(falling, BALL, [0.0, 50.0], event=sn.Event(height, -1, reset=bounce, max_count=3), save="last")
    assert sol.status is sn.Status.EVENT
    assert sol.events[0].counts == len(sol.events[0]) == 3
    assert sol.ys[0, 1] < 0.0  # the last bounce is not made


def test_events_at_one_time_are_applied_in_order() -> None:
    add = sn.Event(height, reset=lambda t, y: y + torch.tensor([1.0, 0.0], dtype=F64))
    double = sn.Event(lambda t, y: 2.0 * y[0], reset=lambda t, y: 2.0 * y)
    for events, start in (([add, double], 2.0), ([double, add], 1.0)):
        sol = sn.solve(falling, BALL, [0.0, 1.44], event=events, save="steps")
        assert [each.counts for each in sol.events] == [1, 1]
        assert torch.equal(sol.events[0].times, sol.events[1].times)
        after = sol.ys[(sol.ts == sol.events[0].times[0]).nonzero()[-1, 0]]
        assert abs(float(after[0]) - start) < 1e-12
    late = sn.solve(falling, BALL, [0.0, 2.0], event=[sn.Event(height), add])
    assert [each.counts for each in late.events] == [1, 1]
    assert late.status is sn.Status.EVENT


def test_a_reset_may_set_off_other_events() -> None:
    """The first neuron lifts the second above its threshold, which lifts the third, at one time."""
    lift = torch.tensor([0.0, 0.4, 0.0], dtype=F64)

    def neuron(i: int) -> sn.Event:
        def spike(t: Tensor, v: Tensor) -> Tensor:
            return torch.where(torch.arange(3) == i, torch.zeros_like(v), v + lift.roll(i))

        return sn.Event(lambda t, v: v[i] - 1.0, direction=1, reset=spike)

    start = torch.tensor([0.9, 0.6, 0.55], dtype=F64)
    events = [neuron(2), neuron(1), neuron(0)]
    sol = sn.solve(lambda t, v: torch.ones_like(v), start, [0.0, 0.2], event=events[::-1])
    assert [each.counts for each in sol.events] == [1, 1, 1]
    assert all(abs(float(each.times[0]) - 0.1) < 1e-12 for each in sol.events)
    assert torch.allclose(sol.events[1].states[0], torch.tensor([0.0, 1.1, 0.65], dtype=F64))
    assert torch.allclose(sol.events[2].states[0], torch.tensor([0.0, 0.0, 1.05], dtype=F64))
    ended = sn.solve(
        falling, BALL, [0.0, 9.0], event=[BOUNCING, sn.Event(lambda t, y: y[0] + y[1] ** 2 / (2 * GRAVITY) - 7.0)]
    )
    assert ended.status is sn.Status.EVENT
    assert torch.equal(ended.events[0].times[-1:], ended.events[1].times)
    assert ended.events[1].states[0, 1] > 0.0  # after the bounce


def test_a_zero_at_the_start_is_no_event() -> None:
    for start in (torch.tensor([0.0, 5.0], dtype=F64), torch.tensor([1e-17, 5.0], dtype=F64)):
        sol = sn.solve(falling, start, [0.0, 1.5], event=sn.Event(height))
        assert torch.allclose(sol.events[0].times, torch.tensor([10.0 / GRAVITY], dtype=F64))


def test_an_interval_without_length_has_a_dense_solution() -> None:
    sol = sn.solve(rotation, WAVE, [1.0, 1.0], event=sn.Event(lambda t, y: y[0]), dense=True)
    assert sol.dense is not None
    assert sol.events[0].counts == 0
    torch.testing.assert_close(sol.dense(1.0), WAVE)


def test_an_event_may_be_at_the_end() -> None:
    sol = sn.solve(rotation, WAVE, [0.0, 1.0, 2.0], event=sn.Event(lambda t, y: t - 2.0 + 0.0 * y[0]))
    assert sol.events[0].times.tolist() == [2.0]
    assert len(sol.ys) == 3
    assert sol.status is sn.Status.EVENT
    sol = sn.solve(rotation, WAVE, [0.0, 1.0, 2.0], event=sn.Event(lambda t, y: t - 2.0 + 0.0 * y[0], terminal=False))
    assert sol.events[0].times.tolist() == [2.0]
    assert len(sol.ys) == 3
    assert sol.status is sn.Status.SUCCESS


def test_events_work_with_jumps() -> None:
    """The field turns round at t = 1, and an event on the same time is found on the near side."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t < 1.0, 1.0, -1.0) * torch.ones_like(y)

    start = torch.zeros(1, dtype=F64)
    options: dict[str, Any] = {"jumps": [1.0], **TIGHT}
    down = sn.solve(field, start, [0.0, 3.0], event=sn.Event(lambda t, y: y[0] - 0.25, direction=-1), **options)
    assert torch.allclose(down.events[0].times, torch.tensor([1.75], dtype=F64))
    at_jump = sn.Event(lambda t, y: t - 1.0 + 0.0 * y[0], reset=lambda t, y: y + 1.0)
    both = sn.solve(field, start, [0.0, 3.0], event=at_jump, **options)
    assert both.events[0].times.tolist() == [1.0]
    assert torch.allclose(both.ys[-1], torch.zeros(1, dtype=F64))


def test_events_along_decreasing_times() -> None:
    sol = sn.solve(rotation, WAVE, [7.0, 0.0], event=sn.Event(lambda t, y: y[0], terminal=False), **TIGHT)
    expected = 7.0 - math.pi * torch.tensor([1.0, 2.0], dtype=F64)
    assert (sol.events[0].times - expected).abs().max() < 1e-9
    only = sn.solve(rotation, WAVE, [7.0, 0.0], event=sn.Event(lambda t, y: y[0], direction=1, terminal=False), **TIGHT)
    assert (only.events[0].times - expected[:1]).abs().max() < 1e-9  # from below to above in the order of the solve


def test_nested_and_complex_and_single_precision_states() -> None:
    nested = {"x": BALL[0], "v": BALL[1]}

    def field(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": y["v"], "v": torch.full_like(y["v"], -GRAVITY)}

    event = sn.Event(lambda t, y: y["x"], -1, reset=lambda t, y: {"v": -0.9 * y["v"], "x": y["x"]})
    sol = sn.solve(field, nested, [0.0, 5.0], event=event)
    assert (sol.events[0].times - bounces(2)).abs().max() < 1e-12
    assert sol.events[0].states["v"].shape == (2,)
    assert sol.ys["x"].shape == (2,)
    turning = sn.solve(
        lambda t, z: 1j * z, torch.ones(1, dtype=torch.complex128), [0.0, 2.0], event=sn.Event(lambda t, z: z[0].real)
    )
    assert abs(float(turning.events[0].times[0]) - 0.5 * math.pi) < 1e-6
    single = sn.solve(falling, BALL.float(), [0.0, 7.0], event=BOUNCING)
    assert single.events[0].times.dtype == F64
    assert (single.events[0].times - bounces(3)).abs().max() < 1e-5
    assert single.events[0].states.dtype == torch.float32
    half = sn.solve(falling, BALL.bfloat16(), [0.0, 3.0], event=BOUNCING)
    assert half.events[0].counts == 1
    assert half.ys.dtype == torch.bfloat16


def test_args_and_closures_of_events() -> None:
    level = torch.tensor(2.0, dtype=F64)
    sol = sn.solve(falling, BALL, [0.0, 5.0], args=(level,), event=sn.Event(lambda t, y, level: y[0] - level))
    assert abs(float(sol.events[0].times[0]) - math.sqrt(2.0 * 8.0 / GRAVITY)) < 1e-12


def test_the_record_has_all_steps() -> None:
    sol = sn.solve(falling, BALL, [0.0, 5.0], event=BOUNCING, record=True)
    assert sol.record is not None
    ends = sol.record.ts
    assert len(sol.record.accepted) == sol.stats.accepted
    assert len(sol.record.rejected) == sol.stats.rejected
    assert len(sol.record.evaluations) == sol.stats.nfe
    assert set(sol.events[0].times.tolist()) <= set(ends)
    assert list(ends) == sorted(ends)
    assert ends[-1] == 5.0


def test_random_numbers_are_drawn_once_for_the_whole_solve() -> None:
    """Dropout masks are the same before and after an event."""
    dropout = torch.nn.Dropout(0.5)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return dropout(torch.ones_like(y))

    torch.manual_seed(0)
    event = sn.Event(lambda t, y: y.sum() - 4.0, terminal=False)
    sol = sn.solve(field, torch.zeros(8, dtype=F64), [0.0, 1.0], event=event)
    rates = sol.ys[-1]
    assert sol.events[0].counts == 1
    assert set(rates.round(decimals=9).tolist()) == {0.0, 2.0}


# What goes wrong


@pytest.mark.parametrize("restitution", [0.6, 0.3, 0.1, 1e-2, 1e-3, 1e-6])
def test_ever_faster_bounces_end_with_an_error(restitution: float) -> None:
    lossy = sn.Event(height, -1, reset=lambda t, y: torch.stack([y[0], -restitution * y[1]]))
    with pytest.raises(sn.ZenoBehaviour, match="max_count") as raised:
        sn.solve(falling, BALL, [0.0, 20.0], event=lossy)
    end = math.sqrt(20.0 / GRAVITY) * (1.0 + 2.0 * restitution / (1.0 - restitution))
    assert abs(raised.value.t - end) < 1e-6
    assert raised.value.stats.events >= 2
    sol = sn.solve(falling, BALL, [0.0, 1.0, 20.0], event=lossy, throw=False)
    assert sol.status is sn.Status.ZENO_BEHAVIOUR
    assert sol.ts.tolist() == [0.0, 1.0]
    assert len(sol.events[0]) >= 2


def test_max_steps_counts_over_all_stretches() -> None:
    with pytest.raises(sn.MaxStepsReached, match="20 steps"):
        sn.solve(falling, BALL, [0.0, 20.0], event=BOUNCING, max_steps=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": 1.0}, "fn: expected a callable"),
        ({"fn": torch.nn.Linear}, "the class Linear"),
        ({"direction": 2}, "direction: expected -1, 0 or 1"),
        ({"direction": True}, "direction: expected -1, 0 or 1"),
        ({"terminal": 3}, "terminal: expected True, False or None"),
        ({"reset": 0.0}, "reset: expected a callable"),
        ({"max_count": 0}, "max_count: expected a whole number"),
        ({"max_count": 2.0}, "max_count: expected a whole number"),
        ({"max_count": 2, "terminal": False}, "max_count: ends the solve"),
        ({"reset": bounce, "terminal": True}, "reset: is never applied"),
    ],
)
def test_events_check_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        sn.Event(**{"fn": height, **options})


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (height, r"event: expected sn.Event"),
        ([height], r"event\[0\]: expected sn.Event.*sn.Event\(height\)"),
        (sn.Event(lambda t, y: y), r"event\[0\].fn: expected a 0-d tensor, found shape \(2,\)"),
        (sn.Event(lambda t, y: y[:1]), r"as in y\[0\]"),
        (
            sn.Event(lambda t, y: float(y[0])),  # pyright: ignore[reportArgumentType]
            r"event\[0\].fn: expected a 0-d tensor, found float",
        ),
        (sn.Event(lambda t, y: y[0] > 0), r"found torch.bool; an event is where a number changes its sign"),
        (sn.Event(lambda t, y: y[0] * math.nan), r"event\[0\].fn: returned a NaN"),
        (sn.Event(lambda t, y: torch.log(y[0] + 1.0 - 100.0 * t)), r"event\[0\].fn: returned a NaN"),
        (sn.Event(lambda t: t), r"event\[0\].fn: is called with \(t, y\), but it takes \(t\)"),
        (sn.Event(lambda t, y: y.mul_(0.0)[0]), r"event\[0\].fn: changed y in place"),
        (sn.Event(lambda t, y: y[0] - t.mul_(2.0)), r"event\[0\].fn: changed t in place"),
        (sn.Event(height, reset=lambda t, y: None), r"event\[0\].reset: returned None"),
        (sn.Event(height, reset=lambda t, y: (y, y)), r"event\[0\].reset: expected the nesting of y0"),
        (sn.Event(height, reset=lambda t, y: y[:1]), r"event\[0\].reset: expected shape \(2,\) as in y0"),
        (sn.Event(height, reset=lambda t, y: y.float()), r"event\[0\].reset: expected dtype torch.float64"),
        (sn.Event(height, reset=lambda t, y: 0.0), r"event\[0\].reset: expected a tensor, found float"),
        (sn.Event(height, reset=lambda t, y: y / 0.0), r"event\[0\].reset: returned a NaN or an infinity"),
        (sn.Event(height, reset=lambda t, y: y.neg_()), r"event\[0\].reset: changed y in place"),
        (sn.Event(height, reset=lambda y: y), r"event\[0\].reset: is called with \(t, y\)"),
    ],
)
def test_bad_events_are_refused(event: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, sn.NonFiniteState), match=message):
        sn.solve(falling, BALL.clone(), [0.0, 2.0], event=event)


def test_an_event_function_without_a_graph_is_refused_where_gradients_are_wanted() -> None:
    blind = sn.Event(lambda t, y: y.detach()[0])
    with pytest.raises(ValueError, match="autograd can follow"):
        sn.solve(falling, BALL.clone().requires_grad_(), [0.0, 2.0], event=blind)
    assert sn.solve(falling, BALL, [0.0, 2.0], event=blind).events[0].counts == 1
    with torch.no_grad():
        assert sn.solve(falling, BALL.clone().requires_grad_(), [0.0, 2.0], event=blind).events[0].counts == 1


def test_combinations_that_are_refused() -> None:
    leaf = BALL.clone().requires_grad_()
    with pytest.raises(ValueError, match="norm: 'auto'"):
        sn.solve(falling, BALL, [0.0, 2.0], event=BOUNCING, norm="auto")
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda y: sn.solve(falling, y, [0.0, 2.0], event=BOUNCING, adjoint="direct").ys.sum())(BALL)
    with pytest.raises(ValueError, match="carries more from step to step"):
        sn.solve(falling, leaf, [0.0, 2.0], event=BOUNCING, solver="reversible_heun", adjoint="reversible")
    assert sn.solve(falling, BALL, [0.0, 2.0], event=BOUNCING, solver="reversible_heun").events[0].counts == 1


def test_an_event_that_is_nan_inside_a_step_names_the_time() -> None:
    """The function is looked at in several places of a step; the first one at which it is NaN is reported."""

    def late(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t > 0.55, math.nan, 1.0 + 0.0 * y[0])

    y0 = torch.ones(1, dtype=torch.float64)
    with pytest.raises(sn.NonFiniteState, match="returned a NaN") as info:
        sn.solve(lambda t, y: -y, y0, [0.25, 2.25], controller=sn.FixedStep(0.5), event=sn.Event(late))
    nodes = [0.25 + 0.5 * x for x in NODES]
    assert info.value.t == pytest.approx(min(t for t in nodes if t > 0.55))

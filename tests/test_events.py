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
    sol = sn.solve(rotation, WAVE, [0.0, 20.0], event=sn.Event(lambda t, y: y[0] - 0.5, terminal=False), **TIGHT)
    expected = sorted([math.pi * (2 * k + x) for k in range(4) for x in (1 / 6, 5 / 6) if math.pi * (2 * k + x) < 20.0])
    assert (sol.events[0].times - torch.tensor(expected, dtype=F64)).abs().max() < 1e-10
    states = torch.stack([sol.events[0].times.sin(), sol.events[0].times.cos()], 1)
    assert (sol.events[0].states - states).abs().max() < 1e-9


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

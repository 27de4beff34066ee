"""The double pendulum is the published one, digit by digit, and so is its data set."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode_lab.models import pendulum
from seminode_lab.models.pendulum import TORQUES

FIRST_STATE = [1.20767813, -0.72375722, 2.11593476, 0.21844206]
FIRST_OBSERVATION = [0.26318896, 0.76338982, 0.9647443, -0.64593807, 1.75493334, 0.63661934, 0.0, 0.0]


def test_first_state_and_observation() -> None:
    """All digits of the published ones."""
    start = pendulum.resets().uniform(-3.14, 3.14, size=4)
    assert [round(float(v), 8) for v in start] == FIRST_STATE
    trajectories = pendulum.trajectories(trials=2, steps=9)
    assert [round(v, 8) for v in trajectories[0, 0, 0].tolist()] == FIRST_OBSERVATION
    assert trajectories.shape == (9, 2, 9, 8)
    assert trajectories.dtype == torch.float64
    assert [tuple(torque) for torque in trajectories[:, 1, 3, 6:].tolist()] == list(TORQUES)
    after = pendulum.step(start, (0.0, 0.0))
    np.testing.assert_array_equal(np.cos(after[:2]), trajectories[0, 0, 0, :2].numpy())

    windows = pendulum.windows(trajectories, dtype=torch.float64)
    assert windows.shape == (9 * 2 * 2, 8, 8)
    assert torch.equal(windows[1], trajectories[0, 0, 1:9])
    assert torch.equal(windows[-1], trajectories[-1, -1, 1:9])


def test_counts_of_the_data_set() -> None:
    """Counting does not need simulating."""
    empty = torch.zeros(()).expand(9, pendulum.TRIALS, pendulum.STEPS, 8)
    parts = pendulum.split(empty)
    assert [part.shape[1] for part in parts] == [89, 19, 20]
    assert [tuple(pendulum.windows(part).shape) for part in parts] == [(20_025, 8, 8), (4_275, 8, 8), (4_500, 8, 8)]
    assert [math.ceil(len(pendulum.windows(part)) / 256) for part in parts] == [79, 17, 18]


def test_the_split_is_by_trial() -> None:
    numbered = torch.arange(20.0).expand(9, 20).reshape(9, 20, 1, 1).expand(9, 20, 8, 8)
    train, validation, test = (sorted({int(v) for v in part.flatten()}) for part in pendulum.split(numbered))
    assert train == list(range(14))
    assert validation == [14, 15, 16]
    assert test == [17, 18, 19]
    parts = pendulum.dataset(trials=8, steps=8)
    assert [len(part) for part in parts] == [9 * 5, 9 * 1, 9 * 2]
    assert parts.train.dtype == torch.float32
    assert torch.equal(parts.train[0], pendulum.trajectories(trials=1, steps=8)[0, 0].float())


@pytest.mark.slow
def test_the_whole_data_set() -> None:
    trajectories = pendulum.trajectories()
    assert [len(pendulum.windows(part)) for part in pendulum.split(trajectories)] == [20_025, 4_275, 4_500]
    # No trial had to be drawn again: these are far below the limits.
    fastest = trajectories[..., 4:6].abs().amax((0, 1, 2)).tolist()
    assert [round(speed, 1) for speed in fastest] == [7.3, 12.9]
    assert bool(trajectories.isfinite().all())
    for other in trajectories[1:]:  # all torques share their initial states, so they do not start far from each other
        assert float((other[:, 0, :4] - trajectories[0, :, 0, :4]).abs().max()) < 0.02


def test_a_trial_that_is_too_fast_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = pendulum.trial(pendulum.resets(), (0.0, 0.0), steps=2)
    monkeypatch.setattr(pendulum, "SPEEDS", (abs(first[:, 2]).max(), 100.0))
    rng = pendulum.resets()
    second = pendulum.trial(rng, (0.0, 0.0), steps=2)
    assert not np.array_equal(first, second)
    assert abs(second[:, 2]).max() < abs(first[:, 2]).max()


def free(t: Tensor, x: Tensor) -> Tensor:
    q1, q2, w1, w2 = x.unbind(-1)
    return torch.stack((w1, w2, *pendulum.accelerations(q1, q2, w1, w2, 0.0, 0.0, xp=torch)), -1)


def test_the_free_pendulum_keeps_its_energy() -> None:
    x0 = torch.tensor([[1.2, -0.7, 2.1, 0.2], [-3.0, 2.0, 3.0, -3.0]], dtype=torch.float64)
    xs = sn.solve(free, x0, [0.0, 0.5, 1.0, 1.6], rtol=1e-11, atol=1e-11).ys
    energies = pendulum.energy(*xs.unbind(-1), xp=torch)
    assert float((xs[-1] - xs[0]).abs().max()) > 1.0
    assert float((energies - energies[0]).abs().max()) < 1e-8


def test_torques_act_through_an_invertible_matrix() -> None:
    """M(q) q″ + … = B(q) u with B = ((0, −1), (1, −d2/d1)), and the kinetic energy is ½ q′ᵀM q′."""
    q2 = 0.8
    d1, d2 = 3.5 + math.cos(q2), 1.25 + 0.5 * math.cos(q2)
    M = np.array([[d1, d2], [d2, 1.25]])
    still = np.array(pendulum.accelerations(0.4, q2, 1.0, -2.0, 0.0, 0.0))
    for u in ((1.0, 0.0), (0.0, 1.0)):
        driven = np.array(pendulum.accelerations(0.4, q2, 1.0, -2.0, *u))
        B = np.array([[0.0, -1.0], [1.0, -d2 / d1]])
        np.testing.assert_allclose(M @ (driven - still), B @ np.array(u), atol=1e-12)
    w = np.array([1.0, -2.0])
    kinetic = pendulum.energy(0.4, q2, *w) - pendulum.energy(0.4, q2, 0.0, 0.0)
    assert kinetic == pytest.approx(0.5 * w @ M @ w)


def test_floats_arrays_and_tensors_agree() -> None:
    numbers = (0.4, 0.8, 1.0, -2.0, 0.5, -1.5)
    expected = pendulum.accelerations(*numbers)
    arrays = pendulum.accelerations(*(np.array([v]) for v in numbers), xp=np)
    tensors = pendulum.accelerations(*(torch.tensor([v], dtype=torch.float64) for v in numbers), xp=torch)
    assert [float(v[0]) for v in arrays] == pytest.approx(expected)
    assert [float(v[0]) for v in tensors] == pytest.approx(expected)


def test_samples_are_states_of_the_pendulum() -> None:
    observations, accelerations = pendulum.samples(50, 4, torch.Generator().manual_seed(0))
    assert observations.shape == (200, 8)
    cos, sin, w, u = observations.split(2, -1)
    q = torch.atan2(sin, cos)
    expected = pendulum.accelerations(*q.T, *w.T, *u.T, xp=torch)
    torch.testing.assert_close(accelerations, torch.stack(expected, -1))
    assert {tuple(torque) for torque in u.tolist()} <= set(TORQUES)
    start, end = (torch.cat((q, w), -1)[i : i + 50] for i in (0, 50))
    reached = torch.from_numpy(pendulum.step(start[0].tolist(), u[0].tolist()))
    torch.testing.assert_close(end[0, 2:], reached[2:], rtol=1e-3, atol=1e-3)


def test_simulation_in_closed_loop() -> None:
    seen = []

    def controller(observation: Tensor) -> Tensor:
        seen.append(observation)
        return torch.tensor([0.1, 0.2]) * len(seen)

    run = pendulum.simulate(controller, steps=3, x0=(0.1, 0.2, 0.3, 0.4))
    assert run.states.shape == (4, 4)
    assert run.ts.tolist() == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert run.torques.tolist() == [[0.0, 0.0], *(pytest.approx([0.1 * i, 0.2 * i]) for i in (1, 2, 3))]
    x = np.array([0.1, 0.2, 0.3, 0.4])
    for i in (1, 2, 3):
        x = pendulum.step(x, run.torques[i].tolist())
        np.testing.assert_array_equal(run.states[i].numpy(), x)
    torch.testing.assert_close(torch.stack(seen), run.observations[:3, :6].float())
    assert run.observations.shape == (4, 8)
    assert seen[0].dtype == torch.float32


def test_an_ideal_controller_lifts_the_pendulum() -> None:
    """Energy shaping with the true potential and actuation, from a slight push: 20 s suffice."""

    def controller(observation: Tensor) -> Tensor:
        cos, sin, w = observation.split(2)
        q1, q2 = torch.atan2(sin, cos)
        slope = torch.stack((14.7 * q1.sin() + 4.9 * (q1 + q2).sin(), 4.9 * (q1 + q2).sin()))
        d1, d2 = 3.5 + cos[1], 1.25 + 0.5 * cos[1]
        B = torch.stack((torch.tensor([0.0, -1.0]).to(cos), torch.stack((torch.ones_like(d1), -d2 / d1))))
        return torch.linalg.solve(B, 2.0 * slope - 4.0 * w)

    run = pendulum.simulate(controller, x0=(1e-3, 0.0, 0.0, 0.0), dtype=torch.float64)
    assert run.states.shape == (400, 4)
    assert abs(float(run.states[-1, 0].cos()) + 1.0) < 0.01
    assert abs(float(run.states[-1, 1].cos()) - 1.0) < 0.01


def test_scipy_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_scipy(name: str, *args: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(ImportError, match=r"needs SciPy: pip install 'seminode\[lab\]'"):
        pendulum.trajectories(trials=1)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="trials: expected a whole number of at least 1, found 0"):
        pendulum.trajectories(trials=0)
    with pytest.raises(ValueError, match=r"trajectories: expected .* at least 8 steps, found \(2, 7, 8\)"):
        pendulum.windows(torch.zeros(2, 7, 8))
    with pytest.raises(ValueError, match=r"x: expected states \(q1, q2, w1, w2\) of shape \(..., 4\), found \(3,\)"):
        pendulum.observe(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"controller: expected torques of shape \(2,\), found \(1, 2\)"):
        pendulum.simulate(lambda x: torch.zeros(1, 2), steps=1)
    with pytest.raises(ValueError, match=r"x0: expected a state .* found 2 numbers"):
        pendulum.simulate(lambda x: torch.zeros(2), steps=1, x0=(0.0, 0.0))


def test_a_pendulum_that_is_never_slow_enough():
    with pytest.raises(ValueError, match=r"torque, steps: expected a pendulum that stays below"):
        pendulum.trial(pendulum.resets(), (500.0, 0.0))
    with pytest.raises(ValueError, match="x, u: expected finite states and torques"):
        pendulum.trial(pendulum.resets(), (float("nan"), 0.0))

"""What errors of explicit solvers say about stiffness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._stepping.schedule import Plan
from seminode._stepping.stiffness import ITERATIONS, dominant_eigenvalue, stiffness


def relaxation(t: Tensor, y: Tensor) -> Tensor:
    return -1e5 * (y - torch.cos(t))


@pytest.mark.parametrize("ts", [[0.0, 1e3], [0.0, -1e3]])
def test_a_stiff_problem_is_recognised_in_the_direction_in_which_it_is_stiff(ts: list[float]) -> None:
    y0, sign = torch.ones(2, dtype=torch.float64), 1.0 if ts[1] > 0 else -1.0
    with pytest.raises(sn.MaxStepsReached, match=r"looks stiff.*'dopri5'.*kvaerno5"):
        sn.solve(lambda t, y: sign * relaxation(t, y), y0, ts, max_steps=300)


def test_an_oscillation_is_not_called_stiff() -> None:
    def oscillation(t: Tensor, y: Tensor) -> Tensor:
        return 100.0 * torch.stack([y[1], -y[0]])

    with pytest.raises(sn.MaxStepsReached, match="may be stiff"):
        sn.solve(oscillation, torch.ones(2, dtype=torch.float64), [0.0, 1e3], max_steps=200)


def test_an_underflow_of_a_stiff_problem() -> None:
    controller = sn.Integral(dt0=1e-3, dt_min=1e-3)
    with pytest.raises(sn.StepSizeUnderflow, match=r"looks stiff|looser rtol"):
        sn.solve(relaxation, torch.zeros(2, dtype=torch.float64), [0.0, 1.0], controller=controller)


@pytest.mark.parametrize("slope", [(0.5, 1.0), (0.0, 0.0), (-3.0, 2.0)])
def test_the_dominant_eigenvalue_does_not_depend_on_the_slope(slope: tuple[float, float]) -> None:
    rates = torch.tensor([-1000.0, -1.0], dtype=torch.float64)
    engine: Any = SimpleNamespace(evaluate=lambda t, y: rates * y)
    y = torch.tensor(slope, dtype=torch.float64) / rates
    assert dominant_eigenvalue(engine, 0.0, y) == pytest.approx(-1000.0, rel=1e-3)


def test_a_damped_oscillation_has_no_dominant_real_eigenvalue() -> None:
    """−10 ± 100i: the real part says little about how long a step may be."""

    def oscillation(t: float, y: Tensor) -> Tensor:
        return torch.stack([100.0 * y[1] - 10.0 * y[0], -100.0 * y[0] - 10.0 * y[1]])

    engine: Any = SimpleNamespace(evaluate=oscillation)
    assert dominant_eigenvalue(engine, 0.0, torch.ones(2, dtype=torch.float64)) is None


def engine_of(rates: list[float], **solver: Any) -> Any:
    """Of y' = rates·y, for `stiffness`."""
    made = {"implicit": False, "general": True, "name": "dopri5"} | solver
    rates_of = torch.tensor(rates, dtype=torch.float64)
    calls: list[float] = []
    return SimpleNamespace(
        solver=SimpleNamespace(**made), calls=calls, evaluate=lambda t, y: calls.append(t) or rates_of * y
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("dt", "stiff"), [(0.009, False), (0.011, True), (0.119, True), (0.121, False)])
def test_steps_at_the_stability_boundary_are_called_stiff(dt: float, stiff: bool, sign: float) -> None:
    """From |eigenvalue·dt| = 1 to 12, where the solution decays in the direction of the solve."""
    y = torch.ones(2, dtype=torch.float64)
    plan = Plan(3.0, 3.0 + sign * dt, sign * dt, dt)
    engine = engine_of([-100.0 * sign, -1.0])
    advice = stiffness(engine, plan, y)
    assert (advice is not None) is stiff
    assert set(engine.calls) == {3.0}
    assert len(engine.calls) == 1 + ITERATIONS
    if advice is not None:
        assert f"an eigenvalue of about {-100.0 * sign:.2g}, and eigenvalue × dt = {-100.0 * dt:.2g} is at" in advice
    growing = engine_of([100.0 * sign, 1.0])
    assert stiffness(growing, plan, y) is None


@pytest.mark.parametrize("solver", [{"implicit": True}, {"general": False}])
def test_other_solvers_are_not_limited_by_stability(solver: dict[str, Any]) -> None:
    engine = engine_of([-100.0, -1.0], **solver)
    assert stiffness(engine, Plan(0.0, 0.03, 0.03, 0.03), torch.ones(2, dtype=torch.float64)) is None
    assert not engine.calls


def test_a_field_that_is_not_defined_beside_the_solution_has_no_eigenvalue() -> None:
    def undefined(t: float, y: Tensor) -> Tensor:
        if bool((y != 1.0).any()):
            raise ValueError("outside")
        return -1000.0 * y

    engine: Any = SimpleNamespace(evaluate=undefined)
    assert dominant_eigenvalue(engine, 0.0, torch.ones(2, dtype=torch.float64)) is None
    constant: Any = SimpleNamespace(evaluate=lambda t, y: torch.ones_like(y))
    assert dominant_eigenvalue(constant, 0.0, torch.ones(2, dtype=torch.float64)) is None

"""What errors of explicit solvers say about stiffness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._stepping.stiffness import dominant_eigenvalue


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

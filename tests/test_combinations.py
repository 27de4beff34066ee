"""Options that do not go together are refused; none of them is ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn

Y0 = torch.ones(2, 1, dtype=torch.float64)
EVENT = sn.Event(lambda t, y: y.sum() - 1.0)


def field(t: Tensor, y: Tensor) -> Tensor:
    return -y


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"event": EVENT, "solver": "scipy"}, "event: solver 'scipy'"),
        ({"event": EVENT, "controller": sn.Integral(land=False)}, "event: .*land=False"),
        ({"batched": True, "controller": sn.Integral(land=False)}, "controller: .*land=False"),
        ({"batched": True, "controller": sn.Grid(), "solver": "rk4"}, "controller: a grid"),
    ],
    ids=["event-scipy", "event-land", "batched-land", "batched-grid"],
)
def test_combinations_that_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sn.solve(field, Y0, [0.0, 2.0], **options)


def test_a_grid_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="construct: expected a function"):
        sn.Grid(0.05)  # type: ignore[arg-type]


def test_backward_statistics_of_implicit_steps_between_events_are_summed() -> None:
    y0 = Y0.clone().requires_grad_()
    reset = sn.Event(lambda t, y: y.sum() - 1.0, reset=lambda t, y: y + 0.5)
    sol = sn.solve(field, y0, [0.0, 2.0], event=reset, solver="kvaerno5")
    sol.ys[-1].sum().backward()
    backward = sol.stats.backward
    assert backward is not None
    assert backward.newton_iterations > 0
    assert backward.jacobians == sum(part.stats.jacobians for part in sol.stats.report.parts if part.stats is not None)

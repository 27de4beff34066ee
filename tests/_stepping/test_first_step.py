"""The first step, compared with the algorithm of Hairer, Nørsett and Wanner by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seminode import norms
from seminode._error_norm import ErrorNorm
from seminode._field.pytree import Layout
from seminode._stepping.first_step import first_step


@pytest.mark.parametrize(
    ("y0", "f0", "f1", "probed", "expected"),
    [
        (1.0, 0.1, 0.1, 0.1, (0.01 / 0.1) ** 0.2),  # d0 = 1, d1 = 0.1: h0 = 0.01·d0/d1
        (1.0, 2.0, 2.0, 0.005, (0.01 / 2.0) ** 0.2),
        (1.0, 0.1, 0.6, 0.1, (0.01 / 5.0) ** 0.2),  # d2 = 0.5/0.1
        (1.0, 1e-6, 1e-6, 1e-6, 1e-4),  # d1 < 1e-5; at most 100·h0
        (1e-6, 1.0, 1.0, 1e-6, 1e-4),  # d0 < 1e-5
        (1.0, 0.0, 0.0, 1e-6, 1e-6),  # nothing moves
    ],
)
def test_first_step(y0: float, f0: float, f1: float, probed: float, expected: float) -> None:
    asked: list[float] = []

    def probe(h: float) -> tuple[float, Tensor]:
        asked.append(h)
        return h, torch.tensor([f1], dtype=torch.float64)

    state, slope = (torch.tensor([x], dtype=torch.float64) for x in (y0, f0))
    error = ErrorNorm(Layout.of(state), norms.rms, 0.0, 1.0, state)
    assert first_step(state, slope, error, 5, probe) == pytest.approx(expected)
    assert asked == [pytest.approx(probed)]

"""The first step, compared with the algorithm of Hairer, Nørsett and Wanner by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seminode as sn
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
        (1.0, 0.1, 0.65, 0.1, (0.01 / 5.5) ** 0.2),
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


def test_a_probe_may_have_to_be_longer() -> None:
    """Where the clock is coarse. The first step is then at least a thousandth of it, even if nothing moves."""
    state, slope = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    error = ErrorNorm(Layout.of(state), norms.rms, 0.0, 1.0, state)
    assert first_step(state, slope, error, 5, lambda h: (0.5, slope)) == pytest.approx(5e-4)
    assert first_step(state, slope, error, 5, lambda h: (h, slope)) == pytest.approx(1e-6)
    # d2 = 1e-15/0.5 is above the bound, 1e-16/0.5 is not.
    assert first_step(state, slope, error, 1, lambda h: (0.5, slope + 1e-15)) == pytest.approx(50.0)
    assert first_step(state, slope, error, 1, lambda h: (0.5, slope + 1e-16)) == pytest.approx(5e-4)


def test_a_norm_that_overflows_leaves_the_probe() -> None:
    state, slope = torch.ones(1, dtype=torch.float64), torch.full((1,), 0.1, dtype=torch.float64)
    error = ErrorNorm(Layout.of(state), norms.rms, 0.0, 1.0, state)
    infinite = torch.full((1,), torch.inf, dtype=torch.float64)
    assert first_step(state, slope, error, 5, lambda h: (h, infinite)) == pytest.approx(0.1)
    asked: list[float] = []
    first_step(infinite, slope, error, 5, lambda h: (asked.append(h) or h, slope))
    assert asked == [1e-6]


def test_the_probe_is_at_the_end_of_its_step() -> None:
    """The second evaluation of a solve is at the end of the Euler step of length h0 = 0.01·d0/d1."""
    sol = sn.solve(lambda t, y: 0.1 + t + 0.0 * y, torch.ones(1, dtype=torch.float64), [2.0, 5.0], record=True)
    assert sol.record is not None
    assert sol.record.evaluations[:2] == (2.0, pytest.approx(2.0 + 0.01 / 2.1))

"""The published counts come out of the published way to count, and differ from the true ones where they should."""

from __future__ import annotations

import torch

import seminode as sn
from seminode_lab.counting import accumulated, strided


def backward_times(restarts: int) -> tuple[list[float], sn.Stats]:
    """The times of evaluations on the backward pass of a solve that restarts so often, and its statistics."""
    ts = torch.linspace(0, 1, restarts + 1, dtype=torch.float64)
    y0 = torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)
    adjoint = sn.Backsolve(norm="mixed", restart="fresh")
    sol = sn.solve(
        lambda t, y: torch.stack([y[1], -(5 * y[0]).sin()]), y0, ts, rtol=1e-4, atol=1e-6, adjoint=adjoint, record=True
    )
    sol.ys.square().sum().backward()
    assert sol.record is not None
    assert sol.record.backward is not None
    assert sol.stats.backward is not None
    return list(sol.record.backward.evaluations), sol.stats.backward


def test_right_for_one_solve_without_interruption() -> None:
    times, stats = backward_times(1)
    found = strided(times)
    assert len(found.accepted) == stats.accepted
    assert len(found.rejected) == stats.rejected


def test_wrong_where_the_adjoint_restarts() -> None:
    times, stats = backward_times(5)
    found = strided(times)
    assert (len(found.accepted), len(found.rejected)) != (stats.accepted, stats.rejected)
    assert len(found.accepted) + len(found.rejected) == len(times[7::6])


def test_published_totals() -> None:
    """98 or 56 evaluations a batch, 79 batches, six passes counted as ten epochs each."""
    assert accumulated([98 * 79] * 6) == 464_520
    assert accumulated([56 * 79] * 6) == 265_440


def test_too_few_times() -> None:
    assert strided([]) == ([], [])
    assert strided([1.0] * 7) == ([], [])
    assert strided([1.0] * 6, prescribed=True) == ([1.0], [])

"""Solves that begin by one program, against solves that begin step by step."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from compiled import replace_back_end, run_graph
from torch import Tensor

import seminode as sn

D = torch.float64


@pytest.fixture(autouse=True)
def _graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)


def pendulum(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], torch.cos(3 * t) - torch.sin(y[0])])


def recorded(compiled: bool, ts: Any, y0: Tensor | None = None, field: Any = pendulum, **options: Any) -> sn.Solution:
    y0 = torch.tensor([1.0, 0.3], dtype=D) if y0 is None else y0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs eagerly in silence
        return sn.solve(field, y0, ts, record=True, compile=compiled, **options)


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Direct(), sn.Backsolve()], ids=repr)
@pytest.mark.parametrize(
    ("ts", "options"),
    [
        ([0.0, 2.0], {}),
        ([2.0, -1.0], {}),
        ([0.0, 1e-9], {}),  # the probe is cut short
        ([0.0, 1.0], {"jumps": [1e-5]}),  # and must not look across a jump
        ([1.0, 0.0], {"jumps": [1.0, 1.0 - 1e-5]}),
        ([0.0, 1.0], {"norm": "max", "atol": 1e-3}),
        ([0.0, 3.0], {"solver": "bosh3", "rtol": 1e-3}),
    ],
)
def test_begins_as_an_eager_solve_does(adjoint: Any, ts: list[float], options: dict[str, Any]) -> None:
    y0 = torch.tensor([1.0, 0.3], dtype=D, requires_grad=True)
    eager, compiled = (recorded(each, ts, y0, adjoint=adjoint, **options) for each in (False, True))
    assert compiled.stats.nfe == eager.stats.nfe
    assert compiled.record is not None
    assert eager.record is not None
    # The norms add up in another order, and steps that follow from each other drift apart by a little more.
    assert compiled.record.evaluations[:3] == pytest.approx(eager.record.evaluations[:3], rel=1e-13, abs=0.0)
    assert compiled.record.evaluations == pytest.approx(eager.record.evaluations, rel=1e-7)
    assert torch.allclose(compiled.ys, eager.ys, rtol=1e-8)


def test_the_field_is_evaluated_on_the_right_side_of_jumps() -> None:
    seen: list[float] = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t < 1e-7, 1.0, 1e8) * torch.ones_like(y) + 0.0 * y

    sol = recorded(True, [0.0, 1.0], torch.ones(2, dtype=D), field, jumps=[1e-7])
    assert sol.record is not None
    seen += [t for t in sol.record.evaluations if t <= 1e-7]
    assert all(t < 1e-7 for t in seen)
    assert len(seen) >= 2


def test_a_state_that_is_not_finite_is_refused() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(sn.NonFiniteState, match="y0 holds a NaN or an infinity"):
            recorded(True, [0.0, 1.0], torch.tensor([1.0, bad], dtype=D))
    with pytest.raises(sn.NonFiniteState, match=r"field\(t0, y0\) holds a NaN"):
        recorded(True, [0.0, 1.0], torch.tensor([0.0, 1.0], dtype=D), lambda t, y: y / y * torch.cos(t))


def test_large_numbers_whose_sum_overflows_are_not_refused() -> None:
    y0 = torch.full((64,), 1e37)
    sol = recorded(True, [0.0, 1e-3], y0, lambda t, y: -y * torch.cos(t), rtol=1e-3)
    assert sol.status is sn.Status.SUCCESS


def test_zero_states_and_zero_slopes_begin_with_a_small_step() -> None:
    for field in (lambda t, y: 0.0 * y * t, lambda t, y: y * t):
        eager, compiled = (recorded(each, [0.0, 1.0], torch.zeros(3, dtype=D), field) for each in (False, True))
        assert compiled.stats == eager.stats


def test_no_program_is_made_for_single_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    replace_back_end(monkeypatch, lambda module, examples: made.append(module) or run_graph(module, examples))
    y0 = torch.tensor([1.0, 0.3], dtype=D, requires_grad=True)
    for adjoint, programs in ((sn.Replay(), 3), (sn.Direct(), 3)):  # the start, a step, the VJP of a step
        made.clear()
        sol = recorded(True, [0.0, 2.0], y0, adjoint=adjoint, save="last")
        sol.ys.sum().backward()
        assert len(made) == programs


@pytest.mark.parametrize("restart", ["carry", "fresh"])
@pytest.mark.parametrize("norm", ["seminorm", "mixed"])
@pytest.mark.parametrize("solver", ["dopri5", "bosh3", "tsit5"])
@pytest.mark.parametrize("options", [{}, {"jumps": [1.0 - 1e-5]}])
def test_backward_passes_begin_as_eager_ones_do(solver: Any, norm: Any, restart: Any, options: dict[str, Any]) -> None:
    weight = torch.tensor([[0.2, 1.0], [-1.0, -0.3]], dtype=D, requires_grad=True)
    y0, adjoint = torch.tensor([1.0, 0.3], dtype=D, requires_grad=True), sn.Backsolve(norm=norm, restart=restart)
    found = []
    for compiled in (False, True):
        options = {"solver": solver, "args": (weight,), "adjoint": adjoint, **options}
        sol = recorded(compiled, [0.0, 0.6, 1.0], y0, lambda t, y, a: torch.tanh(a @ y) + torch.cos(t), **options)
        grads = torch.autograd.grad(sol.ys.square().sum(), (y0, weight))
        assert sol.stats.backward is not None
        assert sol.record is not None
        assert sol.record.backward is not None
        found.append((grads, sol.stats.backward, sol.record.backward.evaluations))
    (eager, stats, times), (compiled, compiled_stats, compiled_times) = found
    assert compiled_times == pytest.approx(times, rel=0.0, abs=1e-6)
    assert (compiled_stats.nfe, compiled_stats.vjp_y) == (stats.nfe, stats.vjp_y)
    if norm == "mixed":
        assert compiled_stats.vjp_params == stats.vjp_params
    else:  # the gradient of one end slope too many in each interval, or of a stage in a step that is cut short
        assert stats.vjp_params <= compiled_stats.vjp_params <= stats.vjp_params + stats.accepted + 3
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)

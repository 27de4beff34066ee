"""Steps on a grid of times."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode.grids import Grid
from seminode.solvers import with_interpolant

TS = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)


def field(t: Tensor, y: Tensor) -> Tensor:
    return torch.cos(t) * y


def start() -> Tensor:
    return torch.ones(2, dtype=torch.float64)


def thirds(ts: Tensor) -> Tensor:
    return torch.stack([ts[0], ts[0] + (ts[-1] - ts[0]) / 3.0, ts[-1]])


def ends(sol: sn.Solution[Any]) -> list[tuple[float, float]]:
    assert sol.record is not None
    return [(plan.t0, plan.t1) for plan in sol.record.accepted]


def test_steps_lead_from_time_to_time() -> None:
    for ts in (TS, TS.flip(0)):
        sol = sn.solve(field, start(), ts, solver="rk4", controller=sn.Grid(), record=True)
        assert ends(sol) == list(itertools.pairwise(ts.tolist()))
    sol = sn.solve(field, start(), TS, solver="rk4", controller=sn.Grid(thirds), record=True)
    assert ends(sol) == list(itertools.pairwise(thirds(TS).tolist()))


def test_a_grid_of_wrong_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"construct: expected a grid from 0 to 1, found 0 and 0\.3"):
        sn.solve(field, start(), TS, solver="rk4", controller=sn.Grid(lambda ts: ts[:-1]))


@pytest.mark.parametrize("construct", [None, thirds])
def test_the_grid_moves_with_the_times(construct: Any) -> None:
    """Against central differences of the solve: all times of the grid move."""

    def solved(ts: Tensor) -> Tensor:
        return sn.solve(field, start(), ts, solver="heun", controller=sn.Grid(construct), adjoint=sn.Direct()).ys

    weights = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ts = TS.clone().requires_grad_()
    (grad,) = torch.autograd.grad((solved(ts) * weights).sum(), ts)
    h = 1e-6
    for i in range(3):
        e = torch.zeros(3, dtype=torch.float64)
        e[i] = h
        expected = ((solved(TS + e) - solved(TS - e)) * weights).sum() / (2 * h)
        torch.testing.assert_close(grad[i], expected, rtol=1e-7, atol=1e-8)


def test_other_adjoints_refuse_gradients_for_the_times_of_a_grid() -> None:
    ts = TS.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"Replay treats the times of a grid as constants.*adjoint=sn\.Direct"):
        sn.solve(field, start(), ts, solver="heun", controller=sn.Grid())


def test_perturbed_grids_stay_inside_of_their_steps() -> None:
    """The field jumps at every time of the grid, and is a constant between them."""

    def steps(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t < 0.3, 1.0, 2.0) * torch.ones_like(y)

    for ts in (TS, TS.flip(0)):
        sol = sn.solve(steps, start(), ts, solver="rk4", controller=sn.Grid(perturb=True), record=True)
        change = torch.tensor([0.0, 0.3, 1.7], dtype=torch.float64)
        expected = change if ts is TS else change.flip(0) - change[-1]
        torch.testing.assert_close(sol.ys[:, 0] - 1.0, expected, rtol=1e-14, atol=1e-14)
        assert sol.record is not None
        assert not {*ts.tolist()} & {*sol.record.evaluations}


def test_backward_solves_have_a_grid_of_their_own() -> None:
    y0 = start().requires_grad_()
    adjoint = sn.Backsolve(controller=sn.Grid(thirds))
    sol = sn.solve(field, y0, TS, solver="rk4", controller=sn.FixedStep(0.01), adjoint=adjoint, record=True)
    (grad,) = torch.autograd.grad(sol.ys[-1].sum(), y0)
    assert sol.record is not None
    assert sol.record.backward is not None
    times = thirds(TS.flip(0)[[0, -1]]).tolist()
    assert [(plan.t0, plan.t1) for plan in sol.record.backward.accepted] == list(itertools.pairwise(times))
    torch.testing.assert_close(grad, torch.exp(torch.sin(TS[-1])).expand(2), rtol=1e-3, atol=0.0)


def test_non_finite_states_are_found_at_the_end() -> None:
    with pytest.raises(sn.NonFiniteState, match="the solution at t = 1 holds a NaN"):
        sn.solve(lambda t, y: y / (t - 0.3), start(), TS, solver="euler", controller=sn.Grid())


@pytest.mark.parametrize(("name", "order"), [("linear", 2), ("cubic", 4)])
def test_polynomials_between_steps(name: Any, order: int) -> None:
    errors = []
    for n in (8, 16):
        solver = with_interpolant(sn.RK38, name)
        ts = torch.linspace(0, 1, 41, dtype=torch.float64)
        sol = sn.solve(field, start(), ts, solver=solver, controller=sn.FixedStep(1.0 / n))
        errors.append(float((sol.ys[:, 0] - torch.exp(torch.sin(ts))).abs().max()))
    assert errors[0] / errors[1] == pytest.approx(2.0**order, rel=0.35)
    with pytest.raises(ValueError, match="expected 'linear' or 'cubic', found 'quintic'"):
        with_interpolant(sn.RK38, "quintic")  # pyright: ignore[reportArgumentType]


def test_what_constructs_a_grid_is_a_function() -> None:
    construct: Any = [0.0, 1.0]
    with pytest.raises(TypeError, match=r"^construct: expected a function of the output times, found \[0.0, 1.0\]$"):
        Grid(construct=construct)


@pytest.mark.parametrize(
    ("grid", "found"),
    [
        ([], "an empty grid"),
        ([0.0, 0.5], "0 and 0.5"),
        ([0.5, 1.0], "0.5 and 1"),
        ([-1.0, 1.0], "-1 and 1"),
        ([0.0, 2.0], "0 and 2"),
    ],
)
def test_a_grid_begins_and_ends_with_the_output_times(grid: list[float], found: str) -> None:
    made = Grid(construct=lambda ts: torch.tensor(grid, dtype=torch.float64))
    with pytest.raises(ValueError, match=rf"^construct: expected a grid from 0 to 1, found {found}$"):
        made.landings([0.0, 1.0])
    assert Grid(construct=lambda ts: torch.linspace(0, 1, 3)).landings([0.0, 0.3, 1.0]) == (0.0, 0.5, 1.0)

"""Regularisers that are read off the steps: against steps taken by hand, central differences and known eigenvalues."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from seminode.models import (
    CNF,
    ConcatMLP,
    KineticEnergy,
    NeuralCDE,
    NeuralODE,
    SolverError,
    Stiffness,
    penalty,
)
from seminode.models.running import Evaluation
from seminode.solvers import BY_NAME

DIRECT: dict[str, Any] = {"adjoint": sn.Direct()}
BOTH = (SolverError(2.0), Stiffness(0.5))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def field(dim: int = 3) -> nn.Module:
    return ConcatMLP(dim, (8,)).double()


def by_hand(f: Any, z: Tensor, times: list[float], name: Any) -> tuple[Tensor, Tensor]:
    """The sums over steps between given times, from the tableau."""
    tableau: Any = BY_NAME[name].tableau  # type: ignore[attr-defined]
    errors, stiffness = torch.zeros(len(z)).double(), torch.zeros(len(z)).double()
    for t0, t1 in itertools.pairwise(times):
        h = t1 - t0
        slopes, states = [], []
        for c, row in zip(tableau.c, tableau.a, strict=True):
            states.append(z + h * sum((a * k for a, k in zip(row, slopes, strict=False)), torch.zeros_like(z)))
            slopes.append(f(torch.tensor(t0 + c * h, dtype=torch.float64), states[-1]))
        y1 = z + h * sum((b * k for b, k in zip(tableau.b, slopes, strict=True)), torch.zeros_like(z))
        end = f(torch.tensor(t1, dtype=torch.float64), y1)
        estimate = h * sum((e * k for e, k in zip(tableau.e, [*slopes, end], strict=False)), torch.zeros_like(z))
        errors = errors + abs(h) * estimate.square().mean(1).sqrt()
        stage = {"dopri5": 5, "tsit5": 5}[name]
        stiffness = stiffness + (end - slopes[stage]).norm(dim=1) / (y1 - states[stage]).norm(dim=1)
        z = y1
    return errors, stiffness


@pytest.mark.parametrize("solver", ["dopri5", "tsit5"])
def test_costs_are_those_of_steps_taken_by_hand(solver: Any) -> None:
    f, x = field(), torch.randn(4, 3, dtype=torch.float64)
    model = NeuralODE(f, regularisers=BOTH, solver=solver, record=True, rtol=1e-5, atol=1e-5, **DIRECT)
    _, costs = model(x, costs=True)
    errors, stiffness = by_hand(f, x, list(model.records[0].ts), solver)
    torch.testing.assert_close(costs["solver_error"], errors, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(costs["stiffness"], stiffness, rtol=1e-6, atol=1e-9)
    actual, expected = (
        torch.autograd.grad(total.sum(), list(f.parameters()))
        for total in (costs["solver_error"] + costs["stiffness"], errors + stiffness)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-9)


def test_costs_need_no_evaluation() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    model = NeuralODE(field(), regularisers=BOTH, **DIRECT)
    model(x)
    nfe = model.nfe
    model(x, costs=True)
    assert model.nfe == nfe


@pytest.mark.parametrize("cost", [SolverError(1.0), Stiffness(1.0)], ids=lambda cost: cost.name)
def test_gradients_are_those_of_differences(cost: Any) -> None:
    rate = torch.tensor([0.7, -1.3], dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def total(x: Tensor, rate: Tensor) -> Tensor:
        f = lambda t, z: torch.tanh(rate * z.flip(1)) + t * z
        model = NeuralODE(f, regularisers=[cost], controller=sn.FixedStep(0.25), **DIRECT)
        return model(x, costs=True)[1][cost.name]

    assert torch.autograd.gradcheck(total, (x, rate), atol=1e-6)


@pytest.mark.parametrize("solver", ["rk4", "heun", "dopri5", "tsit5", "rk38"])
def test_the_stiffness_of_a_decay_is_its_rate(solver: Any) -> None:
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"solver": solver, "controller": sn.FixedStep(0.1), **DIRECT}
    model = NeuralODE(lambda t, z: -7.0 * z, regularisers=[Stiffness(1.0)], t1=0.5, **options)
    _, costs = model(x, costs=True)
    torch.testing.assert_close(costs["stiffness"], torch.full((2,), 35.0).double(), rtol=1e-6, atol=1e-6)


def test_constant_fields_cost_nothing_and_have_finite_gradients() -> None:
    slope = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    model = NeuralODE(lambda t, z: slope.expand_as(z), regularisers=BOTH, controller=sn.FixedStep(0.5), **DIRECT)
    _, costs = model(x, costs=True)
    total = penalty(BOTH, costs)
    assert float(total.detach()) < 1e-12
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(total, (x, slope)))


def test_local_costs_estimate_the_sum() -> None:
    x = torch.randn(3, 2, dtype=torch.float64)
    options: dict[str, Any] = {"controller": sn.FixedStep(0.25), **DIRECT}
    f = field(2)
    with torch.no_grad():
        exact = NeuralODE(f, regularisers=[SolverError(1.0)], **options)(x, costs=True)[1]["solver_error"]
        local = NeuralODE(f, regularisers=[SolverError(1.0, local=True)], **options)
        draws = torch.stack([local(x, costs=True)[1]["solver_error"] for _ in range(150)])
    assert len(draws[:, 0].unique()) == 4  # one of four steps each time
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - exact).abs() < 4 * error).all())


def test_costs_stand_beside_running_costs() -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    f = field(2)
    mixed = NeuralODE(f, regularisers=[BOTH[0], KineticEnergy(), BOTH[1]], **DIRECT)
    plain = NeuralODE(f, regularisers=BOTH, **DIRECT)
    _, costs = mixed(x, costs=True)
    assert list(costs) == ["solver_error", "kinetic", "stiffness"]
    for name, value in plain(x, costs=True)[1].items():
        torch.testing.assert_close(costs[name], value)
    flow = CNF(f, trace="exact", regularisers=[KineticEnergy(), *BOTH], **DIRECT)
    log_prob, of_flow = flow.log_prob(x, costs=True)
    torch.testing.assert_close(log_prob, CNF(f, trace="exact").log_prob(x))
    torch.testing.assert_close(of_flow["solver_error"], costs["solver_error"])
    (penalty(flow.regularisers, of_flow) - log_prob.mean()).backward()


def test_other_models_and_no_grad() -> None:
    model = NeuralCDE(2, 3, path="linear", regularisers=[SolverError(1.0)]).double()
    with torch.no_grad():  # values need no graph, so that every adjoint is fine
        _, costs = model(torch.randn(2, 4, 2, dtype=torch.float64), costs=True)
    assert costs["solver_error"].shape == (2,)


X = torch.zeros(2, 2)
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, r"adjoint: expected Direct\(\) with the regulariser SolverError.*found None; pass adjoint=sn.Direct\(\)"),
    ({"adjoint": sn.Replay()}, r"adjoint: expected Direct\(\)"),
    ({"adjoint": sn.Direct(memory="1MB")}, r"adjoint: expected Direct\(\)"),
    ({"compile": True, **DIRECT}, "compile: expected False"),
    ({"batched": True, **DIRECT}, "batched: expected False"),
    (
        {"solver": "rk4", "controller": sn.FixedStep(0.1), **DIRECT},
        "regularisers: SolverError reads the error estimate",
    ),
    ({"solver": "bosh3", **DIRECT}, "regularisers: Stiffness compares the end of a step with a stage"),
    ({"solver": "kvaerno3", **DIRECT}, "regularisers: SolverError reads the error estimate"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeuralODE(lambda t, z: -z, regularisers=BOTH, **options)(X, costs=True)


def test_a_step_cost_has_no_rate_and_a_checked_weight() -> None:
    with pytest.raises(TypeError, match="SolverError: is read off the steps of a solve and has no rate"):
        BOTH[0].rate(Evaluation(lambda t, z: z, torch.tensor(0.0), X))
    with pytest.raises(ValueError, match="weight"):
        SolverError(-1.0)
    with pytest.raises(TypeError, match="local"):
        Stiffness(1.0, local=1)  # type: ignore[arg-type]

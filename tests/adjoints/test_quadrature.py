"""Quadrature of the parameter integral: its rules, what they cost, how accurate they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from seminode.adjoints import RuleName
from seminode.adjoints._continuous.quadrature_rules import GAUSS, KRONROD, LOBATTO, RADAU, Rule, interpolatory

RULES = {
    **{f"lobatto {n}": rule for n, rule in LOBATTO.items()},
    **{f"radau {n}": rule for n, rule in RADAU.items()},
    **{f"gauss {n}": rule for n, rule in GAUSS.items()},
    "kronrod": KRONROD,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_are_exact_to_their_degree_and_no_further(rule: Rule) -> None:
    def error(weights: tuple[float, ...], degree: int) -> float:
        return sum(w * x**degree for w, x in zip(weights, rule.nodes, strict=True)) - 1 / (degree + 1)

    for degree in range(rule.degree + 1):
        assert error(rule.weights, degree) == pytest.approx(0.0, abs=1e-15)
    assert abs(error(rule.weights, rule.degree + 1)) > 1e-9
    assert sum(rule.lower) == pytest.approx(1.0, abs=1e-15)


def test_interpolatory_weights() -> None:
    assert interpolatory((0.0, 1.0)) == pytest.approx((0.5, 0.5))
    nodes = (0.1, 0.35, 0.7, 0.9)
    weights = interpolatory(nodes)
    for degree in range(4):
        assert sum(w * x**degree for w, x in zip(weights, nodes, strict=True)) == pytest.approx(1 / (degree + 1))


def problem(seed: int) -> tuple[nn.Module, Any, Tensor]:
    """A network with a rotation: smooth, and neither growing nor contracting much."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    for p in net.parameters():
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.5)
    turn = torch.randn(4, 4, generator=generator, dtype=torch.float64)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return net(torch.cat([y, t.expand(len(y), 1)], -1)) + y @ (turn - turn.T)

    return net, field, torch.randn(8, 4, generator=generator, dtype=torch.float64)


def gradient(seed: int, adjoint: Any, rtol: float, **options: Any) -> tuple[Tensor, sn.Stats]:
    net, field, y0 = problem(seed)
    ts = torch.linspace(0.0, 2.0, 5, dtype=torch.float64)
    sol = sn.solve(field, y0.requires_grad_(), ts, rtol=rtol, atol=1e-2 * rtol, adjoint=adjoint, **options)
    grads = torch.autograd.grad(sol.ys.square().mean(), list(net.parameters()))
    assert sol.stats.backward is not None
    return torch.cat([g.reshape(-1) for g in grads]), sol.stats.backward


TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_lobatto_costs_two_evaluations_and_three_gradients_a_step(seed: int) -> None:
    """And is at least as accurate as the stages of Backsolve, at every tolerance."""
    exact, _ = gradient(seed, sn.Replay(), 1e-12)
    for rtol in TOLERANCES:
        stages, plain = gradient(seed, sn.Backsolve(norm="seminorm"), rtol)
        nodes, stats = gradient(seed, sn.Quadrature(), rtol)
        assert float((nodes - exact).norm()) < 1.5 * float((stages - exact).norm())
        assert (stats.accepted, stats.rejected) == (plain.accepted, plain.rejected)
        assert stats.nfe == plain.nfe + 2 * stats.accepted
        assert stats.vjp_params == 3 * stats.accepted
        # Over the dense solution the steps are others, about as many.
        dense, stats = gradient(seed, sn.Quadrature(z="dense"), rtol)
        assert float((dense - exact).norm()) < 3 * float((stages - exact).norm())
        assert stats.nfe <= 1.05 * (plain.nfe + 2 * plain.accepted)
        assert stats.vjp_params == 3 * stats.accepted


@pytest.mark.parametrize("rule", ["lobatto", "gauss", "gauss-kronrod"])
@pytest.mark.parametrize("solver", ["dopri5", "tsit5", "bosh3"])
def test_errors_stay_proportional_to_the_tolerance(solver: str, rule: RuleName) -> None:
    exact, _ = gradient(1, sn.Replay(), 1e-12)
    for rtol in TOLERANCES if solver != "bosh3" else TOLERANCES[:4]:
        for z in ("solve", "dense"):
            found, _ = gradient(1, sn.Quadrature(rule=rule, z=z), rtol, solver=solver)
            assert float((found - exact).norm() / exact.norm()) < 10 * rtol


def test_parameters_see_no_rejected_step() -> None:
    _, field, y0 = problem(0)
    adjoint = sn.Quadrature(controller=sn.Integral(dt0=1.0))
    sol = sn.solve(field, y0.requires_grad_(), [0.0, 2.0], adjoint=adjoint)
    sol.ys[-1].sum().backward()
    stats = sol.stats.backward
    assert stats is not None
    assert stats.rejected > 0
    assert stats.vjp_params == 3 * stats.accepted
    assert stats.vjp_y == 1 + 6 * (stats.accepted + stats.rejected)


def test_nodes_are_batched_where_the_field_allows_it() -> None:
    """Fewer calls, the same gradient; a field that looks at values is called once a node."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y0 = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    calls = 0

    def smooth(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.sin(y @ weight + 3 * t)

    def curious(t: Tensor, y: Tensor) -> Tensor:
        return smooth(t, y) if float(t) > -1.0 else y

    results = {}
    for name, field, batched in (
        ("batched", smooth, None),
        ("looped", smooth, False),
        ("curious", curious, None),
    ):
        sol = sn.solve(field, y0, [0.0, 4.0], rtol=1e-7, atol=1e-9, adjoint=sn.Quadrature(batched=batched))
        calls = 0
        (grad,) = torch.autograd.grad(sol.ys[-1].sum(), weight)
        results[name] = grad, calls, sol.stats.backward
    for name in ("looped", "curious"):
        torch.testing.assert_close(results["batched"][0], results[name][0], rtol=1e-12, atol=0.0)
        assert results["batched"][2].nfe == results[name][2].nfe
    assert results["batched"][1] < results["looped"][1] == results["looped"][2].nfe + results["looped"][2].checks
    sol = sn.solve(curious, y0, [0.0, 4.0], rtol=1e-7, atol=1e-9, adjoint=sn.Quadrature(batched=True))
    loss = sol.ys[-1].sum()
    with pytest.raises(RuntimeError, match="vmap"):
        loss.backward()


def test_the_adaptive_rule_meets_its_own_tolerance() -> None:
    """A parameter that drives the state with a frequency the solver need not resolve."""
    amplitude = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y0 = torch.zeros(1, dtype=torch.float64)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return amplitude**2 * torch.cos(40.0 * t) ** 2 + 0.0 * y

    exact = 2 * 0.7 * (0.5 + torch.sin(torch.tensor(80.0, dtype=torch.float64)).item() / 160.0)
    # Two steps over some thirteen periods: far too few for any fixed rule.
    coarse: dict[str, Any] = {"solver": "dopri5", "controller": sn.FixedStep(0.5)}
    errors = {}
    kinds: list[tuple[RuleName, dict[str, Any]]] = [
        ("lobatto", {}),
        ("gauss-kronrod", {"quad_rtol": 1e-3, "quad_atol": 0.0}),
        ("gauss-kronrod", {"quad_rtol": 1e-9, "quad_atol": 0.0}),
    ]
    for rule, options in kinds:
        sol = sn.solve(field, y0, [0.0, 1.0], adjoint=sn.Quadrature(rule=rule, z="dense", **options), **coarse)
        (grad,) = torch.autograd.grad(sol.ys[-1].sum(), amplitude)
        errors[rule, options.get("quad_rtol")] = abs(float(grad) - exact) / exact
    assert errors["lobatto", None] > 1e-2
    assert errors["gauss-kronrod", 1e-3] < 1e-3
    assert errors["gauss-kronrod", 1e-9] < 1e-9

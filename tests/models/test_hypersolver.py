"""Hypersolvers: the formula of a step, correct gradients or an error, and smaller errors after fitting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from benchmarks.techniques import Trajectories, hypersolved, spectral_field
from seminode.models.hypersolver import CorrectionNet, HyperSolver, fit, local_errors
from seminode.solvers.explicit import EXPLICIT, ExplicitName


class Field(nn.Module):
    """A small nonlinear field that depends on time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.net(torch.cat([z, t.expand(len(z), 1)], 1))


def pendulum(t: Tensor, z: Tensor) -> Tensor:
    return torch.stack([z[:, 1], -torch.sin(z[:, 0])], -1)


def start(n: int = 4, seed: int = 1) -> Tensor:
    return torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0


def hypersolver(base: ExplicitName = "heun") -> HyperSolver:
    torch.manual_seed(2)
    return HyperSolver(base, dim=2, width=8).double()


def solve(hyper: HyperSolver, z0: Tensor, ts: Any = (0.0, 1.0), field: Any = None, eps: float = 0.25, **options: Any):
    field = Field() if field is None else field
    return sn.solve(field, z0, ts, solver=hyper, controller=sn.FixedStep(eps), **options)


def test_a_step_follows_the_formula() -> None:
    hyper, field, z = hypersolver(), Field(), start()
    with torch.no_grad():
        expected = z
        for k in range(4):
            t = torch.tensor(0.25 * k, dtype=torch.float64)
            k1 = field(t, expected)
            k2 = field(t + 0.25, expected + 0.25 * k1)
            g = hyper.correction(torch.tensor(0.25, dtype=torch.float64), expected, k1, k2)
            expected = expected + 0.25 * (k1 + k2) / 2 + 0.25**3 * g
        sol = solve(hyper, z)
    torch.testing.assert_close(sol.ys[-1], expected, rtol=1e-12, atol=1e-12)
    assert sol.stats.nfe == 8  # as many evaluations of f as Heun's method


@pytest.mark.parametrize("base", EXPLICIT)
def test_every_base_method(base: ExplicitName) -> None:
    hyper = hypersolver(base)
    assert (hyper.order, hyper.stages) == (EXPLICIT[base]().order, EXPLICIT[base]().stages)
    with torch.no_grad():
        for p in hyper.correction.parameters():
            p.zero_()
        ts = torch.linspace(0, 1, 7, dtype=torch.float64)
        plain = sn.solve(Field(), start(), ts, solver=base, controller=sn.FixedStep(0.25))
        assert torch.equal(solve(hyper, start(), ts).ys, plain.ys)


@pytest.mark.parametrize("base", ["euler", "midpoint", "heun", "rk4", "bosh3", "dopri5"])
def test_the_interpolant_ends_at_the_corrected_state(base: ExplicitName) -> None:
    """Also just before the end of a step: output times may differ from it by rounding."""
    hyper, ends = hypersolver(base), torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    with torch.no_grad():
        at_ends = solve(hyper, start(), ends).ys
        before = solve(hyper, start(), ends * (1.0 - 1e-13)).ys
        dense = solve(hyper, start(), ends, dense=True).dense
    torch.testing.assert_close(before, at_ends, rtol=1e-9, atol=1e-9)
    assert dense is not None
    torch.testing.assert_close(dense(ends), at_ends, rtol=1e-9, atol=1e-9)


def test_a_field_may_modify_its_result_in_place() -> None:
    field = Field()
    with torch.no_grad():
        ys = solve(hypersolver(), start(), field=lambda t, z: field(t, z).mul_(0.5).mul_(2.0)).ys
        torch.testing.assert_close(ys, solve(hypersolver(), start(), field=field).ys)


def gradients(adjoint: Any, ts: Tensor, hyper: HyperSolver) -> list[Tensor]:
    field, z0 = Field(), start().requires_grad_()
    sol = solve(hyper, z0, ts, field=field, adjoint=adjoint)
    loss = (sol.ys * torch.linspace(1, 2, sol.ys.numel(), dtype=torch.float64).reshape(sol.ys.shape)).sum()
    return list(torch.autograd.grad(loss, [z0, *([ts] if ts.requires_grad else []), *field.parameters()]))


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Replay(every=2), sn.Checkpointed(2)], ids=repr)
def test_discrete_adjoints_agree_with_autograd(adjoint: Any) -> None:
    ts = torch.tensor([0.0, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    for a, b in zip(gradients(adjoint, ts, hypersolver()), gradients(sn.Direct(), ts, hypersolver()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
def test_gradients_are_those_of_the_corrected_steps(adjoint: Any) -> None:
    hyper, field = hypersolver(), Field()
    ts = torch.tensor([0.0, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    first = next(field.parameters())

    def of_state(z0: Tensor, ts: Tensor) -> Tensor:
        return solve(hyper, z0, ts, field=field, adjoint=adjoint).ys

    assert torch.autograd.gradcheck(of_state, (start(2).requires_grad_(), ts))
    (grad,) = torch.autograd.grad(of_state(start(2), ts.detach()).sum(), first)
    with torch.no_grad():
        values = []
        for h in (1e-6, -1e-6):
            first[0, 0] += h
            values.append(of_state(start(2), ts.detach()).sum())
            first[0, 0] -= h
    assert float((values[0] - values[1]) / 2e-6) == pytest.approx(float(grad[0, 0]), rel=1e-6)


def test_second_derivatives_and_transforms() -> None:
    hyper, field = hypersolver(), Field()

    def end(z0: Tensor, adjoint: Any) -> Tensor:
        return solve(hyper, z0, field=field, adjoint=adjoint).ys[-1]

    assert torch.autograd.gradgradcheck(lambda z0: end(z0, sn.Replay()), (start(1).requires_grad_(),))
    alone = torch.func.vmap(lambda z: end(z[None], sn.Direct())[0])(start())
    torch.testing.assert_close(alone, end(start(), sn.Direct()))


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
def test_the_correction_is_a_constant(adjoint: Any) -> None:
    hyper, z0 = hypersolver(), start().requires_grad_()
    loss = solve(hyper, z0, adjoint=adjoint).ys.sum()
    loss.backward()
    assert z0.grad is not None
    assert all(p.grad is None for p in hyper.parameters())


@pytest.mark.parametrize("adjoint", [sn.Backsolve(), sn.Interpolating(), sn.Quadrature()], ids=repr)
def test_continuous_adjoints_need_another_backward_solver(adjoint: Any) -> None:
    z0 = start().requires_grad_()
    with pytest.raises(ValueError, match="adjoint equation, for which solver 'hypersolved heun' was not made"):
        solve(hypersolver(), z0, adjoint=adjoint)


def test_a_continuous_adjoint_with_another_backward_solver() -> None:
    hyper = hypersolver()
    with torch.no_grad():
        for p in hyper.parameters():
            p.zero_()
    adjoint = sn.Backsolve(solver="dopri5", controller=sn.Integral(), rtol=1e-8, atol=1e-8)
    z0, field = start().requires_grad_(), Field()
    (grad,) = torch.autograd.grad(solve(hyper, z0, field=field, eps=0.01, adjoint=adjoint).ys[-1].sum(), z0)
    (exact,) = torch.autograd.grad(sn.solve(field, z0, [0.0, 1.0], rtol=1e-9, atol=1e-9).ys[-1].sum(), z0)
    torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-5)


def test_residuals_are_the_local_errors_of_the_base() -> None:
    """For z′ = λz, ε³g = (e^{λε} − 1 − λε − (λε)²/2) z, and with this correction the steps are exact."""
    rate, eps = -1.5, 0.2
    hyper = hypersolver()
    pairs = local_errors(hyper, lambda t, z: rate * z, start(), [0.0, 0.2, 0.4, 0.5])
    assert [round(float(p.eps), 9) for p in pairs] == [0.2, 0.1]
    assert [len(p.z) for p in pairs] == [8, 4]
    x = torch.tensor(rate * eps, dtype=torch.float64)
    factor = (torch.exp(x) - 1 - x - x**2 / 2) / eps**3
    torch.testing.assert_close(pairs[0].residual, factor * pairs[0].z, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(pairs[0].slopes[1], rate * (1 + rate * eps) * pairs[0].z)

    class Exact(nn.Module):
        def forward(self, eps: Tensor, z: Tensor, k1: Tensor, k2: Tensor) -> Tensor:
            x = rate * eps
            return (torch.exp(x) - 1 - x - x**2 / 2) / eps**3 * z

    sol = solve(HyperSolver("heun", Exact()), start(), field=lambda t, z: rate * z, eps=0.3)
    torch.testing.assert_close(sol.ys[-1], start() * torch.exp(torch.tensor(rate, dtype=torch.float64)))


def test_the_history_is_the_loss() -> None:
    hyper, grid = hypersolver(), torch.linspace(0, 2, 11, dtype=torch.float64)
    history = fit(hyper, pendulum, start(32), grid, steps=100)
    assert len(history) == 100
    assert history[-1] < 0.2 * history[0]
    assert not hyper.correction.training
    (pairs,) = local_errors(hyper, pendulum, start(32), grid)
    loss = (pairs.residual - hyper.correction(pairs.eps, pairs.z, *pairs.slopes)).norm(dim=1).mean()
    assert float(loss.detach()) == pytest.approx(history[-1], rel=0.05)


def test_a_correction_reduces_the_error_on_a_trained_field() -> None:
    """To less than a fifth at the same number of evaluations, from held-out initial values."""
    field = spectral_field(Trajectories.drawn(16, 0, end=2.0, times=17), 150, degree=8)
    result = hypersolved(field, end=2.0, n=64, steps=300)
    assert result.nfe == 16
    assert result.plain > 5.0 * result.corrected
    assert result.nfe_to_match > 2 * result.nfe


@pytest.mark.slow
def test_the_benchmark() -> None:
    result = hypersolved(spectral_field(Trajectories.drawn(64, 0), 1000))
    assert result.plain > 5.0 * result.corrected


def test_backwards_in_time() -> None:
    hyper = hypersolver()
    fit(hyper, pendulum, start(32), torch.linspace(2, 0, 11, dtype=torch.float64), steps=150)
    z0 = start(32, seed=9)
    with torch.no_grad():
        exact = sn.solve(pendulum, z0, [2.0, 0.0], rtol=1e-10, atol=1e-10).ys[-1]
        plain = sn.solve(pendulum, z0, [2.0, 0.0], solver="heun", controller=sn.FixedStep(0.2)).ys[-1]
        corrected = solve(hyper, z0, [2.0, 0.0], field=pendulum, eps=0.2).ys[-1]
    assert float((plain - exact).norm()) > 3.0 * float((corrected - exact).norm())


def test_fitting_does_not_change_the_field() -> None:
    field = Field()
    before = [p.clone() for p in field.parameters()]
    fit(hypersolver(), field, start(8), [0.0, 0.1, 0.2], steps=3, batch=5)
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, field.parameters(), strict=True))


def test_state_dict_and_repr() -> None:
    hyper, other = hypersolver(), HyperSolver("heun", dim=2, width=8).double()
    fit(hyper, pendulum, start(8), [0.0, 0.2], steps=2)
    other.load_state_dict(hyper.state_dict())
    with torch.no_grad():
        assert torch.equal(solve(hyper, start()).ys, solve(other, start()).ys)
    assert "base=Heun()" in repr(hyper)
    assert hyper.name == "hypersolved heun"


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="base: expected one of euler"):
        HyperSolver("simpson", dim=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="base: expected the name"):
        HyperSolver(sn.ReversibleHeun(), dim=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="correction: expected a module, or dim="):
        HyperSolver("heun")
    with pytest.raises(TypeError, match="correction: expected a module, found function"):
        HyperSolver("heun", pendulum)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim: expected None with a correction"):
        HyperSolver("heun", CorrectionNet(2, 2), dim=2)
    with pytest.raises(ValueError, match="controller: solver 'hypersolved heun' has no error estimate"):
        sn.solve(pendulum, start(), [0.0, 1.0], solver=hypersolver())
    with pytest.raises(ValueError, match=r"correction: expected a tensor of shape \(4, 2\)"):
        solve(HyperSolver("heun", Flat()), start())
    with pytest.raises(ValueError, match=r"one tensor of shape \(batch, ...\), found shape \(2,\)"):
        solve(hypersolver(), start()[0], field=lambda t, z: -z)
    with pytest.raises(ValueError, match="found shape"):
        solve(hypersolver(), (start(), start()), field=lambda t, z: z)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ts: expected at least two times"):
        fit(hypersolver(), pendulum, start(), [0.0])
    with pytest.raises(ValueError, match=r"ts: expected times that differ, found 0\.5 twice"):
        fit(hypersolver(), pendulum, start(), [0.0, 0.5, 0.5])
    with pytest.raises(ValueError, match="y0: expected one tensor"):
        fit(hypersolver(), pendulum, start()[0], [0.0, 1.0])
    with pytest.raises(TypeError, match="hyper: expected a HyperSolver, found Heun"):
        fit(sn.Heun(), pendulum, start(), [0.0, 1.0])  # type: ignore[arg-type]


class Flat(nn.Module):
    def forward(self, eps: Tensor, z: Tensor, *slopes: Tensor) -> Tensor:
        return z.flatten()

"""Hamiltonian nets: the field derives from the energy, and solutions conserve it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from seminode.models.hamiltonian import HamiltonianField, HamiltonianNet

T = torch.tensor(0.3, dtype=torch.float64)
every_kind = pytest.mark.parametrize("separable", [True, False], ids=["separable", "joint"])


def small(separable: bool = True, dim: int = 2, seed: int = 0, **options: Any) -> HamiltonianNet:
    torch.manual_seed(seed)
    return HamiltonianNet(dim, hidden=(12, 12), separable=separable, **options).double()


def states(batch: int = 5, dim: int = 2) -> Tensor:
    return torch.randn(batch, 2 * dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@every_kind
def test_field_derives_from_the_energy(separable: bool) -> None:
    model, x = small(separable), states().requires_grad_()
    (dH,) = torch.autograd.grad(model.energy(x).sum(), x)
    dq, dp = dH.split(2, -1)
    torch.testing.assert_close(model.field(T, x), torch.cat((dp, -dq), -1))


def test_separable_energy_is_a_sum() -> None:
    model, x = small(), states()
    q, p = x.split(2, -1)
    expected = model.field.kinetic(p) + model.field.potential(q)
    torch.testing.assert_close(model.energy(x), expected.squeeze(-1))
    mixed = torch.func.hessian(model.field.energy)(x[0])[:2, 2:]
    assert float(mixed.detach().abs().max()) == 0.0
    mixed = torch.func.hessian(small(False).field.energy)(x[0])[:2, 2:]
    assert float(mixed.detach().abs().max()) > 1e-4


@every_kind
def test_the_learned_energy_is_conserved(separable: bool) -> None:
    model, x0 = small(separable, rtol=1e-11, atol=1e-11), states()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that the solution moves far enough
        xs = model(x0, torch.linspace(0.0, 10.0, 6, dtype=torch.float64))
    assert xs.shape == (6, 5, 4)
    assert float((xs[-1] - xs[0]).abs().max()) > 0.1
    assert float((model.energy(xs) - model.energy(x0)).detach().abs().max()) < 1e-8
    assert model.nfe == model.stats[0].nfe > 0


@every_kind
def test_volume_is_conserved(separable: bool) -> None:
    """Liouville's theorem: the trace of the Jacobian of the field is zero."""
    model, x = small(separable), states()
    for each in x:
        assert abs(float(torch.func.jacrev(lambda x: model.field(T, x))(each).trace().detach())) < 1e-14


@every_kind
def test_field_differentiates_inside_no_grad_and_under_func(separable: bool) -> None:
    field, x = small(separable).field, states()
    expected = field(T, x).detach()
    with torch.no_grad():
        value = field(T, x)
    assert not value.requires_grad
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.func.vmap(lambda x: field(T, x))(x), expected)
    tangent = torch.func.jvp(lambda x: field(T, x), (x,), (torch.ones_like(x),))[1]
    (jacobians,) = (torch.func.vmap(torch.func.jacrev(lambda x: field(T, x)))(x),)
    torch.testing.assert_close(tangent, jacobians.sum(-1))


def test_leapfrog_is_the_default_with_fixed_steps() -> None:
    fixed: Any = {"controller": sn.FixedStep(0.1)}
    x0, ts = states(), torch.linspace(0.0, 10.0, 21, dtype=torch.float64)
    with torch.no_grad():
        model = small(**fixed)
        for parameter in model.parameters():
            parameter.mul_(2.0)
        xs = model(x0, ts)
        assert model.stats[0].checks == 0  # the model knows that it is separable
        assert torch.equal(xs, sn.solve(model.field, x0, ts, solver=sn.Leapfrog(), **fixed).ys)
        error = (model.energy(xs) - model.energy(x0)).abs().max()
        assert 1e-9 < float(error) < 1e-3
        for options, separable in (
            ({}, True),
            (fixed, False),
            ({**fixed, "solver": "rk4"}, True),
            ({**fixed, "adjoint": sn.Backsolve()}, True),
            ({**fixed, "adjoint": "interpolating"}, True),
        ):
            model = small(separable, **options)
            expected = sn.solve(model.field, x0, [0.0, 1.0], **options).ys
            assert torch.equal(model(x0, [0.0, 1.0]), expected)
    model, x = small(**fixed, adjoint="reversible"), states(2).requires_grad_()
    model(x, [0.0, 1.0])[-1].sum().backward()
    expected, y = small(**fixed), states(2).requires_grad_()
    expected(y, [0.0, 1.0])[-1].sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)


def test_gradients_through_a_solve() -> None:
    model, x0 = small(rtol=1e-8, atol=1e-10, adjoint=sn.Replay()), states(2).requires_grad_()
    names = ("field.kinetic.0.weight", "field.potential.2.bias")

    def end(x0: Tensor, *replaced: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, replaced, strict=True)), (x0, [0.0, 0.5]))[-1]

    weights = [model.get_parameter(name) for name in names]
    torch.autograd.gradcheck(end, (x0, *weights), fast_mode=True, rtol=1e-3, atol=1e-5)
    end(x0, *weights).sum().backward()
    assert model.backward_nfe > 0


def test_a_pendulum_is_learned_from_derivatives() -> None:
    """Fit to derivatives, as in the paper; then compare a solution with one period of the true pendulum."""
    torch.manual_seed(0)
    model = HamiltonianNet(1, hidden=(32, 32), rtol=1e-6, atol=1e-8).double()
    x = 4.0 * torch.rand(512, 2, dtype=torch.float64) - 2.0
    target = torch.stack((x[:, 1], -x[:, 0].sin()), -1)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-2, total_steps=300)
    for _ in range(300):
        loss = nn.functional.mse_loss(model.field(T, x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    residual = model.field(T, x).detach() - target
    assert float(residual.square().mean()) < 1e-3
    x0, ts = torch.tensor([[1.5, 0.0]], dtype=torch.float64), [0.0, 3.0, 7.0]
    with torch.no_grad():
        learned = model(x0, ts)
        true = sn.solve(lambda t, x: torch.stack((x[:, 1], -x[:, 0].sin()), -1), x0, ts).ys
    assert float((learned - true).abs().max()) < 0.1
    spread = lambda xs: float((xs[:, :, 1] ** 2 / 2 - xs[:, :, 0].cos()).std())
    assert spread(learned) < 0.02


def test_state_dict_copies_and_repr() -> None:
    model, other = small(seed=0, rtol=1e-6), small(seed=1, rtol=1e-6)
    other.load_state_dict(model.state_dict())
    x0 = states()
    assert torch.equal(model(x0, [0.0, 1.0]), other(x0, [0.0, 1.0]))
    assert torch.equal(copy.deepcopy(model)(x0, [0.0, 1.0]), model(x0, [0.0, 1.0]))
    assert model.extra_repr() == "dim=2, separable=True, rtol=1e-06"
    assert small(False).extra_repr() == "dim=2, separable=False"
    assert isinstance(model.field, HamiltonianField)
    assert sum(p.numel() for p in HamiltonianNet(1).parameters()) == 2 * (2 * 200 + 200 * 201 + 201)


def test_errors_name_the_argument() -> None:
    model = small()
    for dim in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"dim: expected a whole number of at least 1, found {dim}"):
            HamiltonianNet(dim)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"hidden: expected the widths of the hidden layers, found int"):
        HamiltonianNet(1, hidden=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hidden\[1\]: expected a whole number of at least 1, found 0"):
        HamiltonianNet(1, hidden=(3, 0))
    with pytest.raises(TypeError, match="separable: expected True or False, found 1"):
        HamiltonianNet(1, separable=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option 'hiden'"):
        HamiltonianNet(1, hiden=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"x0: expected states \(q, p\) of shape \(..., 4\), found \(5, 3\)"):
        model(states()[:, :3], [0.0, 1.0])
    with pytest.raises(ValueError, match="x: expected states"):
        model.energy(states()[:, :3])
    with pytest.raises(TypeError, match="x0: expected a tensor, found list"):
        model([0.0] * 4, [0.0, 1.0])
    with pytest.raises(TypeError, match=r"x0: expected a floating-point dtype, found torch.int64"):
        model(states().long(), [0.0, 1.0])

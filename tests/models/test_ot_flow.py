"""OT-Flow: exact derivatives, the integrals of the objective, and training with discrete and continuous adjoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import seminode as sn
from benchmarks import techniques
from benchmarks.techniques import CONTINUOUS, STEPPED, gaussian_nll, judged, moons, trained_flow
from seminode.models.ot_flow import OTFlow, Potential

SIZES = [(1, 4, 2, 1), (2, 8, 2, 3), (3, 7, 4, 2), (5, 6, 3, 6)]


def randomise(module: torch.nn.Module) -> None:
    """Random values for all parameters: initial zeros or ones may hide an error."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) / math.sqrt(p.shape[-1]))


def potential(dim: int, width: int, layers: int, rank: int) -> Potential:
    torch.manual_seed(dim)
    phi = Potential(dim, width, layers, rank).double()
    randomise(phi)
    return phi


def flow(alpha: tuple[float, float, float] = (2.0, 10.0, 3.0), **options: Any) -> OTFlow:
    torch.manual_seed(0)
    model = OTFlow(2, width=8, layers=3, alpha=alpha, **options).double()
    randomise(model)
    return model


def samples(n: int, dim: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_derivatives_agree_with_autograd(sizes: tuple[int, int, int, int]) -> None:
    phi, dim = potential(*sizes), sizes[0]
    x, t = samples(6, dim), torch.tensor(0.3, dtype=torch.float64)

    def value(t: Tensor, x: Tensor) -> Tensor:
        return phi(t, x.unsqueeze(0))[0]

    derivatives = phi.derivatives(t, x)
    grad_t, grad_x = torch.vmap(torch.func.grad(value, (0, 1)), (None, 0))(t, x)
    hessian = torch.vmap(torch.func.jacrev(torch.func.grad(value, 1), 1), (None, 0))(t, x)
    torch.testing.assert_close(derivatives.grad_x, grad_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(derivatives.grad_t, grad_t, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(derivatives.trace, hessian.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12, atol=1e-12)


def test_the_potential_follows_the_formula() -> None:
    phi = potential(2, 5, 3, 2)
    s = torch.tensor([0.4, -1.2, 0.7], dtype=torch.float64)
    u = torch.log(2 * torch.cosh(phi.opening.weight @ s + phi.opening.bias))
    for layer in phi.residual:
        u = u + 0.5 * torch.log(2 * torch.cosh(layer.weight @ u + layer.bias))
    expected = phi.w @ u + 0.5 * s @ phi.A.T @ phi.A @ s + phi.b @ s
    assert torch.allclose(phi(s[2], s[None, :2])[0], expected, rtol=1e-13)


def test_the_trace_is_cheap() -> None:
    """O(m²d) operations per layer: twice the dimension costs at most twice as much."""

    def flops(function: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    counts = {}
    for dim in (20, 40):
        phi, x, t = Potential(dim, 32, 3), torch.randn(8, dim), torch.tensor(0.5)
        counts[dim] = flops(lambda phi=phi, x=x, t=t: phi.derivatives(t, x))
        assert counts[dim] < 8 * 2 * 3 * 32**2 * dim
    assert counts[40] < 2.0 * counts[20]


def test_large_arguments_do_not_overflow() -> None:
    phi = potential(2, 5, 2, 2).float()
    x = torch.tensor([[1e4, -1e4]])
    assert torch.isfinite(phi(torch.tensor(0.5), x)).all()
    assert all(torch.isfinite(part).all() for part in phi.derivatives(torch.tensor(0.5), x))


def test_rates_follow_their_definitions() -> None:
    model = flow()
    x, t = samples(4), torch.tensor(0.6, dtype=torch.float64)
    v, delta, transport, hjb = model.rates(t, (x, x[:, 0], x[:, 0], x[:, 0]))
    assert torch.equal(v, model.velocity(t, x))
    jacobian = torch.vmap(torch.func.jacrev(lambda x: model.velocity(t, x[None])[0]))(x)
    torch.testing.assert_close(delta, -jacobian.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(transport, 0.5 * v.square().sum(1))
    grad_t = torch.func.jacrev(lambda t: model.potential(t, x))(t)
    # −∂Φ/∂t + |∇Φ|²/(2α_L), since v = −∇Φ/α_L
    grad_x = torch.func.grad(lambda x: model.potential(t, x).sum())(x)
    torch.testing.assert_close(hjb, (grad_x.square().sum(1) / 4.0 - grad_t).abs())


def test_log_prob_is_the_change_of_variables() -> None:
    model = flow(solver="dopri5", rtol=1e-9, atol=1e-9, adjoint=sn.Direct())
    x = samples(5).requires_grad_()
    z, delta = model.transform(x)
    rows = [torch.autograd.grad(z[:, j].sum(), x, retain_graph=True)[0] for j in range(2)]
    torch.testing.assert_close(torch.linalg.slogdet(torch.stack(rows, 1))[1], -delta, rtol=1e-6, atol=1e-7)
    base = torch.distributions.MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
    torch.testing.assert_close(model.log_prob(x), base.log_prob(z) - delta)


def test_the_density_integrates_to_one() -> None:
    torch.manual_seed(0)
    model = OTFlow(1, width=8, steps=16).double()
    line = torch.linspace(-200.0, 200.0, 4001, dtype=torch.float64)
    with torch.no_grad():
        density = model.log_prob(line[:, None]).exp()
    assert float(density.sum() * (line[1] - line[0])) == pytest.approx(1.0, abs=1e-4)


def test_inverse_undoes_transform() -> None:
    model = flow(solver="dopri5", rtol=1e-9, atol=1e-9)
    x = samples(20)
    with torch.no_grad():
        torch.testing.assert_close(model.inverse(model.transform(x)[0]), x, rtol=1e-6, atol=1e-6)
    assert model.sample(7).shape == (7, 2)


def test_the_objective_is_a_weighted_sum_of_three_costs() -> None:
    model = flow()
    x = samples(9)
    costs = model.costs(x)
    assert list(costs) == ["transport", "nll", "hjb"]
    assert all(cost.shape == (9,) for cost in costs.values())
    expected = 2.0 * costs["transport"].mean() + 10.0 * costs["nll"].mean() + 3.0 * costs["hjb"].mean()
    torch.testing.assert_close(model.loss(x), expected)
    torch.testing.assert_close(model(x), -costs["nll"])


def gradient(model: OTFlow) -> Tensor:
    grads = torch.autograd.grad(model.loss(samples(6)), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def test_gradients_of_discrete_adjoints() -> None:
    direct, replay = gradient(flow(adjoint=sn.Direct())), gradient(flow())
    assert float((replay - direct).norm() / direct.norm()) < 1e-12


@pytest.mark.parametrize("adjoint", [sn.Backsolve(), sn.Quadrature()], ids=lambda a: type(a).__name__)
def test_gradients_of_continuous_adjoints(adjoint: Any) -> None:
    """With α_R = 0, because the integral of the third cost converges slowly at the kinks of its absolute value."""
    options: dict[str, Any] = {"alpha": (2.0, 10.0, 0.0), "solver": "dopri5", "rtol": 1e-7, "atol": 1e-7}
    direct, continuous = gradient(flow(adjoint=sn.Direct(), **options)), gradient(flow(adjoint=adjoint, **options))
    assert float((continuous - direct).norm() / direct.norm()) < 1e-5


def test_the_default_is_a_few_steps_of_rk4() -> None:
    model = OTFlow(2, steps=5)
    model.loss(torch.randn(3, 2)).backward()
    assert model.nfe == 20
    assert model.backward_nfe == 20
    for steps in (1, 3, 7, 10):
        other = OTFlow(2, steps=steps)
        other.log_prob(torch.randn(3, 2))
        assert other.nfe == 4 * steps
    adaptive = OTFlow(2, solver="dopri5", adjoint=sn.Backsolve())
    adaptive.log_prob(torch.randn(3, 2))
    assert "controller" not in adaptive.options
    assert model.potential.A.shape == (3, 3)
    assert OTFlow(20).potential.A.shape == (10, 21)


def test_error_control_ignores_the_integrals() -> None:
    x = samples(8)
    with torch.no_grad():
        plain, alone = flow(solver="dopri5"), flow(solver="dopri5")
        plain.log_prob(x)
        alone.solve(alone.velocity, x, (0.0, 1.0))
        assert plain.nfe == alone.nfe


def test_four_steps_train_as_well_as_a_continuous_adjoint() -> None:
    """The NLL on held-out data differs by less than 10 %, and both are far below that of a standard normal."""
    draw, size = torch.Generator().manual_seed(0), torch.tensor([0.3, 0.6])
    x, unseen = (1.0 + size * torch.randn(512, 2, generator=draw) for _ in range(2))
    options = CONTINUOUS | {"rtol": 1e-3, "atol": 1e-3}
    discrete = judged(trained_flow(x, 20, batch=64, width=16, **STEPPED), unseen)
    reference = judged(trained_flow(x, 20, batch=64, width=16, **options), unseen)
    assert reference < 1.5 < float(standard_normal_nll(unseen))
    assert abs(discrete / reference - 1.0) < 0.1


def standard_normal_nll(x: Tensor) -> Tensor:
    return (0.5 * x.square().sum(1) + math.log(2.0 * math.pi)).mean()


@pytest.mark.slow
def test_the_benchmark() -> None:
    x, unseen = moons(2048, 0), moons(2048, 1)
    discrete = judged(trained_flow(x, 150, **STEPPED), unseen)
    reference = judged(trained_flow(x, 150, **CONTINUOUS), unseen)
    gaussian = gaussian_nll(unseen)
    assert reference < gaussian - 0.3
    assert abs(discrete / reference - 1.0) < 0.1
    assert abs((gaussian - discrete) / (gaussian - reference) - 1.0) < 0.1


def test_the_command_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    techniques.main(["--scale", "0.004"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[1:5]] == ["spectral training"] * 2 + ["hypersolved Heun", "OT-Flow"]
    assert "at equal NFE" in lines[-3]


def test_state_dict_and_repr() -> None:
    model, other = flow(), OTFlow(2, width=8, layers=3, alpha=(2.0, 10.0, 3.0)).double()
    other.load_state_dict(model.state_dict())
    x = samples(4)
    assert torch.equal(model.log_prob(x), other.log_prob(x))
    assert "dim=2, alpha=(2.0, 10.0, 3.0)" in repr(model)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="dim: expected a whole number"):
        OTFlow(0)
    with pytest.raises(ValueError, match="layers: expected a whole number of at least 2, found 1"):
        OTFlow(2, layers=1)
    with pytest.raises(ValueError, match="alpha: expected three weights"):
        OTFlow(2, alpha=(0.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="alpha: expected three weights"):
        OTFlow(2, alpha=(1.0, 1.0))
    with pytest.raises(ValueError, match="steps: expected"):
        OTFlow(2, steps=0)
    with pytest.raises(TypeError, match="unknown option 'speed'"):
        OTFlow(2, speed=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"x: expected shape \(batch, 2\), found \(3, 4\)"):
        OTFlow(2).log_prob(torch.zeros(3, 4))
    with pytest.raises(TypeError, match="x: expected a tensor, found list"):
        OTFlow(2).log_prob([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n: expected"):
        OTFlow(2).sample(0)

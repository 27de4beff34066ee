"""Spectral training: the Legendre series, the alternating optimisation, and fields as good as with solves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from benchmarks.techniques import Trajectories, solved_field, spectral_field
from seminode.models.spectral import SpectralTrajectory, gauss_legendre, legendre, residual, train_spectral

TS = torch.linspace(1.0, 3.0, 21, dtype=torch.float64)


class Linear(nn.Module):
    """z′ = rate·z·(1 + t)."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(rate, dtype=torch.float64))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        assert t.ndim == 0
        return self.rate * z * (1.0 + t)


def trajectory(degree: int = 6) -> SpectralTrajectory:
    torch.manual_seed(0)
    z = SpectralTrajectory(torch.randn(3, 2, dtype=torch.float64), TS, degree)
    with torch.no_grad():
        z.coefficients.copy_(torch.randn_like(z.coefficients))
    return z


def test_legendre_polynomials_and_their_derivatives() -> None:
    x = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64).requires_grad_()
    values, slopes = legendre(x, 12)
    for n in range(13):
        torch.testing.assert_close(values[:, n], torch.special.legendre_polynomial_p(x.detach(), n))
        if n:
            (grad,) = torch.autograd.grad(values[:, n].sum(), x, retain_graph=True)
            torch.testing.assert_close(slopes[:, n], grad, rtol=1e-10, atol=1e-10)
    assert legendre(x, 1)[0].shape == (9, 2)


@pytest.mark.parametrize("n", [1, 2, 5, 24])
def test_gauss_nodes_integrate_exactly(n: int) -> None:
    nodes, weights = gauss_legendre(n)
    for degree in range(2 * n):
        exact = 2.0 / (degree + 1) if degree % 2 == 0 else 0.0
        assert float((weights * nodes**degree).sum()) == pytest.approx(exact, abs=1e-13)


def test_the_initial_value_is_exact() -> None:
    z = trajectory()
    assert torch.allclose(z(TS[0]), z.y0, rtol=0.0, atol=1e-13)
    assert z(TS).shape == (21, 3, 2)
    assert z(TS.reshape(3, 7)).shape == (3, 7, 3, 2)
    assert [name for name, _ in z.named_parameters()] == ["coefficients"]


def test_the_derivative_agrees_with_difference_quotients() -> None:
    z, h = trajectory(), 1e-6
    inner = TS[1:-1]
    torch.testing.assert_close(z.derivative(inner), (z(inner + h) - z(inner - h)) / (2 * h), rtol=1e-6, atol=1e-6)


def test_backward_in_time() -> None:
    z = SpectralTrajectory(torch.ones(1, dtype=torch.float64), TS.flip(0), 10)
    z.interpolate(TS, torch.exp(TS - 3.0).unsqueeze(1))
    torch.testing.assert_close(z.derivative(TS), z(TS), rtol=1e-6, atol=1e-6)


def test_interpolation_recovers_a_polynomial() -> None:
    z, other = trajectory(), SpectralTrajectory(trajectory().y0, TS, 6)
    other.interpolate(TS, z(TS))
    torch.testing.assert_close(other.coefficients, z.coefficients)
    few = SpectralTrajectory(z.y0, TS, 30)
    few.interpolate(TS, z(TS).detach(), smoothing=1e-9)
    torch.testing.assert_close(few(TS), z(TS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("vectorise", [True, False])
def test_the_residual_of_a_solution_vanishes(vectorise: bool) -> None:
    field = Linear(-0.3)
    y0 = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    solution = sn.solve(field, y0, TS, rtol=1e-10, atol=1e-10).ys.detach()
    z = SpectralTrajectory(y0, TS, 16)
    z.interpolate(TS, solution)
    assert float(residual(field, z, z.nodes(20), vectorise).detach().abs().max()) < 1e-6
    off = trajectory()
    both = [residual(field, off, off.nodes(5), flag) for flag in (True, False)]
    torch.testing.assert_close(*both)


def test_coefficients_and_parameters_have_their_own_learning_rates() -> None:
    """The first step of Adam changes each entry by the learning rate, against the sign of the gradient."""
    field, z = Linear(0.1), trajectory()
    before = z.coefficients.detach().clone()

    def loss(z: SpectralTrajectory) -> Tensor:
        return z(TS).square().mean()

    total = 3.0 * loss(z) + residual(field, z, z.nodes(12)).square().mean()
    (grad,) = torch.autograd.grad(total, z.coefficients)
    (losses,) = train_spectral(field, z, loss, gamma=3.0, steps=1, lr_coefficients=1e-4, lr_field=1e-3)
    torch.testing.assert_close(z.coefficients - before, -1e-4 * grad.sign(), rtol=1e-4, atol=1e-9)
    assert abs(float(field.rate.detach()) - 0.1) == pytest.approx(1e-3, rel=1e-4)
    assert losses.total == pytest.approx(3.0 * losses.loss + losses.residual)
    assert z.coefficients.grad is None
    assert field.rate.grad is None
    assert len(train_spectral(field, z, loss, steps=4, rounds=(2, 3))) == 4


def test_a_known_rate_is_recovered() -> None:
    truth, field = Linear(-0.4), Linear()
    y0 = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    data = sn.solve(truth, y0, TS, rtol=1e-9, atol=1e-9).ys.detach()
    z = SpectralTrajectory(y0, TS, 8)
    z.interpolate(TS, data)
    history = train_spectral(field, z, lambda z: (z(TS) - data).square().mean(), gamma=10.0, steps=150, lr_field=0.05)
    assert history[-1].total < 1e-2 * history[0].total
    assert float(field.rate.detach()) == pytest.approx(-0.4, abs=2e-3)


def test_the_field_is_as_good_as_one_trained_through_solves() -> None:
    """By accurate solves with both fields, the loss is at most 10 % larger and near the level of the noise."""
    problem = Trajectories.drawn(16, 0, end=2.0, times=17, noise=0.1)
    loss = problem.loss(spectral_field(problem, 150, degree=8))
    reference = problem.loss(solved_field(problem, 100, lr=5e-2))
    assert reference < 1.2 * problem.floor
    assert loss < 1.1 * reference


@pytest.mark.slow
def test_the_benchmark() -> None:
    problem, unseen = Trajectories.drawn(64, 0), Trajectories.drawn(64, 10)
    field, reference = spectral_field(problem, 1000), solved_field(problem, 1500)
    assert problem.loss(reference) < 1.1 * problem.floor
    assert problem.loss(field) < 1.1 * problem.loss(reference)
    assert unseen.loss(field) < 1.1 * unseen.loss(reference)


def test_state_dict_and_repr() -> None:
    z, other = trajectory(), SpectralTrajectory(torch.zeros(3, 2, dtype=torch.float64), TS, 6)
    other.load_state_dict(z.state_dict())
    assert torch.equal(other(TS), z(TS))
    assert "shape=(3, 2), t0=1, t1=3, degree=6" in repr(z)


def test_errors_name_the_argument() -> None:
    y0 = torch.zeros(2)
    with pytest.raises(
        TypeError, match=r"y0: expected a tensor of a floating-point or complex dtype, found torch.int64"
    ):
        SpectralTrajectory(torch.zeros(2, dtype=torch.int64), [0.0, 1.0], 3)
    with pytest.raises(ValueError, match="ts: expected finite times whose first and last differ"):
        SpectralTrajectory(y0, [0.0, 0.0], 3)
    with pytest.raises(ValueError, match="degree: expected a whole number"):
        SpectralTrajectory(y0, [0.0, 1.0], 0)
    z = SpectralTrajectory(y0, [0.0, 1.0], 3)
    with pytest.raises(ValueError, match=r"values: expected shape \(4, 2\), found \(4, 3\)"):
        z.interpolate(torch.linspace(0, 1, 4), torch.zeros(4, 3))
    loss = lambda z: z(TS).sum()
    with pytest.raises(TypeError, match="field: expected a module with parameters"):
        train_spectral(nn.Identity(), z, loss)
    with pytest.raises(TypeError, match="trajectory: expected a SpectralTrajectory, found Tensor"):
        train_spectral(Linear(), y0, loss)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma: expected a positive number"):
        train_spectral(Linear(), z, loss, gamma=0.0)
    with pytest.raises(ValueError, match="rounds: expected two counts"):
        train_spectral(Linear(), z, loss, rounds=(1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nodes: expected"):
        train_spectral(Linear(), z, loss, nodes=0)

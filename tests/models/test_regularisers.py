"""Regularisers: total derivatives compared with closed forms, costs and their gradients, and saved evaluations."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from benchmarks import regularisation
from seminode.adjoints import Adjoint
from seminode.models.derivatives import total_derivatives
from seminode.models.neural_ode import NeuralODE
from seminode.models.regularisers import JacobianNorm, KineticEnergy, TotalDerivative, TotalDerivativePreset, rnode
from seminode.models.running import Evaluation, Regulariser, along, integrals_of, noise_for, penalty, start
from seminode.models.traces import Hutchinson

ORDERS = (1, 2, 3, 4)


class Field(nn.Module):
    """A small network of the state and the time that counts its calls."""

    def __init__(self, size: int = 3, width: int = 8, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(size + 1, width), nn.Tanh(), nn.Linear(width, size)).double()
        self.calls = 0

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        self.calls += 1
        return 2.0 * self.net(torch.cat([z, t.expand(*z.shape[:-1], 1)], -1))


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


@pytest.mark.parametrize("order", ORDERS)
def test_derivatives_of_a_linear_system_are_powers_of_its_matrix(order: int) -> None:
    A, z = double(4, 4), double(5, 4, seed=1)
    derivatives = total_derivatives(lambda t, z: z @ A.T, at(0.3), z, order)
    expected = [z @ torch.linalg.matrix_power(A, k).T for k in range(1, order + 1)]
    torch.testing.assert_close(derivatives, tuple(expected), rtol=1e-12, atol=1e-12)


CLOSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Sequence[Tensor]]]] = {
    "time times state": (
        lambda t, z: t * z,
        lambda t, z: (t * z, (1 + t**2) * z, (3 * t + t**3) * z, (3 + 6 * t**2 + t**4) * z),
    ),
    "time alone": (
        lambda t, z: torch.cos(2 * t).expand_as(z),
        lambda t, z: [
            x.expand_as(z) for x in ((2 * t).cos(), -2 * (2 * t).sin(), -4 * (2 * t).cos(), 8 * (2 * t).sin())
        ],
    ),
    "logistic": (
        lambda t, z: z * (1 - z),
        lambda t, z: [
            z * (1 - z) * factor
            for factor in (
                torch.ones_like(z),
                1 - 2 * z,
                1 - 6 * z + 6 * z**2,
                (1 - 2 * z) * (1 - 12 * z + 12 * z**2),
            )
        ],
    ),
    "constant": (lambda t, z: torch.ones_like(z), lambda t, z: [torch.ones_like(z), *[torch.zeros_like(z)] * 3]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms(name: str, order: int) -> None:
    velocity, derivatives = CLOSED[name]
    t, z = at(0.7), double(6, 2)
    expected = tuple(derivatives(t, z)[:order])
    torch.testing.assert_close(total_derivatives(velocity, t, z, order), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(total_derivatives(velocity, t, z, order), expected, rtol=1e-12, atol=1e-12)


def test_derivatives_are_those_of_the_solution() -> None:
    """Compared with the derivatives of the polynomial through nine values of an accurate solution around t."""
    field, z, t, h = Field(), double(4, 3), 0.4, 0.04
    offsets = torch.arange(-4, 5, dtype=torch.float64)
    options: dict[str, Any] = {"solver": "dopri8", "rtol": 1e-13, "atol": 1e-14}
    with torch.no_grad():
        ahead = sn.solve(field, z, [t + h * k for k in range(5)], **options).ys
        back = sn.solve(field, z, [t - h * k for k in range(5)], **options).ys
    values = torch.cat([back.flip(0)[:-1], ahead]).flatten(1)
    coefficients = torch.linalg.solve(torch.linalg.vander(offsets), values).view(9, *z.shape)
    for k, derivative in enumerate(total_derivatives(field, at(t), z, 4), 1):
        torch.testing.assert_close(derivative, coefficients[k] * math.factorial(k) / h**k, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_the_field_is_evaluated_once(order: int) -> None:
    field = Field()
    total_derivatives(field, at(0.0), double(4, 3), order)
    assert field.calls == 1


@pytest.mark.parametrize("order", [2, 3])
def test_total_derivatives_can_be_differentiated(order: int) -> None:
    field, t, z = Field(2, 4), at(0.3).requires_grad_(), double(2, 2).requires_grad_()
    parameters = list(field.parameters())
    torch.autograd.gradcheck(lambda t, z, *_: total_derivatives(field, t, z, order)[-1], (t, z, *parameters))


def test_total_derivatives_under_torch_func() -> None:
    field, z = Field(), double(4, 3)
    last = lambda z: total_derivatives(field, at(0.3), z, 3)[-1]
    torch.testing.assert_close(torch.func.vmap(last)(z), last(z))
    jacobian = torch.func.jacrev(last)(z[0])
    torch.testing.assert_close(torch.func.jvp(last, (z[0],), (z[1],))[1], jacobian @ z[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, as Inductor is loaded
@pytest.mark.parametrize("order", [2, 3])
def test_a_compiled_vjp_agrees(order: int) -> None:
    net = Field().net

    def velocity(t: Tensor, z: Tensor) -> Tensor:
        return net(torch.cat([z, t.expand(len(z), 1)], -1))

    def vjp_of_last(t: Tensor, z: Tensor) -> Tensor:
        last = lambda z: total_derivatives(velocity, t, z, order)[-1]
        _, vjp_fn, *_ = torch.func.vjp(last, z)
        return vjp_fn(torch.ones_like(z))[0]

    t, z = at(0.3), double(4, 3)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(vjp_of_last, fullgraph=True)(t, z), vjp_of_last(t, z))


def test_rates_follow_their_equations() -> None:
    field, t, z, v = Field(), at(0.2), double(5, 3), double(5, 3, seed=1)
    here = Evaluation(field, t, z, v)
    f = field(t, z)
    J = torch.stack([torch.func.jacrev(lambda x: field(t, x))(x) for x in z])
    torch.testing.assert_close(KineticEnergy().rate(here), f.square().mean(1) / 2)
    torch.testing.assert_close(JacobianNorm().rate(here), torch.einsum("bi,bij->bj", v, J).square().mean(1))
    torch.testing.assert_close(TotalDerivative(1, 1.0).rate(here), f.square().mean(1))
    df_dt = torch.func.jacfwd(lambda t: field(t, z))(t)
    second = df_dt + torch.einsum("bij,bj->bi", J, f)
    torch.testing.assert_close(TotalDerivative(2, 1.0).rate(here), second.square().mean(1))


def test_images_have_one_cost_per_sample() -> None:
    z = double(3, 2, 4, 4)
    here = Evaluation(lambda t, z: t * z, at(2.0), z, torch.ones_like(z))
    squares = z.square().mean((1, 2, 3))
    torch.testing.assert_close(KineticEnergy().rate(here), 2.0 * squares)
    torch.testing.assert_close(JacobianNorm().rate(here), torch.full_like(squares, 4.0))
    torch.testing.assert_close(TotalDerivative(3, 1.0).rate(here), 14.0**2 * squares)


def test_the_jacobian_norm_is_unbiased() -> None:
    A, draws = double(4, 4), 100_000
    z = torch.zeros(draws, 4, dtype=torch.float64)
    rates = JacobianNorm().rate(Evaluation(lambda t, z: z @ A.T, at(0.0), z, double(draws, 4, seed=2)))
    error = 4.0 * float(rates.std()) / math.sqrt(draws)
    assert float(rates.mean()) == pytest.approx(float(A.square().sum()) / 4, abs=error)


def test_costs_of_exponential_decay() -> None:
    regularisers = (*rnode(), TotalDerivative(2, 1.0), TotalDerivative(3, 1.0))
    z0 = double(4, 1)
    model = NeuralODE(lambda t, z: -z, regularisers=regularisers, rtol=1e-10, atol=1e-10)
    torch.manual_seed(0)
    _, costs = model(z0, costs=True)
    torch.manual_seed(0)
    v = torch.randn_like(z0)
    integral = (z0.square() * (1 - math.exp(-2)) / 2)[:, 0]  # ∫ z² dt
    expected = {"kinetic": integral / 2, "jacobian": v[:, 0].square(), "derivative2": integral, "derivative3": integral}
    torch.testing.assert_close(costs, expected, rtol=1e-8, atol=1e-10)
    total = 0.01 * (integral.mean() / 2 + v.square().mean()) + 2 * integral.mean()
    torch.testing.assert_close(penalty(regularisers, costs), total, rtol=1e-8, atol=0.0)


@pytest.mark.parametrize("regulariser", [*rnode(), TotalDerivative(2, 1.0), TotalDerivative(3, 1.0)], ids=repr)
def test_error_control_ignores_costs(regulariser: Regulariser) -> None:
    model = NeuralODE(Field(), regularisers=[regulariser], rtol=1e-5, atol=1e-5)
    z0 = 3.0 * double(4, 3)
    plain, nfe = model(z0), model.nfe
    outputs, _ = model(z0, costs=True)
    assert model.nfe == nfe
    torch.testing.assert_close(outputs, plain)


def test_both_costs_of_rnode_share_one_evaluation_with_the_trace() -> None:
    field, z, running = Field(), double(4, 3), (Hutchinson(), *rnode())
    along(field, running, at(0.0), start(z, running), *noise_for(running, z))
    assert field.calls == 1


SETS = {
    "rnode": rnode(0.3, 0.2),
    "taynode 2": (TotalDerivative(2, 0.1),),
    "taynode 3": (TotalDerivative(3, 0.01),),
    "all": (*rnode(0.3, 0.2), TotalDerivative(2, 0.1)),
}


def regularised_loss(field: nn.Module, z0: Tensor, regularisers: Sequence[Regulariser], **options: Any) -> Tensor:
    torch.manual_seed(0)
    noise = noise_for(regularisers, z0)
    y0, integrals = start(z0, regularisers), integrals_of(regularisers)

    def velocity(t: Tensor, y: Any, *noise: Tensor) -> tuple[Tensor, ...]:
        return along(field, regularisers, t, y, *noise)

    if "controller" not in options:
        options["norm"] = sn.norms.Without(integrals)
    zs, *costs = sn.solve(velocity, y0, [0.0, 1.0], args=noise, **options).ys
    named = {one.name: cost[-1] for one, cost in zip(regularisers, costs, strict=True)}
    return zs[-1].square().mean() + penalty(regularisers, named)


def flat_gradient(loss: Tensor, field: nn.Module, z0: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*field.parameters(), z0])])


@pytest.mark.parametrize("name", SETS)
def test_gradients_of_a_regularised_loss(name: str) -> None:
    regularisers, field, z0 = SETS[name], Field(), double(4, 3).requires_grad_()
    fixed: dict[str, Any] = {"controller": sn.FixedStep(0.1)}
    direct = flat_gradient(regularised_loss(field, z0, regularisers, adjoint=sn.Direct(), **fixed), field, z0)
    replay = flat_gradient(regularised_loss(field, z0, regularisers, adjoint=sn.Replay(), **fixed), field, z0)
    torch.testing.assert_close(replay, direct, rtol=1e-11, atol=1e-13)

    tensors, h = [*field.parameters(), z0], 1e-5
    direction = [double(*x.shape, seed=i) for i, x in enumerate(tensors)]
    values = []
    with torch.no_grad():
        for sign in (1.0, -2.0):  # from x to x + h, then to x − h
            for x, d in zip(tensors, direction, strict=True):
                x.add_(d, alpha=sign * h)
            values.append(float(regularised_loss(field, z0, regularisers, **fixed)))
    slope = float(direct @ torch.cat([d.flatten() for d in direction]))
    assert (values[0] - values[1]) / (2 * h) == pytest.approx(slope, rel=1e-7)


ADJOINTS = (sn.Direct(), sn.Checkpointed(2), sn.Backsolve(), sn.Interpolating(), sn.Quadrature(), sn.Reversible())


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda adjoint: type(adjoint).__name__)
def test_every_adjoint_differentiates_costs(adjoint: Adjoint) -> None:
    regularisers, field, z0 = SETS["all"], Field(), double(4, 3).requires_grad_()
    accurate: dict[str, Any] = {"solver": "dopri8", "rtol": 1e-11, "atol": 1e-12}
    expected = flat_gradient(regularised_loss(field, z0, regularisers, **accurate), field, z0)
    solver = sn.ReversibleRK("dopri5") if isinstance(adjoint, sn.Reversible) else "dopri5"
    loss = regularised_loss(field, z0, regularisers, adjoint=adjoint, solver=solver, rtol=1e-7, atol=1e-9)
    assert float((flat_gradient(loss, field, z0) - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("name", TotalDerivative.PRESETS)
def test_presets(name: TotalDerivativePreset) -> None:
    cost = TotalDerivative.preset(name)
    assert (cost.order, cost.weight) == TotalDerivative.PRESETS[name]
    assert cost == TotalDerivative(cost.order, cost.weight)
    assert pickle.loads(pickle.dumps(cost)) == cost
    assert cost.name == f"derivative{cost.order}"


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: KineticEnergy(-1.0), ValueError, "weight: expected a finite number of at least 0, found -1"),
        (lambda: rnode(jacobian=math.inf), ValueError, "weight: expected a finite number of at least 0, found inf"),
        (lambda: TotalDerivative(0, 1.0), ValueError, "order: expected a whole number of at least 1, found 0"),
        (lambda: TotalDerivative(2, "1"), TypeError, "weight: expected a number, found str"),  # type: ignore[arg-type]
        (
            lambda: TotalDerivative.preset("cifar"),  # type: ignore[arg-type]
            ValueError,
            "name: expected one of mnist-classification, latent-ode",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_regularised_training_saves_evaluations() -> None:
    methods = ("none", "RNODE", "TayNODE, K = 2")
    plain, *regularised = (regularisation.run(method, 0.03, seeds=[0], iterations=60) for method in methods)
    assert plain.seeds[0].nfe >= 60
    for one in regularised:
        assert one.reduction(plain) >= 0.25, (plain, one)


def test_the_largest_weight_that_is_good_enough_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {("none", 0.0): (0.9, 1.1), ("A", 3.0): (1.5, 1.5), ("A", 2.0): (1.1, 1.1), ("B", 5.0): (2.0, 2.0)}

    def measured(method: str, weight: float, *_: Any) -> regularisation.Result:
        nfe = 100 if method == "none" else 60
        seeds = tuple(regularisation.Measurement(nfe, nfe, loss, loss, 1.0) for loss in losses[method, weight])
        return regularisation.Result(method, weight, seeds)

    nothing = lambda weight: ()
    monkeypatch.setattr(regularisation, "METHODS", {"A": (nothing, (3.0, 2.0, 1.0)), "B": (nothing, (5.0,))})
    monkeypatch.setattr(regularisation, "run", measured)
    baseline, tried = regularisation.study()
    assert [(one.method, one.weight) for one in tried] == [("A", 3.0), ("A", 2.0), ("B", 5.0)]
    picked = regularisation.chosen(baseline, tried)
    assert {name: one.weight for name, one in picked.items()} == {"A": 2.0}
    assert picked["A"].reduction(baseline) == pytest.approx(0.4)
    report = regularisation.report(baseline, tried)
    assert "B: no λ of the grid (5.0,) keeps the loss" in report
    row = next(line for line in report.splitlines() if line.startswith("A "))
    assert row.split()[:6] == ["A", "2", "60", "60-60", "40", "%"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_method_saves_a_quarter_of_the_evaluations_at_no_loss() -> None:
    baseline, tried = regularisation.study()
    assert min(one.nfe for one in baseline.seeds) >= 60
    picked = regularisation.chosen(baseline, tried)
    assert set(picked) == set(regularisation.METHODS)
    for one in picked.values():
        assert one.reduction(baseline) >= 0.25, one
        assert one.as_good_as(baseline, "test"), one

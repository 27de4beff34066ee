"""Continuous normalising flows: densities compared with exact changes of variables, fields with direct formulas."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import seminode as sn
from examples.flow import SHAPES, draw, make_flow, moons, train, unroll
from seminode.models.cnf import (
    CNF,
    ConcatConv2d,
    ConcatLinear,
    ConcatMLP,
    ConvField,
    HollowMLP,
    standard_normal_log_prob,
)
from seminode.models.running import Evaluation, Noise, Regulariser, along, penalty, per_sample_mean, start
from seminode.models.traces import ExactTrace, Hutchinson

TIGHT: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9}
TRACES = ("exact", "hutchinson")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def points(n: int = 5, d: int = 3) -> Tensor:
    return torch.randn(n, d, dtype=torch.float64)


def small_flow(d: int = 3, **options: Any) -> CNF:
    """A flow whose weights are large enough that it is far from the identity."""
    field = ConcatMLP(d, (12, 12)).double()
    with torch.no_grad():
        for parameter in field.parameters():
            parameter.mul_(1.6)
    options = {"trace": "exact", **TIGHT, **options}
    return CNF(field, **options)


def exact_delta(flow: CNF, x: Tensor) -> Tensor:
    """−log|det ∂z/∂x| of each sample, from the Jacobian of the whole solve."""
    x = x.clone().requires_grad_()
    z = flow.transform(x)[0].flatten(1)
    rows = [torch.autograd.grad(z[:, i].sum(), x, retain_graph=True)[0].flatten(1) for i in range(z.shape[1])]
    return -torch.linalg.slogdet(torch.stack(rows, 1))[1]


class Linear(nn.Module):
    """z′ = A z."""

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return z @ self.matrix.T


# The density.


def test_log_probability_equals_the_exact_change_of_variables():
    flow, x = small_flow(adjoint=sn.Direct()), points()
    z, delta = flow.transform(x)
    exact = exact_delta(flow, x)
    assert exact.abs().max() > 0.3
    torch.testing.assert_close(delta, exact, rtol=0, atol=1e-6)
    normal = torch.distributions.MultivariateNormal(z.new_zeros(3), torch.eye(3, dtype=z.dtype))
    torch.testing.assert_close(flow.log_prob(x), normal.log_prob(z) - exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(flow(x), flow.log_prob(x))


def test_a_flow_on_images_too():
    field = ConvField(2, 4, zero_init=False).double()
    flow = CNF(field, trace="exact", adjoint=sn.Direct(), **TIGHT)
    x = torch.randn(2, 2, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(flow.transform(x)[1], exact_delta(flow, x), rtol=0, atol=1e-6)


def test_a_linear_flow_in_closed_form():
    matrix = 0.5 * points(3, 3)
    flow, x = CNF(Linear(matrix), trace="exact", t1=1.5, **TIGHT), points()
    z, delta = flow.transform(x)
    torch.testing.assert_close(z, x @ torch.linalg.matrix_exp(1.5 * matrix).T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(delta, -1.5 * matrix.trace().expand(5), rtol=1e-6, atol=1e-6)


def test_inverse_undoes_the_flow():
    flow, x = small_flow(), points()
    z, _ = flow.transform(x)
    assert (z - x).abs().max() > 0.3
    torch.testing.assert_close(flow.inverse(z), x, rtol=0, atol=1e-6)
    loose = small_flow(rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loose.inverse(loose.transform(x)[0]), x, rtol=0, atol=1e-3)


def test_delta_starts_at_the_given_value():
    flow, x, before = small_flow(), points(), torch.arange(5.0).double()
    torch.testing.assert_close(flow.transform(x, before)[1], before + flow.transform(x)[1])


def test_samples_with_their_log_probability():
    flow = small_flow()
    x, log_prob = flow.sample(7, with_log_prob=True)
    assert x.shape == (7, 3)
    assert not log_prob.requires_grad
    torch.testing.assert_close(log_prob, flow.log_prob(x).detach(), rtol=0, atol=1e-6)


def test_samples_have_the_moments_of_the_flow():
    matrix = torch.tensor([[0.4, 0.3], [-0.2, 0.1]], dtype=torch.float64)
    x = CNF(Linear(matrix), trace="exact").sample((20_000, 2))
    root = torch.linalg.matrix_exp(-matrix)
    torch.testing.assert_close(x.T.cov(), root @ root.T, rtol=0, atol=0.04)


def test_a_trained_density_integrates_to_one():
    flow = CNF(ConcatMLP(2, (24, 24)).double(), trace="exact", rtol=1e-3, atol=1e-4, adjoint=sn.Direct())
    optimiser = torch.optim.Adam(flow.parameters(), 0.02)
    losses = []
    for _ in range(50):
        loss = -flow.log_prob(moons(100).double()).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    side = torch.linspace(-5, 5, 101, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).view(-1, 2)
    flow.options.update(rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert float(flow.log_prob(grid).exp().sum()) * 0.1**2 == pytest.approx(1.0, abs=0.01)


def test_another_base_density():
    base = torch.distributions.Independent(torch.distributions.Laplace(points(1, 2)[0], torch.ones(2).double()), 1)
    flow, x = small_flow(2, base=base), points(4, 2)
    z, delta = flow.transform(x)
    torch.testing.assert_close(flow.log_prob(x), base.log_prob(z) - delta)
    y, log_prob = flow.sample(6, with_log_prob=True)
    torch.testing.assert_close(log_prob, flow.log_prob(y).detach(), rtol=0, atol=1e-6)


# The traces.


def test_the_exact_trace_is_the_sum_of_the_diagonal():
    field, z, t = ConcatMLP(3, (8,)).double(), points(), torch.tensor(0.4).double()
    jacobians = torch.func.vmap(torch.func.jacrev(lambda z: field(t, z[None])[0]))(z)
    expected = -jacobians.diagonal(dim1=1, dim2=2).sum(1)
    for trace in (ExactTrace(), ExactTrace(chunk=1), ExactTrace(chunk=2)):
        torch.testing.assert_close(trace.rate(Evaluation(field, t, z)), expected)


@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
def test_hutchinson_is_unbiased(noise):
    exact, x = small_flow(rtol=1e-5, atol=1e-7), points(1)
    estimate = CNF(exact.field, noise=noise, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        deltas = estimate.transform(x.expand(4000, 3))[1]
        error = deltas.mean() - exact.transform(x)[1][0]
    standard_error = deltas.std() / math.sqrt(len(deltas))
    assert standard_error > 0
    assert error.abs() < 3 * standard_error


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_the_conditioner_of_a_hollow_field_does_not_depend_on_its_own_coordinate(dim):
    field, z, t = HollowMLP(dim, (16, 16)).double(), points(1, dim)[0], torch.tensor(0.4).double()
    slopes = torch.func.jacrev(lambda z: field.conditioner(t, z[None])[0])(z).abs().sum(1)
    assert torch.equal(slopes > 0, ~torch.eye(dim).bool())


def test_the_hollow_trace_is_exact():
    field, x = HollowMLP(4, (16, 16)).double(), points(5, 4)
    results = []
    for trace in ("exact", "hollow"):
        flow = CNF(field, trace=trace, **TIGHT)
        log_prob = flow.log_prob(x)
        grads = torch.autograd.grad(log_prob.mean(), list(field.parameters()))
        results.append(torch.cat([log_prob, *(grad.flatten() for grad in grads)]))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("trace", ["exact", "hutchinson", "hollow"])
def test_an_evaluation_calls_the_field_once(trace):
    field, calls = HollowMLP(2, (4,)).double(), []
    field.hidden.register_forward_hook(lambda *_: calls.append(1))
    flow = CNF(field, trace=trace)
    flow.log_prob(points(3, 2).detach()).detach()
    assert len(calls) == flow.nfe


def test_variances_of_the_estimates():
    matrix = points(4, 4)
    symmetric = (matrix + matrix.T) / 2
    diagonal = symmetric.diagonal()
    expected: dict[Noise, Tensor] = {"gaussian": 2 * symmetric.square().sum()}
    expected["rademacher"] = expected["gaussian"] - 2 * diagonal.square().sum()
    for noise, variance in expected.items():
        flow = CNF(Linear(matrix), noise=noise, solver="euler", controller=sn.FixedStep(1.0))
        with torch.no_grad():
            sample_variance = flow.transform(points(1, 4).expand(20_000, 4))[1].var()
        assert float(sample_variance) == pytest.approx(float(variance), rel=0.1)


def test_noise_is_drawn_once_per_solve_also_in_eval_mode():
    flow, x = small_flow(trace="hutchinson").eval(), points()
    first, second = flow.log_prob(x), flow.log_prob(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    again = flow.log_prob(x)
    torch.manual_seed(3)
    noise = torch.randn_like(x)
    calls = []

    def velocity(t: Tensor, z: Tensor) -> Tensor:
        calls.append(t)
        return flow.field(t, z)

    def field(t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return along(velocity, (flow.trace,), t, state, noise)

    ys = sn.solve(field, start(x, (flow.trace,)), (0.0, 1.0), norm=sn.norms.Without((False, True)), **TIGHT).ys
    torch.testing.assert_close(again, standard_normal_log_prob(ys[0][-1]) - ys[1][-1])
    assert len(calls) == flow.nfe  # one call computes f and its VJP


@pytest.mark.parametrize("trace", TRACES)
def test_gradients_agree(trace):
    flow, x = small_flow(2, trace=trace), points(4, 2)

    def gradient(adjoint: Any) -> Tensor:
        flow.options["adjoint"] = adjoint
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        grads = torch.autograd.grad(-flow.log_prob(leaf).mean(), [leaf, *flow.parameters()])
        return torch.cat([grad.flatten() for grad in grads])

    direct = gradient(sn.Direct())
    assert direct.norm() > 0.1
    torch.testing.assert_close(gradient(sn.Replay()), direct, rtol=1e-9, atol=1e-11)
    for adjoint in (sn.Backsolve(), sn.Quadrature(), sn.Interpolating()):
        torch.testing.assert_close(gradient(adjoint), direct, rtol=1e-5, atol=1e-6)


def test_gradient_of_the_density_against_difference_quotients():
    flow, x, direction = small_flow(2), points(4, 2), points(4, 2)
    (grad,) = torch.autograd.grad(flow.log_prob(x.requires_grad_()).sum(), x)
    with torch.no_grad():
        quotient = (flow.log_prob(x + 1e-3 * direction) - flow.log_prob(x - 1e-3 * direction)).sum() / 2e-3
    torch.testing.assert_close((grad * direction).sum(), quotient, rtol=1e-4, atol=1e-4)


# Error control.


class Rough(nn.Module):
    """A small field with a large divergence: the divergence is of order one and varies much faster than z."""

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return 0.01 * torch.sin(100 * z + 20 * t)


@pytest.mark.parametrize("trace", TRACES)
def test_error_control_ignores_the_log_probability_by_default(trace):
    flow, x = CNF(Rough(), trace=trace, rtol=1e-4, atol=1e-4), points()
    flow.log_prob(x)
    alone = sn.solve(Rough(), x, (0.0, 1.0), rtol=1e-4, atol=1e-4).stats
    assert (flow.nfe, flow.stats[0].accepted, flow.stats[0].rejected) == (alone.nfe, alone.accepted, alone.rejected)

    flow.options["norm"] = "mixed"
    flow.log_prob(x)
    assert flow.nfe > 1.5 * alone.nfe


def test_a_mixed_norm_makes_the_log_probability_accurate():
    x = points()
    accurate = CNF(Rough(), trace="exact", **TIGHT).log_prob(x)
    errors = [
        (CNF(Rough(), trace="exact", rtol=1e-4, atol=1e-4, norm=norm).log_prob(x) - accurate).abs().max()
        for norm in (None, "mixed")
    ]
    assert errors[1] < 1e-3 < errors[0]


def test_fixed_steps():
    flow, x = small_flow(rtol=None, atol=None, solver="rk4", controller=sn.FixedStep(0.1)), points()
    torch.testing.assert_close(flow.log_prob(x), small_flow_like(flow).log_prob(x), rtol=0, atol=1e-4)
    assert flow.nfe == 40


def small_flow_like(flow: CNF) -> CNF:
    return CNF(flow.field, trace=flow.trace, **TIGHT)


# Regularisers.


class Energy(Regulariser):
    name, weight = "energy", 0.5

    def rate(self, at: Evaluation) -> Tensor:
        return per_sample_mean(at.f.square())


class Stretch(Regulariser):
    name, weight, needs_noise = "stretch", 2.0, True

    def rate(self, at: Evaluation) -> Tensor:
        return per_sample_mean(at.vjp.square())


@pytest.mark.parametrize("trace", TRACES)
def test_costs_are_integrated_along_the_solution(trace):
    rates = torch.tensor([0.3, -0.5], dtype=torch.float64)
    costs = (Energy(), Stretch())
    flow = CNF(Linear(rates.diag()), trace=trace, noise="rademacher", regularisers=costs, **TIGHT)
    x = points(4, 2)
    log_prob, integrals = flow.log_prob(x, costs=True)
    # z = exp(a t) x, so that ∫ (a z)² dt = a (exp(2a) − 1)/2 x²; and vᵀA = ±a.
    energy = (rates * torch.expm1(2 * rates) / 2 * x.square()).mean(1)
    torch.testing.assert_close(integrals["energy"], energy, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(integrals["stretch"], rates.square().mean().expand(4), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(log_prob, flow.log_prob(x))
    total = penalty(flow.regularisers, integrals)
    torch.testing.assert_close(total, 0.5 * energy.mean() + 2.0 * rates.square().mean())
    torch.testing.assert_close(flow(x, costs=True)[1]["energy"], integrals["energy"])


# Fields.


def test_concat_layers_are_layers_of_a_concatenation():
    t = torch.tensor(0.7).double()
    linear, z = ConcatLinear(3, 4).double(), points()
    with_time = torch.cat([t.expand(5, 1), z], 1)
    torch.testing.assert_close(linear(t, z), with_time @ linear.linear.weight.T + linear.linear.bias)

    conv, image = ConcatConv2d(2, 3).double(), torch.randn(2, 2, 4, 5, dtype=torch.float64)
    bias = conv.conv.bias
    assert bias is not None
    padded = functional.pad(torch.cat([t.expand(2, 1, 4, 5), image], 1), (1, 1, 1, 1))
    expected = torch.empty(2, 3, 4, 5, dtype=torch.float64)
    for i in range(4):
        for j in range(5):
            patch = padded[:, None, :, i : i + 3, j : j + 3]
            expected[:, :, i, j] = (patch * conv.conv.weight).sum((2, 3, 4)) + bias
    torch.testing.assert_close(conv(t, image), expected)


def test_conv_field_is_four_convolutions_with_softplus_between():
    field = ConvField(2, 5, zero_init=False).double()
    t, image = torch.tensor(0.7).double(), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    z = image
    for i, layer in enumerate(field.layers):
        assert isinstance(layer, ConcatConv2d)
        z = functional.conv2d(torch.cat([t.expand(2, 1, 4, 4), z], 1), layer.conv.weight, layer.conv.bias, padding=1)
        z = functional.softplus(z) if i < 3 else z
    assert len(field.layers) == 4
    torch.testing.assert_close(field(t, image), z)


@pytest.mark.parametrize(
    ("field", "shape"), [(ConvField(2, 5), (3, 2, 4, 4)), (ConcatMLP(2, (5,), zero_init=True), (3, 2))], ids=repr
)
def test_zero_init_starts_as_a_shift(field, shape):
    a, b = (field(torch.tensor(t), torch.randn(shape)) for t in (0.0, 1.0))
    torch.testing.assert_close(a, b)
    assert a.abs().max() > 0  # the bias keeps its initial value


def test_activations_of_a_perceptron():
    field, z, t = ConcatMLP(2, (4,), activation="softplus"), torch.randn(3, 2), torch.tensor(0.1)
    first, last = field.layers
    torch.testing.assert_close(field(t, z), last(t, functional.softplus(first(t, z))))


# Behaviour as a module.


def test_state_dict_round_trip():
    flow, other, x = small_flow(), small_flow(), points()
    file = io.BytesIO()
    torch.save(flow.state_dict(), file)
    file.seek(0)
    assert not torch.equal(flow.log_prob(x), other.log_prob(x))
    other.load_state_dict(torch.load(file))
    torch.testing.assert_close(flow.log_prob(x), other.log_prob(x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(flow).log_prob(x), flow.log_prob(x), rtol=0, atol=0)


@pytest.mark.parametrize("trace", TRACES)
def test_single_precision_without_gradients(trace):
    flow, x = CNF(ConcatMLP(2, (8,)), trace=trace), torch.randn(3, 2)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            log_prob = flow.log_prob(x)
        assert log_prob.dtype == torch.float32
        assert not log_prob.requires_grad


def test_any_callable_is_a_field():
    flow = CNF(lambda t, z: -z, trace="exact", **TIGHT)
    x = points()
    torch.testing.assert_close(flow.log_prob(x), standard_normal_log_prob(x / math.e) - 3.0)


def test_repr():
    text = repr(CNF(ConcatMLP(2, (4,)), noise="rademacher", t1=2.0, rtol=1e-3))
    assert "trace=Hutchinson('rademacher'), t1=2.0, rtol=0.001" in text
    assert "activation='tanh'" in text


ERRORS: dict[str, tuple[Any, str]] = {
    "t1 = 0": (lambda: small_flow(t1=0.0), r"t1: expected a number above 0, found 0"),
    "t1 < 0": (lambda: small_flow(t1=-1.0), r"t1: expected a finite number of at least 0, found -1.0"),
    "trace": (
        lambda: small_flow(trace="cheap"),
        r"trace: expected 'hutchinson', 'exact', 'hollow' or a Trace, found 'cheap'",
    ),
    "noise": (
        lambda: small_flow(trace="hutchinson", noise="cauchy"),
        r"noise: expected 'gaussian' or 'rademacher', found 'cauchy'",
    ),
    "names": (lambda: small_flow(regularisers=(Energy(), Energy())), r"regularisers: .* found .*'energy', 'energy'"),
    "no batch": (lambda: small_flow().log_prob(torch.zeros(3)), r"x: expected shape \(batch, ...\), found \(3,\)"),
    "width": (lambda: small_flow().log_prob(points(4, 2)), r"z: expected shape \(batch, 3\), found \(4, 2\)"),
    "delta": (
        lambda: small_flow().transform(points(), torch.zeros(4).double()),
        r"delta: expected shape \(5,\), found \(4,\)",
    ),
    "channels": (
        lambda: CNF(ConvField(3, 4)).log_prob(torch.zeros(2, 1, 4, 4)),
        r"z: expected shape \(batch, 3, height, width\), found \(2, 1, 4, 4\)",
    ),
    "base": (
        lambda: small_flow(base=torch.distributions.Normal(0.0, 1.0)).log_prob(points()),
        r"base: expected one log-probability per sample, shape \(5,\), found \(5, 3\)",
    ),
    "sample": (
        lambda: CNF(ConvField(1, 4)).sample(3),
        r"shape: expected \(n, ...\), the shape of all samples, found 3",
    ),
    "activation": (
        lambda: ConcatMLP(2, (4,), activation="relu"),  # type: ignore[arg-type]
        r"activation: expected 'tanh' or 'softplus'",
    ),
    "chunk": (lambda: ExactTrace(chunk=0), r"chunk: expected a whole number of at least 1, found 0"),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_types_are_checked():
    with pytest.raises(TypeError, match="field: expected a callable"):
        CNF("tanh")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x: expected a tensor, found list"):
        small_flow().log_prob([1.0])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"x: expected a floating-point dtype, found torch.int64"):
        small_flow().log_prob(torch.zeros(2, 3).long())
    with pytest.raises(TypeError, match=r"trace: 'hollow' expects a field with .* such as HollowMLP, found ConcatMLP"):
        small_flow(trace="hollow")
    with pytest.raises(TypeError, match="CNF: unknown option 'rtoll'"):
        small_flow(rtoll=1.0)
    with pytest.raises(TypeError, match="shape: expected a number of samples"):
        small_flow(base=torch.distributions.Independent(torch.distributions.Normal(points(), 1.0), 1)).sample((3, 2))


# The example.


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_the_example_fit_into_its_picture(name):
    x = SHAPES[name](1000)
    assert x.shape == (1000, 2)
    assert (x.abs() < 2.8).float().mean() > 0.99


def test_the_example_trains_and_draws(tmp_path: Path, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    flow = make_flow()
    train(flow, moons, 2)
    assert "iteration" in capsys.readouterr().out
    unrolled = unroll(flow, slices=2, points=50, grid=20)
    assert unrolled.points.shape == (2, 50, 2)
    assert unrolled.densities.shape == (2, 20, 20)
    draw(unrolled, tmp_path / "flow.png")
    assert (tmp_path / "flow.png").stat().st_size > 5000


def test_hutchinson_is_the_default():
    assert isinstance(CNF(ConcatMLP(2, (4,))).trace, Hutchinson)

"""Flow matching: paths against their derivatives, losses against closed forms, fields with the known minimiser."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import flow_matching as example
from seminode.models import (
    CNF,
    ConcatConv2d,
    ConcatLinear,
    ConcatMLP,
    ConvField,
    HollowMLP,
    OptimalTransportPath,
    ProbabilityPath,
    TrigonometricPath,
    VariancePreservingPath,
    flow_matching_loss,
    flow_sample,
    minibatch_coupling,
    sampling_preset,
)

PATHS = [OptimalTransportPath(), OptimalTransportPath(0.1), VariancePreservingPath(), TrigonometricPath()]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_velocities_are_derivatives_of_the_path(path: ProbabilityPath) -> None:
    x, noise, t = normal(5, 2, 3), normal(5, 2, 3), torch.linspace(0.05, 0.9, 5, dtype=torch.float64)
    step = 1e-6
    after, before = (path.at(t + shift, x, noise)[0] for shift in (step, -step))
    torch.testing.assert_close(path.at(t, x, noise)[1], (after - before) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_paths_lead_from_data_to_noise(path: ProbabilityPath) -> None:
    ends = torch.tensor([path.first, 1.0], dtype=torch.float64)
    alpha, sigma, _, _ = path.coefficients(ends)
    assert alpha.tolist() == pytest.approx([1.0, 0.0], abs=7e-3)
    assert sigma.tolist() == pytest.approx([getattr(path, "sigma_min", 0.0), 1.0], abs=2e-3)


@pytest.mark.parametrize("batched", [False, True])
def test_the_loss_is_the_mean_squared_difference_of_velocities(batched: bool) -> None:
    x, noise, t = normal(6, 2), normal(6, 2), torch.rand(6, dtype=torch.float64)
    field = ConcatMLP(2, (8,)).double()
    place = torch.stack([(1 - t[i]) * x[i] + t[i] * noise[i] for i in range(6)])
    values = torch.stack([field(t[i], place[i : i + 1])[0] for i in range(6)])
    expected = (values - (noise - x)).square().mean()
    loss = flow_matching_loss(field, x, noise, t=t, batched=batched)
    torch.testing.assert_close(loss, expected)
    actual = torch.autograd.grad(loss, list(field.parameters()))
    torch.testing.assert_close(actual, torch.autograd.grad(expected, list(field.parameters())))


def gaussian_field(scale: float) -> Any:
    """The minimiser for data N(0, scale²) and the straight path: E[ε − x | x(t)] = x(t) (t − scale²(1 − t))/var(t)."""

    def field(t: Tensor, x: Tensor) -> Tensor:
        variance = (1 - t) ** 2 * scale**2 + t**2
        return x * (t - scale**2 * (1 - t)) / variance

    return field


def test_the_minimiser_for_gaussian_data_has_the_exact_likelihood_and_samples() -> None:
    scale, field = 0.4, gaussian_field(0.4)
    x = scale * normal(50, 2)
    flow = CNF(field, trace="exact", rtol=1e-9, atol=1e-9)
    exact = torch.distributions.Normal(0.0, scale).log_prob(x).sum(1)
    torch.testing.assert_close(flow.log_prob(x), exact, rtol=1e-6, atol=1e-6)
    noise = normal(50, 2)
    torch.testing.assert_close(flow_sample(field, noise, preset="accurate"), scale * noise, rtol=1e-3, atol=1e-3)
    errors = [float((flow_sample(field, noise, steps=n) - scale * noise).abs().max()) for n in (20, 40)]
    assert errors[1] < errors[0] / 3 < 1e-3  # a method of order 2


def test_the_minimiser_has_a_smaller_loss_than_its_neighbours() -> None:
    x, noise = 0.4 * normal(20_000, 1), normal(20_000, 1)
    t = torch.rand(20_000, dtype=torch.float64)

    def loss(scale: float, factor: float) -> float:
        field = gaussian_field(scale)
        return float(flow_matching_loss(lambda t, z: factor * field(t, z), x, noise, t=t))

    best = loss(0.4, 1.0)
    assert best < min(loss(0.4, 0.9), loss(0.4, 1.1), loss(0.3, 1.0), loss(0.5, 1.0))


def test_a_linear_field_is_learned() -> None:
    """Of data at one point c, the velocity at x(t) is (x − c)/t; times t it is linear, and least squares finds c."""

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(torch.zeros(2))

        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return (x - self.c) / t

    field, target = Field(), torch.tensor([[1.0, -2.0]])
    optimiser = torch.optim.Adam(field.parameters(), lr=0.1)
    for _ in range(150):
        optimiser.zero_grad()
        flow_matching_loss(field, target.expand(32, 2), t=torch.rand(32).clamp(min=0.3)).backward()
        optimiser.step()
    torch.testing.assert_close(field.c.detach(), target[0], rtol=0.0, atol=1e-2)


def test_default_times_are_stratified() -> None:
    seen: list[Tensor] = []

    def field(t: Tensor, x: Tensor) -> Tensor:
        seen.append(t)
        return x

    flow_matching_loss(field, normal(64, 2), batched=True)
    flow_matching_loss(field, normal(64, 2), path="vp", batched=True)
    for t in seen:
        assert sorted((t * 64).floor().long().tolist()) == pytest.approx(list(range(64)), abs=1)
    assert float(seen[1].min()) >= 1e-5


def test_minibatch_coupling_is_the_best_permutation() -> None:
    pytest.importorskip("scipy")
    x, noise = normal(5, 2), normal(5, 2)

    def cost(order: Any) -> float:
        return float((x - noise[list(order)]).square().sum())

    best = min(itertools.permutations(range(5)), key=cost)
    assert torch.equal(minibatch_coupling(x, noise), noise[list(best)])
    t = torch.rand(5, dtype=torch.float64)
    zero = lambda t, z: 0 * z
    coupled = flow_matching_loss(zero, x, noise, t=t, coupling="ot")
    assert float(coupled) == pytest.approx(cost(best) / 10)


def test_minibatch_coupling_without_scipy_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"pip install seminode\[scipy\]"):
        flow_matching_loss(lambda t, z: z, normal(3, 2), coupling="ot")


@pytest.mark.parametrize("batched", [False, True])
def test_args_are_split_with_the_samples(batched: bool) -> None:
    x, labels, t = normal(4, 3), torch.arange(4), torch.rand(4, dtype=torch.float64)
    table = normal(4, 3)
    noise = normal(4, 3)

    def field(t: Tensor, x: Tensor, label: Tensor) -> Tensor:
        return table[label] + 0 * x

    loss = flow_matching_loss(field, x, noise, t=t, args=(labels,), batched=batched)
    torch.testing.assert_close(loss, (table - (noise - x)).square().mean())
    samples = flow_sample(field, noise, preset="draft", args=(labels,))
    torch.testing.assert_close(samples, noise - table)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (ConcatLinear(3, 4), normal(5, 3)),
        (ConcatMLP(3, (6, 6)), normal(5, 3)),
        (HollowMLP(3, (6,)), normal(5, 3)),
        (ConcatConv2d(1, 2), normal(5, 1, 4, 4)),
        (ConvField(1, 3, zero_init=False), normal(5, 1, 4, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_take_a_time_for_every_sample(layer: nn.Module, x: Tensor) -> None:
    layer, t = layer.double(), torch.rand(5, dtype=torch.float64)
    expected = torch.cat([layer(t[i], x[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(layer(t, x), expected)
    with pytest.raises(ValueError, match=r"t: expected a scalar or shape \(5,\), found \(3,\)"):
        layer(t[:3], x)


def test_a_field_that_confuses_batch_and_channels_is_right_without_batched() -> None:
    """f = t·x with a square batch would broadcast along the wrong axis; with a scalar t it cannot."""
    x, noise, t = normal(3, 3), normal(3, 3), torch.rand(3, dtype=torch.float64)
    place = (1 - t)[:, None] * x + t[:, None] * noise
    expected = (t[:, None] * place - (noise - x)).square().mean()
    torch.testing.assert_close(flow_matching_loss(lambda t, x: t * x, x, noise, t=t), expected)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.zeros(3)}, ValueError, r"x: expected shape \(batch, ...\)"),
    ({"x": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "x: expected a floating-point dtype"),
    ({"noise": torch.zeros(4, 2)}, ValueError, r"noise: expected the shape of x, \(3, 2\), found \(4, 2\)"),
    ({"path": "straight"}, ValueError, "path: expected one of ot, vp, trigonometric"),
    ({"coupling": "best"}, ValueError, "coupling: expected 'independent' or 'ot'"),
    ({"t": torch.tensor(0.5)}, ValueError, r"t: expected one time per sample, shape \(3,\)"),
    ({"t": torch.tensor([0.1, 0.5, 1.5])}, ValueError, "t: expected times between 0 and 1, found 1.5"),
    ({"t": torch.zeros(3), "path": "vp"}, ValueError, "t: expected times between 1e-05 and 1, found 0"),
    ({"args": (torch.zeros(2),)}, ValueError, r"args\[0\]: expected a tensor with 3 rows"),
    ({"args": [torch.zeros(3)]}, TypeError, "args: expected a tuple"),
    ({"batched": 1}, TypeError, "batched"),
    ({"field": lambda t, x: x[:, :1]}, ValueError, r"field: expected values of the shape of x, \(3, 2\), found \(3, 1"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:18] for *_, message in BAD])
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"field": lambda t, x: x, "x": torch.zeros(3, 2), **change}
    with pytest.raises(error, match=message):
        flow_matching_loss(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimalTransportPath(1.0), "sigma_min: expected a number below 1"),
        (lambda: VariancePreservingPath(beta_min=30.0), "beta_min, beta_max: expected 0 < beta_min <= beta_max"),
        (lambda: VariancePreservingPath(first=0.0), "first: expected a number between 0 and 1"),
        (lambda: sampling_preset("best"), "name: expected one of draft, fast, accurate"),  # type: ignore[arg-type]
        (lambda: sampling_preset("accurate", 10), "steps: expected None with 'accurate'"),
        (lambda: sampling_preset("fast", 0), "steps"),
        (lambda: flow_sample(lambda t, x: x, torch.zeros(3)), "noise: expected shape"),
    ],
)
def test_bad_paths_and_presets(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["moons", "digits"])
def test_the_example_compares_both_trainings(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    problem = example.PROBLEMS[name]()
    tiny = {"widths": (8,), "likelihood_steps": 4, "matching_steps": 8, "batch": 16, "test": problem.test[:40]}
    problem = replace(problem, **tiny)
    results = example.compare(problem)
    assert "flow matching: NLL" in capsys.readouterr().out
    field = ConcatMLP(problem.dim, (8,))
    with torch.no_grad():
        for parameter in field.parameters():
            parameter.zero_()
    # The density of a flow that does not move is that of the noise, here of logits and so of pixels.
    plain = example.evaluate(problem, field)[0]
    exact = -torch.distributions.Normal(0.0, 1.0).log_prob(problem.test).sum(1).mean()
    if name == "moons":
        assert plain == pytest.approx(float(exact), rel=1e-5)
    else:
        rate, inside = 0.05, torch.sigmoid(problem.test)
        slope = ((1 - 2 * rate) / 17 / (inside * (1 - inside))).log().sum(1).mean()
        bits = float(exact - slope) / 64 / float(torch.tensor(2.0).log())
        assert plain == pytest.approx(bits, rel=2e-2)  # the example's slope is that of all test images
    example.draw(problem, results, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_times_of_large_batches_in_half_precision(dtype: torch.dtype) -> None:
    seen: list[Tensor] = []

    def field(t: Tensor, x: Tensor) -> Tensor:
        seen.append(t)
        return x

    flow_matching_loss(field, torch.zeros(70000, 1, dtype=dtype), batched=True)
    (times,) = seen
    assert times.dtype == dtype
    expected = (torch.arange(70000) + 0.5) / 70000
    torch.testing.assert_close(times.float().sort().values, expected, rtol=2.0 * torch.finfo(dtype).eps, atol=1e-4)


def test_minibatch_coupling_far_from_the_origin() -> None:
    x, noise = torch.randn(2, 60, 2, dtype=torch.float64)
    near, far = minibatch_coupling(x, noise), minibatch_coupling(x + 2.0**30, noise + 2.0**30)
    assert torch.allclose(far - 2.0**30, near, rtol=0.0, atol=1e-6)
    with pytest.raises(ValueError, match="noise: expected finite values with an optimal coupling"):
        minibatch_coupling(x, noise / 0.0)


def test_times_that_are_not_numbers() -> None:
    with pytest.raises(ValueError, match="t: expected times between 0 and 1, found nan"):
        flow_matching_loss(lambda t, x: x, torch.zeros(2, 1), t=torch.tensor([0.5, torch.nan]))

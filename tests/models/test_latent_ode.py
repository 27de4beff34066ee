"""ODE-RNNs and latent ODEs: against series solved one by one, closed forms of likelihoods, and bad input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from benchmarks import latent_ode as benchmark
from examples import latent_ode as example
from seminode.models import ODERNN, GRUODECell, LatentField, LatentODE, kl_annealing

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
FIXED: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.25)}
NAN = math.nan


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def data(batch: int = 4, rows: int = 6, channels: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Series with gaps, times of their own and different lengths."""
    x = torch.randn(batch, rows, channels, dtype=torch.float64)
    x[0, 2] = NAN
    x[1, 0] = NAN
    x[2, 3, 1] = NAN
    times = (0.1 + torch.rand(batch, rows, dtype=torch.float64)).cumsum(1)
    return x, times, torch.tensor([6, 4, 6, 1])


def one_by_one(model: Any, x: Tensor, times: Tensor, length: int, backward: bool) -> list[Tensor]:
    """The definition of an ODE-RNN for one series: the states after every row."""
    h = torch.zeros(1, model.hidden, dtype=torch.float64)
    rows = list(range(length))[:: -1 if backward else 1]
    states = []
    for place, k in enumerate(rows):
        if place > 0:
            interval = (float(times[rows[place - 1]]), float(times[k]))
            h = sn.solve(lambda t, h: model.field(t.reshape(1), h), h, interval, **TIGHT).ys[-1]
        seen = ~x[k].isnan()
        if bool(seen.any()):
            h = model.cell(torch.cat((x[k].nan_to_num(), seen.double()))[None], h)
        states.append(h[0])
    return states


class Moving(nn.Module):
    """A field that depends on time."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cell = GRUODECell(hidden)

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        return torch.cos(t)[:, None] * self.cell(t, h)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_every_series_is_as_if_it_were_solved_alone(backward: bool, packed: bool) -> None:
    x, times, lengths = data()
    model = ODERNN(2, 3, field=Moving(3), backward=backward, packed=packed, **TIGHT).double()
    ends = model(x, times, lengths)
    states = model(x, times, lengths, ts="knots")
    for i, length in enumerate(lengths.tolist()):
        expected = one_by_one(model, x[i], times[i], length, backward)
        torch.testing.assert_close(ends[i], expected[-1], rtol=1e-7, atol=1e-9)
        if not packed:
            torch.testing.assert_close(states[:length, i], torch.stack(expected), rtol=1e-7, atol=1e-9)
            assert torch.equal(states[length:, i], states[length - 1, i].expand(6 - length, -1))
    assert model.nfe > 0
    assert len(model.stats) == len(states) - 1


def test_shared_times_are_times_of_every_series() -> None:
    x, times, lengths = data()
    model = ODERNN(2, 3, 2, **TIGHT).double()
    each = times[0].expand(4, -1)
    torch.testing.assert_close(model(x, times[0], lengths), model(x, each, lengths), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4"])
def test_fixed_steps_are_those_of_solve(solver: Any) -> None:
    x, times, lengths = data()
    fixed = ODERNN(2, 3, field=Moving(3), steps=2, solver=solver).double()
    solved = ODERNN(2, 3, solver=solver, controller=sn.FixedStep(0.5))
    solved.field, solved.cell = fixed.field, fixed.cell
    y, expected = fixed(x, times, lengths), solved(x, times, lengths)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    assert fixed.nfe == solved.nfe
    parameters = list(fixed.parameters())
    actual = torch.autograd.grad(y.square().sum(), parameters)
    torch.testing.assert_close(actual, torch.autograd.grad(expected.square().sum(), parameters), rtol=1e-9, atol=1e-12)


def test_packed_fixed_steps_do_not_depend_on_the_times_of_other_series() -> None:
    """On the union of all times, rows of other series would split the intervals."""
    x = torch.full((2, 5, 1), NAN, dtype=torch.float64)
    x[0, 0], x[0, 4], x[1, 1:4] = 1.0, -1.0, 0.5
    times = torch.linspace(0.0, 3.0, 5, dtype=torch.float64)
    model = ODERNN(1, 3, packed=True, steps=1).double()
    alone = model(x[:1, [0, 4]], times[[0, 4]])
    torch.testing.assert_close(model(x, times)[:1], alone, rtol=1e-12, atol=0.0)
    model.packed = False
    assert not torch.allclose(model(x, times)[:1], alone, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("steps", [None, 2])
def test_gradients_by_times_and_values(steps: int | None) -> None:
    x, times = (each[:2, :3] for each in data()[:2])
    options: dict[str, Any] = {} if steps else {"solver": "rk4", "controller": sn.FixedStep(0.5)}
    model = ODERNN(2, 3, field=Moving(3), steps=steps, **options).double()
    known = ~x.isnan()
    values = x.nan_to_num().requires_grad_()

    def function(values: Tensor, times: Tensor) -> Tensor:
        return model(torch.where(known, values, NAN), times, torch.tensor([3, 2]))

    assert torch.autograd.gradcheck(function, (values, times.clone().requires_grad_()), atol=1e-5)


def test_the_gru_field_follows_its_formula_and_stays_bounded() -> None:
    cell = GRUODECell(3).double()
    h = torch.randn(5, 3, dtype=torch.float64)
    z, r = (torch.sigmoid(h @ cell.gates.weight[i].T + cell.gates.bias[i]) for i in (slice(0, 3), slice(3, 6)))
    g = torch.tanh((r * h) @ cell.candidate.weight.T + cell.candidate.bias)
    torch.testing.assert_close(cell(torch.tensor(0.0), h), (1 - z) * (g - h))
    with torch.no_grad():
        cell.candidate.weight.mul_(20.0)
    start = 2 * torch.rand(20, 3, dtype=torch.float64) - 1
    assert float(sn.solve(cell, start, [0.0, 30.0]).ys[-1].abs().max()) <= 1.0


def still(latent: int) -> Any:
    return lambda t, z: 0 * z


def test_the_gaussian_bound_is_that_of_torch_distributions() -> None:
    x, times, lengths = data()
    model = LatentODE(2, 3, 5, field=still(3), noise_std=0.3).double()
    mean, std = model.posterior(x, times, lengths)
    torch.manual_seed(3)
    bound = model.elbo(x, times, lengths, kl_weight=0.25, samples=4)
    torch.manual_seed(3)
    z0 = mean + std * torch.randn(4, *mean.shape).double()
    density = torch.distributions.Normal(model.decoder(z0).unsqueeze(2), 0.3)
    prior, posterior = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(mean, std)
    kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
    for i, length in enumerate(lengths.tolist()):
        seen = ~x[i, :length].isnan()
        terms = density.log_prob(x[:, :length].nan_to_num())[:, i]
        torch.testing.assert_close(bound.log_likelihood[i], (terms * seen).sum((1, 2)).mean())
    torch.testing.assert_close(bound.kl, kl)
    torch.testing.assert_close(bound.value, bound.log_likelihood - 0.25 * kl)


@pytest.mark.parametrize("shared", [False, True])
def test_the_likelihood_of_a_poisson_process_with_constant_intensity(shared: bool) -> None:
    """Σ log λ − λ·(time of the series), and with λ = count/time the largest value."""
    x, times, lengths = data()
    times = times[0] if shared else times
    lengths = torch.tensor([6, 4, 6, 2])
    model = LatentODE(2, 3, 5, field=still(3), poisson=True).double()
    plain = LatentODE(2, 3, 5, field=still(3)).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    assert model.intensity is not None
    with torch.no_grad():
        model.intensity.weight.zero_()
    torch.manual_seed(1)
    with_times = model.elbo(x, times, lengths).log_likelihood
    torch.manual_seed(1)
    extra = with_times - plain.elbo(x, times, lengths).log_likelihood
    rate = model.intensities(torch.zeros(1, 3, dtype=torch.float64))[0]
    for i, length in enumerate(lengths.tolist()):
        counts = (~x[i, :length].isnan()).sum(0)
        clock = times if shared else times[i]
        span = clock[length - 1] - clock[0]
        torch.testing.assert_close(extra[i], (counts * rate.log() - rate * span).sum(), rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="intensities: expected a model with poisson=True"):
        plain.intensities(torch.zeros(1, 3))


def test_the_integral_of_a_varying_intensity() -> None:
    """z = e^(−t) z₀ makes λ a function of time; its integral against a fine sum."""
    model = LatentODE(1, 1, 3, field=lambda t, z: -z, poisson=True, **TIGHT).double()
    x = torch.zeros(1, 2, 1, dtype=torch.float64)
    mean, std = model.posterior(x, torch.tensor([0.0, 2.0]))
    torch.manual_seed(5)
    z0 = mean + std * torch.randn(1, 1, 1).double()[0]
    fine = torch.linspace(0.0, 2.0, 20_001, dtype=torch.float64)
    rates = model.intensities(z0 * torch.exp(-fine)[:, None])[:, 0]
    gauss = model.decoder(z0 * torch.tensor([[1.0], [math.exp(-2.0)]], dtype=torch.float64))
    density = torch.distributions.Normal(0.0, 0.01).log_prob(gauss).sum()
    expected = density + rates[[0, -1]].log().sum() - torch.trapezoid(rates, fine)
    torch.manual_seed(5)
    actual = model.elbo(x, torch.tensor([0.0, 2.0], dtype=torch.float64)).log_likelihood[0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_times_per_series_give_what_shared_times_give() -> None:
    x, times, lengths = data()
    model = LatentODE(2, 3, 5, field=LatentField(3, 8), **TIGHT).double()
    ts = torch.tensor([0.5, 1.0, 9.0], dtype=torch.float64) + times[0, 0]
    each = times[0].expand(4, -1)
    for options in ({}, {"samples": 2}):
        torch.manual_seed(2)
        shared = model(x, times[0], lengths, ts, **options)
        torch.manual_seed(2)
        own = model(x, each, lengths, ts.expand(4, -1), **options)
        torch.testing.assert_close(own, shared, rtol=1e-6, atol=1e-8)
    assert shared.shape == (2, 3, 4, 2)


def test_outputs_are_those_of_the_decoded_solution() -> None:
    x, times, _ = data()
    model = LatentODE(2, 3, 5, **TIGHT).double()
    mean, _ = model.posterior(x, times[0])
    zs = sn.solve(model.field, mean, times[0], **TIGHT).ys
    torch.testing.assert_close(model(x, times[0]), model.decoder(zs), rtol=1e-9, atol=1e-9)
    later = model(x, times[0], ts=times[0, 3:])
    torch.testing.assert_close(later, model(x, times[0])[3:], rtol=1e-7, atol=1e-9)
    assert model.nfe == sum(each.nfe for each in model.stats) > model.encoder.nfe > 0  # type: ignore[union-attr]


def test_the_bound_can_be_learned_with_held_out_targets() -> None:
    """The likelihood of masked values rises, and does not depend on what the encoder must not see."""
    times = torch.linspace(0.0, 3.0, 12)
    phase = 6.0 * torch.rand(16, 1)
    target = torch.sin(2 * times + phase).unsqueeze(-1)
    x = torch.where(torch.rand(16, 12, 1) < 0.5, target, NAN)
    model = LatentODE(1, 4, 8, noise_std=0.2, solver="rk4", controller=sn.FixedStep(0.5), adjoint=sn.Direct())
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    values = []
    for step in range(20):
        bound = model.elbo(x, times, target=target, kl_weight=kl_annealing(step))
        optimiser.zero_grad()
        (-bound.value.mean()).backward()
        optimiser.step()
        values.append(float(bound.log_likelihood.detach().mean()))
    assert values[-1] > values[0] + 10


def test_annealing_rises_from_zero_to_one() -> None:
    weights = [kl_annealing(step, wait=3, rate=0.5) for step in range(8)]
    assert weights == [0.0, 0.0, 0.0, 0.0, 0.5, 0.75, 0.875, 0.9375]


X = torch.zeros(2, 3, 2)


def test_exponential_steps_have_order_one() -> None:
    """Against a solve of the same equation; halving the steps halves the error."""
    torch.manual_seed(0)
    x, times = torch.randn(4, 5, 2, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64).cumsum(1)
    exact = ODERNN(2, 3, rtol=1e-10, atol=1e-12).double()
    errors = []
    for steps in (1, 64, 128):
        model = ODERNN(2, 3, steps=steps, exponential=True).double()
        model.load_state_dict(exact.state_dict())
        errors.append(float((model(x, times) - exact(x, times)).abs().max()))
        assert model.nfe == 4 * steps
    assert errors[1] / errors[2] == pytest.approx(2.0, rel=0.05)
    assert errors[0] < 0.2


def test_exponential_steps_keep_the_state_bounded() -> None:
    cell = GRUODECell(4)
    h = 2.0 * torch.rand(50, 4) - 1.0
    assert cell.exponential_step(h, torch.full((50, 1), 100.0)).abs().max() <= 1.0
    constant = GRUODECell(1)
    with torch.no_grad():
        for parameter in constant.parameters():
            parameter.zero_()  # z = ½ and g = 0, so that h = h₀ exp(−t/2)
    end = constant.exponential_step(torch.ones(1, 1), torch.tensor([[3.0]]))
    torch.testing.assert_close(end, torch.full((1, 1), math.exp(-1.5)))


BAD: list[tuple[Any, str]] = [
    (lambda: ODERNN(0, 3), "channels"),
    (lambda: ODERNN(2, 3, steps=0), "steps"),
    (lambda: ODERNN(2, 3, steps=1, rtol=1e-3), "rtol: expected only the option solver with steps"),
    (lambda: ODERNN(2, 3, steps=1, solver="kvaerno3"), "solver: expected an explicit Runge–Kutta method with steps"),
    (lambda: ODERNN(2, 3, exponential=True), "exponential: expected steps and no options of solve"),
    (lambda: ODERNN(2, 3, steps=1, exponential=True, solver="heun"), "exponential: expected steps and no options"),
    (
        lambda: ODERNN(2, 3, steps=1, exponential=True, field=LatentField(3)),
        "exponential: expected a field with a method exponential_step, found LatentField",
    ),
    (lambda: ODERNN(2, 3)(torch.zeros(3, 2)), r"x: expected shape \(batch, times, channels\)"),
    (lambda: ODERNN(2, 3)(torch.zeros(1, 3, 4)), r"x: expected observations of shape \(..., 2\)"),
    (lambda: ODERNN(2, 3)(X, ts="all"), "ts: expected None or 'knots', found 'all'"),  # type: ignore[arg-type]
    (lambda: ODERNN(2, 3)(X, torch.tensor([0.0, 2.0, 1.0])), "times: expected strictly increasing times"),
    (lambda: LatentODE(2, 3, 5, noise_std=0.0), "noise_std: expected a number above 0"),
    (lambda: LatentODE(2, 3, 5)(X, samples=0), "samples"),
    (lambda: LatentODE(2, 3, 5)(X, ts=[-1.0, 0.5]), "ts: expected increasing times, not before the first time"),
    (lambda: LatentODE(2, 3, 5)(X, ts=torch.zeros(2, 3)), r"ts: expected shape \(T,\), as times has 1 axes"),
    (lambda: LatentODE(2, 3, 5, encoder=ODERNN(2, 4))(X), r"encoder: expected an output of shape \(2, 6\)"),
    (lambda: LatentODE(2, 3, 5).elbo(X, target=X[:1]), "target: expected the shape of x"),
    (lambda: LatentODE(2, 3, 5).elbo(X, kl_weight=-1.0), "kl_weight"),
    (lambda: kl_annealing(-1), "step"),
    (lambda: kl_annealing(1, rate=1.0), "rate: expected a number below 1"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:16] for _, message in BAD])
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_example_fills_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = torch.linspace(0.0, example.END, 20)
    model = example.make_model()
    bounds = example.train(model, times, 8)
    assert bounds[-1] > bounds[0]
    assert "error in the gap" in capsys.readouterr().out
    data = example.draw_series(3, times)
    inside = (times >= 0.4 * example.END) & (times <= 0.7 * example.END)
    assert bool(data.seen[:, inside].isnan().all())
    assert 0.0 <= example.coverage(model, data) <= 1.0
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.zero_()  # all samples are the same then
    assert example.coverage(model, data) == 0.0
    example.draw(model, times, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_the_benchmark_trains_the_same_model_twice() -> None:
    """The contender of the benchmark returns the same as the library where both visit the same rows."""
    pytest.importorskip("torchdiffeq")
    model = benchmark.build()
    contender, ours = benchmark.Contender(model), benchmark.Ours(model)
    data, _ = benchmark.toy(10, points=12, observed=2.0).split()  # all points are seen, so nothing can be skipped
    torch.testing.assert_close(
        contender.predict(data.seen, data.times), ours.predict(data.seen, data.times), rtol=1e-2, atol=1e-2
    )
    assert isinstance(model.encoder, ODERNN)
    model.encoder.exponential = False  # as in the publication
    for expected, actual in zip(
        contender.posterior(data.seen, data.times), model.posterior(data.seen, data.times), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    theirs = contender.loss(data.seen, data.times, 0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(ours.loss(data.seen, data.times, 0.5), theirs, rtol=1e-2, atol=0.1)


def test_times_of_half_precision_models_are_not_rounded_to_it() -> None:
    class Clock(nn.Module):
        def forward(self, t: Tensor, h: Tensor) -> Tensor:
            return t.cos().unsqueeze(-1).to(h.dtype) * torch.ones_like(h)

    x, times = torch.randn(2, 4, 1), 70000.0 + torch.tensor([0.0, 0.3, 1.1, 3.0])  # float16 ends at 65504
    for dtype in (torch.bfloat16, torch.float16):
        for options in ({"steps": 2, "solver": "rk4"}, {}):
            model = ODERNN(1, 3, field=Clock(), **options).to(dtype)  # type: ignore[arg-type]
            coarse = model(x.to(dtype), times).double()
            torch.testing.assert_close(coarse, model.double()(x.to(dtype).double(), times), rtol=0.0, atol=0.03)


def test_the_gaussian_bound_is_exact_in_float64() -> None:
    model = LatentODE(1, 2, 4, noise_std=0.3, **FIXED).double()
    x, times = torch.randn(3, 5, 1, dtype=torch.float64), torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.zero_()
    density = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 0.3).log_prob(x).sum((1, 2))
    torch.testing.assert_close(model.elbo(x, times).log_likelihood, density, rtol=1e-13, atol=1e-12)


def test_intensities_that_underflow_have_a_finite_logarithm() -> None:
    model = LatentODE(2, 2, 4, poisson=True, **FIXED)
    assert model.intensity is not None
    with torch.no_grad():
        model.intensity.weight.zero_()
        model.intensity.bias.copy_(torch.tensor([-150.0, 0.0]))
        for parameter in model.decoder.parameters():
            parameter.zero_()
    x = torch.full((2, 3, 2), torch.nan)
    x[:, 0, 1] = 0.0
    x[1, 1, 0] = 0.0  # an event of a process of which none was expected
    bound = model.elbo(x)
    event = -math.log(model.noise_std * math.sqrt(2.0 * math.pi))
    one = event + math.log(math.log(2.0)) - 2.0 * math.log(2.0)  # of the second channel, over two units of time
    torch.testing.assert_close(bound.log_likelihood, torch.tensor([one, one + event - 150.0]))
    bound.value.sum().backward()
    assert model.intensity.bias.grad is not None
    torch.testing.assert_close(model.intensity.bias.grad[0], torch.tensor(1.0))


def test_a_custom_encoder_is_called_with_knots() -> None:
    class Encoder(nn.Module):
        def forward(self, knots: Any) -> Tensor:
            return knots.values[0].repeat(1, 4)

    model, x = LatentODE(1, 2, 4, encoder=Encoder(), **FIXED), torch.randn(3, 5, 1)
    assert torch.equal(model.posterior(x)[0], x[:, 0].repeat(1, 2))

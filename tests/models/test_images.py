"""Images for flows: bijections compared with autograd, the multiscale flow with exact changes of variables."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode.models.cnf import CNF, standard_normal_log_prob
from seminode.models.images import (
    bits_per_dim,
    check_pixels,
    dequantise,
    inverse_logit,
    logit,
    quantise,
    squeeze,
    unsqueeze,
)
from seminode.models.multiscale import MultiscaleCNF
from seminode.models.running import Evaluation, Regulariser, per_sample_mean

TIGHT: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pixels(n: int = 2, shape: tuple[int, ...] = (1, 4, 4)) -> Tensor:
    return torch.randint(256, (n, *shape), dtype=torch.uint8)


def small_flow(**options: Any) -> MultiscaleCNF:
    options = {"hidden": 3, "scales": 2, "blocks": 2, "zero_init": False, "trace": "exact", **TIGHT, **options}
    return MultiscaleCNF((1, 4, 4), alpha=0.05, **options).double()


# Pixels.


def test_dequantised_pixels_are_uniform_within_their_level():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(50, 1, 16, 16)
    x = dequantise(every)
    assert x.dtype == torch.float32
    assert 0 <= float(x.min()) < float(x.max()) < 1
    assert torch.equal(quantise(x), every)
    u = 256 * x - every
    assert float(u.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(u.var()) == pytest.approx(1 / 12, abs=0.002)
    assert not torch.equal(x, dequantise(every))


def test_white_stays_below_one(monkeypatch):
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 1 - 2**-24))
    white = torch.full((1, 1), 255)
    assert float(dequantise(white)) < 1
    assert torch.equal(quantise(dequantise(white)), white.to(torch.uint8))


def test_deterministic_pixels_are_the_middles_of_their_levels():
    x = dequantise(torch.tensor([0, 1, 255]), deterministic=True, dtype=torch.float64)
    assert x.tolist() == [0.5 / 256, 1.5 / 256, 255.5 / 256]


# The logit.


@pytest.mark.parametrize("alpha", [1e-6, 1e-5, 0.05, 0.4])
def test_log_determinant_of_the_logit_agrees_with_autograd(alpha):
    x = torch.rand(3, 2, 4, dtype=torch.float64)
    x[0, 0, :2] = torch.tensor([0.0, 1.0])
    y, log_det = logit(x.requires_grad_(), alpha)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(log_det, slope.log().flatten(1).sum(1), rtol=1e-12, atol=1e-12)
    s = alpha + (1 - 2 * alpha) * x
    torch.testing.assert_close(y, s.log() - (1 - s).log(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(inverse_logit(y, alpha), x, rtol=0, atol=1e-10)


def test_the_logit_is_accurate_near_white():
    x = torch.tensor([[1 - 2**-24]])
    single, double = logit(x, 1e-6)[0], logit(x.double(), 1e-6)[0]
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, -0.1, 1.0, math.nan])
def test_alpha_is_checked(alpha):
    message = "alpha: expected a number between 0 and 0.5, found"
    for call in (lambda: logit(torch.rand(1, 2), alpha), lambda: MultiscaleCNF(alpha=alpha)):
        with pytest.raises(ValueError, match=message):
            call()


# The squeeze.


def test_squeezed_channels_are_ordered_by_channel_row_column():
    x = torch.randn(2, 3, 4, 6)
    y = squeeze(x)
    assert y.shape == (2, 12, 2, 3)
    for channel in range(3):
        for row in range(2):
            for column in range(2):
                torch.testing.assert_close(y[:, 4 * channel + 2 * row + column], x[:, channel, row::2, column::2])
    assert torch.equal(unsqueeze(y), x)


@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (2, 1, 4, 3), (1, 4, 4)])
def test_sides_must_be_even(shape):
    with pytest.raises(
        ValueError, match=r"x: expected shape \(batch, channels, height, width\) with even sides, found"
    ):
        squeeze(torch.zeros(shape))


def test_channels_must_be_a_multiple_of_four():
    with pytest.raises(ValueError, match=r"x: expected shape \(batch, 4·channels, height, width\), found"):
        unsqueeze(torch.zeros(1, 6, 2, 2))


# Bits per dimension.


def test_bits_per_dim():
    # log p = −D log 2 halves the density in every dimension: one bit more than the 8 of the uniform density.
    torch.testing.assert_close(bits_per_dim(torch.tensor([0.0, -10 * math.log(2.0)]), 10), torch.tensor([8.0, 9.0]))
    with pytest.raises(ValueError, match="dims: expected the number of values in a sample"):
        bits_per_dim(torch.zeros(1), 0)


WRONG_PIXELS: dict[str, tuple[Any, type[Exception], str]] = {
    "floats": (torch.rand(2, 1, 4, 4), TypeError, r"pixels: expected integers in 0…255, .* found torch.float32"),
    "booleans": (torch.ones(2, 1, 4, 4).bool(), TypeError, r"pixels: expected integers in 0…255, .* found torch.bool"),
    "a list": ([[0]], TypeError, r"pixels: expected a tensor, found list"),
    "too large": (torch.full((2, 1, 4, 4), 256), ValueError, r"pixels: expected values in 0…255, found 256"),
    "negative": (torch.full((2, 1, 4, 4), -3), ValueError, r"pixels: expected values in 0…255, found -3"),
    "channels": (pixels(2, (3, 4, 4)), ValueError, r"pixels: expected shape \(batch, 1, 4, 4\), found \(2, 3, 4, 4\)"),
    "sides": (pixels(2, (1, 8, 8)), ValueError, r"pixels: expected shape \(batch, 1, 4, 4\), found \(2, 1, 8, 8\)"),
    "no batch": (pixels()[0, 0], ValueError, r"pixels: expected shape \(batch, 1, 4, 4\), found \(4, 4\)"),
}


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG_PIXELS.values(), ids=WRONG_PIXELS.keys())
def test_invalid_pixels_raise(wrong, kind, message):
    with pytest.raises(kind, match=message):
        check_pixels(wrong, (1, 4, 4))
    with pytest.raises(kind, match=message):
        small_flow().log_prob(wrong)


# The multiscale flow.


@pytest.mark.parametrize(
    ("shape", "hidden", "count"),
    [
        ((1, 28, 28), 32, 281_928),
        ((1, 28, 28), 64, 1_005_384),
        ((1, 28, 28), 128, 3_779_400),
        ((3, 32, 32), 64, 1_200_600),
    ],
)
def test_parameter_counts_are_those_of_the_paper(shape, hidden, count):
    with torch.device("meta"):
        flow = MultiscaleCNF(shape, hidden)
    assert sum(p.numel() for p in flow.parameters()) == count


def test_log_probability_equals_the_exact_change_of_variables():
    flow, x = small_flow(adjoint=sn.Direct()), torch.rand(2, 1, 4, 4, dtype=torch.float64).requires_grad_()
    z, delta = flow.transform(x)
    rows = [torch.autograd.grad(z[:, i].sum(), x, retain_graph=True)[0].flatten(1) for i in range(16)]
    exact = torch.linalg.slogdet(torch.stack(rows, 1))[1]
    torch.testing.assert_close(-delta, exact, rtol=0, atol=1e-6)
    torch.testing.assert_close(flow.inverse(z), x, rtol=0, atol=1e-6)


def test_log_probability_of_pixels():
    flow, image = small_flow(deterministic_eval=True).eval(), pixels()
    z, delta = flow.transform((image.double() + 0.5) / 256)
    log_prob = flow.log_prob(image)
    torch.testing.assert_close(log_prob, standard_normal_log_prob(z) - delta)
    torch.testing.assert_close(flow(image), log_prob)
    torch.testing.assert_close(flow.bits_per_dim(image), bits_per_dim(log_prob, 16))
    torch.testing.assert_close(flow.log_prob(image.long()), log_prob)


def test_dequantisation_draws_new_noise_unless_deterministic():
    image = pixels()
    for flow in (small_flow().train(), small_flow().eval(), small_flow(deterministic_eval=True).train()):
        assert not torch.equal(flow.dequantise(image), flow.dequantise(image))


def test_order_of_the_scales():
    """With zero fields, the flow is logit, squeeze, squeeze, flatten."""
    flow, x = MultiscaleCNF((1, 4, 4), 2, 3, 1, alpha=0.05).double(), torch.rand(2, 1, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.zero_()
    y, log_det = logit(x, 0.05)
    z, delta = flow.transform(x)
    torch.testing.assert_close(z, squeeze(squeeze(y)).flatten(1))
    torch.testing.assert_close(delta, -log_det)


def test_samples_are_images():
    flow = MultiscaleCNF((2, 4, 4), hidden=3, scales=2, blocks=1, zero_init=False)
    x, image = flow.sample(5), flow.sample(5, as_bytes=True)
    assert x.shape == image.shape == (5, 2, 4, 4)
    assert 0 <= float(x.min()) <= float(x.max()) < 1
    assert image.dtype == torch.uint8
    assert not x.requires_grad


def test_every_block_is_a_solve_with_the_options_of_the_model():
    flow, image = small_flow(adjoint=sn.Backsolve()), pixels()
    flow.bits_per_dim(image).mean().backward()
    assert len(flow.stats) == 4
    assert flow.nfe == sum(block.nfe for block in flow.modules() if isinstance(block, CNF))
    assert flow.backward_nfe > 0
    assert all(parameter.grad is not None for parameter in flow.parameters())
    tight_nfe = flow.nfe
    flow.options.update(rtol=1e-2, atol=1e-2)
    flow.log_prob(image)
    assert flow.nfe < tight_nfe
    twin = copy.deepcopy(flow)
    twin.options.update(**TIGHT)
    twin.log_prob(image)
    assert twin.nfe > flow.nfe


class Energy(Regulariser):
    name, weight = "energy", 0.5

    def rate(self, at: Evaluation) -> Tensor:
        return per_sample_mean(at.f.square())


def test_costs_are_summed_over_the_blocks():
    flow = small_flow(regularisers=(Energy(),), deterministic_eval=True).eval()
    image = pixels()
    log_prob, costs = flow.log_prob(image, costs=True)
    z, delta = logit(flow.dequantise(image), 0.05)
    total = torch.zeros(2, dtype=torch.float64)
    for i, blocks in enumerate(flow.scales):
        z = squeeze(z) if i else z
        for block in blocks:  # type: ignore[attr-defined]
            z, delta, cost = block.transform_with_costs(z, delta)
            total = total + cost["energy"]
    torch.testing.assert_close(costs["energy"], total)
    torch.testing.assert_close(flow(image, costs=True)[0], log_prob)
    torch.testing.assert_close(flow.log_prob(image), log_prob)
    assert flow.regularisers[0].weight == 0.5


def test_gradients_of_the_adjoints_agree():
    flow, image = small_flow(deterministic_eval=True, blocks=1).eval(), pixels()
    gradients = []
    for adjoint in (sn.Direct(), sn.Backsolve(), sn.Quadrature()):
        flow.options["adjoint"] = adjoint
        grads = torch.autograd.grad(flow.bits_per_dim(image).mean(), list(flow.parameters()))
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-5, atol=1e-6)


def test_state_dict_round_trip():
    flow, other, image = (
        small_flow(deterministic_eval=True).eval(),
        small_flow(deterministic_eval=True).eval(),
        pixels(),
    )
    assert not torch.equal(flow.log_prob(image), other.log_prob(image))
    other.load_state_dict(flow.state_dict())
    torch.testing.assert_close(flow.log_prob(image), other.log_prob(image), rtol=0, atol=0)


def test_training_reduces_the_loss():
    flow = MultiscaleCNF((1, 4, 4), hidden=8, scales=2, blocks=1, alpha=0.05, rtol=1e-2, atol=1e-3)
    image = (pixels(8) // 4).to(torch.uint8)  # dark images
    optimiser = torch.optim.Adam(flow.parameters(), 0.05)
    bits = []
    for _ in range(6):
        loss = flow.bits_per_dim(image).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        bits.append(loss.item())
    assert bits[-1] < bits[0] - 0.5


@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 30), (0, 28, 28), (1, 2, 2)])
def test_shape_is_checked(shape):
    with pytest.raises(
        ValueError, match=r"shape: expected \(channels, height, width\) with sides divisible by 4 for 3"
    ):
        MultiscaleCNF(shape)


def test_shapes_of_tensors_are_checked():
    with pytest.raises(ValueError, match=r"z: expected shape \(batch, 16\), found \(2, 15\)"):
        small_flow().inverse(torch.zeros(2, 15))
    with pytest.raises(ValueError, match=r"x: expected shape \(batch, 1, 4, 4\), found \(2, 16\)"):
        small_flow().transform(torch.zeros(2, 16))


def test_repr():
    text = repr(small_flow())
    assert "shape=(1, 4, 4), alpha=0.05, levels=256, deterministic_eval=False, rtol=1e-07" in text


def test_options_and_the_end_may_be_changed_later():
    flow = MultiscaleCNF((1, 4, 4), hidden=4, scales=2, blocks=1)
    flow.options = {"solver": "euler", "controller": sn.FixedStep(0.5)}
    flow.t1 = 2.0
    flow.log_prob(torch.randint(256, (2, 1, 4, 4)))
    assert [stats.nfe for stats in flow.stats] == [4, 4]


def test_images_of_fewer_levels():
    flow = small_flow(levels=17)
    pixels = torch.randint(17, (3, 1, 4, 4), dtype=torch.uint8)
    x = flow.dequantise(pixels)
    assert torch.equal((17 * x).floor().to(torch.uint8), pixels)
    torch.manual_seed(0)
    log_prob = flow.log_prob(pixels)
    torch.manual_seed(0)
    bits = flow.bits_per_dim(pixels)
    torch.testing.assert_close(bits, (math.log(17) - log_prob / 16) / math.log(2))
    assert int(flow.sample(4, as_bytes=True).max()) < 17
    with pytest.raises(ValueError, match=r"pixels: expected values in 0…16, found 17"):
        flow.dequantise(torch.full((1, 1, 4, 4), 17, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"levels: expected 2 to 256, found 1"):
        small_flow(levels=1)

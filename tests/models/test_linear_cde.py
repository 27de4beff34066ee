"""Linear CDEs: scans against loops, exponentials against torch's, and the model against a solver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode import paths
from seminode.models import LinearCDE
from seminode.models.small_matrices import exponential, multiply, product_of, scan_products

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def usual(x: Tensor) -> Tensor:
    """The matrices as the last two axes."""
    return x.movedim((0, 1), (-2, -1))


@pytest.mark.parametrize("m", [1, 3, 8, 9])
def test_products_and_their_derivatives(m: int) -> None:
    a, b = normal(m, m, 4), normal(m, m, 4)
    torch.testing.assert_close(usual(multiply(a, b)), usual(a) @ usual(b))
    if m == 3:
        inputs = (a.requires_grad_(), b[:, :1].clone().requires_grad_())
        assert torch.autograd.gradcheck(multiply, inputs)
        assert torch.autograd.gradgradcheck(multiply, inputs)
        mapped = torch.func.vmap(multiply, in_dims=(2, 2), out_dims=2)(a, b)
        torch.testing.assert_close(mapped, multiply(a, b))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 13])
def test_scans_are_loops(n: int) -> None:
    matrices = normal(3, 3, n, 2).requires_grad_()
    running, expected = matrices[:, :, 0], [matrices[:, :, 0]]
    for i in range(1, n):
        running = torch.einsum("ij...,jk...->ik...", matrices[:, :, i], running)
        expected.append(running)
    stacked, scanned, last = torch.stack(expected, 2), scan_products(matrices), product_of(matrices)
    torch.testing.assert_close(scanned, stacked, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, stacked[:, :, -1], rtol=1e-12, atol=1e-12)
    weights = normal(*stacked.shape)
    actual, reference = (torch.autograd.grad((y * weights).sum(), matrices)[0] for y in (scanned, stacked))
    torch.testing.assert_close(actual, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2e-6), (torch.float64, 5e-15)])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.3, 2.0])
@pytest.mark.parametrize("m", [1, 4, 10])
def test_exponentials_are_those_of_torch(m: int, scale: float, dtype: torch.dtype, rounding: float) -> None:
    x = (scale * normal(m, m, 20) / m**0.5).to(dtype)
    reference = torch.linalg.matrix_exp(usual(x.double()))
    error = (usual(exponential(x)).double() - reference).abs().amax((-2, -1)) / reference.abs().amax((-2, -1))
    assert float(error.max()) < rounding * (1 + 8 * scale)


def test_gradients_of_exponentials() -> None:
    x = normal(3, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(exponential, x)
    assert bool(exponential(torch.full((2, 2, 1), torch.nan)).isnan().all())


def data() -> tuple[Tensor, Tensor, Tensor]:
    x = normal(3, 6, 2)
    x[0, 2, 1] = torch.nan
    return x, (0.2 + torch.rand(3, 6, dtype=torch.float64)).cumsum(1), torch.tensor([6, 3, 5])


def solved(model: LinearCDE, x: Tensor, times: Tensor) -> Tensor:
    """The equation of one series, written out and solved with small steps."""
    flow: Any = model.flows[0]
    path = paths.linear(paths.append_time(x, times), times)
    blocks = torch.stack([torch.block_diag(*each) for each in flow.matrices])

    def field(t: Tensor, z: Tensor) -> Tensor:
        columns = torch.einsum("aij,j->ia", blocks, z)
        if flow.offsets is not None:
            columns = columns + flow.offsets.flatten(1).T
        return columns @ path.derivative(t)

    z0 = flow.initial(path.evaluate(times[0]))
    return sn.solve(field, z0, times, jumps=path.jumps, **TIGHT).ys


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_the_model_is_the_solution_of_its_equation(block: int, affine: bool) -> None:
    x, times, lengths = data()
    model = LinearCDE(2, 4, block=block, affine=affine).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("offsets"):
                parameter.copy_(normal(*parameter.shape))
    ends, outputs = model(x, times, lengths), model(x, times, lengths, ts="knots")
    for i, length in enumerate(lengths.tolist()):
        expected = solved(model, x[i, :length], times[i, :length])
        torch.testing.assert_close(outputs[:length, i], expected, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(ends[i], expected[-1], rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(outputs[length - 1 :, i], expected[-1].expand(7 - length, -1), rtol=1e-7, atol=1e-8)


def test_blocks_above_and_below_the_limit_agree() -> None:
    """Two blocks of 5, written as one of 10 with zeros."""
    x = normal(2, 5, 1)
    small, large = LinearCDE(1, 10, block=5).double(), LinearCDE(1, 10, block=10).double()
    left, right = small.flows[0], large.flows[0]
    with torch.no_grad():
        right.initial.load_state_dict(left.initial.state_dict())  # type: ignore[union-attr, operator]
        dense = torch.stack([torch.block_diag(*each) for each in left.matrices])  # type: ignore[union-attr]
        right.matrices.copy_(dense.unsqueeze(1))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(small(x), large(x), rtol=1e-10, atol=1e-12)


def test_layers_readout_and_gradients() -> None:
    x, times, lengths = data()
    model = LinearCDE(2, 4, 3, block=2, layers=2, intensity=True).double()
    outputs = model(x, times, lengths, ts="knots")
    assert outputs.shape == (6, 3, 3)
    torch.testing.assert_close(model(x, times, lengths), outputs[-1])
    torch.testing.assert_close(model(x[2:, :5], times[2:, :5]), outputs[-1, 2:])
    outputs.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    copy = LinearCDE(2, 4, 3, block=2, layers=2, intensity=True).double()
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(x, times, lengths), model(x, times, lengths))


def test_gradients_by_values_and_times() -> None:
    x, times, _ = data()
    model = LinearCDE(2, 4, block=2).double()
    inputs = (x[1:, :4].clone().requires_grad_(), times[1:, :4].clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda x, times: model(x, times), inputs)


def test_half_precision_under_autocast() -> None:
    model, x = LinearCDE(2, 4, 3, block=2), torch.randn(3, 5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    torch.testing.assert_close(y.float(), model(x), rtol=0.1, atol=0.1)


X = torch.zeros(2, 5, 2)
BAD: list[tuple[Any, str]] = [
    (lambda: LinearCDE(2, 6, block=4), "block: expected a divisor of hidden = 6, found 4"),
    (lambda: LinearCDE(2, 4, block=0), "block"),
    (lambda: LinearCDE(2, 4, layers=0), "layers"),
    (lambda: LinearCDE(2, 4)(X, ts="windows"), "ts: expected None or 'knots'"),  # type: ignore[arg-type]
    (lambda: LinearCDE(3, 4)(X), r"x: expected observations of shape \(..., 3\)"),
    (lambda: LinearCDE(2, 4)(X[0]), r"x: expected shape \(batch, times, channels\)"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:16] for _, message in BAD])
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_init_scale_is_the_size_of_the_matrices() -> None:
    torch.manual_seed(0)
    for scale in (0.3, 1.0):
        (flow,) = LinearCDE(9, 400, block=4, time=False, init_scale=scale).flows
        assert flow.matrices.std().item() == pytest.approx(scale / 6, rel=0.05)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="init_scale: expected a finite number"):
        LinearCDE(2, 4, init_scale=-1.0)


def test_the_state_of_a_long_series_stays_moderate() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 160, 20)
    sizes = [LinearCDE(20, 32, init_scale=scale)(x).abs().max().item() for scale in (0.1, 1.0)]
    assert sizes[0] < 100.0 < sizes[1]


@pytest.mark.parametrize("m", [1, 4, 9])
def test_exponentials_do_not_depend_on_large_matrices_beside_them(m: int) -> None:
    small = 0.05 * torch.randn(m, m, 20)
    exact = torch.matrix_exp(small.double().permute(2, 0, 1)).permute(1, 2, 0)
    decay = (-1e4 * torch.eye(m)).unsqueeze(-1)  # its exponential is 0
    both = exponential(torch.cat((small, decay), 2))
    torch.testing.assert_close(both[..., :-1].double(), exact, rtol=0.0, atol=5e-7)
    assert torch.equal(both[..., -1], torch.zeros(m, m))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_exponentials_do_not_depend_on_matrices_that_are_not_finite(wrong: float) -> None:
    matrices = 3.0 * torch.randn(4, 4, 20, dtype=torch.float64)
    exact = torch.matrix_exp(matrices.permute(2, 0, 1)).permute(1, 2, 0)
    both = exponential(torch.cat((matrices, torch.full((4, 4, 1), wrong, dtype=torch.float64)), 2))
    torch.testing.assert_close(both[..., :-1], exact, rtol=1e-10, atol=1e-10)


def test_a_series_does_not_depend_on_a_long_gap_in_another() -> None:
    model = LinearCDE(1, 4, block=2)
    with torch.no_grad():
        model.get_parameter("flows.0.matrices")[0] = -torch.eye(2)  # the state decays with time
    x, times = torch.randn(2, 6, 1), torch.linspace(0.0, 1.0, 6).repeat(2, 1)
    times[1, -1] = 1e4
    alone = model.double()(x[:1].double(), times[:1].double())
    torch.testing.assert_close(model.float()(x, times)[:1].double(), alone, rtol=0.0, atol=2e-6)

"""The same functions in faster formulas: as exact as they say, everywhere, and only where they are meant to be used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from seminode._compile import rewrites
from seminode._compile.inductor import traced


def places() -> Tensor:
    """Floats of all sizes and both signs, densely where the functions bend."""
    sizes = torch.logspace(-37, 2, 100_001, dtype=torch.float64)
    near = torch.linspace(0.0, 30.0, 300_001, dtype=torch.float64)
    x = torch.cat((sizes, near))
    return torch.cat((x, -x)).float()


@pytest.mark.parametrize(
    ("formula", "true", "error"),
    [(rewrites.tanh, torch.tanh, 4.5e-7), (rewrites.softplus, functional.softplus, 4.5e-7)],
)
def test_single_precision(formula: Callable[..., Tensor], true: Callable[..., Tensor], error: float) -> None:
    x = places()
    found, expected = formula(x).double(), true(x.double())
    # Below the smallest normal number there is no relative accuracy to be had.
    relative = (found - expected).abs() / expected.abs().clamp(min=1e-37)
    assert relative.max() < error


@pytest.mark.parametrize("formula", [rewrites.tanh, rewrites.softplus])
def test_ends_of_the_line(formula: Callable[..., Tensor]) -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 3e38, -3e38])
    true = torch.tanh if formula is rewrites.tanh else functional.softplus
    torch.testing.assert_close(formula(x), true(x), equal_nan=True)


def test_tanh_stays_within_one() -> None:
    assert float(rewrites.tanh(places()).abs().max()) == 1.0  # type: ignore[union-attr]


def test_softplus_backward() -> None:
    x, grad = places(), torch.randn(len(places()), generator=torch.Generator().manual_seed(0))
    expected = torch.ops.aten.softplus_backward(grad.double(), x.double(), 1.0, 20.0)
    torch.testing.assert_close(rewrites.softplus_backward(grad, x, 1.0, 20.0).double(), expected, rtol=1e-6, atol=1e-37)  # type: ignore[union-attr]


def test_double_precision_is_left_alone() -> None:
    x = torch.randn(3, dtype=torch.float64)
    assert rewrites.tanh(x) is None
    assert rewrites.softplus(x) is None
    assert rewrites.softplus_backward(x, x, 1.0, 20.0) is None


@pytest.mark.parametrize("shapes", [((5, 3, 1), (5, 1, 4)), ((5, 3, 4), (5, 4, 1)), ((5, 1, 4), (5, 4, 3))])
def test_batches_of_thin_products(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    found = rewrites.bmm(a, b)
    assert found is not None
    torch.testing.assert_close(found, torch.bmm(a, b))
    assert rewrites.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 3)) is None


def test_products_the_other_way_round() -> None:
    g, x = torch.randn(50, 8, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    found = rewrites.mm(g.T, x)
    assert found is not None
    torch.testing.assert_close(found, g.T @ x)
    assert rewrites.mm(x.T, g) is None


def test_products_with_few_columns() -> None:
    x, w = torch.randn(50, 8, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    found = rewrites.mm(x, w)
    assert found is not None
    torch.testing.assert_close(found, x @ w)
    assert rewrites.mm(x, w.T.contiguous().T) is None
    assert rewrites.mm(x[:3], w) is None


def test_a_bias_is_a_sum() -> None:
    bias, a, b = (torch.randn(shape, dtype=torch.float64) for shape in (20, (5, 4), (4, 20)))
    found = rewrites.addmm(bias, a, b)
    assert found is not None
    torch.testing.assert_close(found, torch.addmm(bias, a, b))
    assert rewrites.addmm(bias, a, b, beta=2) is None
    assert rewrites.addmm(torch.randn(5, 3, dtype=torch.float64), a, b) is None


def test_short_products_are_sums() -> None:
    x, w = torch.randn(50, 4, dtype=torch.float64), torch.randn(20, 4, dtype=torch.float64)
    bias = torch.randn(20, dtype=torch.float64)
    for b in (w.T, w.T.contiguous()):
        graph = traced(lambda a, b: [torch.mm(a, b)], [x, b], rewritten=True)
        assert torch.ops.aten.mm.default not in {node.target for node in graph.graph.nodes}
        torch.testing.assert_close(graph(x, b)[0], x @ b)
        found = rewrites.addmm(bias, x, b)
        assert found is not None
        torch.testing.assert_close(found, torch.addmm(bias, x, b))
    assert rewrites.mm(torch.randn(50, 5), torch.randn(5, 20)) is None


def test_a_bias_of_few_columns() -> None:
    bias, a, w = (torch.randn(shape, dtype=torch.float64) for shape in (3, (50, 8), (3, 8)))
    found = rewrites.addmm(bias, a, w.T)
    assert found is not None
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.addmm(bias, a, w.T))
    assert rewrites.addmm(bias, a, w.T.contiguous()) is None
    assert rewrites.addmm(bias, a[:3], w.T) is None


def test_a_graph_is_rewritten() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.bmm(a, b).squeeze(-1) + torch.tanh(x) * functional.softplus(x)]

    whole = {torch.ops.aten.tanh.default, torch.ops.aten.softplus.default, torch.ops.aten.bmm.default}
    for dtype, left in ((torch.float32, set()), (torch.float64, {torch.ops.aten.tanh.default})):
        given = [torch.randn(shape, dtype=dtype) for shape in ((6, 4), (6, 4, 3), (6, 3, 1))]
        kept, changed = (traced(function, given, rewritten) for rewritten in (False, True))
        assert {node.target for node in kept.graph.nodes} >= whole
        assert {node.target for node in changed.graph.nodes} & whole == left
        for graph in (kept, changed):
            torch.testing.assert_close(graph(*given), function(*given))


# Convolutions

ONES = [1, 1]
aten = torch.ops.aten


def convolved(shape: tuple[int, int, int, int], padding: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """An image, weights of the given shape, a bias, and a cotangent of their convolution."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, shape[1], 9, 8), shape, shape[:1]
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    y = aten.convolution(x, weight, bias, ONES, padding, ONES, False, [0, 0], 1)
    return x, weight, bias, torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype)


WIDTHS = ((1, 18), (2, 18), (18, 1), (18, 17))
KERNELS = ((3, 3), (3, 5), (1, 1))
PADDINGS = ([0, 0], [1, 1], [0, 1])
CASES = [((*width, *kernel), padding) for width in WIDTHS for kernel in KERNELS for padding in PADDINGS]


@pytest.mark.parametrize(("shape", "padding"), CASES)
def test_convolutions(shape: tuple[int, int, int, int], padding: list[int]) -> None:
    """Results and gradients equal those of torch in double precision, where a rule applies."""
    rest = ONES, padding, ONES, False, [0, 0], 1
    x, weight, bias, grad = convolved(shape, padding, torch.float32)
    exact = [a.double() for a in (x, weight, bias, grad)]
    found = rewrites.convolution(x, weight, bias, *rest)
    assert (found is None) == (shape[0] > rewrites.FEW_CHANNELS)
    if found is not None:
        torch.testing.assert_close(found.double(), aten.convolution(*exact[:3], *rest), rtol=1e-4, atol=1e-4)
    mask = [True, True, True]
    grads = rewrites.convolution_backward(grad, x, weight, [shape[0]], *rest, mask)
    turns = all(p < k for p, k in zip(padding, shape[2:], strict=True))
    assert (grads is None) == (min(shape[:2]) > rewrites.FEW_CHANNELS or not turns)
    if grads is not None:
        expected = aten.convolution_backward(exact[3], *exact[:2], [shape[0]], *rest, mask)
        for one, other in zip(grads, expected, strict=True):
            assert one is not None
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(18, 17, 3, 3), (1, 18, 3, 3), (18, 1, 3, 3)])
@pytest.mark.parametrize("padding", [[0, 0], [1, 1]])
def test_gradients_of_weights_written_as_convolutions(shape: tuple[int, int, int, int], padding: list[int]) -> None:
    x, _, _, grad = convolved(shape, padding, torch.float32)
    images = x.transpose(0, 1), grad.transpose(0, 1)
    found = rewrites.convolution(*images, None, ONES, padding, ONES, False, [0, 0], 1)
    expected = aten.convolution(*(a.double() for a in images), None, ONES, padding, ONES, False, [0, 0], 1)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(6, 2, 8, 7), (2, 18, 9, 8)])
@pytest.mark.parametrize("padding", [[0, 0], [1, 1]])
def test_a_layer_whose_kernel_is_larger_than_its_result(shape: tuple[int, int, int, int], padding: list[int]) -> None:
    """It looks like the gradient of weights, but has a bias; what comes next may view it in another shape."""
    rest = ONES, padding, ONES, False, [0, 0], 1
    x, weight, bias, _ = convolved(shape, padding, torch.float32)
    found = rewrites.convolution(x, weight, bias, *rest)
    expected = aten.convolution(x.double(), weight.double(), bias.double(), *rest)
    assert found is not None
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change", [{"stride": [2, 2]}, {"dilation": [2, 2]}, {"groups": 2}, {"transposed": True}, {"dtype": torch.float64}]
)
def test_other_convolutions_are_left_alone(change: dict) -> None:
    options = {"stride": ONES, "dilation": ONES, "transposed": False, "groups": 1, "dtype": torch.float32} | change
    x, weight, bias, grad = convolved((2, 18, 3, 3), [1, 1], options["dtype"])
    rest = options["stride"], [1, 1], options["dilation"], options["transposed"], [0, 0], options["groups"]
    assert rewrites.convolution(x, weight, bias, *rest) is None
    assert rewrites.convolution_backward(grad, x, weight, [2], *rest, [True, True, True]) is None


def test_second_derivatives_of_a_convolution() -> None:
    """A traced graph with the rules has the gradients of one without, and no convolution by a whole image."""
    x, weight, _, _ = convolved((18, 1, 3, 3), [1, 1], torch.float32)
    back = torch.randn(1, 18, 3, 3, generator=torch.Generator().manual_seed(1))

    def function(x: Tensor, weight: Tensor, back: Tensor, v: Tensor) -> list[Tensor]:
        def field(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
            def velocity(x: Tensor) -> Tensor:
                return functional.conv2d(functional.softplus(functional.conv2d(x, weight, padding=1)), back, padding=1)

            k, vjp = torch.func.vjp(velocity, x)  # type: ignore[misc]
            return k + vjp(v)[0]

        k, vjp = torch.func.vjp(field, x, weight, back)  # type: ignore[misc]
        return [k, *vjp(v)]

    inputs = x, weight, back, x.roll(1, 0)
    new, plain = (traced(function, inputs, rewritten=rewritten) for rewritten in (True, False))
    torch.testing.assert_close(new(*inputs), plain(*inputs), rtol=1e-4, atol=1e-3)

    def by_images(module: torch.fx.GraphModule) -> int:
        nodes = module.graph.find_nodes(op="call_function", target=aten.convolution.default)
        return sum(min(node.args[1].meta["val"].shape[2:]) > 3 for node in nodes)

    assert by_images(plain) > 0 == by_images(new)

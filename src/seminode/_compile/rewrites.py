"""Rewrites of a graph before it is compiled: the same functions in faster formulas.

The back end (Inductor) makes loops of what it is given. On a CPU some operations make slow ones:

- tanh in single precision goes to a library function that is correct to one unit in the last place and takes longer
  than the matrix product before it. A quotient of two polynomials is correct to seven (4e-7) and takes a third of the
  time. So with the logarithm in softplus, which takes half.
- Batches of matrix-vector products and of outer products, the heart of a controlled differential equation, fall to
  general matrix code one by one. As products and sums they are loops like any other.
- The bias of a layer is copied to every row before the product is added to it.
- Products with few columns, or with a transposed first factor, are faster the other way round.
- A product whose entries are sums over few numbers, as in the first layer of a network on a small state, takes less
  time than the call of a library. As a sum it is part of the loop that reads it.
- MKL, which torch calls for products of matrices, has slow code for processors of other makers. There programs have
  products of their own (`product.cpp`), which are also less slow for narrow and transposed matrices.
- A result with several readers is computed again in the loop of each of them, unless it is held in memory.
- A convolution with few channels on one side takes as long as one with 16, and second derivatives of a convolution
  contain gradients of the weights in the form of convolutions by whole images, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .products import computed_here
from .torch_private import usual_decompositions

#: tanh x ≈ x·P(x²)/Q(x²) for |x| ≤ TANH_END, from where on it rounds to one: the best fit of these degrees in the
#: relative error (9e-9 before rounding), found by linear programming.
TANH_P = (1.00000001253621, 0.13400028096203742, 0.0035171003139261242, 2.091281302475961e-05, 1.3670256972877095e-08)
TANH_Q = (1.0, 0.46733365804729343, 0.025961656619026066, 0.0003318738032215988, 7.928397474515852e-07)
TANH_END = 9.02
#: log(1 + u) ≈ u·P(u)/Q(u) on [0, 1], to 2e-9 before rounding and 3e-7 after it, found likewise.
LOG1P_P = (0.9999999983604385, 0.8625429447085551, 0.12188711090484532)
LOG1P_Q = (1.0, 1.362541093466907, 0.4698587152742001, 0.03052759363595946)

#: Fewer columns than these are a narrow matrix.
NARROW = 16
#: A sum over at most so many products is short.
SHORT = 4
#: So many channels are few.
FEW_CHANNELS = 2
aten = torch.ops.aten

#: What takes so long that it is better kept than computed again.
SLOW = {
    getattr(aten, name).default
    for name in (
        "tanh",
        "exp",
        "expm1",
        "log",
        "log1p",
        "sin",
        "cos",
        "tan",
        "sigmoid",
        "erf",
        "softplus",
        "sqrt",
        "atan",
    )
}


def slow(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in SLOW


def held(x: Tensor) -> Tensor:
    """x itself, which the back end now has to have in memory."""
    return torch.as_strided(x, x.shape, x.stride())


def _single(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def tanh(x: Tensor) -> Tensor | None:
    if not _single(x):
        return None
    x = x.clamp(-TANH_END, TANH_END)
    square = x * x
    return held((x * _polynomial(TANH_P, square) / _polynomial(TANH_Q, square)).clamp(-1.0, 1.0))


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor | None:
    # Above the threshold log(1 + exp(−x)) is lost in rounding anyway.
    if not _single(x) or threshold < 20.0:
        return None
    x = x * beta
    u = torch.exp(-x.abs())
    return held((x.clamp(min=0.0) + u * _polynomial(LOG1P_P, u) / _polynomial(LOG1P_Q, u)) / beta)


def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor | None:
    return grad * torch.sigmoid(x * beta) if _single(x) and threshold >= 20.0 else None


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    value = x * coefficients[-1] + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        value = value * x + coefficient
    return value


def bmm(a: Tensor, b: Tensor) -> Tensor | None:
    if a.device.type != "cpu":
        return None
    if a.shape[2] == 1:
        return held(a * b)
    if b.shape[2] == 1:
        return (a * b.mT).sum(2, keepdim=True)
    if a.shape[1] == 1:
        return (a.mT * b).sum(1, keepdim=True)
    return None


def _is_short(a: Tensor, b: Tensor) -> bool:
    inner = a.shape[1]
    return a.device.type == "cpu" and isinstance(inner, int) and 0 < inner <= SHORT and b.shape[1] >= NARROW


def _short_product(a: Tensor, b: Tensor) -> Tensor:
    """a·b as the sum of the columns of a times the rows of b, which loops read along."""
    rows = b if b.stride(1) == 1 else held(b.contiguous())
    total = a[:, :1] * rows[0]
    for k in range(1, a.shape[1]):
        total = total + a[:, k : k + 1] * rows[k]
    return total


def mm(a: Tensor, b: Tensor) -> Tensor | None:
    if _is_short(a, b):
        return _short_product(a, b)
    # The gradient of a layer with more outputs than inputs: for libraries it is up to three times as fast the other way
    # round.
    if (
        a.device.type == "cpu"
        and a.shape[0] > b.shape[1]
        and a.stride(0) == 1
        and a.stride(1) > 1
        and not computed_here(a)
    ):
        return torch.mm(b.mT, a.mT).mT.contiguous()
    # The same holds for products with few columns, which are slower than those with few rows.
    if a.device.type == "cpu" and b.shape[1] < NARROW < a.shape[0] and b.stride(1) == 1 and b.stride(0) > 1:
        return torch.mm(b.mT, a.mT).mT.contiguous()
    return None


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    # The bias would be copied to every row first; as a sum it is part of the loop that reads the product. Not held, the
    # back end would make an addmm of it again.
    if a.device.type != "cpu" or bias.ndim != 1 or beta != 1 or alpha != 1:
        return None
    if _is_short(a, b):
        return _short_product(a, b) + bias
    if b.shape[1] >= NARROW:
        return held(torch.mm(a, b)) + bias
    if a.shape[0] > NARROW and b.stride(0) == 1:
        return (held(torch.mm(b.mT, a.mT)).mT + bias).contiguous()
    return None


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor | None:
    if transposed or not _plain_convolution(x, stride, dilation, groups):
        return None
    sizes = [n + 2 * p - k + 1 for n, p, k in zip(x.shape[2:], padding, weight.shape[2:], strict=True)]
    if min(weight.shape[2:]) > max(sizes):
        # The gradient of the weights, as torch writes it for second derivatives: a convolution by a whole image.
        shape = weight.shape[0], x.shape[0], *sizes
        like = torch.empty(shape, dtype=x.dtype, device=x.device)
        grad = _backward(weight.transpose(0, 1), x.transpose(0, 1), like, padding, [False, True, False])[1]
        found = grad.transpose(0, 1).contiguous()
    elif weight.shape[0] <= FEW_CHANNELS and x.shape[1] >= NARROW:
        found = _by_product(x, weight, padding)
    else:
        return None
    return found if bias is None else found + bias[:, None, None]


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    few = min(weight.shape[:2]) <= FEW_CHANNELS and max(weight.shape[:2]) >= NARROW
    if transposed or not few or not _plain_convolution(x, stride, dilation, groups):
        return None
    back = [k - 1 - p for k, p in zip(weight.shape[2:], padding, strict=True)]
    if min(back) < 0 or not (output_mask[0] or weight.shape[0] <= FEW_CHANNELS):
        return None
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        turned = weight.flip(2, 3).transpose(0, 1).contiguous()
        grad_x = aten.convolution.default(grad, turned, None, [1, 1], back, [1, 1], False, [0, 0], 1)
    if output_mask[1] and weight.shape[0] <= FEW_CHANNELS:
        grad_weight = _weights_by_product(grad, x, weight.shape, padding)
    elif output_mask[1]:
        grad_weight = _backward(grad, x, weight, padding, [False, True, False])[1]
    if output_mask[2]:
        grad_bias = grad.sum((0, 2, 3))
    return grad_x, grad_weight, grad_bias


def _plain_convolution(x: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> bool:
    return _single(x) and x.ndim == 4 and groups == 1 and {*stride, *dilation} == {1}


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int], mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return aten.convolution_backward.default(grad, x, weight, None, [1, 1], padding, [1, 1], False, [0, 0], 1, mask)


def _shifts(x: Tensor, sizes: Sequence[int], kernel: Sequence[int], padding: Sequence[int]) -> list[Tensor]:
    """The parts of x, with zeros around it, that each entry of a kernel sees; `sizes` are those of the result."""
    (rows, columns), (a, b) = padding, sizes
    padded = torch.constant_pad_nd(x, [columns, columns, rows, rows])
    return [padded[..., i : i + a, j : j + b] for i in range(kernel[0]) for j in range(kernel[1])]


def _by_product(x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """A convolution with few results: libraries compute 16 of them at a time. Here one product for all entries of the
    kernel, whose results are shifted and added."""
    (outputs, inputs, *kernel), (batch, _, *space) = weight.shape, x.shape
    rows = weight.permute(0, 2, 3, 1).reshape(1, -1, inputs).expand(batch, -1, inputs)
    product = held(torch.bmm(rows, x.reshape(batch, inputs, -1))).reshape(batch, outputs, -1, *space)
    sizes = [n + 2 * p - k + 1 for n, p, k in zip(space, padding, kernel, strict=True)]
    shifted = _shifts(product, sizes, kernel, padding)
    total = shifted[0][:, :, 0]
    for k, part in enumerate(shifted[1:], 1):
        total = total + part[:, :, k]
    return total


def _weights_by_product(grad: Tensor, x: Tensor, shape: Sequence[int], padding: Sequence[int]) -> Tensor:
    """The gradient of the weights of a convolution with few results, in the same way."""
    outputs, inputs, *kernel = shape
    batch, _, *space = x.shape
    back = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
    # What is multiplied with x[h, w] for the entry (i, j) of the kernel is grad[h − i + padding, w − j + padding].
    shifted = _shifts(grad, space, kernel, back)[::-1]
    rows = held(torch.stack(shifted, 2).reshape(batch, -1, space[0] * space[1]))
    products = torch.bmm(rows, x.reshape(batch, inputs, -1).mT)
    return products.sum(0).reshape(outputs, *kernel, inputs).permute(0, 3, 1, 2).contiguous()


RULES: dict[Any, Callable[..., Any]] = {
    aten.tanh.default: tanh,
    aten.softplus.default: softplus,
    aten.softplus_backward.default: softplus_backward,
    aten.bmm.default: bmm,
    aten.mm.default: mm,
    aten.addmm.default: addmm,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}


def table(rewritten: bool) -> dict[Any, Callable[..., Any]]:
    """What operations become while a graph is traced: as the back end has it and, if `rewritten`, by the rules here.

    Otherwise what the rules are about stays whole.
    """
    usual = usual_decompositions()
    found = {op: rule for op, rule in usual.items() if op not in RULES}
    if rewritten:
        found |= {op: _either(rule, usual.get(op)) for op, rule in RULES.items()}
    return found


def _either(rule: Callable[..., Any], usual: Callable[..., Any] | None) -> Callable[..., Any]:
    def become(*args: Any, **kwargs: Any) -> Any:
        found = rule(*args, **kwargs)
        if found is not None:
            return found
        return NotImplemented if usual is None else usual(*args, **kwargs)

    return become

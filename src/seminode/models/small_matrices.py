"""Products, exponentials and scans of many small matrices, stored with the rows and columns as the first two axes.

With this layout a product is m multiply–adds of long contiguous vectors. For matrices of a few rows this is several
times as fast as batched matrix products, forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: Up to this size, products are sums over columns; above it, batched matrix products.
SMALL = 8


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The products A B of matrices of shape (m, m, ...) with matrices or columns of shape (m, k, ...).

    Example:
        >>> import torch
        >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).unsqueeze(-1)
        >>> multiply(a, a).squeeze(-1)
        tensor([[ 7., 10.],
                [15., 22.]])
    """
    if a.shape[1] > SMALL:
        return (a.movedim((0, 1), (-2, -1)) @ b.movedim((0, 1), (-2, -1))).movedim((-2, -1), (0, 1))
    return _Product.apply(a, b)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """Σ_k a[:, k] b[k], with the two products of its gradient instead of the gradients of every summand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        total = a[:, :1] * b[:1]
        for k in range(1, a.shape[1]):
            total = torch.addcmul(total, a[:, k : k + 1], b[k : k + 1])
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        (adj,) = cotangents
        adj_a = multiply(adj, b.transpose(0, 1)) if ctx.needs_input_grad[0] else None
        adj_b = multiply(a.transpose(0, 1), adj) if ctx.needs_input_grad[1] else None
        return adj_a, adj_b


def exponential(x: Tensor) -> Tensor:
    """exp X of matrices of shape (m, m, ...): a Taylor polynomial of X/2ˢ, squared s times.

    s is the smallest number for which the remainder of the polynomial is below rounding for all finite matrices. The
    polynomial is evaluated by the scheme of Paterson and Stockmeyer (1973): degree q² with 2(q − 1) products. It is
    exp X/2ˢ − I that is squared, by (I + E)² − I = 2E + E²: then a small matrix is not rounded s times to the accuracy
    of I because there is a large one next to it.

    Example:
        >>> import torch
        >>> exponential(torch.tensor([[0.0, 1.0], [0.0, 0.0]]).unsqueeze(-1)).squeeze(-1)
        tensor([[1., 1.],
                [0., 1.]])
    """
    q, radius = (4, 0.78) if x.dtype == torch.float64 else (3, 0.78)
    sums = x.detach().abs().sum(0)
    largest = float(torch.where(sums.isfinite(), sums, 0.0).max()) if x.numel() else 0.0
    squarings = max(0, math.ceil(math.log2(largest / radius))) if largest > 0.0 else 0
    scaled = x / 2.0**squarings
    powers = [scaled]
    while len(powers) < q:
        powers.append(multiply(powers[-1], scaled))
    identity = torch.eye(len(x), dtype=x.dtype, device=x.device).reshape(len(x), len(x), *[1] * (x.ndim - 2))

    def part(first: int) -> Tensor:
        """Σ X^i/(first + i)! for i from 0 to q − 1, without I for first = 0."""
        total = identity / math.factorial(first) if first else torch.zeros_like(identity)
        for i, power in enumerate(powers[:-1], 1):
            total = torch.add(total, power, alpha=1.0 / math.factorial(first + i))
        return total

    total = torch.add(part(q * (q - 1)), powers[-1], alpha=1.0 / math.factorial(q * q))
    for j in range(q - 2, -1, -1):
        total = part(q * j) + multiply(total, powers[-1])
    for _ in range(squarings):
        total = torch.add(multiply(total, total), total, alpha=2.0)
    return identity + total


def scan_products(matrices: Tensor) -> Tensor:
    """All products Mᵢ ⋯ M₁M₀ along the third axis, in log₂(n) rounds of parallel products; (m, m, n, ...).

    Neighbours are multiplied in pairs, the pairs are scanned, and the results are completed: about 2n products.
    Blelloch, *Prefix sums and their applications*, 1990.

    Example:
        >>> import torch
        >>> scan_products(torch.tensor([2.0, 3.0, 5.0]).reshape(1, 1, 3)).flatten()
        tensor([ 2.,  6., 30.])
    """
    n = matrices.shape[2]
    if n < 2:
        return matrices
    odd = scan_products(multiply(matrices[:, :, 1::2], matrices[:, :, : n - 1 : 2]))  # products up to 1, 3, 5, …
    later = multiply(matrices[:, :, 2::2], odd[:, :, : (n - 1) // 2])
    even = torch.cat((matrices[:, :, :1], later), 2)  # up to 0, 2, 4, …
    count = odd.shape[2]
    pairs = torch.stack((even[:, :, :count], odd), 3).flatten(2, 3)
    return pairs if n % 2 == 0 else torch.cat((pairs, even[:, :, -1:]), 2)


def product_of(matrices: Tensor) -> Tensor:
    """The product Mₙ₋₁ ⋯ M₁M₀ along the third axis, in log₂(n) rounds of parallel products; (m, m, ...).

    Example:
        >>> import torch
        >>> product_of(torch.tensor([2.0, 3.0, 5.0]).reshape(1, 1, 3))
        tensor([[30.]])
    """
    while (n := matrices.shape[2]) > 1:
        pairs = multiply(matrices[:, :, 1::2], matrices[:, :, : n - 1 : 2])
        matrices = pairs if n % 2 == 0 else torch.cat((pairs, matrices[:, :, -1:]), 2)
    return matrices[:, :, 0]

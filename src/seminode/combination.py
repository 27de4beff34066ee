"""Linear combinations of slopes, y + dt·Σ wᵢkᵢ: the arithmetic under every Runge–Kutta method.

Weights are host floats. A host float dt is folded into them, so that each term is one fused multiply-add kernel; a
tensor dt (a differentiable or traced one) multiplies the finished sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SparseWeights = tuple[tuple[int, float], ...]


def sparse(weights: Iterable[float]) -> SparseWeights:
    """The non-zero weights with their indices.

    >>> sparse((0.5, 0.0, 0.25))
    ((0, 0.5), (2, 0.25))
    """
    return tuple((i, float(w)) for i, w in enumerate(weights) if w != 0.0)


def weighted_sum(weights: SparseWeights, slopes: Sequence[Tensor], factor: float = 1.0) -> Tensor:
    """factor·Σ wᵢkᵢ."""
    if not weights:
        return torch.zeros_like(slopes[0])
    i, w = weights[0]
    return _accumulate(torch.mul(slopes[i], w * factor), factor, weights[1:], slopes)


def combine(y: Tensor, dt: float | Tensor, weights: SparseWeights, slopes: Sequence[Tensor]) -> Tensor:
    """y + dt·Σ wᵢkᵢ."""
    if not weights:
        return y
    if isinstance(dt, float):
        i, w = weights[0]
        return _accumulate(torch.add(y, slopes[i], alpha=w * dt), dt, weights[1:], slopes)
    return y + dt * weighted_sum(weights, slopes)


def _accumulate(total: Tensor, factor: float, weights: SparseWeights, slopes: Sequence[Tensor]) -> Tensor:
    """total + factor·Σ wᵢkᵢ. `total` is the caller's own fresh tensor: where nothing watches it is reused."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        for i, w in weights:
            total = torch.add(total, slopes[i], alpha=w * factor)
        return total
    for i, w in weights:
        total.add_(slopes[i], alpha=w * factor)
    return total


def scaled_sum(dt: float | Tensor, weights: SparseWeights, slopes: Sequence[Tensor]) -> Tensor:
    """dt·Σ wᵢkᵢ."""
    if isinstance(dt, float):
        return weighted_sum(weights, slopes, dt)
    return dt * weighted_sum(weights, slopes)

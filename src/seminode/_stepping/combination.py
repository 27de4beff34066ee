"""Linear combinations of slopes, y + dt·Σ wᵢkᵢ: the arithmetic under every Runge–Kutta method.

Weights and dt are host floats, so that each term is one fused multiply-add kernel. Where the derivative with respect
to dt is wanted, a zero-valued tensor is added to it: values, and the steps that follow from them, stay the same to the
last bit. In a graph that is to be compiled, dt is a tensor, since a number would be a constant of the graph. In a
batched solve it is a tensor with one entry per sample, in the shape of a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .._compile.torch_private import transforms_active

SparseWeights = tuple[tuple[int, float], ...]


class MovingStep(NamedTuple):
    """A step size to be differentiated: its value, and a tensor that is zero and carries the derivative."""

    value: float | Tensor
    shift: Tensor


StepSize: TypeAlias = float | MovingStep | Tensor


def length(dt: StepSize) -> float | Tensor:
    """A step size as a number or, if it is differentiated, as a tensor."""
    return dt.value + dt.shift if isinstance(dt, MovingStep) else dt


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


def combine(y: Tensor, dt: StepSize, weights: SparseWeights, slopes: Sequence[Tensor]) -> Tensor:
    """y + dt·Σ wᵢkᵢ."""
    if not weights:
        return y
    if isinstance(dt, MovingStep):
        return combine(y, dt.value, weights, slopes) + dt.shift * weighted_sum(weights, slopes)
    if isinstance(dt, Tensor):
        if not _each_lane(dt, y):
            return y + dt * weighted_sum(weights, slopes)
        i, w = weights[0]
        return _accumulate_each(torch.addcmul(y, dt, slopes[i], value=w), dt, weights[1:], slopes)
    i, w = weights[0]
    return _accumulate(torch.add(y, slopes[i], alpha=w * dt), dt, weights[1:], slopes)


def scaled_sum(dt: StepSize, weights: SparseWeights, slopes: Sequence[Tensor]) -> Tensor:
    """dt·Σ wᵢkᵢ."""
    if isinstance(dt, MovingStep):
        return scaled_sum(dt.value, weights, slopes) + dt.shift * weighted_sum(weights, slopes)
    if isinstance(dt, Tensor):
        if not weights or not _each_lane(dt, slopes[0]):
            return dt * weighted_sum(weights, slopes)
        i, w = weights[0]
        return _accumulate_each((dt * w) * slopes[i], dt, weights[1:], slopes)
    return weighted_sum(weights, slopes, dt)


def _each_lane(dt: Tensor, y: Tensor) -> bool:
    """Whether to add the terms one by one with their own step sizes, by one operation each.

    Rounding is then the same as with a number. A compiler fuses everything anyway.
    """
    return dt.ndim > 0 and not y.is_complex() and not transforms_active()


def _accumulate_each(total: Tensor, dt: Tensor, weights: SparseWeights, slopes: Sequence[Tensor]) -> Tensor:
    """As `_accumulate`, with a tensor of step sizes."""
    for i, w in weights:
        total.addcmul_(dt, slopes[i], value=w)
    return total


def _accumulate(total: Tensor, factor: float, weights: SparseWeights, slopes: Sequence[Tensor]) -> Tensor:
    """total + factor·Σ wᵢkᵢ. `total` is the caller's own fresh tensor, which no graph saves: it is reused.

    Not under torch.func, where a tensor that is not mapped over cannot take up one that is.
    """
    if transforms_active():
        for i, w in weights:
            total = torch.add(total, slopes[i], alpha=w * factor)
        return total
    for i, w in weights:
        total.add_(slopes[i], alpha=w * factor)
    return total

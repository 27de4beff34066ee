r"""Bijections between pixels and real numbers, with exact log-determinants, for flows on images.

    x = (pixel + u) / n,  u ~ U[0, 1)                                   dequantisation with n levels, 256 for bytes
    s = α + (1 − 2α)x,  y = log s − log(1 − s)                          logit
    log|dy/dx| = log(1 − 2α) − log s − log(1 − s)

Dinh, Sohl-Dickstein and Bengio (2017, arXiv:1605.08803); Theis, van den Oord and Bethge (2016, arXiv:1511.01844).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._field.checks import check_count

LEVELS = 256
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def check_pixels(pixels: Any, shape: Sequence[int], levels: int = LEVELS) -> None:
    """Raise an error unless pixels are integers in 0, …, levels − 1 of shape (batch, *shape)."""
    if not isinstance(pixels, Tensor):
        raise TypeError(f"pixels: expected a tensor, found {type(pixels).__name__}")
    if pixels.dtype not in INTEGERS:
        raise TypeError(f"pixels: expected integers in 0…{levels - 1}, torch.uint8 for example, found {pixels.dtype}")
    if tuple(pixels.shape[1:]) != tuple(shape) or pixels.ndim == 0:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"pixels: expected shape (batch, {expected}), found {tuple(pixels.shape)}")
    if (pixels.dtype != torch.uint8 or levels < LEVELS) and pixels.numel():  # with 256 levels every byte is valid
        low, high = (int(x) for x in pixels.aminmax())
        if low < 0 or high >= levels:
            raise ValueError(f"pixels: expected values in 0…{levels - 1}, found {low if low < 0 else high}")


def check_levels(levels: int) -> int:
    """Check that there are 2 to 256 levels: samples are stored as bytes."""
    if not 2 <= check_count("levels", levels) <= LEVELS:
        raise ValueError(f"levels: expected 2 to {LEVELS}, found {levels}")
    return levels


def dequantise(
    pixels: Tensor, *, levels: int = LEVELS, deterministic: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """x = (pixel + u)/levels in [0, 1), with a new u ~ U[0, 1) for every pixel, or u = ½ if deterministic.

    >>> dequantise(torch.tensor([0, 255], dtype=torch.uint8), deterministic=True)
    tensor([0.0020, 0.9980])
    """
    x = pixels.to(dtype)
    u = 0.5 if deterministic else torch.rand_like(x)
    # 255 + u may be rounded to 256.
    return ((x + u) / levels).clamp(max=1.0 - torch.finfo(dtype).eps / 2)


def quantise(x: Tensor, levels: int = LEVELS) -> Tensor:
    """The level, as a byte, of values in [0, 1); values outside are clamped to the nearest level.

    >>> quantise(torch.tensor([-0.1, 0.5, 1.0]))
    tensor([  0, 128, 255], dtype=torch.uint8)
    """
    return (x * levels).floor().clamp(0, levels - 1).to(torch.uint8)


def logit(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """y = log s − log(1 − s) with s = α + (1 − 2α)x, and Σ log|dy/dx| per sample, shape (batch,).

    >>> y, log_det = logit(torch.tensor([[0.5, 0.75]]), 0.05)
    >>> y
    tensor([[0.0000, 0.9694]])
    """
    check_alpha(alpha)
    scale = 1.0 - 2.0 * alpha
    # Compute 1 − s from 1 − x: for s near 1 the difference 1 − s would lose most digits.
    log_s, log_1_minus_s = (alpha + scale * x).log(), (alpha + scale * (1.0 - x)).log()
    return log_s - log_1_minus_s, (math.log(scale) - log_s - log_1_minus_s).flatten(1).sum(1)


def inverse_logit(y: Tensor, alpha: float) -> Tensor:
    """x = (σ(y) − α)/(1 − 2α), which lies in the interval (−α, 1 − α)/(1 − 2α), slightly larger than (0, 1).

    >>> inverse_logit(logit(torch.tensor([[0.5, 0.75]]), 0.05)[0], 0.05)
    tensor([[0.5000, 0.7500]])
    """
    check_alpha(alpha)
    return (torch.sigmoid(y) - alpha) / (1.0 - 2.0 * alpha)


def check_alpha(alpha: float) -> None:
    if not 0.0 < alpha < 0.5:
        raise ValueError(f"alpha: expected a number between 0 and 0.5, found {alpha!r}")


def squeeze(x: Tensor) -> Tensor:
    """(batch, c, h, w) to (batch, 4c, h/2, w/2); channels are ordered by (old channel, row offset, column offset).

    This is a permutation of the entries, so the log-determinant is zero.

    >>> squeeze(torch.arange(4.0).view(1, 1, 2, 2)).flatten()
    tensor([0., 1., 2., 3.])
    """
    if x.ndim != 4 or x.shape[2] % 2 or x.shape[3] % 2:
        raise ValueError(f"x: expected shape (batch, channels, height, width) with even sides, found {tuple(x.shape)}")
    return functional.pixel_unshuffle(x, 2)


def unsqueeze(x: Tensor) -> Tensor:
    """The inverse of `squeeze`."""
    if x.ndim != 4 or x.shape[1] % 4:
        raise ValueError(f"x: expected shape (batch, 4·channels, height, width), found {tuple(x.shape)}")
    return functional.pixel_shuffle(x, 2)


def bits_per_dim(log_prob: Tensor, dims: int, levels: int = LEVELS) -> Tensor:
    """−(log p(x)/D − log levels)/log 2 for a density p of dequantised images x in [0, 1)ᴰ.

    Averaged over the noise u, this is an upper bound on the bits per dimension of the discrete model (Theis et al.,
    2016).

    Arguments:
        log_prob: log p(x), of any shape.
        dims: D, the number of values in a sample.
        levels: how many values a pixel may have.

    The uniform density has 8 bits per dimension:

    >>> bits_per_dim(torch.zeros(1), 784)
    tensor([8.])
    """
    if dims < 1:
        raise ValueError(f"dims: expected the number of values in a sample, at least 1, found {dims!r}")
    return -(log_prob / dims - math.log(levels)) / math.log(2.0)

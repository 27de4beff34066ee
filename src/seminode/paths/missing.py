"""Filling of values that were not observed (NaN). The knot is the first axis of `Knots`."""

from __future__ import annotations

import torch
from torch import Tensor

from .._untyped import integers
from .knots import Knots, check_values


def fill_unobserved(x: Tensor, value: float = 0.0) -> Tensor:
    """Replace those channels of series that were never observed by a constant; other gaps (NaN) stay.

    No interpolation can be made of a channel without a single observation. A constant has no increments, so that it
    adds nothing to a controlled differential equation.

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed.
        value: the constant.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> paths.fill_unobserved(torch.tensor([[torch.nan, 1.0], [torch.nan, torch.nan]]))
        tensor([[0., 1.],
                [0., nan]])
    """
    check_values(x)
    never = x.isnan().all(-2, keepdim=True)
    return torch.where(never, value, x) if bool(never.any()) else x


def forward_fill(x: Tensor, dim: int = -2) -> Tensor:
    """Fill gaps (NaN) with the latest observed value along an axis; entries before the first observation stay NaN.

    Arguments:
        x: values of any shape, for example (batch..., K, channels).
        dim: the axis of time.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> paths.forward_fill(torch.tensor([[torch.nan], [1.0], [torch.nan]])).squeeze(-1)
        tensor([nan, 1., 1.])
    """
    observed = ~x.isnan()
    if bool(observed.all()):
        return x
    before, _ = neighbours(observed.movedim(dim, 0))
    return x.gather(dim, before.clamp(min=0).movedim(0, dim))


def check_observed(knots: Knots) -> None:
    """Raise an error unless every channel of every series has at least one observation."""
    if knots.complete:
        return
    never = ~knots.observed.any(0)
    if bool(never.any()):
        *series, channel = integers(never.nonzero()[0])
        where = ", ".join(map(str, (*series, ":", channel)))
        named = f"series {_plain(series)}, channel {channel}" if series else f"channel {channel}"
        more = int(never.sum()) - 1
        raise ValueError(
            f"x[{where}]: expected at least one observation in each channel of each series, found only NaN in {named}"
            f"{f' and in {more} more' if more else ''}; fill it with a constant (paths.fill_unobserved), or remove it"
        )


def _plain(index: list[int]) -> int | tuple[int, ...]:
    return index[0] if len(index) == 1 else tuple(index)


def neighbours(observed: Tensor) -> tuple[Tensor, Tensor]:
    """For each knot, the last observed knot up to it (−1 if none), and the first one from it on (K if none)."""
    count = len(observed)
    index = torch.arange(count, device=observed.device).reshape(-1, *(1 for _ in observed.shape[1:]))
    before = torch.where(observed, index, -1).cummax(0).values
    after = torch.where(observed, index, count).flip(0).cummin(0).values.flip(0)
    return before, after


def filled_linearly(knots: Knots) -> Tensor:
    """Fill gaps along straight lines; knots before the first and after the last observation get its value."""
    values, observed = knots.values, knots.observed
    if knots.complete:
        return values
    before, after = neighbours(observed)
    known = torch.where(observed, values, 0.0)  # without NaN, because the gradient of 0 · NaN is NaN
    left = torch.where(before < 0, after, before)
    right = torch.where(after == len(values), before, after)
    clock = knots.clock.expand_as(values)
    t_left, t_right = clock.gather(0, left), clock.gather(0, right)
    width = torch.where(right > left, t_right - t_left, 1.0)
    share = ((clock - t_left) / width).to(values.dtype)
    x_left = known.gather(0, left)
    return torch.where(observed, known, x_left + share * (known.gather(0, right) - x_left))


def filled_forward(knots: Knots) -> Tensor:
    """Fill gaps with the latest observed value; knots before the first observation get its value."""
    values, observed = knots.values, knots.observed
    if knots.complete:
        return values
    before, after = neighbours(observed)
    return torch.where(observed, values, 0.0).gather(0, torch.where(before < 0, after, before))

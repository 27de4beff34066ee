"""Filling of values that were not observed (NaN). The knot is the first axis of all tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .._untyped import integers
from .knots import Knots


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
            f"{f' and in {more} more' if more else ''}; fill it with a constant, or remove it"
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

"""Values for what was not observed, which is NaN. The knot is the first axis throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from .knots import Knots


def check_observed(knots: Knots) -> None:
    """Every channel of every series must have been observed at least once."""
    if knots.complete:
        return
    never = ~knots.observed.any(0)
    if bool(never.any()):
        *series, channel = never.nonzero()[0].tolist()
        where = ", ".join(map(str, (*series, ":", channel)))
        named = f"series {_plain(series)}, channel {channel}" if series else f"channel {channel}"
        more = int(never.sum()) - 1
        raise ValueError(
            f"x[{where}]: expected at least one observation in each channel of each series, found only NaN in {named}"
            f"{f' and in {more} more' if more else ''}; fill it with a constant, or leave it out"
        )


def _plain(index: list[int]) -> int | tuple[int, ...]:
    return index[0] if len(index) == 1 else tuple(index)


def neighbours(observed: Tensor) -> tuple[Tensor, Tensor]:
    """Of each knot the latest observed one until then, −1 if there is none, and the next one from there, K if none."""
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
    known = torch.where(observed, values, 0.0)  # no NaN may take part, not even times zero: its gradient would
    left = torch.where(before < 0, after, before)
    right = torch.where(after == len(values), before, after)
    clock = knots.clock.expand_as(values)
    t_left, t_right = clock.gather(0, left), clock.gather(0, right)
    width = torch.where(right > left, t_right - t_left, 1.0)
    share = ((clock - t_left) / width).to(values.dtype)
    x_left = known.gather(0, left)
    return torch.where(observed, known, x_left + share * (known.gather(0, right) - x_left))


def filled_forward(knots: Knots) -> Tensor:
    """With the latest observed value, or before there is any with the first."""
    values, observed = knots.values, knots.observed
    if knots.complete:
        return values
    before, after = neighbours(observed)
    return torch.where(observed, values, 0.0).gather(0, torch.where(before < 0, after, before))

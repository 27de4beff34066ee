"""Checks of what a path is to go through, and the form in which all interpolations take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Times = Tensor | Sequence[float] | None


@dataclass(frozen=True, eq=False)
class Knots:
    """Observations with the knot in front.

    Attributes:
        times: as a path keeps them, (K,) or (batch..., K); beyond the end of a series its last time is repeated.
        values: (K, batch..., channels), NaN where nothing was observed and beyond the end of a series.
        lengths: (batch...), or `None` if all series have K knots.
    """

    times: Tensor
    values: Tensor
    lengths: Tensor | None

    @property
    def clock(self) -> Tensor:
        """The times in the dtype of the values, shaped to broadcast with them."""
        times = self.times.to(torch.promote_types(self.values.dtype, self.times.dtype)).movedim(-1, 0).unsqueeze(-1)
        return times.reshape(len(times), *(1 for _ in self.values.shape[1:])) if self.times.ndim == 1 else times

    @property
    def widths(self) -> Tensor:
        """(K − 1, ...) of the pieces, in the dtype of the values; 1 beyond the end of a series."""
        widths = self.clock.diff(dim=0).to(self.values.dtype)
        return widths if self.lengths is None else torch.where(widths > 0, widths, 1.0)

    @cached_property
    def observed(self) -> Tensor:
        return ~self.values.isnan()

    @cached_property
    def complete(self) -> bool:
        """Whether nothing is missing, and no series is shorter than others."""
        return bool(self.observed.all())

    def inside(self, offset: int = 0) -> Tensor | None:
        """(K − offset, batch..., 1): whether the series has a knot i + offset; `None` if all have all."""
        if self.lengths is None:
            return None
        index = torch.arange(offset, len(self.values), device=self.values.device)
        return (index.reshape(-1, *(1 for _ in self.lengths.shape)) < self.lengths).unsqueeze(-1)


def check_values(x: Any) -> tuple[torch.Size, int]:
    """The batch shape of x (batch..., K, channels), and K."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor, found {type(x).__name__}")
    if x.dtype not in FLOATING:
        raise TypeError(f"x: expected a floating-point dtype, found {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"x: expected shape (batch..., K, channels), found {tuple(x.shape)}")
    batch, count = x.shape[:-2], x.shape[-2]
    if count < 2:
        raise ValueError(f"x: expected at least 2 knots along axis −2, found {count} in shape {tuple(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"x: expected at least one series and one channel, found shape {tuple(x.shape)}")
    return batch, count


def check_knots(x: Any, times: Any, lengths: Any) -> Knots:
    """Observations x (batch..., K, channels) at times that increase strictly."""
    batch, count = check_values(x)
    own_lengths = None if lengths is None else check_lengths(lengths, batch, count, x.device)
    knots = Knots(check_times(times, x, own_lengths), x.movedim(-2, 0), own_lengths)
    inside = knots.inside()
    if inside is not None:
        knots = Knots(knots.times, torch.where(inside, knots.values, torch.nan), own_lengths)
    if bool(knots.values.isinf().any()):
        raise ValueError("x: expected finite values, or NaN where nothing was observed, found infinite ones")
    return knots


def check_lengths(lengths: Any, batch: torch.Size, count: int, device: torch.device) -> Tensor:
    lengths = _tensor("lengths", lengths).to(device)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected whole numbers, found {lengths.dtype}")
    if lengths.shape != batch:
        raise ValueError(f"lengths: expected shape {tuple(batch)}, one for each series, found {tuple(lengths.shape)}")
    wrong = (lengths < 1) | (lengths > count)
    if bool(wrong.any()):
        raise ValueError(f"lengths: expected numbers from 1 to {count}, the knots of x, found {lengths[wrong][0]}")
    return lengths.to(torch.int64)


def check_times(times: Any, x: Tensor, lengths: Tensor | None) -> Tensor:
    """The knots as a tensor of a floating dtype, without whatever stands in the padding."""
    batch, count = x.shape[:-2], x.shape[-2]
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    solving = torch.float64 if x.dtype == torch.float64 else torch.float32  # the dtype in which a solve sees time
    if times is None:
        return torch.arange(count, dtype=solving, device=x.device)
    times = _tensor("times", times, wide)
    if times.is_complex() or times.dtype == torch.bool:
        raise TypeError(f"times: expected real numbers, found {times.dtype}")
    if times.dtype not in (torch.float32, torch.float64):
        times = times.to(wide)
    times = times.to(x.device)
    if times.shape not in ((count,), (*batch, count)):
        shapes = f"({count},)" + (f" or {(*batch, count)}" if batch else "")
        raise ValueError(f"times: expected shape {shapes} for x of shape {tuple(x.shape)}, found {tuple(times.shape)}")
    if lengths is not None and times.ndim > 1:
        index = torch.arange(count, device=times.device).expand(times.shape)
        times = times.gather(-1, torch.minimum(index, lengths.unsqueeze(-1) - 1))
    _check_increasing(times.detach(), solving, lengths)
    return times


def _check_increasing(times: Tensor, solving: torch.dtype, lengths: Tensor | None) -> None:
    if not bool(times.isfinite().all()):
        at = _first(~times.isfinite())
        raise ValueError(f"times{list(at)}: expected a finite time, found {float(times[at])}")
    for dtype in (times.dtype, solving):
        stuck = times.to(dtype).diff() <= 0
        if lengths is not None and times.ndim > 1:
            stuck &= torch.arange(1, times.shape[-1], device=times.device) < lengths.unsqueeze(-1)
        if bool(stuck.any()):
            *series, i = _first(stuck)
            a, b = float(times[(*series, i)]), float(times[(*series, i + 1)])
            where = ", ".join(map(str, (*series, i + 1)))
            if b > a:
                raise ValueError(
                    f"times[{where}]: {b!r} after {a!r} is the same time in {solving}, in which x would be solved; "
                    "subtract the first time, or use float64"
                )
            raise ValueError(f"times: expected strictly increasing times, found times[{where}] = {b} after {a}")


def _tensor(name: str, numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(numbers, Tensor):
        return numbers
    try:
        return torch.as_tensor(numbers, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(numbers).__name__
        raise TypeError(f"{name}: expected a tensor or a sequence of numbers, found {kind}: {error}") from None


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())

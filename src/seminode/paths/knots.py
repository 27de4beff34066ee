"""Checks of the arguments of paths, and the observations in the form that all interpolations use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._untyped import integers

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Times = Tensor | Sequence[float] | None
Lengths = Tensor | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Knots:
    """Observations, with the knot as the first axis.

    Attributes:
        times: (K,) or (batch..., K), as in a path; after the end of a series its last time is repeated.
        values: (K, batch..., channels), NaN where nothing was observed and after the end of a series.
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
        """(K − 1, ...), the widths of the pieces in the dtype of the values; 1 after the end of a series."""
        widths = self.clock.diff(dim=0).to(self.values.dtype)
        return widths if self.lengths is None else torch.where(widths > 0, widths, 1.0)

    @cached_property
    def observed(self) -> Tensor:
        return ~self.values.isnan()

    @cached_property
    def complete(self) -> bool:
        """Whether no value is missing and all series have K knots."""
        return bool(self.observed.all())

    def inside(self, offset: int = 0) -> Tensor | None:
        """(K − offset, batch..., 1), whether the series has a knot i + offset; `None` if all series have K knots."""
        if self.lengths is None:
            return None
        index = torch.arange(offset, len(self.values), device=self.values.device)
        return (index.reshape(-1, *(1 for _ in self.lengths.shape)) < self.lengths).unsqueeze(-1)


def check_values(x: Any) -> tuple[torch.Size, int]:
    """Check x of shape (batch..., K, channels), and return the batch shape and K."""
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
    """Check observations x of shape (batch..., K, channels) at strictly increasing times."""
    batch, count = check_values(x)
    own_lengths = None if lengths is None else check_lengths(lengths, batch, count, x.device)
    knots = Knots(check_times(times, x, own_lengths), x.movedim(-2, 0), own_lengths)
    inside = knots.inside()
    if inside is not None:
        knots = Knots(knots.times, torch.where(inside, knots.values, torch.nan), own_lengths)
    if bool(knots.values.isinf().any()):
        raise ValueError("x: expected finite values, or NaN where nothing was observed, found infinite values")
    return knots


def check_lengths(lengths: Any, batch: torch.Size, count: int, device: torch.device) -> Tensor:
    lengths = _tensor("lengths", lengths).to(device)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected integers, found {lengths.dtype}")
    if lengths.shape != batch:
        raise ValueError(f"lengths: expected shape {tuple(batch)}, one number per series, found {tuple(lengths.shape)}")
    wrong = (lengths < 1) | (lengths > count)
    if bool(wrong.any()):
        raise ValueError(f"lengths: expected numbers from 1 to {count}, the number of knots, found {lengths[wrong][0]}")
    return lengths.to(torch.int64)


def check_times(times: Any, x: Tensor, lengths: Tensor | None) -> Tensor:
    """The knots of x of shape (batch..., K, channels), in a floating-point dtype; padding repeats the last time."""
    batch, count = x.shape[:-2], x.shape[-2]
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    solving = torch.float64 if x.dtype == torch.float64 else torch.float32  # the dtype of time in a solve
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
        raise ValueError(f"times: expected shape {shapes}, one time per knot, found {tuple(times.shape)}")
    if lengths is not None and times.ndim > 1:
        index = torch.arange(count, device=times.device).expand(times.shape)
        times = times.gather(-1, torch.minimum(index, lengths.unsqueeze(-1) - 1))
    _check_increasing(times.detach(), solving, lengths)
    return times


def check_coefficients(coefficients: Any, times: Any, lengths: Any, smooth: Any) -> tuple[Tensor, Tensor | None]:
    """Check coefficients of shape (batch..., K − 1, degree + 1, channels), and return times and lengths as tensors."""
    if not isinstance(coefficients, Tensor):
        raise TypeError(f"coefficients: expected a tensor, found {type(coefficients).__name__}")
    if coefficients.dtype not in FLOATING:
        raise TypeError(f"coefficients: expected a floating-point dtype, found {coefficients.dtype}")
    shape = tuple(coefficients.shape)
    if len(shape) < 3 or shape[-2] < 2 or 0 in shape:
        raise ValueError(
            "coefficients: expected shape (batch..., K − 1, degree + 1, channels) with a degree of at least 1, "
            f"found {shape}"
        )
    if not isinstance(smooth, bool):
        raise TypeError(f"smooth: expected True or False, found {smooth!r}")
    if not bool(coefficients.isfinite().all()):
        raise ValueError("coefficients: expected finite values, found NaN or infinite values")
    batch, count = coefficients.shape[:-3], shape[-3] + 1
    if lengths is not None:
        lengths = check_lengths(lengths, batch, count, coefficients.device)
        after = torch.arange(1, count, device=coefficients.device) >= lengths.unsqueeze(-1)  # (batch..., K − 1)
        if bool(coefficients[..., 1:, :].movedim(-3, 0)[after.movedim(-1, 0)].any()):
            raise ValueError("coefficients: expected constant pieces after the last knot of each series, found slopes")
    like = coefficients.new_empty(()).expand(*batch, count, shape[-1])
    return check_times(times, like, lengths), lengths


def check_index(index: Any, batch: torch.Size, device: torch.device) -> Any:
    """Check an index into the first batch axis, and return an integer, a slice or a tensor of integers."""
    if not batch:
        raise TypeError("index: expected a path with a batch axis, found the path of a single series")
    size = batch[0]
    checked: Any = index
    if isinstance(index, slice):
        count = len(range(size)[index])
    else:
        kind: Any = tuple(index.shape) if isinstance(index, Tensor) else type(index).__name__
        if isinstance(index, str | tuple) or (isinstance(index, Tensor) and index.ndim > 1):
            raise TypeError(f"index: expected an integer, a slice, or a sequence of integers, found {kind}")
        index = _tensor("index", index).to(device)
        if index.is_floating_point() or index.is_complex() or (index.dtype == torch.bool and index.shape != (size,)):
            raise TypeError(f"index: expected integers or a mask of shape ({size},), found {index.dtype}")
        index = index.nonzero().squeeze(-1) if index.dtype == torch.bool else index.long()
        wrong = (index < -size) | (index >= size)
        if bool(wrong.any()):
            raise IndexError(f"index: expected numbers from {-size} to {size - 1}, found {int(index[wrong][0])}")
        count = index.numel()
        checked = int(index) if index.ndim == 0 else index
    if count == 0:
        raise ValueError("index: expected at least one series, found none")
    return checked


def clocks(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if device.type == "mps" else (torch.float32, torch.float64)


def breaks(times: Tensor, dtype: torch.dtype, shared: bool) -> Tensor:
    """The boundaries between pieces, in the dtype of the times that are looked up.

    If that dtype cannot represent a knot exactly, the number closest to the knot counts as the knot.
    """
    times = times.to(dtype)
    if shared:
        return times[1:-1].contiguous()
    first = torch.nextafter(times[..., :1], torch.full_like(times[..., :1], -math.inf))
    return torch.cat((first, times[..., 1:]), -1)


def uniform(widths: Tensor, lengths: Tensor | None) -> bool:
    """Whether all pieces of each series have the same width, up to rounding."""
    if lengths is not None:
        inside = torch.arange(widths.shape[-1], device=widths.device) < lengths.unsqueeze(-1) - 1
        widths = torch.where(inside, widths, widths[..., :1])
    rounding = 1e3 * torch.finfo(widths.dtype).eps
    return bool(torch.allclose(widths, widths[..., :1].expand_as(widths), rtol=rounding, atol=0.0))


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
                    f"times[{where}]: expected times that differ in {solving}, the dtype of time in a solve, found "
                    f"{b!r} after {a!r}; subtract the first time, or use float64"
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
    return tuple(integers(mask.nonzero()[0]))

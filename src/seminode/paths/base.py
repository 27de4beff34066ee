"""A path made of polynomials, one between each two neighbouring knots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Path:
    """A control X(t): a polynomial between each two neighbouring knots, for a batch of series at once.

    Made by [`linear`][seminode.paths.linear], [`rectilinear`][seminode.paths.rectilinear],
    [`natural_cubic`][seminode.paths.natural_cubic] and [`hermite_cubic`][seminode.paths.hermite_cubic].

    Knots that all series share make a path that goes on beyond both ends with its end pieces. Where each series has
    knots of its own, it is constant before its first and after its last one.

    Arguments:
        times: the knots, (K,) for all series or (batch..., K). Only where every series has its own may they repeat,
            and only at the end: those repetitions are padding.
        powers: coefficients of (t − times[i])ᵐ on piece i, for m = 0, 1, …: each of shape (K − 1, batch..., channels).
        smooth: whether dX/dt is continuous at the inner knots.
        lengths: (batch...), the number of knots of each series, if they differ. Pieces beyond must be constant.
        kind: what to call it.

    Attributes:
        times: the knots.
        lengths: the number of knots of each series; `None` if all have K.
        interval: (t0, t1), from the first knot of any series to the last.
        smooth: whether dX/dt is continuous at the inner knots.
        channels: of X.
        batch_shape: of X.
    """

    def __init__(
        self,
        times: Tensor,
        powers: Sequence[Tensor],
        *,
        smooth: bool = False,
        lengths: Tensor | None = None,
        kind: str = "path",
    ):
        constant = powers[0]
        pieces, batch = times.shape[-1] - 1, constant.shape[1:-1]
        if constant.ndim < 2 or len(constant) != pieces or times.shape[:-1] not in ((), batch):
            raise ValueError(
                f"powers: expected coefficients of shape ({pieces}, batch..., channels) for times of shape "
                f"{tuple(times.shape)}, found {tuple(constant.shape)}"
            )
        self.times = times
        self.lengths = lengths
        self.smooth = smooth
        self.kind = kind
        self.channels = constant.shape[-1]
        self.batch_shape = batch
        self.shared = times.ndim == 1
        ends = torch.stack((times.detach().min(), times.detach().max()))
        self.interval: tuple[float, float] = tuple(ends.tolist())
        if not self.shared:
            powers = _with_constant_ends(times, powers)
        # The piece comes first, so that what one evaluation needs lies side by side.
        self._values = powers[0].contiguous()
        if len(powers) == 2:
            self._slopes = powers[1].unsqueeze(1).contiguous()
        else:
            self._slopes = torch.stack([m * c for m, c in enumerate(powers)][1:], 1)
        self._lines = self._slopes[:, 0]
        starts = times[..., :-1] if self.shared else torch.cat((times[..., :1], times), -1)
        self._starts = starts.movedim(-1, 0).contiguous()
        self._breaks = {dtype: _breaks(times.detach(), dtype) for dtype in _clocks(times.device)}

    def evaluate(self, t: float | Tensor) -> Tensor:
        """X(t).

        Arguments:
            t: a number or a 0-d tensor: (batch..., channels) comes back. Of shape (T,): (T, batch..., channels). Of
                shape (T, batch...), with times of its own for each series: (T, batch..., channels) again.
        """
        t = self._time(t)
        index = self._piece(t, "left")
        value, derivative = self._take(self._values, index), self._take(self._slopes, index)
        u = self._since(t, index)
        # X = c₀ + u·(c₁ + u·(2c₂/2 + u·(3c₃/3 + …)))
        *lower, total = (c / m for m, c in enumerate(derivative.unbind(index.ndim), 1))
        for c in reversed(lower):
            total = torch.addcmul(c, u, total)
        return torch.addcmul(value, u, total)

    def derivative(self, t: float | Tensor, side: str = "left") -> Tensor:
        """dX/dt(t), shaped as in `evaluate`.

        At a knot the two pieces may disagree: `side="left"` asks the one before, `side="right"` the one after. "At"
        means equal in the dtype of t. The first knot of a series belongs to its first piece.
        """
        t = self._time(t)
        index = self._piece(t, side)
        if self._slopes.shape[1] == 1:
            return self._take(self._lines, index)
        *lower, total = self._take(self._slopes, index).unbind(index.ndim)
        u = self._since(t, index)
        for c in reversed(lower):
            total = torch.addcmul(c, u, total)
        return total

    @property
    def powers(self) -> tuple[Tensor, ...]:
        """Coefficients of (t − times[i])ᵐ on piece i, for m = 0, 1, …: each of shape (K − 1, batch..., channels)."""
        pieces = slice(None) if self.shared else slice(1, -1)
        values, slopes = self._values[pieces], self._slopes[pieces]
        return values, *(slopes[:, m - 1] / m for m in range(1, slopes.shape[1] + 1))

    @property
    def bends(self) -> Tensor:
        """The knots inside the interval, of all series, increasing: there dX/dt or a higher derivative jumps.

        Where dX/dt does not jump, a solver gets along without them; ending steps there by `step_to` of its controller
        saves rejections and is more accurate.
        """
        return self._inner(self.times.detach())

    @property
    def jumps(self) -> Tensor:
        """Times inside the interval at which dX/dt is discontinuous, increasing: what `solve(jumps=...)` wants."""
        if not self.smooth:
            return self.bends
        times = self.times.detach()
        if self.lengths is not None:  # a series that has ended stands still
            ends = times.expand(*self.batch_shape, -1).gather(-1, self.lengths.unsqueeze(-1) - 1)
        else:
            ends = times[..., -1:]
        return self._inner(torch.cat((times[..., :1].reshape(-1), ends.reshape(-1))))

    def on_index_clock(self) -> Path:
        """The same path at another pace: its knots at 0, 1, …, K − 1, the same for all series.

        A controlled differential equation z′ = F(z) dX/dt does not notice: z at knot i is the same. Series with times
        of their own then share their knots, so that one solve with K − 2 jumps serves them all.
        """
        widths = self.times.diff()
        count = self.times.shape[-1]
        smooth = self.smooth and _uniform(widths.detach(), self.lengths)
        if self.shared:
            widths = widths.reshape(-1, *(1 for _ in self._values.shape[1:]))
        else:
            widths = widths.movedim(-1, 0).unsqueeze(-1)
        widths = widths.to(self._values.dtype)
        powers = [c * widths**m if m else c for m, c in enumerate(self.powers)]
        times = torch.arange(count, dtype=self.times.dtype, device=self.times.device)
        return Path(times, powers, smooth=smooth, lengths=self.lengths, kind=self.kind)

    def to(self, *args: Any, **kwargs: Any) -> Path:
        """As `Tensor.to`. A dtype is for the values; times keep theirs where the device has it."""
        powers = [c.to(*args, **kwargs) for c in self.powers]
        if not powers[0].is_floating_point():
            raise TypeError(f"dtype: expected a floating-point dtype, found {powers[0].dtype}")
        device = powers[0].device
        times = self.times.to(device, torch.float32 if device.type == "mps" else self.times.dtype)
        lengths = None if self.lengths is None else self.lengths.to(device)
        return Path(times, powers, smooth=self.smooth, lengths=lengths, kind=self.kind)

    def __repr__(self) -> str:
        t0, t1 = self.interval
        knots = f"{self.times.shape[-1]} knots{'' if self.shared else ' of its own for each series'}"
        batch = f"batch_shape={tuple(self.batch_shape)}, channels={self.channels}"
        return f"Path({self.kind}, {knots} on [{t0:g}, {t1:g}], {batch}, {self._values.dtype})"

    def _inner(self, times: Tensor) -> Tensor:
        t0, t1 = self.interval
        times = times.unique()
        return times[(times > t0) & (times < t1)]

    def _time(self, t: float | Tensor) -> Tensor:
        if not isinstance(t, Tensor):
            t = torch.as_tensor(t, dtype=self.times.dtype, device=self.times.device)
        elif t.dtype not in self._breaks:  # whole numbers, half precision
            if t.is_complex() or t.dtype == torch.bool:
                raise TypeError(f"t: expected real times, found {t.dtype}")
            t = t.to(torch.float32 if t.is_floating_point() else self.times.dtype)
        if t.ndim > 1 and t.shape[1:] != self.batch_shape:
            shapes = f"(), (T,) or (T, *{tuple(self.batch_shape)})"
            raise ValueError(f"t: expected a number or shape {shapes}, found {tuple(t.shape)}")
        return t

    def _piece(self, t: Tensor, side: str) -> Tensor:
        """Which piece each time falls into: shaped like t, or (T?, batch...) where that depends on the series."""
        if side not in ("left", "right"):
            raise ValueError(f"side: expected 'left' or 'right', found {side!r}")
        breaks, t = self._breaks[t.dtype], t.detach()
        if self.shared:
            return torch.searchsorted(breaks, t.contiguous(), right=side == "right")
        asked = t.unsqueeze(0) if t.ndim == 0 else t
        if asked.ndim == 1:
            asked = asked.expand(*self.batch_shape, -1)
        else:
            asked = asked.movedim(0, -1)
        index = torch.searchsorted(breaks, asked.contiguous(), right=side == "right").movedim(-1, 0)
        return index.squeeze(0) if t.ndim == 0 else index

    def _own(self, index: Tensor) -> bool:
        """Whether pieces were looked up by series."""
        return index.ndim > 1 or not self.shared

    def _take(self, pieces: Tensor, index: Tensor) -> Tensor:
        """The pieces of an index, stacked as the index is; its own axes, the degree, the rest."""
        if not self._own(index):
            # Not pieces[index]: with a 0-d index that would wait for the device.
            return pieces.index_select(0, index.reshape(-1)).reshape(index.shape + pieces.shape[1:])
        n = math.prod(self.batch_shape)
        flat = pieces.flatten(pieces.ndim - 1 - len(self.batch_shape), -2) if self.batch_shape else pieces.unsqueeze(-2)
        series = torch.arange(n, device=index.device)
        # Both indices stand beside each other, so that their axes come first.
        picked = flat.movedim(-2, 1)[index.reshape(-1, n), series]
        return picked.reshape(index.shape + picked.shape[2:])

    def _since(self, t: Tensor, index: Tensor) -> Tensor:
        """Time since the piece began, ready to be multiplied with what was taken."""
        if self.shared:
            starts = self._starts.index_select(0, index.reshape(-1)).reshape(index.shape)
        else:
            starts = self._take(self._starts.unsqueeze(-1), index).squeeze(-1)
            t = t.reshape(*t.shape, *(1 for _ in self.batch_shape)) if t.ndim <= 1 else t
        u = (t - starts).to(self._values.dtype)
        rest = 1 if self._own(index) else len(self.batch_shape) + 1
        return u.reshape(*u.shape, *(1 for _ in range(rest)))


def _clocks(device: torch.device) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if device.type == "mps" else (torch.float32, torch.float64)


def _breaks(times: Tensor, dtype: torch.dtype) -> Tensor:
    """Where one piece gives way to the next, in the dtype of the times that will be looked up.

    Rounded like a time: where a knot has no exact name in that dtype, the number closest to it is "at" the knot, and
    its neighbours are on either side.
    """
    times = times.to(dtype)
    if times.ndim == 1:
        return times[1:-1].contiguous()
    first = torch.nextafter(times[..., :1], torch.full_like(times[..., :1], -math.inf))
    return torch.cat((first, times[..., 1:]), -1)


def _with_constant_ends(times: Tensor, powers: Sequence[Tensor]) -> list[Tensor]:
    """One more piece before the first knot, one after the last."""
    width = (times[..., -1] - times[..., -2]).to(powers[0].dtype).unsqueeze(-1)
    last = torch.zeros_like(powers[0][-1])
    for c in reversed(powers):
        last = c[-1] + width * last
    still = torch.zeros_like(powers[0][:1])
    constant = torch.cat((powers[0][:1], powers[0], last.unsqueeze(0)))
    return [constant, *(torch.cat((still, c, still)) for c in powers[1:])]


def _uniform(widths: Tensor, lengths: Tensor | None) -> bool:
    """Whether all pieces of a series are equally long, but for rounding."""
    if lengths is not None:
        inside = torch.arange(widths.shape[-1], device=widths.device) < lengths.unsqueeze(-1) - 1
        widths = torch.where(inside, widths, widths[..., :1])
    rounding = 1e3 * torch.finfo(widths.dtype).eps
    return bool(torch.allclose(widths, widths[..., :1].expand_as(widths), rtol=rounding, atol=0.0))

"""Piecewise polynomial paths: their evaluation, their derivative, and how they are indexed and saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .._untyped import numbers, unique
from .knots import Lengths, Times, breaks, check_coefficients, check_index, clocks, uniform

#: At a knot, whether a derivative is that of the piece before it or after it.
Side = Literal["left", "right"]

#: The keys of the state dict of a path.
STATE = {"coefficients", "times", "lengths", "smooth", "shared", "kind"}


class Path:
    """A control X(t) for a batch of series: one polynomial between each two neighbouring knots.

    [`linear`][seminode.paths.linear], [`rectilinear`][seminode.paths.rectilinear],
    [`natural_cubic`][seminode.paths.natural_cubic] and [`hermite_cubic`][seminode.paths.hermite_cubic] return paths.

    If all series share their knots, the first and the last polynomial also hold beyond the ends of the interval. If
    each series has its own knots, the path of a series is constant before its first and after its last knot.

    `path[index]` is the path of some of the series, and `len(path)` their number, along the first batch axis.

    Arguments:
        times: the knots, of shape (K,) if all series share them, otherwise (batch..., K). In the second case the last
            knot of a series may be repeated as padding. Otherwise knots increase strictly.
        powers: for m = 0, 1, …, the coefficients of (t − times[i])ᵐ on piece i, of shape (K − 1, batch..., channels).
        smooth: whether dX/dt is continuous at the inner knots.
        lengths: (batch...), the number of knots of each series, if they differ. The path must be constant on the pieces
            after the last knot of a series.
        kind: the name of the path in its `repr`.
        shared: whether all series share their knots. By default, whether `times` has one axis. Only the path of a
            single series needs this: with `False` it is constant beyond its ends.
        slopes: for m = 0, 1, …, the coefficients of (t − times[i])ᵐ of dX/dt on piece i, if these are known; then
            `powers` may hold the first ones only. All series must share their knots.

    Attributes:
        times: the knots.
        lengths: the number of knots of each series; `None` if all have K.
        interval: (t0, t1), the first and the last knot of all series.
        smooth: whether dX/dt is continuous at the inner knots.
        shared: whether all series share their knots.
        channels: the number of channels of X.
        batch_shape: the batch axes of X.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> path = paths.linear(torch.randn(32, 10, 3))
        >>> len(path), path[:8].batch_shape, path[0].batch_shape
        (32, torch.Size([8]), torch.Size([]))
        >>> again = paths.Path.from_state_dict(path.state_dict())
        >>> bool((again.evaluate(2.5) == path.evaluate(2.5)).all())
        True
    """

    def __init__(
        self,
        times: Tensor,
        powers: Sequence[Tensor],
        *,
        smooth: bool = False,
        lengths: Tensor | None = None,
        kind: str = "path",
        shared: bool | None = None,
        slopes: Sequence[Tensor] | None = None,
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
        self.shared = times.ndim == 1 if shared is None else shared
        ends = torch.stack((times.detach().min(), times.detach().max()))
        t0, t1 = numbers(ends)
        self.interval = (t0, t1)
        if not self.shared:
            powers = _with_constant_ends(times, powers)
        if slopes is None or not self.shared:
            slopes = powers[1:] if len(powers) == 2 else [m * c for m, c in enumerate(powers)][1:]
        # The piece is the first axis, so that the numbers of one evaluation are contiguous.
        self._values = powers[0].contiguous()
        self._slopes = torch.stack(list(slopes), 1)
        self._lines = self._slopes[:, 0]
        starts = times[..., :-1] if self.shared else torch.cat((times[..., :1], times), -1)
        self._starts = starts.movedim(-1, 0).contiguous()
        self._breaks = {dtype: breaks(times.detach(), dtype, self.shared) for dtype in clocks(times.device)}

    @classmethod
    def from_coefficients(
        cls,
        coefficients: Tensor,
        times: Times = None,
        *,
        lengths: Lengths = None,
        smooth: bool = False,
        kind: str = "path",
    ) -> Path:
        """Make a path from its `coefficients`, for example those of a batch of a `DataLoader`.

        Arguments:
            coefficients: (batch..., K − 1, degree + 1, channels), as in `path.coefficients`.
            times: (K,) or (batch..., K), the knots; by default 0, 1, …, K − 1.
            lengths: (batch...), the number of knots of each series, if they differ.
            smooth: pass `path.smooth`. With `False`, all inner knots of a spline are among its `jumps`, which costs
                steps.
            kind: the name of the path in its `repr`.
        """
        times, lengths = check_coefficients(coefficients, times, lengths, smooth)
        return cls(times, coefficients.movedim(-3, 0).unbind(-2), smooth=smooth, lengths=lengths, kind=kind)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Path:
        """Make a path from `state`, its `state_dict()`."""
        state = _checked_state(state)
        if state.pop("shared") or state["times"].ndim > 1:
            return cls.from_coefficients(**state)
        # A single series of a batch with different times: as a batch of one, its times may be padded.
        batch: dict[str, Any] = {name: x.unsqueeze(0) if isinstance(x, Tensor) else x for name, x in state.items()}
        return cls.from_coefficients(**batch)[0]

    def state_dict(self) -> dict[str, Any]:
        """All that defines the path: tensors, without their graphs, and plain values. `torch.load` accepts it.

        `torch.save(path.state_dict(), file)` saves the path, and `Path.from_state_dict(torch.load(file))` loads it with
        the default `weights_only=True`.
        """
        return {
            "coefficients": self.coefficients.detach(),
            "times": self.times.detach(),
            "lengths": self.lengths,
            "smooth": self.smooth,
            "shared": self.shared,
            "kind": self.kind,
        }

    @property
    def coefficients(self) -> Tensor:
        """All coefficients as one tensor of shape (batch..., K − 1, degree + 1, channels).

        `coefficients[..., i, m, :]` belongs to (t − times[i])ᵐ on piece i. The batch axes come first, so that a
        `TensorDataset` can hold this tensor.
        """
        return torch.stack(self.powers, -2).movedim(0, -3)

    def __len__(self) -> int:
        if not self.batch_shape:
            raise TypeError("len(): expected a path with a batch axis, found the path of a single series")
        return self.batch_shape[0]

    def __iter__(self) -> Iterator[Path]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return True  # also if len() raises

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Path:
        """The path of the series with these indices along the first batch axis.

        Arguments:
            index: an integer, which removes the axis; a slice; integers as a sequence or a tensor; or a mask.
        """
        index = check_index(index, self.batch_shape, self.times.device)
        times = self.times if self.times.ndim == 1 else self.times[index]
        lengths = None if self.lengths is None else self.lengths[index]
        powers = self._powers(self._values[:, index], self._slopes[:, :, index])
        return Path(times, powers, smooth=self.smooth, lengths=lengths, kind=self.kind, shared=self.shared)

    def evaluate(self, t: float | Tensor) -> Tensor:
        """X(t).

        Arguments:
            t: a number or a 0-d tensor, for a result of shape (batch..., channels); times of shape (T,), or times of
                shape (T, batch...), which differ between series, for a result of shape (T, batch..., channels).
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

    def derivative(self, t: float | Tensor, side: Side = "left") -> Tensor:
        """dX/dt(t), with the shapes of `evaluate`.

        At a knot the two pieces may have different slopes. `side="left"` takes the piece before the knot,
        `side="right"` the piece after it. A time is at a knot if both are equal in the dtype of t. The first knot of a
        series belongs to its first piece.
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
        """For m = 0, 1, …, the coefficients of (t − times[i])ᵐ on piece i, of shape (K − 1, batch..., channels)."""
        return self._powers(self._values, self._slopes)

    def _powers(self, values: Tensor, slopes: Tensor) -> tuple[Tensor, ...]:
        """The same without the constant pieces at the ends, and for some of the series."""
        pieces = slice(None) if self.shared else slice(1, -1)
        values, slopes = values[pieces], slopes[pieces]
        return values, *(slopes[:, m - 1] / m for m in range(1, slopes.shape[1] + 1))

    @property
    def bends(self) -> Tensor:
        """The knots of all series inside the interval, sorted. dX/dt or a higher derivative is discontinuous there.

        If dX/dt is continuous, a solver does not need them. Steps that end there (`step_to` of the controller) are
        still more accurate, and fewer of them are rejected.
        """
        return self._inner(self.times.detach())

    @property
    def jumps(self) -> Tensor:
        """The times inside the interval at which dX/dt is discontinuous, sorted: pass them to `solve(jumps=...)`."""
        if not self.smooth:
            return self.bends
        times = self.times.detach()
        if self.lengths is not None:  # a series is constant after its end
            ends = times.expand(*self.batch_shape, -1).gather(-1, self.lengths.unsqueeze(-1) - 1)
        else:
            ends = times[..., -1:]
        return self._inner(torch.cat((times[..., :1].reshape(-1), ends.reshape(-1))))

    def on_index_clock(self) -> Path:
        """The same path with another parametrisation: knot i of every series is at time i.

        The solution of a controlled differential equation z′ = F(z) dX/dt at knot i stays the same. Series with
        different times now share their knots, so that one solve with K − 2 jumps is enough for all of them.
        """
        widths = self.times.diff()
        count = self.times.shape[-1]
        smooth = self.smooth and uniform(widths.detach(), self.lengths)
        if self.shared:
            widths = widths.reshape(-1, *(1 for _ in self._values.shape[1:]))
        else:
            widths = widths.movedim(-1, 0).unsqueeze(-1)
        widths = widths.to(self._values.dtype)
        powers = [c * widths**m if m else c for m, c in enumerate(self.powers)]
        times = torch.arange(count, dtype=self.times.dtype, device=self.times.device)
        return Path(times, powers, smooth=smooth, lengths=self.lengths, kind=self.kind)

    def to(self, *args: Any, **kwargs: Any) -> Path:
        """Move the path to another device or dtype, as `Tensor.to` does.

        The dtype is that of the values. Times keep theirs, unless the device does not support it.
        """
        powers = [c.to(*args, **kwargs) for c in self.powers]
        if not powers[0].is_floating_point():
            raise TypeError(f"dtype: expected a floating-point dtype, found {powers[0].dtype}")
        device = powers[0].device
        times = self.times.to(device, torch.float32 if device.type == "mps" else self.times.dtype)
        lengths = None if self.lengths is None else self.lengths.to(device)
        return Path(times, powers, smooth=self.smooth, lengths=lengths, kind=self.kind, shared=self.shared)

    def __repr__(self) -> str:
        t0, t1 = self.interval
        knots = f"{self.times.shape[-1]} knots{'' if self.shared else ' per series'}"
        batch = f"batch_shape={tuple(self.batch_shape)}, channels={self.channels}"
        return f"Path({self.kind}, {knots} on [{t0:g}, {t1:g}], {batch}, {self._values.dtype})"

    def _inner(self, times: Tensor) -> Tensor:
        t0, t1 = self.interval
        times = unique(times)
        return times[(times > t0) & (times < t1)]

    def _time(self, t: float | Tensor) -> Tensor:
        if not isinstance(t, Tensor):
            t = torch.as_tensor(t, dtype=self.times.dtype, device=self.times.device)
        elif t.dtype not in self._breaks:  # integers, half precision
            if t.is_complex() or t.dtype == torch.bool:
                raise TypeError(f"t: expected real times, found {t.dtype}")
            t = t.to(torch.float32 if t.is_floating_point() else self.times.dtype)
        if t.ndim > 1 and t.shape[1:] != self.batch_shape:
            shapes = f"(), (T,) or (T, *{tuple(self.batch_shape)})"
            raise ValueError(f"t: expected a number or shape {shapes}, found {tuple(t.shape)}")
        return t

    def _piece(self, t: Tensor, side: Side) -> Tensor:
        """The index of the piece for each time: of the shape of t, or (T?, batch...) if it depends on the series."""
        if side not in ("left", "right"):
            raise ValueError(f"side: expected 'left' or 'right', found {side!r}")
        ends, t = self._breaks[t.dtype], t.detach()
        if self.shared:
            return torch.searchsorted(ends, t.contiguous(), right=side == "right")
        asked = t.unsqueeze(0) if t.ndim == 0 else t
        if asked.ndim == 1:
            asked = asked.expand(*self.batch_shape, -1)
        else:
            asked = asked.movedim(0, -1)
        index = torch.searchsorted(ends, asked.contiguous(), right=side == "right").movedim(-1, 0)
        return index.squeeze(0) if t.ndim == 0 else index

    def _own(self, index: Tensor) -> bool:
        """Whether the index has the batch axes, because it depends on the series."""
        return index.ndim > 1 or not self.shared

    def _take(self, pieces: Tensor, index: Tensor) -> Tensor:
        """The coefficients of the pieces with these indices: axes of the index, degree, other axes."""
        if not self._own(index):
            # Not pieces[index]: a 0-d index would synchronise with the device.
            picked = pieces.index_select(0, index.reshape(-1))
            return picked.squeeze(0) if index.ndim == 0 else picked.reshape(index.shape + pieces.shape[1:])
        n = math.prod(self.batch_shape)
        flat = pieces.flatten(pieces.ndim - 1 - len(self.batch_shape), -2) if self.batch_shape else pieces.unsqueeze(-2)
        series = torch.arange(n, device=index.device)
        # Adjacent index tensors: their axes come first in the result.
        picked = flat.movedim(-2, 1)[index.reshape(-1, n), series]
        return picked.reshape(index.shape + picked.shape[2:])

    def _since(self, t: Tensor, index: Tensor) -> Tensor:
        """The time since the start of the piece, in a shape that broadcasts with the result of `_take`."""
        if self.shared:
            starts = self._starts.index_select(0, index.reshape(-1)).reshape(index.shape)
        else:
            starts = self._take(self._starts.unsqueeze(-1), index).squeeze(-1)
            t = t.reshape(t.shape + (1,) * len(self.batch_shape)) if t.ndim <= 1 else t
        u = (t - starts).to(self._values.dtype)
        if u.ndim == 0:
            return u
        rest = 1 if self._own(index) else len(self.batch_shape) + 1
        return u.reshape(*u.shape, *(1 for _ in range(rest)))


def _checked_state(state: Any) -> dict[str, Any]:
    if isinstance(state, Mapping):
        entries = dict(cast("Mapping[str, Any]", state))
        if set(entries) == STATE:
            return entries
        keys = ", ".join(map(str, entries)) or "none"
    else:
        keys = type(state).__name__
    raise ValueError(f"state: expected a dict with the keys {', '.join(sorted(STATE))}, found {keys}")


def _with_constant_ends(times: Tensor, powers: Sequence[Tensor]) -> list[Tensor]:
    """The coefficients with one more constant piece before the first knot, and one after the last knot."""
    width = (times[..., -1] - times[..., -2]).to(powers[0].dtype).unsqueeze(-1)
    last = torch.zeros_like(powers[0][-1])
    for c in reversed(powers):
        last = c[-1] + width * last
    still = torch.zeros_like(powers[0][:1])
    constant = torch.cat((powers[0][:1], powers[0], last.unsqueeze(0)))
    return [constant, *(torch.cat((still, c, still)) for c in powers[1:])]

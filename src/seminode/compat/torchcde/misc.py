"""Small tools, and a control for states that are tuples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import paths
from ...paths.tridiagonal import tridiagonal_solution


def cheap_stack(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.stack`; a single tensor is not copied."""
    return tensors[0].unsqueeze(dim) if len(tensors) == 1 else torch.stack(list(tensors), dim)


def tridiagonal_solve(b: Tensor, A_upper: Tensor, A_diagonal: Tensor, A_lower: Tensor) -> Tensor:
    """Solve tridiagonal systems along the last axis.

    Arguments:
        b: (..., n), the right-hand sides.
        A_upper, A_lower: (..., n − 1), the entries above and below the diagonal.
        A_diagonal: (..., n).
    """
    A_diagonal, b = torch.broadcast_tensors(A_diagonal, b)
    A_upper, A_lower, _ = torch.broadcast_tensors(A_upper, A_lower, b[..., :-1])
    parts = (x.movedim(-1, 0) for x in (b, A_upper, A_diagonal, A_lower))
    return tridiagonal_solution(*parts).movedim(0, -1)


def forward_fill(x: Tensor, fill_index: int = -2) -> Tensor:
    """Fill gaps (NaN) with the latest observed value along an axis; entries before the first observation stay NaN."""
    if not isinstance(x, Tensor) or x.ndim < 2:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise AssertionError(f"x: expected a tensor of two or more axes, found {found}")
    return paths.forward_fill(x, fill_index)


def validate_input_path(x: Tensor, t: Tensor | None) -> Tensor:
    """Check x of shape (batch..., K, channels) and t of shape (K,), and return t; by default 0, 1, …, K − 1."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x: expected a tensor of a floating-point dtype, found {_described(x)}")
    if x.ndim < 2:
        raise ValueError(f"x: expected shape (batch..., K, channels), found {tuple(x.shape)}")
    count = x.shape[-2]
    if t is None:
        t = torch.arange(count).to(x)
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise ValueError(f"t: expected a tensor of a floating-point dtype, found {_described(t)}")
    if t.ndim != 1:
        raise ValueError(f"t: expected one axis, found shape {tuple(t.shape)}")
    if not bool((t.diff() > 0).all()):
        raise ValueError("t: expected strictly increasing times")
    if len(t) != count:
        raise ValueError(f"t: expected one time per knot, {count} for x of shape {tuple(x.shape)}, found {len(t)}")
    if count < 2:
        raise ValueError(f"x: expected at least 2 knots along axis −2, found {count} in shape {tuple(x.shape)}")
    return t


def _described(x: Any) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


class TupleControl(nn.Module):
    """Several controls over the same interval as one, for a state that is a tuple.

    Arguments:
        controls: one or more controls, in the order of the states.
    """

    def __init__(self, *controls: Any):
        super().__init__()
        if not controls:
            raise ValueError("controls: expected one or more, found none")
        self._interval = controls[0].interval
        for i, control in enumerate(controls[1:], 1):
            if bool((control.interval != self._interval).any()):
                raise ValueError(
                    f"controls[{i}]: expected the interval of the first control, {self._interval.tolist()}, found "
                    f"{control.interval.tolist()}"
                )
        first, *others = (control.grid_points for control in controls)
        self._grid_points = first if all(_equal(first, grid) for grid in others) else None
        self.controls = nn.ModuleList(controls)

    @property
    def interval(self) -> Tensor:
        return self._interval

    @property
    def grid_points(self) -> Tensor:
        """The knots of all controls; a `RuntimeError` if they differ."""
        if self._grid_points is None:
            raise RuntimeError("grid_points: the controls have different ones; ask each of them in `controls`")
        return self._grid_points

    def evaluate(self, t: Any) -> tuple[Tensor, ...]:
        return tuple(control.evaluate(t) for control in self.controls)  # type: ignore[operator]

    def derivative(self, t: Any) -> tuple[Tensor, ...]:
        return tuple(control.derivative(t) for control in self.controls)  # type: ignore[operator]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())

"""Controls whose coefficients are buffers of a module, and which are evaluated as a `Path`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...paths import Path
from .interpolation_base import InterpolationBase


class PiecewisePolynomial(InterpolationBase):
    """A control with the knots `_t` and its coefficients as buffers, all of which subclasses register.

    The path is made from the buffers, and made again if one of them is replaced (`module.to`) or changed in place
    (`load_state_dict`, an optimiser).
    """

    _t: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._made_from: list[tuple[Tensor | None, int]] = []
        self._path: Path | None = None

    @abc.abstractmethod
    def _pieces(self) -> tuple[Tensor, Sequence[Tensor]]:
        """X at the start of each piece, and for m = 0, 1, … the coefficients of (t − _t[i])ᵐ of dX/dt.

        All are of shape (batch..., K − 1, channels).
        """

    @property
    def grid_points(self) -> Tensor:
        return self._t

    @property
    def interval(self) -> Tensor:
        return torch.stack((self._t[0], self._t[-1]))

    def evaluate(self, t: Any) -> Tensor:
        """X(t), of shape (batch..., shape of t..., channels)."""
        path = self._current_path()
        return _at(path.evaluate, t, path)

    def derivative(self, t: Any) -> Tensor:
        """dX/dt(t), of shape (batch..., shape of t..., channels). At a knot, it is that of the piece before."""
        path = self._current_path()
        return _at(path.derivative, t, path)

    def _current_path(self) -> Path:
        if self._path is not None and torch.compiler.is_compiling():
            return self._path  # versions cannot be traced; the solve has made the path current before
        buffers = self._buffers.values()
        if self._path is not None and all(
            x is y and version == _version(y) for (x, version), y in zip(self._made_from, buffers, strict=True)
        ):
            return self._path
        # Also where the first evaluation is one without a graph: the path belongs to later ones too.
        with torch.enable_grad():
            # Half precision would merge knots.
            times = self._t if self._t.dtype == torch.float64 else self._t.float()
            values, slopes = self._pieces()
            self._path = Path(times, [values.movedim(-2, 0)], slopes=[c.movedim(-2, 0) for c in slopes])
        self._made_from = [(x, _version(x)) for x in buffers]
        return self._path

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_path": None, "_made_from": []}


def _version(x: Tensor | None) -> int:
    return 0 if x is None or x.is_inference() else x._version


def _at(function: Callable[[Tensor], Tensor], t: Any, path: Path) -> Tensor:
    """Values of a path at times of any shape, whose axes come between the batch axes and the channels."""
    if not isinstance(t, Tensor):
        t = torch.as_tensor(t, dtype=path.times.dtype)
    t = t.to(path.times.device)
    if t.ndim == 0:
        return function(t)
    return function(t.flatten()).movedim(0, -2).unflatten(-2, t.shape)

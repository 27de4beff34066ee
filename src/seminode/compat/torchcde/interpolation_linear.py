"""Linear and rectilinear interpolation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...paths import fill_unobserved, linear_fill, rectilinear_knots
from ._piecewise import PiecewisePolynomial
from .misc import validate_input_path


def linear_interpolation_coeffs(x: Tensor, t: Tensor | None = None, rectilinear: int | None = None) -> Tensor:
    """The values at the knots, with gaps filled, for `LinearInterpolation`: (batch..., K, channels).

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed. A channel without any observation is 0.
        t: (K,), strictly increasing; by default 0, 1, …, K − 1. With `rectilinear`, it has 2K − 1 entries.
        rectilinear: the index of the channel of x that is time. If given, the result has 2K − 1 knots: time changes
            first, then the values. So a channel keeps its latest value until the next observation.
    """
    if rectilinear is not None:
        x = _rectilinear_values(x, rectilinear)
    t = validate_input_path(x, t)
    return linear_fill(fill_unobserved(x), t) if bool(x.isnan().any()) else x


def _rectilinear_values(x: Tensor, channel: int) -> Tensor:
    validate_input_path(x, None)
    channels = x.shape[-1]
    if not isinstance(channel, int) or not 0 <= channel < channels:
        raise AssertionError(
            f"rectilinear: expected the index of the time channel, 0 to {channels - 1}, found {channel}"
        )
    if bool(x[..., channel].isnan().any()):
        raise AssertionError(
            f"x[..., {channel}]: expected times without gaps in the time channel, found NaN; if the end of a series is "
            "padded with NaN, repeat its last time instead"
        )
    return rectilinear_knots(fill_unobserved(x), channel)


class LinearInterpolation(PiecewisePolynomial):
    """The control along straight lines through these values.

    Arguments:
        coeffs: (batch..., K, channels), of `linear_interpolation_coeffs`.
        t: (K,), the times for which they were computed; by default 0, 1, …, K − 1.
    """

    _coeffs: Tensor
    _derivs: Tensor

    def __init__(self, coeffs: Tensor, t: Tensor | None = None):
        super().__init__()
        t = torch.arange(coeffs.shape[-2]).to(coeffs) if t is None else t
        self.register_buffer("_t", t)
        self.register_buffer("_coeffs", coeffs)
        self.register_buffer("_derivs", coeffs.diff(dim=-2) / t.diff().unsqueeze(-1))
        self._current_path()

    def _pieces(self) -> tuple[Tensor, Sequence[Tensor]]:
        return self._coeffs[..., :-1, :], (self._derivs,)

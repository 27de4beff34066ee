"""Natural cubic splines, and the control that evaluates cubic coefficients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...paths import Path, fill_unobserved, natural_cubic
from ...paths.cubic import Ends
from ._piecewise import PiecewisePolynomial
from .misc import validate_input_path


def natural_cubic_coeffs(x: Tensor, t: Tensor | None = None) -> Tensor:
    """The coefficients of the natural cubic spline, for `CubicSpline`: (batch..., K − 1, 4·channels).

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed. A channel without any observation is 0.
        t: (K,), strictly increasing; by default 0, 1, …, K − 1.
    """
    return _natural(x, t, "held")


def natural_cubic_spline_coeffs(x: Tensor, t: Tensor | None = None) -> Tensor:
    """The older natural spline: a channel keeps its first and last observation only at the first and last knot."""
    return _natural(x, t, "loose")


def _natural(x: Tensor, t: Tensor | None, ends: Ends) -> Tensor:
    t = validate_input_path(x, t)
    x = x.to(torch.promote_types(x.dtype, t.dtype))
    return as_coeffs(natural_cubic(fill_unobserved(x), t, ends=ends))


def as_coeffs(path: Path) -> Tensor:
    """The coefficients a, b, c, d of a + b·u + c·u² + d·u³ as torchcde keeps them: a, b, 2c, 3d along the last axis."""
    a, b, c, d = path.powers
    return torch.cat((a, b, 2.0 * c, 3.0 * d), -1).movedim(0, -2)


class CubicSpline(PiecewisePolynomial):
    """The control with these cubic coefficients.

    Arguments:
        coeffs: (batch..., K − 1, 4·channels), of `natural_cubic_coeffs` or of
            `hermite_cubic_coefficients_with_backward_differences`.
        t: (K,), the times for which they were computed; by default 0, 1, …, K − 1.
    """

    _a: Tensor
    _b: Tensor
    _two_c: Tensor
    _three_d: Tensor

    def __init__(self, coeffs: Tensor, t: Tensor | None = None):
        super().__init__()
        if coeffs.shape[-1] % 4 != 0:
            raise ValueError(
                "coeffs: expected 4 coefficients per channel along the last axis, as of natural_cubic_coeffs, found "
                f"shape {tuple(coeffs.shape)}"
            )
        count = coeffs.shape[-2] + 1
        self.register_buffer("_t", torch.arange(count).to(coeffs) if t is None else t)
        channels = coeffs.shape[-1] // 4
        for i, name in enumerate(("_a", "_b", "_two_c", "_three_d")):
            self.register_buffer(name, coeffs[..., i * channels : (i + 1) * channels])
        self._current_path()

    def _pieces(self) -> tuple[Tensor, Sequence[Tensor]]:
        return self._a, (self._b, self._two_c, self._three_d)


class NaturalCubicSpline(CubicSpline):
    """The old name of `CubicSpline`."""

"""Cubic Hermite splines with backward differences."""

from __future__ import annotations

import torch
from torch import Tensor

from ...paths import fill_unobserved, hermite_cubic
from .interpolation_cubic import as_coeffs
from .misc import validate_input_path


def hermite_cubic_coefficients_with_backward_differences(x: Tensor, t: Tensor | None = None) -> Tensor:
    """The coefficients of the Hermite spline, for `CubicSpline`: (batch..., K − 1, 4·channels).

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed. A channel without any observation is 0.
        t: (K,), strictly increasing; by default 0, 1, …, K − 1.
    """
    t = validate_input_path(x, t)
    x = x.to(torch.promote_types(x.dtype, t.dtype))
    return as_coeffs(hermite_cubic(fill_unobserved(x), t))

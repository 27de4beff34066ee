"""Drop-in for torchcde 0.2.5: `import seminode.compat.torchcde as torchcde`.

Names, arguments, results and exceptions are those of torchcde. The paths are those of `seminode.paths` and the solves
those of `seminode.solve`. The page "Coming from torchcde" of the documentation lists what differs.
"""

from __future__ import annotations

from . import (
    interpolation_base,
    interpolation_cubic,
    interpolation_hermite_cubic_bdiff,
    interpolation_linear,
    log_ode,
    misc,
    solver,
)
from .interpolation_base import InterpolationBase
from .interpolation_cubic import CubicSpline, natural_cubic_coeffs, natural_cubic_spline_coeffs
from .interpolation_hermite_cubic_bdiff import hermite_cubic_coefficients_with_backward_differences
from .interpolation_linear import LinearInterpolation, linear_interpolation_coeffs
from .log_ode import logsig_windows, logsignature_windows
from .misc import TupleControl
from .solver import cdeint

#: The version of torchcde whose behaviour this module has.
__version__ = "0.2.5"

__all__ = [
    "CubicSpline",
    "InterpolationBase",
    "LinearInterpolation",
    "TupleControl",
    "cdeint",
    "hermite_cubic_coefficients_with_backward_differences",
    "interpolation_base",
    "interpolation_cubic",
    "interpolation_hermite_cubic_bdiff",
    "interpolation_linear",
    "linear_interpolation_coeffs",
    "log_ode",
    "logsig_windows",
    "logsignature_windows",
    "misc",
    "natural_cubic_coeffs",
    "natural_cubic_spline_coeffs",
    "solver",
]

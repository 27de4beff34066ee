"""Controls X(t) of a controlled differential equation."""

from __future__ import annotations

from .base import Path
from .channels import append_intensity, append_time
from .controlled import ControlledField
from .cubic import hermite_cubic, natural_cubic
from .linear import linear, linear_fill, rectilinear, rectilinear_knots
from .logsignatures import logsignature, logsignature_windows, window_edges
from .lyndon import logsignature_channels
from .missing import fill_unobserved, forward_fill

__all__ = [
    "ControlledField",
    "Path",
    "append_intensity",
    "append_time",
    "fill_unobserved",
    "forward_fill",
    "hermite_cubic",
    "linear",
    "linear_fill",
    "logsignature",
    "logsignature_channels",
    "logsignature_windows",
    "natural_cubic",
    "rectilinear",
    "rectilinear_knots",
    "window_edges",
]

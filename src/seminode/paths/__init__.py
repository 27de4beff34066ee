"""Controls X(t) of a controlled differential equation."""

from __future__ import annotations

from .base import Path
from .channels import append_intensity, append_time
from .cubic import hermite_cubic, natural_cubic
from .linear import linear, rectilinear
from .logsignatures import logsignature, logsignature_windows
from .lyndon import logsignature_channels

__all__ = [
    "Path",
    "append_intensity",
    "append_time",
    "hermite_cubic",
    "linear",
    "logsignature",
    "logsignature_channels",
    "logsignature_windows",
    "natural_cubic",
    "rectilinear",
]

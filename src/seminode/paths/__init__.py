"""Controls X(t) of a controlled differential equation."""

from __future__ import annotations

from .base import Path
from .linear import linear, rectilinear

__all__ = ["Path", "linear", "rectilinear"]

"""Models whose forward pass solves a differential equation, and the techniques around them."""

from __future__ import annotations

from .base import SolvingModule

__all__ = ["SolvingModule"]

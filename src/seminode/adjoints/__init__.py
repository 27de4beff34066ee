"""Ways to differentiate a solve: one strategy a file."""

from __future__ import annotations

from .base import Adjoint
from .direct import Direct
from .replay import Replay

__all__ = ["Adjoint", "Direct", "Replay"]

"""Ways to differentiate a solve: one strategy a file."""

from __future__ import annotations

from .backsolve import Backsolve
from .base import Adjoint
from .checkpointed import Checkpointed
from .direct import Direct
from .interpolating import Interpolating
from .quadrature import Quadrature
from .replay import Replay
from .reversible import Reversible

__all__ = ["Adjoint", "Backsolve", "Checkpointed", "Direct", "Interpolating", "Quadrature", "Replay", "Reversible"]

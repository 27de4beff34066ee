"""Ways to differentiate a solve: one strategy per file."""

from __future__ import annotations

from typing import Literal

from .backsolve import Backsolve, BackwardNorm, Restart
from .base import Adjoint
from .checkpointed import Checkpointed
from .direct import Direct
from .interpolating import Interpolating
from .quadrature import Quadrature, RuleName, StateSource
from .replay import Replay
from .reversible import Reversible

AdjointName = Literal["backsolve", "direct", "interpolating", "quadrature", "replay", "reversible"]

#: Adjoints by the names that `solve(adjoint=...)` takes, with their default options.
BY_NAME: dict[str, type[Adjoint]] = {
    "backsolve": Backsolve,
    "direct": Direct,
    "interpolating": Interpolating,
    "quadrature": Quadrature,
    "replay": Replay,
    "reversible": Reversible,
}

__all__ = [
    "BY_NAME",
    "Adjoint",
    "AdjointName",
    "Backsolve",
    "BackwardNorm",
    "Checkpointed",
    "Direct",
    "Interpolating",
    "Quadrature",
    "Replay",
    "Restart",
    "Reversible",
    "RuleName",
    "StateSource",
]

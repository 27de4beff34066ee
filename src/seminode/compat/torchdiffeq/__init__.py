"""A drop-in replacement of torchdiffeq 0.2.5: `import seminode.compat.torchdiffeq as torchdiffeq`."""

from __future__ import annotations

from . import _impl
from ._methods import SOLVERS
from ._odeint import odeint, odeint_adjoint, odeint_dense, odeint_event
from ._switch import Settings, current, use

#: The version of torchdiffeq whose interface this is.
__version__ = "0.2.5"

__all__ = [
    "SOLVERS",
    "Settings",
    "_impl",
    "current",
    "odeint",
    "odeint_adjoint",
    "odeint_dense",
    "odeint_event",
    "use",
]

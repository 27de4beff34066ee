"""`torchdiffeq._impl.odeint`."""

from __future__ import annotations

from .._methods import SOLVERS
from .._odeint import odeint, odeint_dense, odeint_event

__all__ = ["SOLVERS", "odeint", "odeint_dense", "odeint_event"]

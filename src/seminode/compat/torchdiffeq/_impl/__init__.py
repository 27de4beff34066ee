"""The modules of torchdiffeq that programs import names from though they are private."""

from __future__ import annotations

from .adjoint import odeint_adjoint
from .odeint import odeint, odeint_dense, odeint_event

__all__ = ["odeint", "odeint_adjoint", "odeint_dense", "odeint_event"]

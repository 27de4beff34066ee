"""`torchdiffeq._impl.adjoint`."""

from __future__ import annotations

from .._arguments import find_parameters
from .._odeint import odeint_adjoint

__all__ = ["find_parameters", "odeint_adjoint"]

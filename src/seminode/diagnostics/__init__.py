"""Diagnostics: which adjoint, which solver, compiled or not, for a problem of your own?"""

from __future__ import annotations

from .cost import backward_cost, cost
from .profile import profile
from .results import Profile, Recommendation, Reference, Row

__all__ = ["Profile", "Recommendation", "Reference", "Row", "backward_cost", "cost", "profile"]

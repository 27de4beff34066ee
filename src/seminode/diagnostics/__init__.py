"""Diagnostics: measure adjoints and solvers, eager and compiled, on your own problem."""

from __future__ import annotations

from .cost import backward_cost, cost
from .profile import profile
from .results import Profile, Recommendation, Reference, Row

__all__ = ["Profile", "Recommendation", "Reference", "Row", "backward_cost", "cost", "profile"]

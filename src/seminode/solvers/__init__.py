"""Solvers: one family a file, each with a pure step function."""

from __future__ import annotations

from .base import Solver
from .explicit import (
    EXPLICIT,
    RK4,
    AdaptiveHeun,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    ExplicitRungeKutta,
    Fehlberg2,
    Heun,
    Midpoint,
    Ralston,
    Tsit5,
)
from .reversible import ReversibleHeun, ReversibleRK, ReversibleSolver

#: Solvers by the names that `solve(solver=...)` takes.
BY_NAME: dict[str, type[Solver]] = {**EXPLICIT, "reversible_heun": ReversibleHeun}

__all__ = [
    "BY_NAME",
    "RK4",
    "AdaptiveHeun",
    "Bosh3",
    "Dopri5",
    "Dopri8",
    "Euler",
    "ExplicitRungeKutta",
    "Fehlberg2",
    "Heun",
    "Midpoint",
    "Ralston",
    "ReversibleHeun",
    "ReversibleRK",
    "ReversibleSolver",
    "Solver",
    "Tsit5",
]

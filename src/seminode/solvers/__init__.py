"""Solvers: one family per file, each with a pure step function."""

from __future__ import annotations

from typing import Literal

from .adams import ExplicitAdams, ImplicitAdams
from .base import Solver, StepResult
from .explicit import (
    EXPLICIT,
    RK4,
    AdaptiveHeun,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    ExplicitName,
    ExplicitRungeKutta,
    Fehlberg2,
    Heun,
    Midpoint,
    Ralston,
    Tsit5,
)
from .reversible import ReversibleHeun, ReversibleRK, ReversibleSolver
from .scipy import SciPy
from .symplectic import Leapfrog, Yoshida4

SolverName = Literal[
    ExplicitName, "reversible_heun", "explicit_adams", "implicit_adams", "leapfrog", "yoshida4", "scipy"
]

#: Solvers by the names that `solve(solver=...)` takes.
BY_NAME: dict[str, type[Solver]] = {
    **EXPLICIT,
    "reversible_heun": ReversibleHeun,
    "explicit_adams": ExplicitAdams,
    "implicit_adams": ImplicitAdams,
    "leapfrog": Leapfrog,
    "yoshida4": Yoshida4,
    "scipy": SciPy,
}

__all__ = [
    "BY_NAME",
    "RK4",
    "AdaptiveHeun",
    "Bosh3",
    "Dopri5",
    "Dopri8",
    "Euler",
    "ExplicitAdams",
    "ExplicitName",
    "ExplicitRungeKutta",
    "Fehlberg2",
    "Heun",
    "ImplicitAdams",
    "Leapfrog",
    "Midpoint",
    "Ralston",
    "ReversibleHeun",
    "ReversibleRK",
    "ReversibleSolver",
    "SciPy",
    "Solver",
    "SolverName",
    "StepResult",
    "Tsit5",
    "Yoshida4",
]

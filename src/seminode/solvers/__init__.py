"""Solvers: one family per file, each with a pure step function."""

from __future__ import annotations

from typing import Literal

from .adams import MAX_ORDER, ExplicitAdams, ImplicitAdams
from .base import Solver, StepResult
from .explicit import (
    EXPLICIT,
    RK4,
    RK38,
    AdaptiveHeun,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    ExplicitName,
    ExplicitRungeKutta,
    Fehlberg2,
    Heun,
    Heun3,
    Midpoint,
    Ralston,
    Tsit5,
    with_interpolant,
)
from .lagged import GrowingAdams, Lagged, QuarticBosh3, QuarticDopri8
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
    "MAX_ORDER",
    "RK4",
    "RK38",
    "AdaptiveHeun",
    "Bosh3",
    "Dopri5",
    "Dopri8",
    "Euler",
    "ExplicitAdams",
    "ExplicitName",
    "ExplicitRungeKutta",
    "Fehlberg2",
    "GrowingAdams",
    "Heun",
    "Heun3",
    "Lagged",
    "ImplicitAdams",
    "Leapfrog",
    "Midpoint",
    "QuarticBosh3",
    "QuarticDopri8",
    "Ralston",
    "ReversibleHeun",
    "ReversibleRK",
    "ReversibleSolver",
    "SciPy",
    "Solver",
    "SolverName",
    "StepResult",
    "Tsit5",
    "with_interpolant",
    "Yoshida4",
]

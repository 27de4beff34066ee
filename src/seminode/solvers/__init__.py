"""Solvers: one family per file, each with a pure step function."""

from __future__ import annotations

from typing import Literal

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
from .implicit import (
    IMPLICIT,
    SDIRK2,
    TRBDF2,
    GaussLegendre4,
    GaussLegendre6,
    ImplicitEuler,
    ImplicitMidpoint,
    ImplicitName,
    ImplicitRungeKutta,
    Kvaerno3,
    Kvaerno5,
    RadauIIA3,
    RadauIIA5,
    Trapezoid,
)
from .reversible import ReversibleHeun, ReversibleRK, ReversibleSolver

SolverName = Literal[ExplicitName, ImplicitName, "reversible_heun"]

#: Solvers by the names that `solve(solver=...)` takes.
BY_NAME: dict[str, type[Solver]] = {**EXPLICIT, **IMPLICIT, "reversible_heun": ReversibleHeun}

__all__ = [
    "BY_NAME",
    "RK4",
    "SDIRK2",
    "TRBDF2",
    "AdaptiveHeun",
    "Bosh3",
    "Dopri5",
    "Dopri8",
    "Euler",
    "ExplicitName",
    "ExplicitRungeKutta",
    "Fehlberg2",
    "GaussLegendre4",
    "GaussLegendre6",
    "Heun",
    "ImplicitEuler",
    "ImplicitMidpoint",
    "ImplicitName",
    "ImplicitRungeKutta",
    "Kvaerno3",
    "Kvaerno5",
    "Midpoint",
    "RadauIIA3",
    "RadauIIA5",
    "Ralston",
    "ReversibleHeun",
    "ReversibleRK",
    "ReversibleSolver",
    "Solver",
    "SolverName",
    "StepResult",
    "Trapezoid",
    "Tsit5",
]

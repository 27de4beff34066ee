"""Solvers: one family a file, each with a pure step function."""

from __future__ import annotations

from .base import Solver
from .explicit import (
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

BY_NAME: dict[str, type[Solver]] = {
    "euler": Euler,
    "midpoint": Midpoint,
    "heun": Heun,
    "ralston": Ralston,
    "rk4": RK4,
    "bosh3": Bosh3,
    "adaptive_heun": AdaptiveHeun,
    "fehlberg2": Fehlberg2,
    "dopri5": Dopri5,
    "tsit5": Tsit5,
    "dopri8": Dopri8,
}

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
    "Solver",
    "Tsit5",
]

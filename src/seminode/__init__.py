"""seminode: solve, differentiate and train neural differential equations in PyTorch."""

from __future__ import annotations

from . import norms
from .adjoints import Direct, Replay
from .controllers import PID, FixedStep, Integral, PrescribedSteps
from .errors import (
    MaxStepsReached,
    NonFiniteState,
    SolveError,
    StatefulFieldWarning,
    StepSizeUnderflow,
    ToleranceWarning,
)
from .interpolation import DenseSolution
from .problem import Record, Solution, Stats, Status
from .solve import solve
from .solvers import (
    RK4,
    AdaptiveHeun,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    Fehlberg2,
    Heun,
    Midpoint,
    Ralston,
    Tsit5,
)

__version__ = "0.1.0"

__all__ = [
    "PID",
    "RK4",
    "AdaptiveHeun",
    "Bosh3",
    "DenseSolution",
    "Direct",
    "Dopri5",
    "Dopri8",
    "Euler",
    "Fehlberg2",
    "FixedStep",
    "Heun",
    "Integral",
    "MaxStepsReached",
    "Midpoint",
    "NonFiniteState",
    "PrescribedSteps",
    "Ralston",
    "Record",
    "Replay",
    "Solution",
    "SolveError",
    "StatefulFieldWarning",
    "Stats",
    "Status",
    "StepSizeUnderflow",
    "ToleranceWarning",
    "Tsit5",
    "norms",
    "solve",
]

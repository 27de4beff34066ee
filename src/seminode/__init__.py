"""seminode: solve, differentiate and train neural differential equations in PyTorch."""

from __future__ import annotations

from . import _moved, models, norms, paths
from ._integrals.detect import integral_leaves
from ._stepping.interpolation import DenseSolution
from .adjoints import Backsolve, Checkpointed, Direct, Interpolating, Quadrature, Replay, Reversible
from .controllers import PID, FixedStep, Integral, PrescribedSteps
from .diagnostics import profile
from .errors import (
    CompileWarning,
    DriftWarning,
    MaxStepsReached,
    NewtonDivergence,
    NonFiniteState,
    SolveError,
    StatefulFieldWarning,
    StepFailure,
    StepSizeUnderflow,
    ToleranceWarning,
    ZenoBehaviour,
)
from .events import Event
from .grids import Grid
from .solution import Record, Solution, Stats, Status
from .solve import solve
from .solvers import (
    RK4,
    RK38,
    SDIRK2,
    TRBDF2,
    AdaptiveHeun,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    ExplicitAdams,
    Fehlberg2,
    GaussLegendre4,
    GaussLegendre6,
    Heun,
    Heun3,
    ImplicitAdams,
    ImplicitEuler,
    ImplicitMidpoint,
    Kvaerno3,
    Kvaerno5,
    Leapfrog,
    Midpoint,
    RadauIIA3,
    RadauIIA5,
    Ralston,
    ReversibleHeun,
    ReversibleRK,
    SciPy,
    Trapezoid,
    Tsit5,
    Yoshida4,
)

__version__ = "0.2.0"

__all__ = [
    "PID",
    "RK4",
    "RK38",
    "SDIRK2",
    "TRBDF2",
    "AdaptiveHeun",
    "Backsolve",
    "Bosh3",
    "Checkpointed",
    "CompileWarning",
    "DenseSolution",
    "Direct",
    "Dopri5",
    "Dopri8",
    "DriftWarning",
    "Euler",
    "Event",
    "ExplicitAdams",
    "Fehlberg2",
    "FixedStep",
    "GaussLegendre4",
    "GaussLegendre6",
    "Grid",
    "Heun",
    "Heun3",
    "ImplicitAdams",
    "ImplicitEuler",
    "ImplicitMidpoint",
    "Integral",
    "Interpolating",
    "Kvaerno3",
    "Kvaerno5",
    "Leapfrog",
    "MaxStepsReached",
    "Midpoint",
    "NewtonDivergence",
    "NonFiniteState",
    "PrescribedSteps",
    "Quadrature",
    "RadauIIA3",
    "RadauIIA5",
    "Ralston",
    "Record",
    "Replay",
    "Reversible",
    "ReversibleHeun",
    "ReversibleRK",
    "SciPy",
    "Solution",
    "SolveError",
    "StatefulFieldWarning",
    "Stats",
    "Status",
    "StepFailure",
    "StepSizeUnderflow",
    "ToleranceWarning",
    "Trapezoid",
    "Tsit5",
    "ZenoBehaviour",
    "Yoshida4",
    "integral_leaves",
    "models",
    "norms",
    "paths",
    "profile",
    "solve",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_moved.install()

"""Classes and functions for your own solvers and adjoints; the guide for contributors has examples."""

from __future__ import annotations

from ._stepping.combination import StepSize, length
from ._stepping.observers import Observer, State, Tape
from ._stepping.problem import Problem
from ._stepping.schedule import Plan
from ._stepping.step import Step
from .adjoints._autograd import BackwardRequest, FunctionAdjoint
from .adjoints._continuous.parameter_integral import ParameterIntegral
from .adjoints._continuous.solve import IntegralContext
from .adjoints._continuous.strategy import ContinuousAdjoint
from .adjoints._continuous.system import Integrand
from .adjoints._discrete.states import States
from .adjoints._discrete.sweep import DiscreteAdjoint, Sweep
from .adjoints._sums import Sums
from .adjoints.base import Adjoint, ForwardResult
from .controllers import Adaptive, Controller, Verdict
from .solvers.base import Evaluate, Memory, Solver, StepResult

__all__ = [
    "Adaptive",
    "Adjoint",
    "BackwardRequest",
    "ContinuousAdjoint",
    "Controller",
    "DiscreteAdjoint",
    "Evaluate",
    "ForwardResult",
    "FunctionAdjoint",
    "Integrand",
    "IntegralContext",
    "Memory",
    "Observer",
    "ParameterIntegral",
    "Plan",
    "Problem",
    "Solver",
    "State",
    "States",
    "Step",
    "StepResult",
    "StepSize",
    "Sums",
    "Sweep",
    "Tape",
    "Verdict",
    "length",
]

"""The field of a problem as a graph, if it can be compiled, or a warning with the reason if not."""

from __future__ import annotations

from torch import Tensor

from .._field.determinism import Determinism
from .._field.field import as_time
from .._field.pytree import real_dtype
from .._stepping.problem import Problem
from ..errors import CompileWarning, warn
from ..solvers.explicit import ExplicitRungeKutta
from ..solvers.reversible import CoupledSolver
from .front_end import capture
from .graph import Capture, NotCompiled, described

#: How every warning begins that something could not be compiled.
EAGERLY = "compile: the solve runs eagerly, since "


def reason_against(problem: Problem) -> str | None:
    """Why a problem cannot be compiled, as far as that is known without the compiler."""
    field, y = problem.field, problem.y0
    if not isinstance(problem.solver, ExplicitRungeKutta | CoupledSolver):
        return f"solver {problem.solver.name!r} is not an explicit Runge–Kutta method or a reversible variant of one"
    if field.autocast is not None or field.dtype != y.dtype:
        return "the field runs in lower precision than the solver"
    return "the compiler does not support complex numbers" if y.is_complex() else None


def captured(problem: Problem, t: float | Tensor, determinism: Determinism) -> Capture | None:
    """The field of a problem as a graph; `None`, with a warning, if it cannot be compiled."""
    field, y = problem.field, problem.y0.detach()
    reason = reason_against(problem)
    if reason is None:
        time = as_time(t, real_dtype(y), y.device)
        try:
            return capture(field.func, field.layout, time, y, field.args, determinism.trial)
        except NotCompiled as error:
            reason = str(error)
        except Exception as error:
            reason = described(error)
            with determinism.trial():
                # An error of the field itself is raised here. With a graph, since the field may cache weights.
                field(time, y)
    warn_not_compiled(reason)
    return None


def warn_not_compiled(reason: object) -> None:
    warn(f"{EAGERLY}{reason}", CompileWarning)

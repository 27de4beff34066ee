"""The steps that SciPy takes, as plans for the loop."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._compile.torch_private import transforms_active
from .._field.pytree import real_dtype
from ..controllers import FixedStep
from ..errors import StepFailure
from ..solvers.base import StepResult
from ..solvers.scipy import SciPy, polynomial_rule
from .engine import Evaluator
from .problem import Problem
from .schedule import Plan, Schedule


class SciPySteps:
    """Takes a step of SciPy's solver whenever the loop asks for a plan; the solver hands out its result.

    Between jumps, one of SciPy's solvers is at work. It is advanced in place: a step cannot be taken again.
    """

    smallest = 0.0

    def __init__(self, problem: Problem, solver: SciPy, evaluate: Evaluator, y0: Tensor, k1: Tensor):
        if torch.is_grad_enabled() and (y0.requires_grad or problem.ts.requires_grad):
            refuse_gradient()
        self._solver, self._evaluate = solver, evaluate
        self._like, self._start = y0, k1
        self._kind = _kind(solver, y0)
        assert problem.error is not None
        self._tolerances = {name: _flat(getattr(problem.error, name), y0) for name in ("rtol", "atol")}
        # Pieces between jumps are planned as steps that are longer than the interval.
        whole = FixedStep(2.0 * abs(problem.times[-1] - problem.times[0]))
        self._pieces = Schedule(whole, 1, problem.times, problem.jumps, real_dtype(y0))
        self._piece: Plan | None = None
        self._y = y0
        self._own: Any = None  # SciPy's object
        self._seen: tuple[float, Tensor, Tensor] | None = None
        self._plan: Plan | None = None

    def next(self) -> Plan | None:
        """Take the next step."""
        if self._own is None:
            self._piece = piece = self._pieces.next()
            if piece is None:
                return None
            start = _to_numpy(self._y)
            options = {**self._tolerances, **self._solver.options}
            if options["first_step"] is not None:
                options["first_step"] = min(options["first_step"], abs(piece.dt))
            self._own = self._kind(self._function, piece.t0, start, piece.t1, **options)
        piece, own = self._piece, self._own
        assert piece is not None
        self._seen = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            message = own.step()
        if own.status == "failed":
            self._fail(message or "; ".join(str(w.message) for w in caught))
        ends = own.status == "finished"
        if own.t == own.t_old and not ends:
            self._fail("its step is too small to move the clock; the solution may blow up there")
        t0, t1 = float(own.t_old), piece.t1 if ends else float(own.t)
        self._plan = piece._replace(
            t0=t0,
            t1=t1,
            dt=t1 - t0,
            proposal=abs(t1 - t0),
            floating=False,
            landing=ends,
            final=ends and piece.final,
            crosses_jump=ends and piece.crosses_jump,
        )
        return self._plan

    def judge(self, plan: Plan, ratio: float) -> bool:
        if plan.landing:
            assert self._piece is not None
            self._pieces.judge(self._piece, ratio)
            self._own = None
        return True

    def result(self) -> StepResult:
        own, plan = self._own, self._plan
        assert plan is not None
        polynomial, y0, largest = own.dense_output(), self._y, self._solver.stages
        self._y = self._to_tensor(own.y)
        # Powers of a lower degree have smaller rounding errors; that of LSODA differs from step to step.
        powers = getattr(polynomial, "p", ()) if self._solver.method == "LSODA" else ()
        nodes, matrix = polynomial_rule(min(max(len(powers) - 1, 1), largest) if len(powers) else largest, largest)
        slopes = [(self._to_tensor(polynomial(plan.t0 + x * plan.dt)) - y0) / plan.dt for x in nodes]
        return StepResult(self._y, slopes, self, interpolant=matrix)

    def sample(self) -> tuple[float, Tensor, Tensor]:
        assert self._seen is not None
        assert self._plan is not None
        t, y, slope = self._seen
        return (t - self._plan.t0) / self._plan.dt, y, slope

    def _function(self, t: Any, y: Any) -> Any:
        """The field for SciPy, which may not keep what it is given."""
        piece, state = self._piece, self._to_tensor(y)
        assert piece is not None
        time = min(max(float(t), piece.lowest), piece.highest)
        slope = self._start
        if slope is None or not torch.equal(state, self._like):
            slope = self._evaluate(time, state)
            if slope.requires_grad:
                refuse_gradient()
        self._start = None  # the slope at the start is known, and asked for first
        self._seen = self._seen or (time, state, slope)
        return _to_numpy(slope)

    def _to_tensor(self, y: Any) -> Tensor:
        like = self._like
        return torch.tensor(y, dtype=like.dtype, device=like.device).reshape(like.shape)

    def _fail(self, message: str) -> NoReturn:
        t = float(self._own.t)
        raise StepFailure(f"at t = {t:g} SciPy's {self._solver.method} could not continue: {message}", t=t)


def refuse_gradient() -> NoReturn:
    raise ValueError(
        "adjoint: there is no derivative through the steps of SciPy's solvers; pass adjoint=sn.Backsolve("
        "solver='dopri5', controller=sn.Integral()) or another continuous adjoint with a solver of its own, or solve "
        "under torch.no_grad()"
    )


def _kind(solver: SciPy, y0: Tensor) -> Any:
    """The class of SciPy's solver."""
    if transforms_active():
        raise ValueError("solver: SciPy's solvers read values, which torch.func does not allow; pass another solver")
    if y0.is_complex() and solver.method == "LSODA":
        raise ValueError("solver: SciPy's LSODA takes no complex states; pass sn.SciPy('RK45') or sn.SciPy('BDF')")
    try:
        integrate = importlib.import_module("scipy.integrate")
    except ImportError as error:
        raise ImportError(
            "solver: sn.SciPy needs SciPy, which is not installed; pip install seminode[scipy]"
        ) from error
    return getattr(integrate, solver.method)


def _to_numpy(x: Tensor) -> Any:
    wide = torch.complex128 if x.is_complex() else torch.float64
    return x.detach().to("cpu", wide).reshape(-1).numpy().copy()


def _flat(tolerance: float | Tensor, like: Tensor) -> Any:
    if isinstance(tolerance, Tensor) and tolerance.ndim > 0:
        return _to_numpy(tolerance.expand(like.shape))
    return float(tolerance)

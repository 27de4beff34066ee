"""What adjoints that solve the adjoint equation have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from ... import norms
from ..._field import checks
from ..._field.pytree import real_dtype
from ..._field.rank_checks import refuse_implicit_ranks
from ..._stepping.engine import Engine
from ..._stepping.observers import Observer
from ..._stepping.problem import Problem
from ...controllers import Controller, PrescribedSteps
from ...norms import Norm
from ...solvers import Solver, SolverName
from ...solvers.reversible import CoupledSolver
from .._autograd import BackwardRequest, FunctionAdjoint, Gradients
from .dense_state import DenseState
from .parameter_integral import ParameterIntegral
from .solve import BackwardSolve, IntegralContext, Method

RelativeTo = Literal["sample", "entry"]


@dataclass(frozen=True, kw_only=True, repr=False)
class ContinuousAdjoint(FunctionAdjoint):
    """An adjoint that solves the adjoint equation, with options for its backward solve.

    To write one, provide `tape` (what the forward pass keeps), `integral` (how the parameter integral is computed) and,
    if the state is not solved backwards, `dense_state` (where it comes from instead).

    Arguments:
        rtol, atol: tolerances of the backward solve: a number, or a structure like y0; by default the forward ones.
        relative_to: what rtol is relative to in the entries of a_z: `"sample"` (default) adds a part (0.3) of the mean
            magnitude over the last axis to the magnitude of each entry, so that entries which are small among the
            others of their sample do not shorten the steps; `"entry"` is |a_z| of each entry alone, as in other
            libraries. States with one axis have no samples.
        solver: of the backward solve; by default the forward one.
        controller: of the backward solve; by default the forward one.
        max_steps: limit on the attempted steps of the backward pass; by default the forward one.
        observers: objects that are told about every step of the backward pass; its state is one flat vector.

    Example:
        A looser tolerance backward, relative to each entry, and a cheaper solver:

        >>> import torch, seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
        >>> adjoint = sn.Quadrature(rtol=1e-3, atol=1e-5, relative_to="entry", solver="bosh3")
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], rtol=1e-8, atol=1e-10, adjoint=adjoint)
        >>> sol.ys[-1].sum().backward()
        >>> sol.stats.backward.accepted < sol.stats.accepted, abs(y0.grad.item() - 0.367879) < 1e-3
        (True, True)

    [Contributing](contributing.md#a-continuous-adjoint) shows a complete subclass.
    """

    keeps_outputs: ClassVar[bool] = True
    #: Whether the backward solve may use an implicit solver.
    implicit: ClassVar[bool] = False

    rtol: Any = None
    atol: Any = None
    relative_to: RelativeTo = "sample"
    solver: SolverName | Solver | None = None
    controller: Controller | None = None
    max_steps: int | None = None
    observers: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        if self.relative_to not in get_args(RelativeTo):
            raise ValueError(f"relative_to: expected 'sample' or 'entry', found {self.relative_to!r}")
        if self.solver is not None:
            object.__setattr__(self, "solver", checks.check_solver(self.solver))
        if self.controller is not None and not isinstance(self.controller, Controller):
            raise TypeError(f"controller: expected a Controller, found {checks.described(self.controller)}")
        if self.max_steps is not None:
            checks.check_count("max_steps", self.max_steps)

    def __repr__(self) -> str:
        given = [f"{x.name}={getattr(self, x.name)!r}" for x in fields(self) if getattr(self, x.name) != x.default]
        return f"{self.name}({', '.join(given)})"

    def refuse(self, problem: Problem) -> None:
        if problem.dense:
            raise ValueError(
                f"dense: {self.name} gives gradients of outputs at times, not of the polynomials between them; pass "
                "adjoint=sn.Replay(), or ask for the times you need in ts"
            )
        solver, controller = self.backward_method(problem)
        if isinstance(solver, CoupledSolver):
            raise ValueError(
                f"adjoint: {self.name} cannot take its own steps with solver {solver.name!r}, whose two coupled copies "
                f"are made for sn.Reversible(); pass {self.name}(solver='dopri5')"
            )
        if not solver.general:
            raise ValueError(
                f"adjoint: {self.name} solves the adjoint equation, for which solver {solver.name!r} was not made; "
                f"pass {self.name}(solver='dopri5', controller=sn.Integral()), or adjoint=sn.Replay()"
            )
        if solver.implicit and not self.implicit:
            raise ValueError(
                f"adjoint: {self.name} cannot use the implicit solver {solver.name!r} on the backward pass. Where z is "
                "solved backwards, a stiff problem is unstable, and damping hides it. Pass adjoint=sn.Replay() or "
                f"sn.Interpolating(); or, if the problem is not stiff, {self.name}(solver='dopri5')"
            )
        if isinstance(controller, PrescribedSteps):
            raise ValueError(
                f"adjoint: {self.name} takes steps of its own, for which PrescribedSteps has no sizes; pass "
                f"{self.name}(controller=...)"
            )
        if problem.ranks.several and solver.implicit:
            refuse_implicit_ranks(solver)
        if problem.ranks.several and self.integrals_in_state:
            raise ValueError(
                f"norm: {self!r} reads the gradients of parameters in every step, but with norms.distributed() each "
                "rank has only its own part of them; pass norm='seminorm', which does not read them"
            )
        self.tolerances(problem)

    def backward_method(self, problem: Problem) -> tuple[Solver, Controller]:
        """Solver and controller of the backward solve."""
        solver = problem.solver if self.solver is None else self.solver
        assert isinstance(solver, Solver)
        return solver, checks.check_controller(self.controller or problem.controller, solver)

    def tolerances(self, problem: Problem) -> tuple[float | Tensor, float | Tensor]:
        """rtol and atol of the backward solve: numbers, or flat like the state."""
        layout, y0 = problem.field.layout, problem.y0
        like = layout.unpack(y0.detach())
        defaults: tuple[Any, Any] = checks.DEFAULT_TOLERANCES[real_dtype(y0)]
        if problem.error is not None:
            defaults = problem.error.rtol, problem.error.atol
            if self.rtol is None and self.atol is None:
                return defaults
        if not self.backward_method(problem)[1].adaptive:
            for name, value in (("rtol", self.rtol), ("atol", self.atol)):
                if value is not None:
                    raise ValueError(f"{name}: does nothing on a backward pass with fixed steps")
        return checks.check_tolerances(self.rtol, self.atol, defaults, like, layout, y0)

    @property
    def backward_norm(self) -> Norm:
        return norms.seminorm

    @property
    def fresh(self) -> bool:
        """Whether every output time is a new beginning, as published."""
        return False

    @property
    def every_stop(self) -> bool:
        """Whether to stop at output times without a cotangent too."""
        return False

    @property
    def integrals_in_state(self) -> bool:
        """Whether a_θ is part of the solver's state, and a_t if there is a gradient with respect to times."""
        return False

    @property
    def time_in_state(self) -> bool:
        """Whether a_t is part of the solver's state even without a gradient with respect to times."""
        return False

    def dense_state(self, request: BackwardRequest, engine: Engine) -> DenseState | None:
        """Where z comes from, if it is not solved for; `engine` takes steps of the forward solve again."""
        return None

    @abstractmethod
    def integral(self, context: IntegralContext) -> ParameterIntegral:
        """How the parameter integral is computed."""

    def backward(self, request: BackwardRequest) -> Gradients:
        problem = request.forward.problem
        solver, controller = self.backward_method(problem)
        rtol, atol = self.tolerances(problem)
        max_steps = self.max_steps or problem.max_steps
        method = Method(
            self.name,
            solver,
            controller,
            rtol,
            atol,
            self.backward_norm,
            self.fresh,
            self.integrals_in_state,
            max_steps,
            self.every_stop,
            self.time_in_state,
            tuple(self.observers),
            self.samples or controller.adaptive,
            self.relative_to == "sample" and not self.fresh,
        )
        return BackwardSolve(request, method, self.dense_state, self.integral).run()


def refuse_coarse_polynomials(name: str, solver: Solver) -> None:
    if solver.interpolant_order < solver.order - 1:
        raise ValueError(
            f"solver: {name} reads the solution between steps, where the polynomial of {solver.name!r} is of order "
            f"{solver.interpolant_order} only and misses the tolerance; take "
            f"{'kvaerno5' if solver.implicit else 'dopri5'!r} or {'kvaerno3' if solver.implicit else 'tsit5'!r}, or "
            "another adjoint"
        )

"""Implicit Runge–Kutta methods: one step function over a tableau, for stiff problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import tableaux_implicit as tableaux
from .._compile.torch_private import transforms_active
from .._field.linearisation import from_real, to_real
from .._stepping.combination import MovingStep, SparseWeights, StepSize, scaled_sum, sparse
from .._stepping.interpolation import weights_at
from ..tableaux_implicit import ImplicitTableau
from ._linear import Factor, Jacobian, LinearSolver, Spectrum, StageFactors
from ._newton import TOO_SHORT, Linear, ToRounding, WithinTolerance, newton, reach_of_updates, remaining
from ._stages import Block, Differentiated, Stages, blocks_of, predictors, run_stages, without_tangent
from .base import ImplicitEvaluate, Solver, StepResult

ImplicitName = Literal[
    "implicit_euler",
    "implicit_midpoint",
    "trapezoid",
    "sdirk2",
    "trbdf2",
    "kvaerno3",
    "kvaerno5",
    "radauIIA3",
    "radauIIA5",
    "gl4",
    "gl6",
]
#: A step that is so much longer than the one before has a first guess of its own.
FAR = 3.0


class Memory(NamedTuple):
    """What an implicit method carries from one step to the next. No later result depends on it beyond the tolerance."""

    slope: Tensor | None = None  # at the start of the step
    linear: Linear | None = None
    carried: float = 1.0  # the factor of Newton's error estimate
    dt: float = 0.0  # the previous step, and the slopes of its stages
    stages: tuple[Tensor, ...] = ()
    cautious: bool = True  # at the start and after a rejected step


class Attempt(NamedTuple):
    """The stages of a step, or why there are none; what the linear solver has learned."""

    stages: Stages | None
    linear: Linear
    carried: float
    failure: str = ""


class ImplicitRungeKutta(Solver):
    """An implicit Runge–Kutta method given by its [`ImplicitTableau`][seminode.tableaux_implicit.ImplicitTableau].

    The stages are solved for by simplified Newton iterations. The Jacobian and its factorisation are reused from step
    to step until convergence slows. If the iterations do not converge with a new Jacobian either, the step counts as
    rejected and a shorter one is tried. With fixed steps the iterations continue to rounding; with adaptive steps they
    stop at a fraction of the tolerance. Gradients are those of the stage equations, by the implicit function theorem.

    Arguments:
        jacobian: `jacobian(t, y, *args)`, the matrix ∂f/∂y of shape (n, n) for the n numbers of y, or (B, d, d) for a
            batch whose samples do not depend on each other. By default it is computed by automatic differentiation. An
            approximation is enough: it is used to find the stages, not to differentiate them.
        linear_solver: `"dense"` factorises the (n, n) Jacobian; `"batched"` one (d, d) block for each sample of the
            first axis, which requires that the field treats samples independently; `"gmres"` needs products with the
            Jacobian only, so that memory grows with n. `"auto"` takes `"batched"` where the field is found to be
            separable, else `"dense"` up to n = 1024, and `"gmres"` beyond.
        newton_tolerance: which part of the tolerance of a step the iterations may leave as an error.

    >>> import torch, seminode as sn
    >>> solver = sn.Kvaerno5(jacobian=lambda t, y: -1000 * torch.eye(2))
    >>> sn.solve(lambda t, y: -1000 * y, torch.ones(2), [0.0, 1.0], solver=solver).stats.accepted < 50
    True
    """

    tableau: ClassVar[ImplicitTableau]
    implicit = True
    _error_weights: ClassVar[SparseWeights]
    _predictors: ClassVar[dict[int, SparseWeights]]
    _spectrum: ClassVar[Spectrum]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tableau = cls.tableau
        cls.order, cls.stages = tableau.order, tableau.stages
        cls.error_order, cls.error_needs_end_slope = tableau.error_order, False
        cls.weights = tableau.b
        cls.error_weights = None if tableau.e is None else (*tableau.e, 0.0)
        cls.interpolant, cls.interpolant_order = tableau.interpolant, tableau.interpolant_order
        cls._error_weights = sparse(tableau.e or ())
        cls._predictors = predictors(tableau)
        cls._spectrum = ((complex(tableau.gamma), (1.0,), (1.0,)),) if tableau.diagonal else tableau.spectrum

    def __init__(
        self,
        *,
        jacobian: Callable[..., Tensor] | None = None,
        linear_solver: LinearSolver = "auto",
        newton_tolerance: float = 0.01,
    ):
        if jacobian is not None and not callable(jacobian):
            raise TypeError(f"jacobian: expected a callable jacobian(t, y, *args), found {type(jacobian).__name__}")
        if linear_solver not in get_args(LinearSolver):
            names = ", ".join(map(repr, get_args(LinearSolver)))
            raise ValueError(f"linear_solver: expected one of {names}, found {linear_solver!r}")
        if jacobian is not None and linear_solver == "gmres":
            raise ValueError("linear_solver: 'gmres' uses no Jacobian; pass either jacobian= or linear_solver='gmres'")
        tolerance: Any = newton_tolerance
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
            raise TypeError(f"newton_tolerance: expected a number, found {type(newton_tolerance).__name__}")
        if not 0.0 < newton_tolerance < 1.0:
            raise ValueError(f"newton_tolerance: expected between 0 and 1, found {newton_tolerance}")
        self.jacobian, self.newton_tolerance = jacobian, newton_tolerance
        self.linear_solver: LinearSolver = linear_solver

    @property
    def name(self) -> str:
        return self.tableau.name

    def step(self, evaluate: ImplicitEvaluate, dt: StepSize, y0: Tensor, memory: Memory | None) -> StepResult:  # type: ignore[override]
        tableau, memory = self.tableau, memory or Memory()
        if transforms_active():
            raise ValueError(
                f"solver: {self.name!r} makes decisions based on values and cannot be used inside a torch.func "
                "transform; use an explicit solver with sn.FixedStep"
            )
        without_tangent(y0)
        k1 = memory.slope
        if k1 is None and (tableau.explicit_start or tableau.e_start):
            k1 = evaluate(0.0, y0, stage=0)
        h = float(dt.value if isinstance(dt, MovingStep) else dt)
        with torch.no_grad():
            start = None if k1 is None else k1.detach()
            attempt = self._solve(evaluate, h, y0.detach(), start, memory)
        stages = attempt.stages
        if stages is None:
            kept = memory._replace(slope=k1, linear=attempt.linear, carried=1.0)
            return StepResult(y0, [], kept, attempt.failure)
        error = None
        if tableau.filtered and evaluate.norm is not None:
            with torch.no_grad():
                assert attempt.linear.factors is not None
                error = self._filtered(evaluate, h, y0.detach(), start, stages, attempt.linear.factors.real, memory)
        slopes = tuple(stages.slopes)
        if torch.is_grad_enabled():
            derivatives = Differentiated(evaluate, stages.increments, dt, self.linear_solver)
            stages = run_stages(tableau, dt, y0, k1, derivatives)
            assert stages is not None
        end = stages.slopes[-1] if tableau.stiffly_accurate else None
        after = Memory(end, attempt.linear, attempt.carried, h, () if tableau.diagonal else slopes, cautious=False)
        return StepResult(stages.y1, stages.slopes, after, error=error)

    def _solve(self, evaluate: ImplicitEvaluate, dt: float, y0: Tensor, k1: Tensor | None, memory: Memory) -> Attempt:
        """Solve for the stages: with what is known from earlier steps first, then with a Jacobian of this step."""
        linear = memory.linear
        if linear is not None and not memory.cautious:  # the state has moved on
            linear = linear.aged(dt)
        if linear is None:
            linear = Linear(self._jacobian(evaluate, y0))
        linear = linear.factorised(evaluate.counter, self._spectrum, dt, abs(dt) > abs(memory.dt) > 0.0)
        attempt = self._iterate(evaluate, dt, y0, k1, memory, linear)
        if attempt.stages is not None or (linear.current and linear.dt == dt):
            return attempt
        if not linear.current:
            linear = Linear(self._jacobian(evaluate, y0))
        linear = linear._replace(factors=None).factorised(evaluate.counter, self._spectrum, dt, False)
        return self._iterate(evaluate, dt, y0, k1, memory, linear)

    def _jacobian(self, evaluate: ImplicitEvaluate, y: Tensor, c: float = 0.0) -> Jacobian:
        return evaluate.jacobian(c, y, self.linear_solver, self.jacobian)

    def _iterate(
        self, evaluate: ImplicitEvaluate, dt: float, y0: Tensor, k1: Tensor | None, memory: Memory, linear: Linear
    ) -> Attempt:
        """Newton iterations for all stages with one factorisation."""
        factors = linear.factors
        if factors is None:
            return Attempt(None, linear, 1.0, "the matrix I − γ·dt·J of Newton's method is singular")
        norm = evaluate.norm
        criterion = ToRounding(evaluate.eps) if norm is None else WithinTolerance(norm, self.newton_tolerance, y0)
        carried, rate, least = memory.carried, 0.0, remaining(linear.mismatch(dt))
        if self.jacobian is not None and (memory.linear is None or factors is not memory.linear.factors):
            reach = reach_of_updates(evaluate, blocks_of(self.tableau)[0], dt, y0, factors)
            if reach < TOO_SHORT:
                reason = "the matrix that jacobian= returns is not that of the field (far too large?)"
                return Attempt(None, linear, 1.0, reason)
            carried = max(carried, 1.0 / reach - 1.0)
        previous: list[Tensor] = []

        def refresh(block: Block, states: Tensor) -> StageFactors | None:
            new = Linear(self._jacobian(evaluate, states[-1], block.nodes[-1]))
            return new.factorised(evaluate.counter, self._spectrum, dt, False).factors

        def solve(block: Block, starts: Sequence[Tensor], slopes: Sequence[Tensor]) -> Sequence[Tensor] | None:
            nonlocal carried, rate
            guess = self._guess(block, dt, starts, slopes, memory, previous)
            found = newton(
                lambda j, y: without_tangent(evaluate(block.nodes[j], y, stage=None)),
                block.a,
                dt,
                starts,
                guess,
                factors,
                linear.damping(dt),
                criterion,
                max(carried, least),
                # With adaptive steps a shorter one is cheaper.
                partial(refresh, block) if norm is None else None,
                y0,
            )
            carried, rate = found.carried, max(rate, found.rate)
            evaluate.counter.newton_iterations += found.iterations
            previous[:] = [starts[-1] + found.increments[-1]]
            return list(found.increments) if found.converged else None

        stages = run_stages(self.tableau, dt, y0, k1, solve)
        if stages is None:
            return Attempt(None, linear, 1.0, f"Newton's method does not converge (rate of convergence {rate:.2g})")
        return Attempt(stages, linear._replace(rate=rate), carried)

    def _guess(
        self,
        block: Block,
        dt: float,
        starts: Sequence[Tensor],
        slopes: Sequence[Tensor],
        memory: Memory,
        previous: Sequence[Tensor],
    ) -> Tensor:
        """Where Newton's method starts."""
        tableau = self.tableau
        if tableau.diagonal:
            i = block.first
            if previous and tableau.c[i] == tableau.c[i - 1]:
                return (previous[0] - starts[0])[None]  # the stage before is at the same time
            if not slopes:
                return torch.zeros_like(starts[0])[None]
            return scaled_sum(tableau.gamma * dt, self._predictors[i], slopes)[None]
        ratio = dt / memory.dt if memory.dt else 0.0
        if not memory.stages or not 0.0 < ratio < FAR:
            return torch.zeros_like(torch.stack(list(starts)))
        # The polynomial of the previous step, continued.
        rows = (
            (w - b for w, b in zip(weights_at(self.interpolant, 1.0 + c * ratio), tableau.b, strict=True))
            for c in tableau.c
        )
        return torch.stack([scaled_sum(memory.dt, sparse(row), memory.stages) for row in rows])

    def _filtered(
        self,
        evaluate: ImplicitEvaluate,
        dt: float,
        y0: Tensor,
        k1: Tensor | None,
        stages: Stages,
        factor: Factor,
        memory: Memory,
    ) -> Tensor:
        """(I − γ·dt·J)⁻¹ times the difference of two methods: Hairer and Wanner, IV.8.

        If the estimate is too large at the start or after a rejected step, it is filtered once more, as they advise.
        """
        weight, difference = self.tableau.e_start, scaled_sum(dt, self._error_weights, stages.slopes)

        def filtered(first: Tensor | None) -> Tensor:
            raw = difference if first is None else torch.add(difference, first, alpha=dt * weight)
            return from_real(factor.solve(to_real(raw)), y0)

        error = filtered(k1 if weight else None)
        assert evaluate.norm is not None
        if weight and memory.cautious and evaluate.norm.ratio(error, y0, stages.y1) > 1.0:
            error = filtered(evaluate(0.0, y0 + error, stage=None))
        return error

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        return scaled_sum(dt, self._error_weights, slopes)

    def with_slope(self, memory: Memory | None, slope: Tensor) -> Memory:
        """A slope that follows from the last stage is kept: an evaluation magnifies the error of the state."""
        if memory is None:
            return Memory(slope)
        return memory if memory.slope is not None else memory._replace(slope=slope)

    def retry(self, memory: Memory | None, result: StepResult) -> Memory:
        memory, known = memory or Memory(), result.memory
        if result.failure is not None:
            return known._replace(cautious=True)
        slope = result.slopes[0] if self.tableau.explicit_start else memory.slope
        return memory._replace(slope=slope, linear=known.linear, carried=known.carried, cautious=True)

    def __repr__(self) -> str:
        defaults = {"jacobian": None, "linear_solver": "auto", "newton_tolerance": 0.01}
        text = ", ".join(f"{name}={getattr(self, name)!r}" for name, x in defaults.items() if getattr(self, name) != x)
        return f"{type(self).__name__}({text})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


class ImplicitEuler(ImplicitRungeKutta):
    """Euler's implicit method, order 1, L-stable. Fixed steps only."""

    tableau = tableaux.IMPLICIT_EULER


class ImplicitMidpoint(ImplicitRungeKutta):
    """The implicit midpoint rule, order 2: A-stable, symmetric and symplectic. Fixed steps only."""

    tableau = tableaux.IMPLICIT_MIDPOINT


class Trapezoid(ImplicitRungeKutta):
    """The trapezoidal rule (Crank–Nicolson), order 2: A-stable and symmetric. Fixed steps only."""

    tableau = tableaux.TRAPEZOID


class SDIRK2(ImplicitRungeKutta):
    """Alexander's singly diagonally implicit method of order 2, L-stable. Fixed steps only."""

    tableau = tableaux.SDIRK2


class TRBDF2(ImplicitRungeKutta):
    """A step of the trapezoidal rule and one of BDF2, order 2 with a filtered error estimate, L-stable."""

    tableau = tableaux.TRBDF2


class Kvaerno3(ImplicitRungeKutta):
    """Kværnø's pair of order 3(2), L-stable: for stiff problems at loose tolerances."""

    tableau = tableaux.KVAERNO3


class Kvaerno5(ImplicitRungeKutta):
    """Kværnø's pair of order 5(4), L-stable: the first choice for stiff problems.

    One of its stages is at t0 + 1.23·dt, so that the last step evaluates the field past ts[-1].

    Example:
        >>> import torch, seminode as sn
        >>> def robertson(t, y):
        ...     a, b, c = y.unbind()
        ...     first, second, third = 0.04 * a, 1e4 * b * c, 3e7 * b * b
        ...     return torch.stack([second - first, first - second - third, third])
        >>> y0 = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        >>> sn.solve(robertson, y0, [0.0, 1e4], solver="kvaerno5", atol=1e-10).stats.accepted < 100
        True
    """

    tableau = tableaux.KVAERNO5


class RadauIIA3(ImplicitRungeKutta):
    """Radau IIA with two coupled stages, order 3, L-stable. Fixed steps only."""

    tableau = tableaux.RADAU_IIA3


class RadauIIA5(ImplicitRungeKutta):
    """Radau IIA with three coupled stages, order 5 with a filtered error estimate of order 3, L-stable.

    For very stiff problems and tight tolerances. Its dense output is of order 3 only. Hairer and Wanner (1996), IV.8.
    """

    tableau = tableaux.RADAU_IIA5


class GaussLegendre4(ImplicitRungeKutta):
    """Gauss–Legendre with two coupled stages, order 4: A-stable, symmetric and symplectic. Fixed steps only."""

    tableau = tableaux.GL4


class GaussLegendre6(ImplicitRungeKutta):
    """Gauss–Legendre with three coupled stages, order 6: A-stable, symmetric and symplectic. Fixed steps only."""

    tableau = tableaux.GL6


#: Implicit Runge–Kutta methods by name.
IMPLICIT: dict[str, type[ImplicitRungeKutta]] = {
    kind.tableau.name: kind
    for kind in (
        *(ImplicitEuler, ImplicitMidpoint, Trapezoid, SDIRK2, TRBDF2, Kvaerno3, Kvaerno5, RadauIIA3, RadauIIA5),
        *(GaussLegendre4, GaussLegendre6),
    )
}

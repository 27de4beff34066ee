"""Explicit Runge–Kutta methods: one step function over a tableau."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import tableaux
from .._polynomials import cubic_hermite
from .._stepping.combination import SparseWeights, StepSize, combine, scaled_sum, sparse
from ..tableaux import Tableau
from .base import Evaluate, Solver, StepResult

ExplicitName = Literal[
    "euler",
    "midpoint",
    "heun",
    "ralston",
    "rk4",
    "rk38",
    "heun3",
    "bosh3",
    "adaptive_heun",
    "fehlberg2",
    "dopri5",
    "tsit5",
    "dopri8",
]


def runge_kutta_step(
    later: Sequence[tuple[float, SparseWeights]],
    weights: SparseWeights,
    evaluate: Evaluate,
    dt: StepSize,
    y0: Tensor,
    k1: Tensor,
    stage: int = 1,
) -> tuple[Tensor, list[Tensor]]:
    """One explicit Runge–Kutta step,

        kᵢ = f(t0 + cᵢ·dt, y0 + dt·Σⱼ aᵢⱼ·kⱼ),    y1 = y0 + dt·Σᵢ bᵢ·kᵢ.

    The first slope is given, since it is usually known from the previous step; `later` holds cᵢ and the row aᵢ of the
    other stages. The first of their evaluations is number `stage`.
    """
    stages = [k1]
    for i, (c, row) in enumerate(later, stage):
        stages.append(evaluate(c, combine(y0, dt, row, stages), stage=i))
    return combine(y0, dt, weights, stages), stages


def runge_kutta_vjp(
    later: Sequence[tuple[float, SparseWeights]],
    weights: SparseWeights,
    stage_vjp: Callable[[int, Tensor], Tensor],
    dt: float | Tensor,
    adj_y1: Tensor,
    adj_slopes: Sequence[Tensor | None],
) -> Tensor:
    """The cotangent of y0 from those of y1 and of the slopes: the transposed Runge–Kutta step,

        ū_i = (∂f/∂y)ᵀ k̄_i,    k̄_i = dt·(bᵢ·ȳ1 + Σⱼ aⱼᵢ·ū_j),    ȳ0 = ȳ1 + Σᵢ ū_i.

    `stage_vjp(i, k̄)` is the VJP of slope i: from its cotangent to that of the state where it was evaluated.
    """
    adj = list(adj_slopes)

    def distribute(row: SparseWeights, x: Tensor) -> None:
        for j, w in row:
            known = adj[j]
            if isinstance(dt, float):
                adj[j] = x * (w * dt) if known is None else torch.add(known, x, alpha=w * dt)
            else:
                adj[j] = scaled_sum(dt, ((0, w),), [x]) if known is None else combine(known, dt, ((0, w),), [x])

    distribute(weights, adj_y1)
    total = adj_y1
    for i in range(len(later), -1, -1):
        adj_slope = adj[i]
        if adj_slope is None:
            continue
        adj_state = stage_vjp(i, adj_slope)
        total = total + adj_state
        if i > 0:
            distribute(later[i - 1][1], adj_state)
    return total


class ExplicitRungeKutta(Solver):
    """An explicit Runge–Kutta method given by its [`Tableau`][seminode.tableaux.Tableau], with s stages,

        kᵢ = f(t0 + cᵢ·dt, y0 + dt·Σⱼ aᵢⱼ·kⱼ),    y1 = y0 + dt·Σᵢ bᵢ·kᵢ.

    Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), II.1.

    Example:
        >>> import torch, seminode as sn
        >>> from seminode.solvers import ExplicitRungeKutta
        >>> from seminode.tableaux import Tableau
        >>> class Kutta3(ExplicitRungeKutta):
        ...     tableau = Tableau.classical(
        ...         "kutta3", order=3, c=(0, 1 / 2, 1), a=((), (1 / 2,), (-1, 2)), b=(1 / 6, 2 / 3, 1 / 6)
        ...     )
        >>> y0, ts = torch.ones(1, dtype=torch.float64), [0.0, 1.0]
        >>> sol = sn.solve(lambda t, y: -y, y0, ts, solver=Kutta3(), controller=sn.FixedStep(0.1))
        >>> sol.stats.nfe, abs(sol.ys[-1].item() - 0.367879) < 3e-5
        (30, True)
    """

    batches = True
    tableau: ClassVar[Tableau]
    #: Node cᵢ and row aᵢ of every stage but the first.
    later_stages: ClassVar[tuple[tuple[float, SparseWeights], ...]]
    _weights: ClassVar[SparseWeights]
    _error_weights: ClassVar[SparseWeights]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tableau = cls.tableau
        cls.order = tableau.order
        cls.stages = tableau.stages
        cls.error_order = None if tableau.e is None else tableau.error_order
        cls.error_needs_end_slope = tableau.fsal
        cls.weights = tableau.b
        cls.error_weights = tableau.e
        # Without the end slope's row where it is zero: then a polynomial costs no evaluation.
        cls.interpolant_order = tableau.interpolant_order
        cls.interpolant = tableau.interpolant[: None if tableau.interpolant_reads_end else -1]
        cls.later_stages = tuple((c, sparse(row)) for c, row in zip(tableau.c[1:], tableau.a[1:], strict=True))
        cls._weights = sparse(tableau.b)
        cls._error_weights = sparse(tableau.e or ())

    @property
    def name(self) -> str:
        return self.tableau.name

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Tensor | None) -> StepResult:
        k1 = evaluate(0.0, y0, stage=0) if memory is None else memory
        return StepResult(*runge_kutta_step(self.later_stages, self._weights, evaluate, dt, y0, k1))

    def vjp(
        self,
        stage_vjp: Callable[[int, Tensor], Tensor],
        dt: float | Tensor,
        adj_y1: Tensor,
        adj_slopes: Sequence[Tensor | None],
    ) -> Tensor:
        """The cotangent of y0 from those of y1 and of the slopes; see `runge_kutta_vjp`."""
        return runge_kutta_vjp(self.later_stages, self._weights, stage_vjp, dt, adj_y1, adj_slopes)

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        return scaled_sum(dt, self._error_weights, slopes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Euler(ExplicitRungeKutta):
    """Euler's method, order 1. Fixed steps only."""

    tableau = tableaux.EULER


class Midpoint(ExplicitRungeKutta):
    """The explicit midpoint rule, order 2. Fixed steps only."""

    tableau = tableaux.MIDPOINT


class Heun(ExplicitRungeKutta):
    """Heun's method (explicit trapezoidal rule), order 2. Fixed steps only; see `AdaptiveHeun`."""

    tableau = tableaux.HEUN


class Ralston(ExplicitRungeKutta):
    """Ralston's method, order 2 with the smallest error bound. Fixed steps only."""

    tableau = tableaux.RALSTON


class RK4(ExplicitRungeKutta):
    """The classical method of Runge and Kutta, order 4. Fixed steps only."""

    tableau = tableaux.RK4


class RK38(ExplicitRungeKutta):
    """Kutta's 3/8 rule, order 4. Fixed steps only. torchdiffeq calls it `rk4`.

    Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), II.1.
    """

    tableau = Tableau.classical(
        "rk38", 4, (0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)
    )


class Heun3(ExplicitRungeKutta):
    """Heun's method of order 3. Fixed steps only.

    Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), II.1.
    """

    tableau = Tableau.classical(
        "heun3", 3, (0, 1 / 3, 2 / 3), ((), (1 / 3,), (0, 2 / 3)), (1 / 4, 0, 3 / 4), interpolant_order=3
    )


class Bosh3(ExplicitRungeKutta):
    """Bogacki and Shampine's pair of order 3(2): for loose tolerances."""

    tableau = tableaux.BOSH3


class AdaptiveHeun(ExplicitRungeKutta):
    """Heun's method with Euler's embedded in it, order 2(1)."""

    tableau = tableaux.ADAPTIVE_HEUN


class Fehlberg2(ExplicitRungeKutta):
    """Fehlberg's pair of order 2(1). Its error estimate is too small: errors of hundreds of tolerances are usual.

    It is there for comparison with other libraries; use `AdaptiveHeun` or `Bosh3` instead.
    """

    tableau = tableaux.FEHLBERG2


class Dopri5(ExplicitRungeKutta):
    """Dormand and Prince's pair of order 5(4) with Shampine's error weights: the default."""

    tableau = tableaux.DOPRI5


class Tsit5(ExplicitRungeKutta):
    """Tsitouras's pair of order 5(4): often a little cheaper than `Dopri5` at the same accuracy."""

    tableau = tableaux.TSIT5


class Dopri8(ExplicitRungeKutta):
    """Prince and Dormand's pair of order 8(7): for tight tolerances."""

    tableau = tableaux.DOPRI8


#: Explicit Runge–Kutta methods by name.
EXPLICIT: dict[str, type[ExplicitRungeKutta]] = {
    kind.tableau.name: kind
    for kind in (
        Euler,
        Midpoint,
        Heun,
        Ralston,
        RK4,
        RK38,
        Heun3,
        Bosh3,
        AdaptiveHeun,
        Fehlberg2,
        Dopri5,
        Tsit5,
        Dopri8,
    )
}


@functools.cache
def with_interpolant(kind: type[ExplicitRungeKutta], name: Literal["linear", "cubic"]) -> ExplicitRungeKutta:
    """A method with another polynomial between steps: the line from y0 to y1, which costs no evaluation, or the cubic
    Hermite polynomial.

    >>> with_interpolant(Heun, "linear").interpolant
    ((0.5,), (0.5,))
    """
    weights = kind.tableau.b
    if name not in ("linear", "cubic"):
        raise ValueError(f"name: expected 'linear' or 'cubic', found {name!r}")
    matrix = [*((b,) for b in weights), (0.0,)] if name == "linear" else cubic_hermite(weights)
    order = 1 if name == "linear" else min(kind.tableau.order, 3)

    class Interpolated(kind):
        tableau = replace(kind.tableau, interpolant=tuple(map(tuple, matrix)), interpolant_order=order)

        def __reduce__(self) -> tuple[Any, ...]:
            return with_interpolant, (kind, name)

        def __repr__(self) -> str:
            return f"with_interpolant({kind.__name__}, {name!r})"

    return Interpolated()


def check_base(base: Any) -> ExplicitRungeKutta:
    """The explicit Runge–Kutta method that another method builds on, given by name or as an object."""
    if isinstance(base, str):
        if base not in EXPLICIT:
            raise ValueError(f"base: expected one of {', '.join(EXPLICIT)}, found {base!r}")
        return EXPLICIT[base]()
    if not isinstance(base, ExplicitRungeKutta):
        raise TypeError(f"base: expected the name of an explicit Runge–Kutta method, found {type(base).__name__}")
    return base

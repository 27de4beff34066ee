"""Runge–Kutta pairs as torchdiffeq runs them: other polynomials, and steps that start from the last stage before them.

They take exactly the steps of that library. The methods in `explicit` are more accurate between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .._polynomials import cubic_hermite, quartic_through_midpoint
from .._stepping.combination import MovingStep, SparseWeights, StepSize, combine, sparse
from .._stepping.interpolation import weights_at
from ..errors import warn
from ..tableaux import BOSH3, DOPRI8, Tableau
from .adams import MAX_ORDER, rule
from .base import Evaluate, Solver, StepResult
from .explicit import RK38, AdaptiveHeun, ExplicitRungeKutta, Fehlberg2, runge_kutta_step


def _quartic(tableau: Tableau, mid: Sequence[float], order: int) -> Tableau:
    """The pair with the quartic through y_mid = y0 + dt·Σ midᵢkᵢ."""
    rows = quartic_through_midpoint(tableau.b, mid)
    return replace(tableau, interpolant=tuple(map(tuple, rows)), interpolant_order=order)


class QuarticBosh3(ExplicitRungeKutta):
    """`Bosh3` with the quartic through y0 + dt/2·k₂, which is of order 1 in the middle of a step."""

    tableau = _quartic(BOSH3, (0.0, 0.5, 0.0, 0.0), 1)


class QuarticDopri8(ExplicitRungeKutta):
    """`Dopri8` with the quartic through the middle of its polynomial, of order 4 instead of 5."""

    tableau = _quartic(DOPRI8, weights_at(DOPRI8.interpolant, 0.5), 4)


class Lagged(Solver):
    """A pair whose steps start with the last stage of the step before, instead of f(t1, y1).

        k₁ of a step = k_s of the accepted step before it

    This saves one evaluation per step of a pair that is not first-same-as-last; in the language of predictor–corrector
    methods it is the mode PEC instead of PECE. The order stays 2, since k_s = f(t1, y1) + O(dt²). The polynomial is the
    quartic through y0 + dt·Σ midᵢkᵢ with the slopes k₁ and k_s.

    Gradients: `Direct`, or `Backsolve(check=False)`.

    Arguments:
        base: `"adaptive_heun"` or `"fehlberg2"`.

    >>> Lagged("adaptive_heun").evaluations
    2
    """

    #: The pair, and the weights of the middle of a step.
    BASES: ClassVar[dict[str, tuple[type[ExplicitRungeKutta], tuple[float, ...]]]] = {
        "adaptive_heun": (AdaptiveHeun, (0.5, 0.0)),
        "fehlberg2": (Fehlberg2, (0.0, 0.5, 0.0)),
    }

    carries_slopes = True
    error_needs_end_slope = False

    def __init__(self, base: str):
        if base not in self.BASES:
            raise ValueError(f"base: expected one of {', '.join(self.BASES)}, found {base!r}")
        kind, mid = self.BASES[base]
        self._base = pair = kind()
        self.order, self.stages, self.error_order = pair.order, pair.stages, pair.error_order
        self.weights, self.error_weights = pair.weights, pair.error_weights
        *rows, last, end = quartic_through_midpoint(pair.weights, (*mid, 0.0))
        self.interpolant = [*rows, [x + y for x, y in zip(last, end, strict=True)]]
        self.interpolant_order = 1

    @property
    def name(self) -> str:
        return self._base.name

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Tensor | None) -> StepResult:
        result = self._base.step(evaluate, dt, y0, memory)
        return result._replace(memory=result.slopes[-1])

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        return self._base.error(dt, slopes)

    def __repr__(self) -> str:
        return f"Lagged({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lagged) and self.name == other.name

    def __hash__(self) -> int:
        return hash((Lagged, self.name))


class Past(NamedTuple):
    """Slopes of earlier steps, the latest first, and how long before the next step each was evaluated.

    `slope` is the first slope of the next step, if it is known.
    """

    slopes: tuple[Tensor, ...] = ()
    times: tuple[float, ...] = ()
    slope: Tensor | None = None


class GrowingAdams(Solver):
    """Adams methods whose order grows with the number of steps behind them, from Kutta's 3/8 rule at the start.

        y₁ = y₀ + dt·Σᵢ bᵢ·f(t₋ᵢ, y₋ᵢ)        (explicit)
        y₁ = y₀ + dt·(b₁·f(t₁, y₁) + Σᵢ b₋ᵢ·f(t₋ᵢ, y₋ᵢ))        (implicit, by a predictor and corrections)

    `ExplicitAdams` and `ImplicitAdams` have their full order from the first step on. These methods are cheaper at the
    start: three steps of the 3/8 rule, then the method of order 3 or 4, and one order more with each further step.
    Weights follow from the times of the slopes, also on uneven grids.

    Gradients: `Direct`, or `Backsolve(check=False)`.

    Arguments:
        corrected: whether to correct the prediction.
        max_order: the largest order. Below 4 all steps are those of the 3/8 rule.
        max_iters: the largest number of corrections.
        rtol, atol: corrections end when no entry of y₁ − y₀ changes by more than the tolerance.
        interp: the polynomial between steps: `"linear"` or `"cubic"`.

    Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I* (1993), III.1.
    """

    error_order = None
    error_needs_end_slope = False
    weights: Sequence[float] = ()  # they differ from step to step
    error_weights = None
    carries_slopes = True
    steady = False
    stages = MAX_ORDER + 4

    def __init__(
        self,
        corrected: bool = False,
        max_order: Any = MAX_ORDER,
        max_iters: int = 4,
        rtol: float = 1e-7,
        atol: float = 1e-9,
        interp: Literal["linear", "cubic"] = "linear",
    ):
        if isinstance(max_order, bool) or not isinstance(max_order, int) or not 1 <= max_order <= MAX_ORDER:
            raise ValueError(f"max_order: expected a whole number from 1 to {MAX_ORDER}, found {max_order!r}")
        if interp not in ("linear", "cubic"):
            raise ValueError(f"interp: expected 'linear' or 'cubic', found {interp!r}")
        self.corrected, self.max_order, self.max_iters = corrected, max_order, max_iters
        self.rtol, self.atol, self.interp = rtol, atol, interp
        self.order = 4
        self.interpolant_order = 1 if interp == "linear" else 3
        self.interpolant = self._polynomial(RK38.tableau.b)

    @property
    def name(self) -> str:
        return "implicit_adams" if self.corrected else "explicit_adams"

    @property
    def evaluations(self) -> int:
        return 1 + self.max_iters * self.corrected

    def _polynomial(self, weights: Sequence[float]) -> Sequence[Sequence[float]]:
        return [(w,) for w in weights] if self.interp == "linear" else cubic_hermite(weights)

    def step(self, evaluate: Evaluate, dt: StepSize, y0: Tensor, memory: Past | None) -> StepResult:
        memory = memory or Past()
        first = evaluate(0.0, y0, stage=0) if memory.slope is None else memory.slope
        h = float(dt.value if isinstance(dt, MovingStep) else dt)
        slopes, times = [first, *memory.slopes], (0.0, *memory.times)
        kept = min(len(slopes), self.max_order - 1)
        slopes, times = slopes[:kept], times[:kept]
        if kept < 3:
            later, weights = RK38.later_stages, RK38.tableau.b
            y1, stages = runge_kutta_step(later, sparse(weights), evaluate, dt, y0, first)
            result = StepResult(y1, stages, interpolant=self._polynomial(weights))
        else:
            result = self._follow(evaluate, dt, y0, slopes, tuple(-t / h for t in times))
        past = Past(tuple(slopes), tuple(t + h for t in times))
        return result._replace(memory=past)

    def _follow(
        self, evaluate: Evaluate, dt: StepSize, y0: Tensor, slopes: list[Tensor], nodes: tuple[float, ...]
    ) -> StepResult:
        """A step with three slopes or more: the first at the start of the step, the others before it."""
        weights = rule(nodes, len(nodes)).weights
        y1 = combine(y0, dt, weights, slopes)
        if self.corrected:
            weights = rule((*nodes, 1.0), len(nodes) + 1).weights
            y1, slopes = self._corrected(evaluate, dt, y0, y1, slopes, weights)
        dense = [0.0] * len(slopes)
        for i, w in weights:
            dense[i] = w
        return StepResult(y1, slopes, interpolant=self._polynomial(dense))

    def _corrected(
        self, evaluate: Evaluate, dt: StepSize, y0: Tensor, y1: Tensor, slopes: list[Tensor], weights: SparseWeights
    ) -> tuple[Tensor, list[Tensor]]:
        corrected = slopes
        for i in range(1, self.max_iters + 1):
            corrected = [*slopes, evaluate(1.0, y1, stage=i)]
            before, y1 = y1, combine(y0, dt, weights, corrected)
            change, moved = (y1 - before).detach().abs(), torch.maximum((y1 - y0).abs(), (before - y0).abs()).detach()
            if bool((change < self.atol + self.rtol * moved).all()):
                return y1, corrected
        warn("Functional iteration did not converge. Solution may be incorrect: take smaller steps.", UserWarning)
        return y1, corrected

    def error(self, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError(f"{self.name} has no error estimate")

    def start(self, y0: Tensor) -> Past:
        return Past()

    def with_slope(self, memory: Past | None, slope: Tensor) -> Past:
        return (memory or Past())._replace(slope=slope)

    def across_jump(self, memory: Past) -> Past:
        return Past()

    def __repr__(self) -> str:
        return f"GrowingAdams(corrected={self.corrected}, max_order={self.max_order})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GrowingAdams) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((GrowingAdams, self.corrected, self.max_order))

"""Runge–Kutta pairs as torchdiffeq runs them: other polynomials, and steps that start from the last stage before them.

They take exactly the steps of that library. The methods in `explicit` are more accurate between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from .._stepping.combination import StepSize
from .._stepping.interpolation import weights_at
from ..tableaux import BOSH3, DOPRI8, Tableau, quartic_through_midpoint
from .base import Evaluate, Solver, StepResult
from .explicit import AdaptiveHeun, ExplicitRungeKutta, Fehlberg2


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

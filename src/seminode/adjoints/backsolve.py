"""Backsolve: solve the state and its adjoint backwards together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import norms
from .._stepping.observers import Tape
from .._stepping.problem import Problem
from ..norms import Norm
from ._continuous.parameter_integral import StageSums
from ._continuous.solve import BackwardSolve
from ._continuous.strategy import ContinuousAdjoint, refuse_coarse_polynomials

#: Norms that read z and a_z alone: then a_θ and a_t need not be there.
SEMINORMS = (norms.seminorm, norms.seminorm_rms)


@dataclass(frozen=True, repr=False)
class Backsolve(ContinuousAdjoint):
    """Solve [z, a_z] backwards in time, in constant memory: the method of the seminorm paper and its baselines.

        z′ = f(t, z),    a_z′ = −a_zᵀ ∂f/∂z,    ∂L/∂θ = ∫ a_zᵀ ∂f/∂θ dt

    Nothing of the forward pass is kept but the outputs. The gradient is that of the exact solution, to the tolerance;
    where the solution contracts, going back is unstable and the gradient wrong, of which `DriftWarning` tells.

    Arguments:
        norm: of the error on the way back. `"seminorm"` (default: the larger of the norms of z and a_z; gradients of
            parameters, being plain integrals, have no say), `"seminorm_rms"`, `"mixed"` (the paper's baseline),
            `"mixed_per_tensor"` (torchdiffeq's), or a function of an `AdjointState`.
        restart: `"carry"` keeps the step size across output times, lands on them exactly, does not stop at those
            without a cotangent, and scales the cotangents to order one. `"fresh"` is the published procedure: at every
            output time a new first step, a solve that runs past its end, and an interpolation back to it.

    Kidger, Chen and Lyons, *"Hey, that's not an ODE": Faster ODE Adjoints via Seminorms* (ICML 2021).
    """

    norm: str | Norm = "seminorm"
    restart: str = "carry"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.norm, str) and self.norm not in norms.BACKWARD:
            raise ValueError(f"norm: expected one of {', '.join(norms.BACKWARD)} or a callable, found {self.norm!r}")
        if not isinstance(self.norm, str) and not callable(self.norm):
            raise TypeError(f"norm: expected a name or a callable, found {type(self.norm).__name__}")
        if self.restart not in ("carry", "fresh"):
            raise ValueError(f"restart: expected 'carry' or 'fresh', found {self.restart!r}")

    @property
    def backward_norm(self) -> Norm:
        return norms.BACKWARD[self.norm] if isinstance(self.norm, str) else self.norm

    @property
    def fresh(self) -> bool:
        return self.restart == "fresh"

    @property
    def integrals_in_state(self) -> bool:
        return self.backward_norm not in SEMINORMS

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.fresh:
            refuse_coarse_polynomials("Backsolve(restart='fresh')", self.method(problem)[0])

    def tape(self, problem: Problem) -> Tape | None:
        return None

    def watch(self, solve: BackwardSolve) -> Any:
        return StageSums(solve.solver, solve.targets, idle=self.integrals_in_state)

"""Backsolve: solve the state and its adjoint backwards together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .. import norms
from .._stepping.observers import Tape
from .._stepping.problem import Problem
from ..norms import Norm
from ._continuous.parameter_integral import StageSums
from ._continuous.solve import IntegralContext
from ._continuous.strategy import ContinuousAdjoint, refuse_coarse_polynomials

#: Norms of the backward pass by name.
BackwardNorm = Literal["seminorm", "seminorm_rms", "mixed", "mixed_per_tensor"]
Restart = Literal["carry", "fresh", "every"]
#: Norms that read z and a_z alone: with them a_θ and a_t need not be part of the solver's state.
SEMINORMS = (norms.seminorm, norms.seminorm_rms)


@dataclass(frozen=True, repr=False)
class Backsolve(ContinuousAdjoint):
    """Solve [z, a_z] backwards in time, in constant memory: the method of the seminorm paper and its baselines.

        z′ = f(t, z),    a_z′ = −a_zᵀ ∂f/∂z,    ∂L/∂θ = ∫ a_zᵀ ∂f/∂θ dt

    Only the outputs of the forward pass are kept. The gradient is that of the exact solution, to the tolerance.
    Where the solution contracts, solving backwards is unstable and the gradient wrong; a `DriftWarning` says so.

    Arguments:
        norm: of the error on the backward pass. `"seminorm"` (default) is the larger of the norms of z and a_z:
            gradients of parameters, which are plain integrals, do not steer the steps. `"seminorm_rms"` is the root
            mean square over both, `"mixed"` the paper's baseline, `"mixed_per_tensor"` that of torchdiffeq; or pass a
            function of an `AdjointState`.
        restart: `"carry"` keeps the step size across output times, lands on them exactly, does not stop at those
            without a cotangent, and scales the cotangents to order one. `"fresh"` is the published procedure: at every
            output time with a cotangent a new first step, a solve that runs past its end, and an interpolation back.
            `"every"` does so at all output times before the last one with a cotangent, as torchdiffeq does.
        check: whether to evaluate the field again at some points of the forward pass, to notice a change since then.

    References: Kidger, Chen and Lyons, *"Hey, that's not an ODE": Faster ODE Adjoints via Seminorms*, ICML 2021,
    arXiv:2009.09457; the equations: Chen, Rubanova, Bettencourt and Duvenaud, *Neural Ordinary Differential Equations*,
    NeurIPS 2018, arXiv:1806.07366.

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], adjoint=sn.Backsolve(rtol=1e-4, atol=1e-6))
        >>> sol.ys[-1].sum().backward()
        >>> round(y0.grad.item(), 3)  # e⁻¹, to the tolerance
        0.368
    """

    norm: BackwardNorm | Norm = "seminorm"
    restart: Restart = "carry"
    check: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.norm, str) and self.norm not in norms.BACKWARD:
            raise ValueError(f"norm: expected one of {', '.join(norms.BACKWARD)} or a callable, found {self.norm!r}")
        if isinstance(self.norm, norms.Distributed):
            raise TypeError(
                "norm: expected a norm of one rank; pass norms.distributed() to solve, and the backward pass follows"
            )
        if not isinstance(self.norm, str) and not callable(self.norm):
            raise TypeError(f"norm: expected a name or a callable, found {type(self.norm).__name__}")
        if self.restart not in get_args(Restart):
            raise ValueError(f"restart: expected 'carry', 'fresh' or 'every', found {self.restart!r}")

    @property
    def backward_norm(self) -> Norm:
        return norms.BACKWARD[self.norm] if isinstance(self.norm, str) else self.norm

    @property
    def fresh(self) -> bool:
        return self.restart != "carry"

    @property
    def every_stop(self) -> bool:
        return self.restart == "every"

    @property
    def integrals_in_state(self) -> bool:
        norm = self.backward_norm
        return norm.params if isinstance(norm, norms.Reading) else norm not in SEMINORMS

    @property
    def time_in_state(self) -> bool:
        norm = self.backward_norm
        return isinstance(norm, norms.Reading) and norm.time

    @property
    def samples(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.check

    @property
    def repeats_steps(self) -> bool:
        return self.check

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        solver = self.backward_method(problem)[0]
        if solver.carries_slopes and not self.integrals_in_state:
            raise ValueError(
                f"norm: a norm that does not read the gradients of parameters needs steps that can be taken alone, but "
                f"a step of {solver!r} depends on slopes of the one before it; pass Backsolve(norm='mixed_per_tensor')"
            )
        if self.restart == "fresh":
            refuse_coarse_polynomials("Backsolve(restart='fresh')", self.backward_method(problem)[0])

    def tape(self, problem: Problem) -> Tape | None:
        return None

    def integral(self, context: IntegralContext) -> StageSums:
        return StageSums(context.solver, context.system.targets, idle=self.integrals_in_state)

"""Interpolating: only the adjoint is solved backwards, the state comes from the forward solution."""

from __future__ import annotations

from dataclasses import dataclass

from .._field.checks import check_count
from .._stepping.engine import Engine
from .._stepping.observers import CheckpointTape, PolynomialTape, Tape
from .._stepping.problem import Problem
from ..solvers.implicit import ImplicitRungeKutta
from ._autograd import BackwardRequest
from ._continuous.dense_state import DenseState, WindowedState
from ._continuous.implicit_stages import ImplicitStageSums
from ._continuous.parameter_integral import ParameterIntegral, StageSums
from ._continuous.solve import IntegralContext
from ._continuous.strategy import ContinuousAdjoint, refuse_coarse_polynomials


@dataclass(frozen=True, kw_only=True, repr=False)
class DenseAdjoint(ContinuousAdjoint):
    """A continuous adjoint that may take z from the forward solution.

    Arguments:
        memory: about how many copies of the state may be kept, at least 16; forward steps are then taken again where
            needed. By default the polynomials of all steps are kept.
    """

    memory: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None:
            check_count("memory", self.memory, 16)

    @property
    def reads_forward(self) -> bool:
        return True

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.reads_forward:
            if self.memory is not None and problem.solver.external:
                raise ValueError(
                    f"memory: {self.name} takes steps of the forward solve again to save memory, which is not possible "
                    f"with solver {problem.solver.name!r}; leave it out"
                )
            refuse_coarse_polynomials(self.name, problem.solver)
        if self.memory is not None and (problem.solver.implicit or self.backward_method(problem)[0].implicit):
            raise ValueError(
                f"memory: {self.name} keeps the polynomials of all steps of an implicit solver; leave memory= out, or "
                "pass adjoint=sn.Checkpointed(n)"
            )

    def tape(self, problem: Problem) -> Tape | None:
        if not self.reads_forward:
            return None
        return PolynomialTape(quick=True) if self.memory is None else CheckpointTape(self.memory // 2)

    def dense_state(self, request: BackwardRequest, engine: Engine) -> DenseState | None:
        tape = request.forward.tape
        if isinstance(tape, PolynomialTape) and tape.plans:
            return DenseState(tape.plans, request.kept[:-1])
        if not isinstance(tape, CheckpointTape) or not tape.plans:
            return None
        assert self.memory is not None
        degree = len(engine.solver.interpolant[0])
        width = max(1, self.memory // 2 // (degree + 1))
        return WindowedState(tape.plans, tape.checkpoints, width, engine)


@dataclass(frozen=True, kw_only=True, repr=False)
class Interpolating(DenseAdjoint):
    """Solve a_z alone backwards, with z taken from the dense forward solution.

        a_z′ = −a_zᵀ ∂f/∂z(t, z(t)),    ∂L/∂θ = ∫ a_zᵀ ∂f/∂θ dt

    Since z is not solved backwards, contracting and chaotic problems are safe. Memory grows with the steps: the
    polynomial of each, five copies of the state for dopri5, unless `memory` bounds it. Also known as the interpolated
    reverse dynamic method (IRDM).

    The backward solve may be implicit too: the equation for a_z is linear, with the matrix −(∂f/∂z)ᵀ.

    Reference: Daulbaev et al., *Interpolation Technique to Speed Up Gradients Propagation in Neural ODEs*, NeurIPS
    2020, arXiv:2003.05271.

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -50 * y, y0, [0.0, 1.0], adjoint=sn.Interpolating())  # contracts
        >>> sol.ys[-1].sum().backward()
        >>> sol.stats.backward.nfe > 0
        True
    """

    implicit = True

    def integral(self, context: IntegralContext) -> ParameterIntegral:
        if isinstance(context.solver, ImplicitRungeKutta):
            return ImplicitStageSums(context, context.solver)
        return StageSums(context.solver, context.system.targets)

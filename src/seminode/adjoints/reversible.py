"""Reversible: undo each step, then pull back through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._field.checks import DEFAULT_TOLERANCES
from .._field.pytree import real_dtype
from .._stepping.observers import EndTape
from .._stepping.problem import Problem
from ..errors import DriftWarning, warn
from ..norms import ErrorNorm, mixed_per_tensor
from ..solvers import ReversibleSolver
from ..solvers.reversible import Increment
from ._autograd import Asked
from ._continuous.parameter_integral import Sums
from ._continuous.solve import DRIFT, warn_of_drift
from ._discrete.sweep import States, Sweep
from .replay import DiscreteAdjoint

#: The copies are apart by about the error of the solution, tens of tolerances where all is well.
GAP = 1000.0


@dataclass(frozen=True)
class Reversible(DiscreteAdjoint):
    """Exact gradients of the discrete solution in constant memory, for solvers whose steps can be undone.

    Nothing is kept but the last state and the step sizes: going back, each step is undone by exact algebra and then
    pulled back through. Needs `solver="reversible_heun"` or `ReversibleRK(...)`.

    What is exact in algebra repeats the rounding of every step, and going back amplifies it: by λ^−N over N steps of
    `ReversibleRK`, and by the contraction of the problem. A float64 solve reaches N·ln(1/λ) ≈ 10 with nine good digits.
    Beyond its reach `DriftWarning` tells.
    """

    def refuse(self, problem: Problem) -> None:
        if not isinstance(problem.solver, ReversibleSolver):
            raise ValueError(
                f"adjoint: Reversible needs a solver whose steps can be undone, found {problem.solver.name!r}; pass "
                "solver='reversible_heun' or solver=sn.ReversibleRK(...)"
            )

    def tape(self, problem: Problem) -> EndTape:
        return EndTape()

    def states(self, asked: Asked) -> UndoneStates:
        return UndoneStates(asked.kept)


class UndoneStates(States):
    """Each state from the one after it."""

    def __init__(self, kept: Sequence[Tensor]):
        self._end = self._state = kept[0] if kept else None
        self._at: int | None = None

    def before(self, j: int, sweep: Sweep) -> Tensor:
        assert self._state is not None
        at = len(sweep.plans) if self._at is None else self._at
        while at > j:
            at -= 1
            self._state = sweep.engine().undo(sweep.plans[at], self._state)
        self._at = at
        return self._state

    def pull_back(self, j: int, sweep: Sweep, adj: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Undo the step and pull back through it at once: each evaluation serves both."""
        end = self.before(j + 1, sweep)
        engine, plan = sweep.engine(), sweep.plans[j]
        solver = sweep.problem.solver
        assert isinstance(solver, ReversibleSolver)
        grads = Sums(len(sweep.targets))

        def slope(c: float, y: Tensor) -> Tensor:
            return engine.slope(plan.stage_time(c), y)

        def pull(increment: Increment, source: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
            before = sweep.tally.nfe
            with torch.enable_grad():
                source = source.detach().requires_grad_()
                value = increment(slope, source)
            sweep.pulled += sweep.tally.nfe - before
            found: Sequence[Tensor | None] = [None] * (1 + len(sweep.targets))
            if value.requires_grad:
                found = torch.autograd.grad(value, [source, *sweep.targets], cotangent, allow_unused=True)
            grads.add(found[1:])
            return value.detach(), torch.zeros_like(source) if found[0] is None else found[0]

        self._state, adj = solver.pull_back(pull, plan.dt, end, adj)
        self._at = j
        return adj, grads.values

    def finish(self, sweep: Sweep) -> None:
        if self._at != 0 or self._state is None:
            return
        error, y0 = sweep.problem.error, sweep.y0
        controlled = error is not None
        if error is None:
            tolerances = DEFAULT_TOLERANCES[real_dtype(y0)]
            error = ErrorNorm(sweep.problem.field.layout, mixed_per_tensor, *tolerances, y0)
        drift = error.size(self._state[0] - y0, y0)
        if not drift <= DRIFT:
            warn_of_drift("Reversible", drift, sweep.problem.times[0])
            return
        assert self._end is not None
        y, z = self._end.unbind(0)
        gap = error.size(y - z, y)
        if controlled and not gap <= GAP:
            t = sweep.plans[-1].t1
            warn(
                f"Reversible: the two copies of the state have drifted {gap:.3g} tolerances apart at t = {t:g}, so "
                "neither the solution nor its gradient is to be trusted. Reversible methods are unstable where the "
                "solution contracts: use sn.Replay() or sn.Interpolating(), a smaller coupling, or tighter tolerances.",
                DriftWarning,
            )

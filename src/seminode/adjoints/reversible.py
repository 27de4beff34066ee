"""Reversible: undo each step, then differentiate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._compile.graph import NotCompiled
from .._compile.programs import large, undoing_program
from .._compile.torch_private import backpropagate
from .._error_norm import ErrorNorm
from .._field.checks import DEFAULT_TOLERANCES
from .._field.pytree import real_dtype
from .._stepping.observers import EndTape, State
from .._stepping.problem import Problem
from .._stepping.schedule import Plan
from ..errors import DriftWarning, warn
from ..norms import mixed_per_tensor
from ..solvers.reversible import CoupledSolver, Increment, ReversibleSolver
from ._autograd import BackwardRequest
from ._discrete.states import States
from ._discrete.step_vjp import StepGradients
from ._discrete.sweep import DiscreteAdjoint, Sweep
from ._drift import DRIFT, warn_of_drift
from ._sums import Sums

#: The copies are apart by about the error of the solution, tens of tolerances where all is well.
GAP = 1000.0


@dataclass(frozen=True)
class Reversible(DiscreteAdjoint):
    """Exact gradients of the discrete solution in constant memory, for solvers whose steps can be undone.

    Only the last state and the step sizes are kept: on the backward pass, each step is undone by exact algebra
    and then differentiated. Needs `solver="reversible_heun"` or `ReversibleRK(...)` or, for separable Hamiltonian
    systems, `"leapfrog"` or `"yoshida4"`.

    Exact algebra repeats the rounding of every step, and undoing steps amplifies it: by λ^−N over N steps of
    `ReversibleRK`, and by the contraction of the problem. A float64 solve reaches N·ln(1/λ) ≈ 10 with nine correct
    digits. Beyond that, there is a `DriftWarning`.

    References: McCallum and Foster, *Efficient, Accurate and Stable Gradients for Neural ODEs*, 2024, arXiv:2410.11648;
    for `reversible_heun`: Kidger, Foster, Li and Lyons, *Efficient and Accurate Gradients for Neural SDEs*, NeurIPS
    2021, arXiv:2105.13493.

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> y0 = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
        >>> turn = lambda t, y: torch.stack([y[1], -y[0]])
        >>> sol = sn.solve(turn, y0, [0.0, 1.0], solver=sn.ReversibleRK("dopri5"), adjoint=sn.Reversible())
        >>> sol.ys[-1, 0].backward()
        >>> y0.grad  # cos 1 and sin 1
        tensor([0.5403, 0.8415], dtype=torch.float64)
    """

    samples = leaves_programs = True

    def refuse(self, problem: Problem) -> None:
        if not isinstance(problem.solver, ReversibleSolver):
            raise ValueError(
                f"adjoint: Reversible needs a solver whose steps can be undone, found {problem.solver.name!r}; pass "
                "solver='reversible_heun' or solver=sn.ReversibleRK(...)"
            )

    def tape(self, problem: Problem) -> EndTape:
        return EndTape(copied=problem.save == "last")

    def states(self, request: BackwardRequest) -> UndoneStates:
        return UndoneStates(request.kept)


class UndoneStates(States):
    """Each state from the one after it."""

    exact = False
    special = True

    def __init__(self, kept: Sequence[Tensor]):
        self._end = self._state = tuple(kept) or None
        self._at: int | None = None

    def before(self, j: int, sweep: Sweep) -> State:
        at = len(sweep.plans) if self._at is None else self._at
        solver = _reversible(sweep)
        field = sweep.evaluate if sweep.capture is None else sweep.compiled_engine.evaluate
        while at > j:
            at -= 1
            plan = sweep.plans[at]

            def evaluate(c: float, y: Tensor, *, stage: int, plan: Plan = plan) -> Tensor:
                return field(plan.stage_time(c), y, stage=stage)

            assert self._state is not None
            self._state = solver.invert(evaluate, plan.dt, self._state)
        self._at = at
        assert self._state is not None
        return self._state

    def own_vjp(self, j: int, sweep: Sweep, adj: State) -> StepGradients:
        """Undo the step and differentiate it at once: each evaluation serves both."""
        end = self.before(j + 1, sweep)
        if sweep.capture is not None and not large(sweep.capture):
            try:
                return self._compiled_vjp(j, sweep, end, adj)
            except NotCompiled as reason:
                sweep.go_on_eagerly(reason)
        sweep.check_field()
        plan, sums = sweep.plans[j], Sums(len(sweep.targets))

        def evaluate(c: float, y: Tensor, *, stage: int) -> Tensor:
            return sweep.evaluate(plan.stage_time(c), y, stage=stage)

        def vjp(increment: Increment, source: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
            count, sweep.evaluate.watched = sweep.counter.nfe, []
            with torch.enable_grad():
                source = source.detach().requires_grad_()
                value = increment(evaluate, source)
            sweep.check_graphs([source])
            sweep.differentiated += sweep.counter.nfe - count
            grads: Sequence[Tensor | None] = [None] * (1 + len(sweep.targets))
            if value.requires_grad:
                grads = backpropagate([value], [source, *sweep.targets], [cotangent])
            sums.add(grads[1:])
            return value.detach(), torch.zeros_like(source) if grads[0] is None else grads[0]

        self._state, before = _reversible(sweep).step_vjp(vjp, plan.dt, end, adj)
        self._at = j
        return StepGradients(list(before), [], sums.values)

    def _compiled_vjp(self, j: int, sweep: Sweep, end: State, adj: State) -> StepGradients:
        """The same by one program, which adds to the sums of the sweep."""
        solver, plan = _reversible(sweep), sweep.plans[j]
        assert isinstance(solver, CoupledSolver)  # a field is captured for no others
        assert sweep.capture is not None
        program = undoing_program(sweep.capture, solver, sweep.choose()[1], sweep.y0.detach())
        y, z, *grads, finite = (results := program(plan, end, adj, sweep.capture.rest, sweep.compiled))[:5]
        sweep.compiled = list(results[5:])
        sweep.log.add_nodes(plan, program.nodes.evaluated)
        sweep.differentiated += len(program.nodes.evaluated)
        sweep.finite.check_number(finite, grads[0], plan)
        self._state, self._at = (y, z), j
        return StepGradients(grads, [], [None] * sum(sweep.needs[2:]))

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
        if not isinstance(sweep.problem.solver, CoupledSolver):
            return
        y, z = self._end
        gap = error.size(y - z, y)
        if controlled and not gap <= GAP:
            t = sweep.plans[-1].t1
            warn(
                f"Reversible: at t = {t:g} the two copies of the state are {gap:.3g} tolerances apart. The solution "
                "and its gradient may be wrong by that much: reversible methods are unstable where the solution "
                "contracts. Use sn.Replay() or sn.Interpolating(), a smaller coupling, or tighter tolerances.",
                DriftWarning,
            )


def _reversible(sweep: Sweep) -> ReversibleSolver:
    solver = sweep.problem.solver
    assert isinstance(solver, ReversibleSolver)
    return solver

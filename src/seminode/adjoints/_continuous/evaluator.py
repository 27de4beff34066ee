"""Evaluators and steppers of an adjoint system: the eager ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..._field.linearisation import Linearisation
from ..._field.pytree import real_dtype
from ..._stepping.engine import EvaluationLog, Evaluator, Stepper, count_product
from ..._stepping.observers import Counter
from ..._stepping.schedule import Plan
from ..._stepping.step import Step
from ...solvers._linear import AdjointJacobian, BlockJacobian, Jacobian, LinearSolver, jacobian_of
from ...solvers.base import Memory, Solver
from .parameter_integral import ParameterIntegral
from .system import AdjointSystem, Integrand


class AdjointEvaluator:
    """Evaluates the slope of an adjoint system and tells the parameter integral."""

    def __init__(self, system: AdjointSystem, integral: ParameterIntegral, log: EvaluationLog):
        self._system, self._integral, self._log = system, integral, log

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        self._log.add(t)
        now, later = self._integral.wanted(stage)
        k, grads, kept = self._system.slope(t, y, now, later)
        self._integral.stage(stage, grads if now else [], kept)
        return k

    @property
    def counter(self) -> Counter:
        return self._log.counter

    @property
    def eps(self) -> float:
        return self._system.field.eps

    def jacobian(
        self, t: float, y: Tensor, linear_solver: LinearSolver, function: Callable[..., Tensor] | None
    ) -> Jacobian:
        """diag(0, −Jᵀ) with the Jacobian of the field at the forward solution, by automatic differentiation."""
        system, counter = self._system, self._log.counter
        assert system.source is not None
        self._log.add(t)
        counter.jacobians += 1
        z, _, f = system.evaluate(t, system.source(t))
        linearisation, reduction = Linearisation(f, z), system.reduction
        if reduction.trivial:
            return AdjointJacobian(jacobian_of(linearisation, linear_solver, partial(count_product, counter)))
        solved = reduction.reduce(torch.arange(z.numel()).reshape(z.shape))
        if z.is_complex():
            solved = torch.stack([2 * solved, 2 * solved + 1], -1).flatten()
        solved = solved.to(z.device)
        return AdjointJacobian(BlockJacobian(linearisation.matrix()[solved][:, solved][None]))


class AdjointStepper:
    """Tells the parameter integral about every step before it is tried."""

    def __init__(self, solver: Solver, evaluate: Evaluator, step: Stepper, integral: ParameterIntegral):
        self._solver, self._evaluate, self._step, self._integral = solver, evaluate, step, integral

    def __call__(self, plan: Plan, y0: Tensor, memory: Memory) -> Step:
        if memory is None:
            memory = self._solver.with_slope(None, self._evaluate(plan.stage_time(0.0), y0, stage=0))
        self._integral.begin(plan)
        return self._step(plan, y0, memory)


class IntegrandEvaluator:
    """Evaluates the field at times inside accepted steps, for the VJP with respect to the parameters."""

    def __init__(self, system: AdjointSystem, log: EvaluationLog, like: Tensor):
        self._system, self._log = system, log
        self._dtype, self._device = real_dtype(like), like.device

    def one(self, t: float, z: Tensor, a: Tensor) -> Integrand:
        self._log.add(t)
        return Integrand(self._system.evaluate(t, z)[2], a)

    def many(self, times: Sequence[float], zs: Sequence[Tensor]) -> Tensor:
        """The field at several times and states in one vectorised call, stacked."""
        t = torch.tensor(times, dtype=self._dtype, device=self._device)
        f = self._system.evaluate_batch(t, torch.stack(list(zs)))
        self._log.add(*times)
        return f

    def count(self, times: Sequence[float]) -> None:
        """Evaluations with a VJP for the parameters that a program has made."""
        self._log.add(*times)
        self._system.vjp_params += len(times)

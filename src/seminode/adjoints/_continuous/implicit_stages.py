"""The parameter integral over the stages of implicit steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..._stepping.combination import combine, sparse
from ..._stepping.schedule import Plan
from ..._stepping.step import Step
from ...solvers.implicit import ImplicitRungeKutta
from .._sums import Sums
from .parameter_integral import ErrorSample, ParameterIntegral
from .solve import IntegralContext
from .system import Integrand


class ImplicitStageSums(ParameterIntegral):
    """The integral with the weights b of an implicit method, at the stages of accepted steps.

    Newton's method evaluates the field many times in a stage, at states that are only approximations. So nothing is
    collected there: once a step is accepted, the field is evaluated at its stages.
    """

    def __init__(self, context: IntegralContext, solver: ImplicitRungeKutta):
        self._system, self._evaluate, self._tableau = context.system, context.evaluate, solver.tableau
        self.total = Sums(len(context.system.targets))
        self._idle = not context.system.targets
        self._sample = ErrorSample(context.system.targets)

    @property
    def error(self) -> float | None:
        return None if self._idle or self._tableau.e is None else self._sample.relative_to(self.total.values)

    def begin(self, plan: Plan) -> None:
        """Only accepted steps count."""

    def wanted(self, stage: int | None) -> tuple[bool, bool]:
        return False, False

    def stage(self, stage: int | None, grads: Sequence[Tensor | None], kept: Integrand | None) -> None:
        """Nothing was wanted."""

    def accepted(self, step: Step, ratio: float) -> None:
        tableau, dt = self._tableau, step.plan.dt
        if self._idle:
            return
        for c, row, b, e in zip(tableau.c, tableau.a, tableau.b, tableau.e or tableau.b, strict=True):
            if b == 0.0:
                continue
            t, w = step.plan.stage_time(c), combine(step.y0, dt, sparse(row), step.slopes)
            z, a = self._system.unpack(w, t)
            grads = self._system.params_vjp(self._evaluate.one(t, z, a))
            self.total.add(grads, -dt * b)  # a_θ′ has a minus
            self._sample.add(grads, -dt * e)
        self._sample.accept(dt)

"""Are the gradients of a backward pass over steps finite?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ..._field.pytree import is_finite
from ..._stepping.loop import PendingTests, on_host
from ..._stepping.observers import Counter
from ..._stepping.problem import Problem
from ..._stepping.schedule import Plan
from ...errors import NonFiniteState


class FiniteGradients:
    """Refuses gradients that hold a NaN or an infinity.

    On a device, and with several ranks, which all fail if one does, they are tested together: nobody waits in between.
    """

    def __init__(self, problem: Problem, counter: Counter):
        self._problem, self._counter = problem, counter
        self._pending = PendingTests(problem.ranks)
        self.sums_unseen = False  # whether there are sums that nobody has looked at

    def check(self, grad_y: Tensor, plan: Plan) -> None:
        """Check the gradient for a state."""
        problem = self._problem
        if not problem.throw:
            return
        if self._later(grad_y):
            self.sums_unseen = True
            self._refuse(self._pending.add(plan, torch.isfinite(grad_y).all()))
        elif not is_finite(grad_y):
            of_state = grad_y.shape == problem.y0.shape  # else of something else that the solver carries
            self._fail("the state", plan, problem.field.layout.non_finite_leaf(grad_y) if of_state else None)

    def check_number(self, finite: Tensor, grad_y: Tensor, plan: Plan) -> None:
        """Look at the number that a program hands out, and only if it is not finite at the gradients themselves."""
        if self._later(grad_y):
            self.check(grad_y, plan)
        elif self._problem.throw and not math.isfinite(finite.item()):
            self.check(grad_y, plan)
            self.sums_unseen = True

    def close(self) -> None:
        """Read the tests that are left."""
        self._refuse(self._pending.failed())

    def check_sums(self, sums: Sequence[Tensor | None], first: Plan) -> None:
        if not self._problem.throw or not self.sums_unseen:
            return
        bad = next((x for x in sums if x is not None and not is_finite(x)), None)
        if not self._problem.ranks.every(bad is None):
            of_shape = " (on another rank)" if bad is None else f" of shape {tuple(bad.shape)}"
            self._fail(f"a parameter or argument{of_shape}", first, None)

    def _later(self, x: Tensor) -> bool:
        return self._problem.ranks.several or not on_host(x)

    def _refuse(self, plan: Plan | None) -> None:
        if plan is not None:
            self._fail("the state", plan, None)

    def _fail(self, what: str, plan: Plan, leaf: str | None) -> NoReturn:
        raise NonFiniteState(
            f"the gradient with respect to {what} became NaN or infinite at t = {plan.time:g}"
            f"{f' (leaf {leaf})' if leaf else ''}. Look for an operation in the field whose derivative is infinite "
            "there (sqrt, norm or pow at 0), or a gradient that grows beyond the dtype.",
            t=plan.time,
            dt=plan.dt if self._problem.lanes is None else None,
            stats=self._counter.stats(),
            leaf=leaf,
            backward=True,
        )

"""A solve along its accepted steps once more, as a function: what derivatives of higher order differentiate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..._field.determinism import SameAnswers
from ..._stepping.problem import Problem
from .._autograd import BackwardRequest
from ..base import ForwardPass, time_shifts


def frozen_solve(request: BackwardRequest) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
    """The solve along its accepted steps, as a function of leaves for y0, ts, the args and the parameters."""
    forward, inputs = request.forward, request.inputs
    problem, plans, n_args = replace(forward.problem, record=False, progress=False), forward.plans, len(inputs.args)
    assert forward.mark is not None
    mark = torch.stack(forward.mark)

    def solved(leaves: Sequence[Tensor]) -> list[Tensor | None]:
        y0, ts, *rest = leaves
        field = inputs.bound(rest[:n_args], rest[n_args:])
        shifts = time_shifts(problem, ts, y0) if ts.requires_grad else None
        again = ForwardPass(problem, forward.determinism)
        result = again.run(again.engine(field, shifts), y0, shifts=shifts, plans=plans)
        same = SameAnswers(problem.field.eps, inputs.check_unmodified, 1e4, repeatability(problem))
        same.recognise(result.ys.detach(), mark, lambda: [result.ys.detach()], problem.times[0])
        same.finish(problem.times[0])
        return [result.ys, result.coefficients]

    return solved


def repeatability(problem: Problem) -> tuple[float, float]:
    """How far the state after steps that are taken again may be from the one that they have led to: rtol and atol.

    Implicit solvers stop at a fraction of the tolerance of a step, in another place if they start from another guess or
    have another Jacobian. On a backward pass they go on to rounding.
    """
    if not problem.solver.implicit:
        return 0.0, 0.0
    if problem.error is None:
        return 1e4 * problem.field.eps, 0.0
    rtol, atol = (float(torch.as_tensor(x).max()) for x in (problem.error.rtol, problem.error.atol))
    return 10.0 * rtol, 10.0 * atol  # errors of several steps add up

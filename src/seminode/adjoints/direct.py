"""Direct: autograd through the accepted steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingModuleSource]

from .._field.capture import reachable, restricted
from .._field.determinism import Purity
from .._stepping.engine import TimeShifts
from .._stepping.problem import Forward, Problem, Record, Stats
from ._discrete.saved import Saved
from .base import Adjoint, ForwardPass, has_tangent, transforms_active


@dataclass(frozen=True)
class Direct(Adjoint):
    """Backpropagation through the solver's own operations.

    The graph of a rejected step is dropped as soon as it is rejected, and step-size control is no part of the graph:
    the gradient is that of the accepted steps with their sizes held fixed. Memory grows with every activation of every
    accepted step. No custom autograd function is involved, so that second derivatives and, with fixed steps,
    all of torch.func work.
    """

    def run(self, problem: Problem) -> Forward:
        if problem.compile and not transforms_active():
            return Saved().run(problem)
        shifts = TimeShifts(problem.ts, problem.y0) if _differentiable(problem.ts) else None
        modules, _ = reachable(problem.field.reach)
        forward = ForwardPass(problem, Purity(problem.y0.device, modules))
        field = problem.field
        if problem.params is not None:
            field = field.bind(field.arg_tensors, restricted(field.func, problem.params))
        try:
            result = forward.run(forward.engine(field, shifts), problem.y0, shifts=shifts)
        except RuntimeError as error:
            if problem.error is None or not transforms_active() or "vmap" not in str(error):
                raise
            raise ValueError(
                "controller: adaptive steps look at the error, which torch.func.vmap does not allow; "
                "pass controller=sn.FixedStep(...)"
            ) from error
        if not transforms_active():
            for output in (result.ys, result.coefficients):
                if output is not None and output.requires_grad:
                    _count_backward(output, result, problem.solver.evaluations)
        return result


def _differentiable(ts: Tensor) -> bool:
    if ts.requires_grad and torch.is_grad_enabled():
        return True
    if is_functorch_wrapped_tensor(ts):
        return True
    return has_tangent(ts)


def _count_backward(output: Tensor, result: Forward, evaluations: int) -> None:
    # Autograd pulls back through the stages of every accepted step and evaluates nothing anew.
    stats, record = result.stats, result.record
    pulled = evaluations * stats.accepted
    backward = Stats(accepted=stats.accepted, vjp_y=pulled, vjp_params=pulled)
    cells: list[tuple[list[Any], Any]] = [(stats._backward, backward)]
    if record is not None:
        cells.append((record._backward, Record((), record.accepted[::-1], (), ())))

    def note(_: Tensor) -> None:
        for cell, value in cells:
            cell[:] = [value]

    output.register_hook(note)

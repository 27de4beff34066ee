"""What adjoints share: looking at cotangents, and the pull-back of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..._field.pytree import real_dtype
from ..._stepping.engine import Eager
from ..._stepping.interpolation import weights_at
from ..._stepping.observers import Outputs
from ..._stepping.problem import Plan, Stats
from ...errors import NonFiniteState
from ...solvers import Solver


def row_sizes(grad: Tensor | None) -> list[float]:
    """The largest magnitude in every row: zero where there is nothing to pull back."""
    if grad is None or len(grad) == 0:
        return []
    return grad.flatten(1).abs().amax(1).tolist() if grad[0].numel() else [0.0] * len(grad)


def check_cotangents(sizes: Sequence[float], times: Sequence[float], what: str, stats: Callable[[], Stats]) -> None:
    """Refuse what the loss handed us if it is not finite, before any work is done."""
    if not all(map(math.isfinite, sizes)):
        i = next(i for i, size in enumerate(sizes) if not math.isfinite(size))
        message = f"the gradient of the loss with respect to {what} {i} holds a NaN or an infinity"
        raise NonFiniteState(message, t=times[i], stats=stats(), backward=True)


class StepShifts:
    """Leaves for the times of one step, to differentiate with respect to them."""

    def __init__(self, like: Tensor, count: int):
        dtype = real_dtype(like)
        self.start = like.new_zeros((), dtype=dtype).requires_grad_()
        self.end = like.new_zeros((), dtype=dtype).requires_grad_()
        self.out = like.new_zeros(count, dtype=dtype).requires_grad_()

    def of(self, plan: Plan) -> tuple[Tensor, Tensor]:
        return self.start, self.end

    def outputs(self, low: int, high: int) -> Tensor:
        return self.out[: high - low]


class TimeGradient:
    """The gradient with respect to `ts`, by what each time moves with."""

    def __init__(self, ts: Tensor, like: Tensor):
        self.total = like.new_zeros(len(ts), dtype=real_dtype(like))

    def add(self, plan: Plan, low: int, start: Tensor | None, end: Tensor | None, out: Tensor | None) -> None:
        if start is not None and plan.floating:
            self.total[0] += start
        if end is not None:
            if plan.final:
                self.total[-1] += end
            elif plan.end_floats:
                self.total[0] += end
        if out is not None and len(out):
            self.total[low : low + len(out)] += out


def pull_back(
    engine: Eager,
    plan: Plan,
    y: Tensor,
    outputs: Outputs,
    bounds: tuple[int, int],
    cotangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    targets: Sequence[Tensor],
    shifts: StepShifts | None,
    audit: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Take a step again and pull cotangents back through it: those of y1, of the outputs inside, of its polynomial.

    Returns the gradients for y, for the shifts (start, end, outputs) and for the targets. `audit` may look at the
    values and at the leaves that they are known to depend on.
    """
    adj_y1, adj_outputs, adj_coefficients = cotangents
    engine.handed = None if audit is None else []
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        step = engine.step(plan, y, None)
        values: list[Tensor] = []
        if adj_y1 is not None:
            values.append(step.end)
        if adj_outputs is not None:
            values.append(outputs.of(step, *bounds, shifts))
        if adj_coefficients is not None:
            values.append(step.coefficients())
    del step  # its slopes are held by the graph alone, which frees them as it is pulled back
    times = [] if shifts is None else [shifts.start, shifts.end, shifts.out]
    leaves = [y, *times, *targets]
    if audit is not None:
        audit(values, [*leaves, *(engine.handed or ())])
    grads = torch.autograd.grad(
        values,
        leaves,
        [c for c in cotangents if c is not None],
        allow_unused=True,
    )
    split = 1 + len(times)
    return grads[0], list(grads[1:split]), list(grads[split:])


def spread(
    adj: Tensor | None,
    adj_outputs: Tensor | None,
    outputs: Outputs,
    plan: Plan,
    bounds: tuple[int, int],
    solver: Solver,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of a step's end, its start and its slopes, from those of its end and of the outputs in it.

    An output inside a step is y0 + dt·Σ bᵢ(x)·kᵢ, so that its pull-back is a combination too.
    """
    if adj_outputs is None:
        return adj, None, None
    xs = outputs.inside(plan, *bounds)
    inner, ends = adj_outputs[: len(xs)], adj_outputs[len(xs) :]
    if len(ends):
        adj = ends.sum(0) if adj is None else adj + ends.sum(0)
    if not xs:
        return adj, None, None
    weights = torch.tensor([weights_at(solver.interpolant, x) for x in xs], dtype=torch.float64)
    weights = (plan.dt * weights).to(inner)
    return adj, inner.sum(0), torch.tensordot(weights.T, inner, 1)

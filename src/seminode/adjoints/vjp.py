"""The pull-back of one step: what discrete adjoints share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine import Eager
from ..observers import Outputs
from ..problem import Plan
from ..state import HALF, real_dtype


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


class Accumulator:
    """Sums of gradients, one for each tensor, made when the first contribution comes."""

    def __init__(self, count: int):
        self.totals: list[Tensor | None] = [None] * count

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            total = self.totals[i]
            if total is not None:
                total.add_(grad)
            elif grad.dtype in HALF:
                self.totals[i] = grad.float()  # many small contributions would be lost in a half-precision sum
            else:
                self.totals[i] = grad.clone()  # a gradient may be an expanded view


class TimeGradient:
    """The gradient with respect to `ts`, by what each time moves with."""

    def __init__(self, ts: Tensor, like: Tensor):
        self._ts = ts
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

    def result(self) -> Tensor:
        return self.total.to(device=self._ts.device, dtype=self._ts.dtype)


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
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        step = engine.step(plan, y, None)
        values: list[Tensor] = []
        if adj_y1 is not None:
            values.append(step.y1)
        if adj_outputs is not None:
            values.append(outputs.of(step, *bounds, shifts))
        if adj_coefficients is not None:
            values.append(step.coefficients())
    del step  # its slopes are held by the graph alone, which frees them as it is pulled back
    times = [] if shifts is None else [shifts.start, shifts.end, shifts.out]
    leaves = [y, *times, *targets]
    if audit is not None:
        audit(values, leaves)
    grads = torch.autograd.grad(
        values,
        leaves,
        [c for c in cotangents if c is not None],
        allow_unused=True,
    )
    split = 1 + len(times)
    return grads[0], list(grads[1:split]), list(grads[split:])

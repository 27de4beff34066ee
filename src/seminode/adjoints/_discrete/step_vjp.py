"""The VJP of one step that is taken again, and what it takes to compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._compile.torch_private import backpropagate
from ..._field.pytree import real_dtype
from ..._stepping.engine import Engine
from ..._stepping.loop import refuse_failure
from ..._stepping.observers import State
from ..._stepping.outputs import Outputs
from ..._stepping.schedule import Plan
from ..._stepping.step import Step


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


class StepCotangents(NamedTuple):
    """Cotangents of a step: of what it leads to, of the outputs inside of it, and of its polynomial."""

    after: Sequence[Tensor | None]
    outputs: Tensor | None
    coefficients: Tensor | None


class StepGradients(NamedTuple):
    """Gradients of a step: for its start (all or none), for its times (start, end, outputs) and for the targets."""

    before: list[Tensor | None]
    times: list[Tensor | None]
    targets: list[Tensor | None]


def step_vjp(
    engine: Engine,
    plan: Plan,
    before: State,
    outputs: Outputs,
    bounds: tuple[int, int],
    cotangents: StepCotangents,
    targets: Sequence[Tensor],
    shifts: StepShifts | None,
    check: Callable[[Step, Sequence[Tensor]], None],
) -> StepGradients:
    """Take a step again and backpropagate through it.

    `check` may inspect the step, and the leaves that it depends on in addition to the targets.
    """
    with torch.enable_grad():
        before = tuple(x.detach().requires_grad_() for x in before)
        step = engine.step(plan, before[0], engine.solver.recall(before[1:]))
        refuse_failure(engine, step)
        after = zip(step.after, cotangents.after, strict=True)
        pairs = [(x, c) for x, c in after if c is not None and x.requires_grad]
        if cotangents.outputs is not None:
            pairs.append((outputs.of(step, *bounds, shifts), cotangents.outputs))
        if cotangents.coefficients is not None:
            pairs.append((step.coefficients(), cotangents.coefficients))
    values, weights = zip(*pairs, strict=True)
    times = [] if shifts is None else [shifts.start, shifts.end, shifts.out]
    check(step, [*before, *times])
    del step, pairs  # the slopes are held by the graph alone, which frees them while it is differentiated
    grads = backpropagate(values, [*before, *times, *targets], weights)
    first, second = len(before), len(before) + len(times)
    starts: list[Tensor | None] = list(grads[:first])
    if any(grad is not None for grad in starts):
        starts = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(before, starts, strict=True)]
    return StepGradients(starts, list(grads[first:second]), list(grads[second:]))

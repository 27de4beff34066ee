"""A compiled start of a solve: its first two evaluations, from which the length of the first step follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._error_norm import ErrorNorm
from ..._field.pytree import real_dtype, wide_dtype
from ..._host_numbers import as_tensor
from ..._stepping.first_step import first_step
from ..._stepping.schedule import Plan
from ...solvers.base import Solver
from ..graph import Capture
from ..inductor import compile_graph
from .pieces import large, saving_evaluation
from .saving import SavingEvaluation
from .steps import Layouts, Wanted, dense, key_of, tolerances


class TracedNorm:
    """The part of an `ErrorNorm` that `first_step` uses, over tensors that a program takes."""

    def __init__(self, error: ErrorNorm, rtol: Tensor, atol: Tensor):
        self._error, self._rtol, self._atol = error, rtol, atol

    def allowed(self, magnitude: Tensor) -> Tensor:
        return self._atol + self._rtol * self._error.sizes(magnitude)

    def measured(self, ratio: Tensor) -> Tensor:
        size = self._error.norm(self._error.layout.fitting(ratio).unpack(ratio))
        # As the host computes with it, where the device can.
        return size.to(wide_dtype(size))


class StartClock:
    """The times that a program reads with which a solve starts, as one tensor.

    They are the time at the start, the shortest and the longest probe, with a sign, and the time at its end.
    """

    def __init__(self, like: Tensor):
        self._dtype, self._device = real_dtype(like), like.device

    def of(self, near: Plan, far: Plan, shortest: float) -> Tensor:
        return self._tensor(near.stage_time(0.0), shortest, far.dt, far.stage_time(1.0))

    def example(self) -> Tensor:
        return self._tensor(0.0, 0.0, 1.0, 1.0)

    def _tensor(self, *times: float) -> Tensor:
        return as_tensor(times, self._dtype, self._device)


def first_length(
    clock: Tensor,
    y: Tensor,
    k1: Tensor,
    evaluate: Callable[[Tensor, Tensor], Tensor],
    error: ErrorNorm,
    allowed: Sequence[Tensor],
    order: int,
) -> Tensor:
    """In a program: the length of the first step, that of the probe, and a number that is finite if y and k1 are."""
    t0, shortest, longest, last = clock.unbind()
    probed: list[Tensor] = []

    def probe(h: Any) -> Any:
        length = torch.minimum(torch.maximum(h.to(clock.dtype), shortest), longest.abs())
        dt = torch.copysign(length, longest)
        t = torch.where(length < longest.abs(), t0 + dt, last)
        probed.append(length.to(h.dtype))
        return probed[0], evaluate(t, y + dt * k1)

    norm: Any = TracedNorm(error, *allowed)
    length: Any = first_step(y, k1, norm, order, probe)
    return torch.stack([length, *probed, (y.sum() + k1.sum()).to(length.dtype)])


class Started(NamedTuple):
    """What a program has computed with which a solve starts."""

    slope: Tensor
    finite: bool  # the sum of y0 and of the slope
    length: float  # of the first step
    probed: float  # the time of the second evaluation
    kept: list[Tensor]  # of the first one

    @classmethod
    def read(cls, near: Plan, far: Plan, numbers: Tensor, k1: Tensor, *kept: Tensor) -> Started:
        """From what the program returns; one read by the host."""
        length, probed, total = numbers.tolist()
        whole = probed >= abs(far.dt)
        time = far.stage_time(1.0) if whole else near.stage_time(0.0) + math.copysign(probed, far.dt)
        return cls(k1, math.isfinite(total), length, time, list(kept))


class StartProgram:
    """y ↦ (the numbers of `first_length`, k1, what is kept)."""

    def __init__(self, capture: Capture, solver: Solver, error: ErrorNorm, saving: SavingEvaluation | None, y: Tensor):
        order = solver.error_order or solver.order

        def start(clock: Tensor, y: Tensor, rtol: Tensor, atol: Tensor, *rest: Tensor) -> list[Tensor]:
            t0 = clock[0]
            first = [capture.evaluate(t0, y, rest)] if saving is None else saving.halves.forward(t0, y, *rest)
            k1, *kept = first

            def evaluate(t: Tensor, y: Tensor) -> Tensor:
                return capture.evaluate(t, y, rest)

            return [first_length(clock, y, k1, evaluate, error, (rtol, atol), order), k1, *kept]

        y = capture.example(dense(y))
        self._layouts, self._clock = Layouts([y], capture.axis), StartClock(y)
        inputs = [self._clock.example(), y, *tolerances(error, y), *capture.rest]
        self._run = compile_graph(start, inputs, capture.axis)

    def __call__(self, near: Plan, far: Plan, shortest: float, y: Tensor, allowed: Any, rest: list[Tensor]) -> Started:
        clock = self._clock.of(near, far, shortest)
        return Started.read(near, far, *self._run([clock, *self._layouts.fitted([y]), *allowed, *rest]))


def start_program(
    capture: Capture, solver: Solver, error: ErrorNorm, wanted: Wanted | None, y: Tensor
) -> StartProgram | None:
    """The program that starts a solve; `None` where the field is large, or the norm is a function of the user's.

    With `wanted`, it keeps activations.
    """
    if large(capture) or not error.in_programs:
        return None

    def make(capture: Capture) -> StartProgram:
        saving = None if wanted is None else saving_evaluation(capture, wanted, y)
        return StartProgram(capture, solver, error, saving, y)

    order = solver.error_order or solver.order
    return capture.program(("start", order, key_of(error, capture.kind), wanted), make)

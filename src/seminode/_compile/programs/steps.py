"""Programs compiled from the graph of a field: an evaluation, a whole step, the VJP of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._error_norm import ErrorNorm
from ..._field.field import as_time
from ..._field.pytree import HALF, Layout, real_dtype
from ..._host_numbers import TYPE_CODES, as_tensor
from ..._stepping.combination import StepSize
from ..._stepping.schedule import Plan
from ..._stepping.step import Attempt, attempt
from ...solvers.base import Evaluate, Solver
from ..batch_axis import BatchAxis, Strides
from ..chain import Chain
from ..graph import Capture
from ..inductor import compile_graph

Wanted = tuple[bool, ...]


class StepNodes:
    """At which nodes of a step a program evaluates the field, in which order; recorded while it is traced.

    The clock is one tensor: dt, then the time at each node. On the host it is made from a plan, so that times are
    exactly those of an eager step: on the right side of a jump, and t1 itself at the end. With `lanes`, it has five
    rows with one number per sample: dt, t0, t1 and the bounds of times. The program computes the times at the nodes.
    """

    def __init__(self, solver: Solver, like: Tensor, lanes: int | None = None):
        self._lanes = () if lanes is None else (lanes,)
        self._column = () if lanes is None else (lanes, *(1,) * (like.ndim - 1))
        self._size = 2 + solver.evaluations
        self._dtype, self._device = real_dtype(like), like.device
        self.evaluated: list[float] = []
        self._index: dict[float, int] = {}

    def index(self, c: float) -> int:
        return self._index.setdefault(c, len(self._index))

    def time(self, clock: Tensor, c: float) -> Tensor:
        self.evaluated.append(c)
        place = self.index(c)
        if not self._lanes:
            return clock[1 + place]
        dt, t0, t1, lowest, highest = clock.unbind()
        t = t1 if c == 1.0 else t0 if c == 0.0 else t0 + c * dt
        return torch.minimum(torch.maximum(t, lowest), highest).to(self._dtype)

    def length(self, clock: Tensor) -> Tensor:
        """The step size, as it is multiplied with the state."""
        return clock[0].to(self._dtype).reshape(self._column) if self._lanes else clock[0]

    @property
    def on_host(self) -> bool:
        """Whether a clock is made without a copy: one for all samples, in the memory of the host."""
        return not self._lanes and self._device.type == "cpu" and self._dtype in TYPE_CODES

    def times(self, plan: Plan) -> list[float]:
        return plan.stage_times(self._index)

    def example(self) -> Tensor:
        if self._lanes:
            return torch.zeros((5, *self._lanes), dtype=torch.float64, device=self._device)
        return torch.zeros(self._size, dtype=self._dtype, device=self._device)

    def clock(self, plan: Plan) -> Tensor:
        if self._lanes:
            return plan.clock().to(self._device)  # type: ignore[attr-defined]
        return as_tensor(self._row(plan), self._dtype, self._device)

    def clocks(self, plans: Sequence[Plan]) -> Sequence[Tensor]:
        """Those of several steps, on the host."""
        rows = as_tensor([t for plan in plans for t in self._row(plan)], self._dtype, self._device)
        return rows.view(len(plans), self._size).unbind()

    def starts(self, plans: Sequence[Plan]) -> Sequence[Tensor]:
        """The times at which several steps start, on the host."""
        return as_tensor([plan.stage_time(0.0) for plan in plans], self._dtype, self._device).unbind()

    def blank(self, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Clocks and starts of several steps that are still to be filled in."""
        clocks = torch.empty((count, self._size), dtype=self._dtype)
        return clocks.unbind(), torch.empty(count, dtype=self._dtype).unbind()

    @property
    def places(self) -> list[float]:
        """The nodes of the times in a clock, in order."""
        return [*self._index]

    def reads(self, ratio: Tensor) -> bool:
        """Whether this is one number, in the precision of clocks."""
        return ratio.ndim == 0 and ratio.dtype == self._dtype

    def _row(self, plan: Plan) -> list[float]:
        times = [plan.dt, *self.times(plan)]
        return times + [plan.t1] * (self._size - len(times))


class EvaluationProgram:
    """(t, y) ↦ k; as `SavingEvaluation`, but that nothing is kept."""

    kept = 0

    def __init__(self, capture: Capture, y: Tensor):
        def evaluate(t: Tensor, y: Tensor, *rest: Tensor) -> list[Tensor]:
            return [capture.evaluate(t, y, rest)]

        y = capture.example(dense(y))
        self._layouts = Layouts([y], capture.axis)
        self._dtype, self._device = real_dtype(y), y.device
        time = torch.zeros(clock_shape(capture), dtype=self._dtype, device=self._device)
        self._run = compile_graph(evaluate, [time, y, *capture.rest], capture.axis)

    def __call__(self, t: float | Tensor, y: Tensor, rest: list[Tensor]) -> Any:
        time = as_time(t, self._dtype, self._device)
        return self._run([time, *self._layouts.fitted([y]), *rest])

    def chain(self, y: Tensor, rest: Sequence[Tensor]) -> Chain | None:
        """What evaluates it as a part of a chain, for states with the memory layout of y."""
        return chain_of(self._run, 2 + len(rest), 1) if self._layouts.are_those_of([y]) else None


def whole_step(
    solver: Solver, error: ErrorNorm | None, evaluate: Evaluate, dt: StepSize, y: Tensor, memory: Any, allowed: Any
) -> list[Tensor]:
    """y1, its error ratio, k_end where the error estimate reads it, k2, k3, …

    Without error control the ratio is the sum of y1: it is finite if y1 is.
    """
    ends = solver.error_needs_end_slope
    taken = attempt(solver, evaluate, dt, y, memory, end_slope=ends, error=error is not None)
    return [taken.result.y1, ratio_of(error, taken, y, allowed), *end_of(taken), *taken.result.slopes[1:]]


def end_of(taken: Attempt) -> list[Tensor]:
    return [] if taken.end_slope is None else [taken.end_slope]


def ratio_of(error: ErrorNorm | None, taken: Attempt, y: Tensor, allowed: Sequence[Tensor]) -> Tensor:
    """What `ErrorNorm.of_program` makes the size of the error of."""
    y1 = taken.result.y1
    if error is None:
        return y1.sum()  # that of a batched solve looks at the samples itself
    assert taken.error is not None
    rtol, atol = allowed
    scale = atol + rtol * error.sizes(torch.maximum(y.abs(), y1.abs()))
    ratio = taken.error / scale
    return error.norm(error.layout.fitting(y).unpack(ratio)) if error.in_programs else ratio


class StepProgram:
    """(y, k1) ↦ (y1, error ratio, k_end, k2, …), k_end where the error estimate reads it."""

    def __init__(self, capture: Capture, solver: Solver, error: ErrorNorm | None, y: Tensor, k1: Tensor):
        self.nodes = nodes = StepNodes(solver, y, capture.lanes)

        def step(clock: Tensor, y: Tensor, k1: Tensor, rtol: Tensor, atol: Tensor, *rest: Tensor) -> list[Tensor]:
            def evaluate(c: float, z: Tensor, *, stage: int) -> Tensor:
                return capture.evaluate(nodes.time(clock, c), z, rest)

            return whole_step(solver, error, evaluate, nodes.length(clock), y, k1, [rtol, atol])

        y, k1 = capture.example(dense(y)), capture.example(dense(k1))
        self._layouts = Layouts([y, k1], capture.axis)
        inputs = [nodes.example(), y, k1, *tolerances(error, y), *capture.rest]
        self._run = compile_graph(step, inputs, capture.axis)

    def __call__(self, plan: Plan, y: Tensor, k1: Tensor, allowed: Sequence[Tensor], rest: list[Tensor]) -> Any:
        return self._run([self.nodes.clock(plan), *self._layouts.fitted([y, k1]), *allowed, *rest])

    def chain(self, y: Tensor, k1: Tensor, rest: Sequence[Tensor], outputs: int) -> Chain | None:
        """What takes several steps, for states and slopes with the memory layouts of y and k1."""
        fits = self.nodes.on_host and self._layouts.are_those_of([y, k1])
        return chain_of(self._run, 5 + len(rest), outputs) if fits else None


def chain_of(run: Any, inputs: int, outputs: int) -> Chain | None:
    """What calls a program several times, if it takes and returns this many tensors."""
    chain = getattr(run, "chain", None)
    return chain if chain is not None and (chain.inputs, chain.outputs) == (inputs, outputs) else None


class VJPProgram:
    """The VJP of a step, which is taken again: from the cotangent of y1 to the gradients. With `slopes`, it also takes
    the cotangents that outputs inside of the step give to its parts, as `StepEndings` has them.

    `wanted` says for which of the tensors that the field uses, besides y, there is a gradient to compute. Like every
    VJP program it takes the sums of those gradients so far. It returns the gradient of y, a number that is finite if
    all gradients are, and the sums with its own part added.
    """

    def __init__(self, capture: Capture, solver: Solver, wanted: Wanted, y: Tensor, slopes: bool):
        self.nodes = nodes = StepNodes(solver, y, capture.lanes)
        count, rest_end = 1 + slopes, 1 + slopes + len(capture.rest)

        def step_vjp(clock: Tensor, y: Tensor, *others: Tensor) -> list[Tensor]:
            cotangents, rest, sums = others[:count], others[count:rest_end], others[rest_end:]

            def forward(y: Tensor, *chosen: Tensor) -> tuple[Tensor, ...]:
                inputs = replaced(rest, wanted, chosen)

                def evaluate(c: float, z: Tensor, *, stage: int) -> Tensor:
                    return capture.evaluate(nodes.time(clock, c), z, inputs)

                reads_end = slopes and len(solver.interpolant) > solver.stages
                taken = attempt(solver, evaluate, nodes.length(clock), y, None, end_slope=reads_end, error=False)
                if not slopes:
                    return (taken.result.y1,)
                return taken.result.y1, torch.stack([*taken.result.slopes, *end_of(taken)])

            _, back = torch.func.vjp(forward, y, *chosen_of(rest, wanted))  # type: ignore[misc]
            if not slopes:
                return added(back(cotangents), sums)
            adj, parts = cotangents
            grad_y, *grads = back((adj + parts[0], parts[2:]))
            return added([grad_y + parts[1], *grads], sums)

        y = capture.example(dense(y))
        cotangents = [torch.zeros_like(y)]
        if slopes:
            cotangents.append(no_parts(solver, y))
        inputs = [nodes.example(), y, *cotangents, *capture.rest, *no_sums(capture.rest, wanted)]
        self._run = Tuned(step_vjp, inputs, capture.axis)

    def __call__(
        self, plan: Plan, y: Tensor, cotangents: Sequence[Tensor], rest: list[Tensor], sums: Sequence[Tensor]
    ) -> Any:
        return self._run([self.nodes.clock(plan), y, *cotangents, *rest, *sums])

    @property
    def evaluated(self) -> list[float]:
        """The nodes at which the field is evaluated."""
        return self.nodes.evaluated


_stride = Tensor.stride


class Layouts:
    """The memory layouts for which a program was compiled."""

    def __init__(self, examples: Sequence[Tensor], axis: BatchAxis | None):
        self._strides = Strides(examples, axis)

    def are_those_of(self, given: list[Tensor]) -> bool:
        return list(map(_stride, given)) == self._strides.of(given)

    def fitted(self, given: list[Tensor]) -> list[Tensor]:
        """The tensors in these layouts, copied where they are in others."""
        expected = self._strides.of(given)
        if list(map(_stride, given)) == expected:
            return given
        return [with_strides(x, strides) for x, strides in zip(given, expected, strict=True)]


class Tuned:
    """A program for the memory layouts of the tensors that it is first given."""

    def __init__(self, function: Callable[..., list[Tensor]], given: Sequence[Tensor], axis: BatchAxis | None = None):
        self._layouts = Layouts(given, axis)
        self._run = compile_graph(function, [x.detach() for x in given], axis)

    def __call__(self, given: list[Tensor]) -> Any:
        return self._run(self._layouts.fitted(given))


def key_of(error: ErrorNorm | None, layout: Layout) -> Hashable:
    """What a program depends on of an error norm and of the layout of the state."""
    if error is None:
        return None
    # Those of entries have the shape of the state.
    entries = tuple(isinstance(x, Tensor) and x.ndim > 0 for x in (error.rtol, error.atol))
    return error.norm if error.in_programs else None, error.in_rows, layout, entries


def step_key(capture: Capture, solver: Solver, error: ErrorNorm | None) -> Hashable:
    return solver, key_of(error, capture.kind), capture.lanes


def evaluation_program(capture: Capture, y: Tensor) -> EvaluationProgram:
    return capture.program(("evaluation", capture.lanes), lambda capture: EvaluationProgram(capture, y))


def clock_shape(capture: Capture) -> tuple[int, ...]:
    """The shape of a time: of a batched solve, one entry per sample."""
    return () if capture.lanes is None else (capture.lanes,)


def nodes_of(solver: Solver, like: Tensor) -> StepNodes:
    """The nodes of a step whose first slope is known, in order."""
    nodes = StepNodes(solver, like)

    def evaluate(c: float, y: Tensor, *, stage: int) -> Tensor:
        nodes.evaluated.append(c)
        nodes.index(c)
        return y

    y = torch.zeros(1)
    attempt(solver, evaluate, 0.0, y, y, end_slope=solver.error_needs_end_slope, error=False)
    return nodes


def tolerances(error: ErrorNorm | None, like: Tensor) -> list[Tensor]:
    """rtol and atol as tensors, so that another tolerance is no other program."""
    dtype = real_dtype(like)
    if error is None:
        return [torch.zeros((), dtype=dtype, device=like.device) for _ in range(2)]
    return [_tolerance(x, like, dtype) for x in (error.rtol, error.atol)]


def _tolerance(value: float | Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=dtype, device=like.device)
    if value.ndim == 0:
        return value
    example = torch.empty_like(like, dtype=dtype)  # there is one for each entry
    symbolic = any(isinstance(n, torch.SymInt) for n in like.shape)
    return example if symbolic else with_strides(value, example.stride())


def no_parts(solver: Solver, y: Tensor) -> Tensor:
    """Cotangents of the parts of a step without outputs inside: of its end, its start and its slopes."""
    return y.new_zeros((2 + len(solver.interpolant), *y.shape))


def cotangents_of_parts(solver: Solver, given: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """Those of y1, of the slopes and of the start of a step, from what the VJP of a step that keeps activations takes.

    That is the cotangent of y1 and, where outputs may lie inside, that of k1 as the end slope of the step before, and
    those of the parts.
    """
    end, *inside = given
    if not inside:
        return end, [None] * solver.stages, None
    first, parts = inside
    return end + parts[0], [parts[2] + first, *parts[3 : 2 + solver.stages].unbind()], parts[1]


def chosen_of(rest: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [x for x, want in zip(rest, wanted, strict=True) if want]


def no_sums(rest: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Sums of gradients before there are any. Many small terms would be lost in half precision."""
    chosen = chosen_of(rest, wanted)
    return [torch.zeros_like(x, dtype=torch.float32 if x.dtype in HALF else x.dtype) for x in chosen]


def added(grads: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of y, a number that is finite if all gradients are, and the sums with the others added."""
    totals = [s + g for s, g in zip(sums, grads[1:], strict=True)]
    alive = sum((x.sum() for x in totals), grads[0].sum())
    return [grads[0], alive, *totals]


def replaced(rest: Sequence[Tensor], wanted: Sequence[bool], chosen: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with others in place of the wanted ones."""
    own = iter(chosen)
    return [next(own) if want else x for x, want in zip(rest, wanted, strict=True)]


def dense(x: Tensor) -> Tensor:
    """Without gaps in memory, the order of its dimensions kept."""
    return with_strides(x, torch.empty_like(x).stride())


def with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """In the memory layout for which a program was compiled."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)

"""Compiled evaluations and steps that also keep the activations that their VJPs need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..._error_norm import ErrorNorm
from ..._field.field import as_time
from ..._field.pytree import real_dtype
from ..._stepping.schedule import Plan
from ..._stepping.step import completed
from ...solvers.base import Solver, StepResult
from ..batch_axis import BatchAxis, Source
from ..graph import Capture, NotCompiled
from ..inductor import compile_graph, split
from .steps import (
    Layouts,
    StepNodes,
    Tuned,
    Wanted,
    added,
    chosen_of,
    clock_shape,
    cotangents_of_parts,
    dense,
    end_of,
    no_parts,
    no_sums,
    ratio_of,
    replaced,
    tolerances,
)


class TunedLater:
    """A VJP from what a program has kept: only then are the memory layouts known in which things are kept.

    `shapes` are those of its inputs, with sizes that are not fixed.
    """

    def __init__(self, capture: Capture, function: Callable[..., list[Tensor]], shapes: Sequence[Any]):
        self._graph, self._axis, self._function, self._shapes = capture.graph, capture.axis, function, shapes

    def __call__(self, inputs: list[Tensor]) -> Any:
        graph, axis = self._graph, self._axis
        if axis is None:
            return graph.program(("vjp", self), lambda: Tuned(self._function, inputs))(inputs)
        try:
            program, samples = graph.program(("vjp", self), lambda: self._of_any_size(axis, inputs))
        except NotCompiled:
            pass
        else:
            if axis.admits(samples.read(inputs)):
                return program(inputs)
        shapes = tuple(x.shape for x in inputs)
        return graph.program(("vjp", self, shapes), lambda: Tuned(self._function, inputs))(inputs)

    def ahead(self, examples: list[Tensor]) -> None:
        """Have it built for inputs like these, which are going to come. Without symbolic sizes only."""
        graph = self._graph
        with graph.ahead(), contextlib.suppress(NotCompiled):
            graph.program(("vjp", self), lambda: Tuned(self._function, examples))

    def _of_any_size(self, axis: BatchAxis, inputs: Sequence[Tensor]) -> tuple[Tuned, Source]:
        examples = [axis.like(x, shape) for x, shape in zip(inputs, self._shapes, strict=True)]
        return Tuned(self._function, examples, axis), axis.source(examples)


class SavingEvaluation:
    """(t, y) ↦ k and what is kept; and the VJP from that and the cotangent of k, as a `VJPProgram`."""

    def __init__(self, capture: Capture, wanted: Wanted, y: Tensor):
        def joint(t: Tensor, y: Tensor, *others: Tensor) -> list[Tensor]:
            rest, adj = others[:-1], others[-1]

            def evaluate(y: Tensor, *chosen: Tensor) -> Tensor:
                return capture.evaluate(t, y, replaced(rest, wanted, chosen))

            k, back = torch.func.vjp(evaluate, y, *chosen_of(rest, wanted))  # type: ignore[misc]
            return [k, *back(adj)]

        y = capture.example(dense(y))
        self._layouts = Layouts([y], capture.axis)
        self._dtype, self._device = real_dtype(y), y.device
        inputs = [torch.zeros(clock_shape(capture), dtype=self._dtype, device=self._device), y, *capture.rest]
        self.halves = split(joint, inputs, [torch.zeros_like(y)], 1, capture.axis)
        self.kept = self.halves.kept
        # Without values, so that it holds on to no parameters.
        self._examples, self._axis = (
            [_without_values(x) if capture.axis is None else x for x in inputs],
            capture.axis,
        )
        sums = [x.shape for x in chosen_of(capture.rest, wanted)]
        self._tuned = TunedLater(capture, self._vjp, [*self.halves.shapes, y.shape, *sums])

    @cached_property
    def _run(self) -> Any:
        # Only if it is called: most solves evaluate their field as a part of other programs.
        given = self._examples
        if self._axis is None:
            given = [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=self._device) for x in given]
        return compile_graph(self.halves.forward, given, self._axis)

    def ready(self) -> SavingEvaluation:
        """Compile it now, where that may fail."""
        assert self._run is not None
        return self

    def __call__(self, t: float | Tensor, y: Tensor, rest: list[Tensor]) -> Any:
        time = as_time(t, self._dtype, self._device)
        return self._run([time, *self._layouts.fitted([y]), *rest])

    def _vjp(self, *tensors: Tensor) -> list[Tensor]:
        count = self.kept + 1
        return added(self.halves.backward(*tensors[:count]), tensors[count:])

    def vjp(self, kept: Sequence[Tensor], adj: Tensor, sums: Sequence[Tensor]) -> Any:
        return self._tuned([*kept, adj, *sums])


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


class SavingPrograms:
    """Steps that also keep the activations that their VJPs need.

    A step is cut into two: k1 = f(t0, y), and the rest of it. The first slope of a step is usually the last one of the
    previous step, which keeps what its VJP needs, so that nothing is evaluated twice:

        at:     as `SavingEvaluation`
        step:   (y, k1) ↦ y1, error ratio, k_end, k2, …, what is kept of it, and of the evaluation at its end
        vjp:    what was kept of a step and of the evaluation at its start, the cotangent of y1 and, with `slopes`,
                those of k1 and of the parts of the step ↦ as `VJPProgram`
    """

    def __init__(
        self,
        capture: Capture,
        solver: Solver,
        error: ErrorNorm | None,
        at: SavingEvaluation,
        wanted: Wanted,
        slopes: bool,
        y: Tensor,
    ):
        self._solver, self._slopes = solver, slopes
        self.at = at
        self.nodes = StepNodes(solver, y)
        y = capture.example(dense(y))
        self._layouts = Layouts([y, y], capture.axis)
        self._split(capture, wanted, y)
        self.kept = self._after.kept
        #: The bytes of what a step keeps, by the number of entries of the state, once they are known.
        self.sizes: dict[int, Any] = {}
        self._step = self._compile_step(capture, error, y)
        self._cotangents = 3 if slopes else 1
        states = [x.shape for x in self._no_cotangents(y)]
        sums = [x.shape for x in chosen_of(capture.rest, wanted)]
        self._tuned = TunedLater(capture, self._vjp, [*self._after.shapes, *at.halves.shapes, *states, *sums])
        if capture.axis is None:
            self._build_vjp(y, no_sums(capture.rest, wanted))

    def _no_cotangents(self, y: Tensor) -> list[Tensor]:
        if not self._slopes:
            return [torch.zeros_like(y)]
        return [torch.zeros_like(y), torch.zeros_like(y), no_parts(self._solver, y)]

    def _build_vjp(self, y: Tensor, sums: Sequence[Tensor]) -> None:
        """Have the VJP built in parallel with the step, if the layouts in which the step keeps things are known."""
        strides = getattr(self._step, "strides", None)
        if strides is None or not self._solver.error_needs_end_slope:
            return
        shapes = [*self._after.shapes, *self.at.halves.shapes]
        dtypes = [*self._after.dtypes, *self.at.halves.dtypes]
        layouts = strides[len(strides) - len(shapes) :]
        if any(layout is None for layout in layouts):
            return
        kept = [
            torch.empty_strided(shape, layout, dtype=dtype, device=y.device)
            for shape, layout, dtype in zip(shapes, layouts, dtypes, strict=True)
        ]
        self._tuned.ahead([*kept, *self._no_cotangents(y), *sums])

    def _split(self, capture: Capture, wanted: Wanted, y: Tensor) -> None:
        solver, nodes = self._solver, self.nodes
        count = len(capture.rest)
        differentiated = solver.stages if self._slopes else 1  # y1, and k2, … if outputs may lie inside

        def joint(clock: Tensor, y: Tensor, k1: Tensor, *others: Tensor) -> list[Tensor]:
            rest, cotangents = others[:count], others[count:]

            def forward(y: Tensor, k1: Tensor, *chosen: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
                inputs = replaced(rest, wanted, chosen)

                def evaluate(c: float, z: Tensor, *, stage: int) -> Tensor:
                    return capture.evaluate(nodes.time(clock, c), z, inputs)

                result = solver.step(evaluate, clock[0], y, k1)
                values = [result.y1, *result.slopes[1:]]
                return tuple(values[:differentiated]), values

            chosen = chosen_of(rest, wanted)
            _, vjp, values = torch.func.vjp(forward, y, k1, *chosen, has_aux=True)  # type: ignore[misc]
            return [*values, *vjp(cotangents)]

        # One tensor each: a tracer tells its inputs apart by their identity.
        cotangents = [torch.zeros_like(y) for _ in range(differentiated)]
        inputs = [nodes.example(), y, torch.zeros_like(y), *capture.rest]
        self._after = split(joint, inputs, cotangents, solver.stages, capture.axis)

    def _compile_step(self, capture: Capture, error: ErrorNorm | None, y: Tensor) -> Any:
        solver, nodes = self._solver, self.nodes
        after, at = self._after.forward, self.at.halves.forward

        def step(clock: Tensor, y: Tensor, k1: Tensor, rtol: Tensor, atol: Tensor, *rest: Tensor) -> list[Tensor]:
            values = after(clock, y, k1, *rest)
            (y1, *later), kept = values[: solver.stages], list(values[solver.stages :])

            def evaluate(c: float, z: Tensor, *, stage: int) -> Tensor:
                k, *kept_at_end = at(nodes.time(clock, c), z, *rest)
                kept.extend(kept_at_end)
                return k

            ends, controlled = solver.error_needs_end_slope, error is not None
            taken = completed(solver, StepResult(y1, [k1, *later]), evaluate, clock[0], ends, controlled)
            return [y1, ratio_of(error, taken, y, [rtol, atol]), *end_of(taken), *later, *kept]

        inputs = [nodes.example(), y, torch.zeros_like(y), *tolerances(error, y), *capture.rest]
        return compile_graph(step, inputs, capture.axis)

    def _vjp(self, *tensors: Tensor) -> list[Tensor]:
        n_step, n_both = self.kept, self.kept + self.at.kept
        n_all = n_both + self._cotangents
        end, (first, *later), start = cotangents_of_parts(self._solver, tensors[n_both:n_all])
        of_later = [x for x in later if x is not None]
        grad_y, grad_k1, *grads = self._after.backward(*tensors[:n_step], end, *of_later)
        grad_k1 = grad_k1 if first is None else grad_k1 + first
        own_y, *own = self.at.halves.backward(*tensors[n_step:n_both], grad_k1)
        both = [a + b for a, b in zip(grads, own, strict=True)]
        total = grad_y + own_y
        return added([total if start is None else total + start, *both], tensors[n_all:])

    def step(self, plan: Plan, y: Tensor, k1: Tensor, allowed: Sequence[Tensor], rest: list[Tensor]) -> Any:
        return self._step([self.nodes.clock(plan), *self._layouts.fitted([y, k1]), *allowed, *rest])

    def vjp(self, plan: Plan, kept: Sequence[Tensor], cotangents: Sequence[Tensor], sums: Sequence[Tensor]) -> Any:
        return self._tuned([*kept, *cotangents, *sums])

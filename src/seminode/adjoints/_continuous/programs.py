"""Programs for the adjoint equation: its slope, a whole step of it, and the parameter integral over a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compile.capturing import warn_not_compiled
from ..._compile.graph import Capture, NotCompiled
from ..._compile.programs import (
    StartClock,
    Started,
    Tuned,
    chosen_of,
    dense,
    first_length,
    key_of,
    large,
    nodes_of,
    replaced,
    tolerances,
    whole_step,
)
from ..._error_norm import ErrorNorm
from ..._field.pytree import Layout, real_dtype
from ..._host_numbers import as_tensor
from ..._stepping.combination import combine, sparse
from ..._stepping.interpolation import weights_at
from ..._stepping.schedule import Plan
from ..._stepping.step import Step
from ...solvers.base import Solver
from .._sums import Sums
from .parameter_integral import Folded, sample_stride, sampled
from .quadrature_rules import Rule
from .system import AdjointSystem


class CompiledAdjointStep(NamedTuple):
    """What a program returns for a step of the adjoint system."""

    y1: Tensor
    ratio: Tensor
    slopes: list[Tensor]  # k_end if the error estimate reads it, then k2, k3, …
    folded: Folded | None  # Σ wᵢgᵢ of the later stages
    evaluated: list[float]  # the times at which the field was evaluated


class ProgramInputs(NamedTuple):
    """The tensors that a program takes, by what their sizes depend on."""

    numbers: Sequence[Tensor]  # times and weights of stages
    allowed: Sequence[Tensor]  # rtol and atol: one number, or as many as the solver's state has entries
    vectors: Sequence[Tensor]  # states and slopes of the solver
    wholes: Sequence[Tensor]  # z and a_z, like the state of the problem
    places: Sequence[Tensor]  # where z is not solved for: at which places its polynomials are evaluated
    polynomials: Sequence[Tensor]  # and their coefficients, for one place each
    rest: Sequence[Tensor]  # what else the field uses

    def flat(self) -> list[Tensor]:
        return [x for group in self for x in group]

    def like(self, tensors: Iterable[Tensor]) -> ProgramInputs:
        """Other tensors in their places."""
        others = iter(tensors)
        return ProgramInputs(*([next(others) for _ in group] for group in self))

    def z(self, i: int) -> Tensor | None:
        """z at one of the times, where it is not solved for."""
        if not self.polynomials:
            return None
        x, coefficients = self.places[0][i], self.polynomials[i].unbind()
        z = coefficients[-1]
        for coefficient in coefficients[-2::-1]:
            z = z * x + coefficient
        return z


class AdjointPrograms:
    """Programs for one backward solve, which are kept with the graph of the field.

    `keys` are the ids of the targets, `wanted` says which inputs of the graph they are: a target that the field does
    not use is none of them. As soon as a program cannot be made, the solve goes on eagerly: `usable` is false.
    """

    def __init__(
        self,
        capture: Capture,
        system: AdjointSystem,
        solver: Solver,
        error: ErrorNorm | None,
        keys: Sequence[int],
        wanted: tuple[bool, ...],
        like: Tensor,
    ):
        self._capture, self._system, self.solver, self._error = capture, system, solver, error
        self._rest = capture.rest
        self._wanted = wanted
        #: A program for each evaluation: one for a whole step would take too long to compile.
        self.pieces = large(capture)
        self.usable = True
        chosen = chosen_of(self._rest, wanted)
        ids = [id(x) for x in chosen]
        self._places = [ids.index(key) if key in ids else None for key in keys]
        self._strides = [sample_stride(x) for x in chosen]
        #: Whose number of entries is not that of the next batch: these are sampled outside of programs.
        self._batched = [batched for batched, want in zip(capture.batched_rest(), wanted, strict=True) if want]
        self._dtype, self._device = real_dtype(like), like.device
        self._in_state, self._sourced = system.integrals_in_state, system.source is not None
        unused = tuple(x.shape for x, place in zip(system.targets, self._places, strict=True) if place is None)
        self._ready: dict[Any, Any] = {}  # the programs of this solve
        self._allowed: list[Tensor] = []
        self._nodes: Any = None
        places = tuple(self._places)
        self._key = capture.kind, system.reduction.key, wanted, places, unused, self._in_state, self._sourced
        self._method = solver, key_of(error, capture.kind)  # of programs that take whole steps

    def give_up(self, reason: NotCompiled) -> None:
        warn_not_compiled(reason)
        self.usable = False

    def _slope(
        self, t: Tensor, w: Tensor, inputs: ProgramInputs, params: bool, place: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """The slope of [z, a_z], and aᵀ∂f/∂θ; `place` is that of the time among those at which z is given."""
        system, rest = self._system, inputs.rest
        wanted = self._wanted if params or self._in_state else (False,) * len(rest)
        z, a = system.split(w, *inputs.wholes)
        given = inputs.z(place)
        z = z if given is None else given

        def evaluate(z: Tensor, *chosen: Tensor) -> Tensor:
            return self._capture.evaluate(t, z, replaced(rest, wanted, chosen))

        f, vjp = torch.func.vjp(evaluate, z, *chosen_of(rest, wanted))  # type: ignore[misc]
        grad_z, *grads = vjp(a)
        parts = [system.reduction.reduce(f), -system.reduction.reduce(grad_z)]
        if self._in_state:
            found = self._by_target(grads)
            pairs = zip(found, system.targets, strict=True)
            parts += [z.new_zeros(x.numel()) if g is None else -g.reshape(-1).to(z.dtype) for g, x in pairs]
        return torch.cat(parts), grads if params else []

    def _by_target(self, grads: Sequence[Any]) -> list[Any]:
        return [None if place is None else grads[place] for place in self._places]

    def _sampled(self, grads: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self._strides, self._batched, strict=True)
        return sampled(grads, [1 if batched else stride for stride, batched in pairs])

    def _sum(self, weights: Sequence[Any], grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Σ wᵢgᵢ for each tensor; weights of zero are left out."""
        pairs = [(w, g) for w, g in zip(weights, grads, strict=True) if not (isinstance(w, float) and w == 0.0)]
        if not pairs:
            return [torch.zeros_like(x) for x in grads[0]]
        columns = zip(*(g for _, g in pairs), strict=True)
        factors = [w for w, _ in pairs]
        scaled = ([w * x for w, x in zip(factors, column, strict=True)] for column in columns)
        return [functools.reduce(torch.add, terms) for terms in scaled]

    def _inputs(
        self, numbers: Sequence[Tensor], vectors: Sequence[Tensor], times: Sequence[float], allowed: bool = False
    ) -> ProgramInputs:
        """The inputs of a program; z is given at these times, where it is not solved for."""
        system = self._system
        if allowed and not self._allowed:
            self._allowed = tolerances(self._error, vectors[0])
        polynomials, places = ([], []) if system.source is None else system.source.polynomials(times)
        return ProgramInputs(
            numbers,
            self._allowed if allowed else [],
            vectors,
            [system.z, system.a],
            [as_tensor(places, self._dtype, self._device)] if places else [],
            polynomials,
            self._rest,
        )

    def _run(
        self, name: str, more: Any, function: Callable[[ProgramInputs], list[Tensor]], inputs: ProgramInputs
    ) -> Any:
        key = name, more
        if key not in self._ready:  # long keys take time to look up
            whole = "adjoint", name, self._key, more
            self._ready[key] = self._capture.program(whole, lambda capture: self._made(capture, function, inputs))
        return self._ready[key](inputs.flat())

    def _made(
        self, capture: Capture, function: Callable[[ProgramInputs], list[Tensor]], inputs: ProgramInputs
    ) -> Tuned:
        def traced(*tensors: Tensor) -> list[Tensor]:
            return function(inputs.like(tensors))

        return Tuned(traced, self._examples(capture, inputs).flat(), capture.axis)

    def _examples(self, capture: Capture, inputs: ProgramInputs) -> ProgramInputs:
        """What a program is traced over: the inputs themselves, unless it is one for any size."""
        axis = capture.axis
        if axis is None:
            return inputs
        wholes, rest = [capture.example(dense(x)) for x in inputs.wholes], capture.rest
        size = sum(math.prod(shape) for shape in self._layout(wholes[0], rest).shapes)
        return ProgramInputs(
            inputs.numbers,
            [axis.like(x, [size]) if x.ndim else x for x in inputs.allowed],
            [axis.like(x.contiguous(), [size]) for x in inputs.vectors],
            wholes,
            inputs.places,
            [axis.like(x.contiguous(), [len(x), *wholes[0].shape]) for x in inputs.polynomials],
            rest,
        )

    def _layout(self, z: Tensor, rest: Sequence[Tensor]) -> Layout:
        """The layout of the solver's state, for the sizes of these tensors, which may be symbols."""
        chosen = chosen_of(rest, self._wanted)
        pairs = zip(self._places, self._system.targets, strict=True)
        return self._system.layout(z, [x if place is None else chosen[place] for place, x in pairs])

    def _norm(self, inputs: ProgramInputs) -> ErrorNorm | None:
        error = self._error
        return None if error is None else error.over(self._layout(inputs.wholes[0], inputs.rest))

    def start(self, t: float, w: Tensor, params: bool) -> tuple[Tensor, list[Tensor | None]]:
        """The slope at one place and, with `params`, the gradients of the targets."""

        def function(inputs: ProgramInputs) -> list[Tensor]:
            k, grads = self._slope(inputs.numbers[0], inputs.vectors[0], inputs, params)
            return [k, *grads]

        time = torch.full((), t, dtype=self._dtype, device=self._device)
        k, *grads = self._run("start", params, function, self._inputs([time], [w], [t]))
        return k, self._by_target(grads) if params else []

    def begin(
        self, near: Plan, far: Plan, shortest: float, w: Tensor, params: bool
    ) -> tuple[Started, list[Tensor | None]]:
        """The slope at the start, with the gradients of the targets if `params`, and the length of the first step."""
        order = self.solver.error_order or self.solver.order

        def function(inputs: ProgramInputs) -> list[Tensor]:
            (clock,), (w,), error = inputs.numbers, inputs.vectors, self._norm(inputs)
            assert error is not None
            k1, grads = self._slope(clock[0], w, inputs, params)

            def evaluate(t: Tensor, w: Tensor) -> Tensor:
                return self._slope(t, w, inputs, False)[0]

            return [first_length(clock, w, k1, evaluate, error, inputs.allowed, order), k1, *grads]

        inputs = self._inputs([StartClock(w).of(near, far, shortest)], [w], [], allowed=True)
        numbers, k1, *grads = self._run("begin", (self._method, params), function, inputs)
        return Started.read(near, far, numbers, k1), self._by_target(grads) if params else []

    @property
    def begins(self) -> bool:
        """Whether the first two evaluations and the length of the first step come from one program.

        Where z is not solved for, it is known at times that the host knows.
        """
        error = self._error
        return not (self.pieces or self._sourced or error is None or error.ranks.several) and error.in_programs

    def step(
        self, plan: Plan, w: Tensor, k1: Tensor, weights: Sequence[float], wanted: tuple[bool, ...]
    ) -> CompiledAdjointStep:
        """A step, with the gradients of its later stages weighted and summed, those that are wanted."""
        solver = self.solver
        ends, params = int(solver.error_needs_end_slope), any(wanted)
        if self._nodes is None:
            self._nodes = self._capture.graph.program(("adjoint nodes", solver), lambda: nodes_of(solver, w))
        nodes = self._nodes

        def function(inputs: ProgramInputs) -> list[Tensor]:
            (clock, b), (w, k1) = inputs.numbers, inputs.vectors
            of_stages: dict[int, list[Tensor]] = {}

            def evaluate(c: float, w: Tensor, *, stage: int) -> Tensor:
                index = nodes.index(c)
                wants = wanted[stage - 1]
                k, grads = self._slope(clock[1 + index], w, inputs, wants, index)
                if wants:
                    of_stages[stage] = grads
                return k

            found = whole_step(solver, self._norm(inputs), evaluate, clock[0], w, k1, inputs.allowed)
            return found + self._folding(clock[0], b, of_stages)

        clock = nodes.clock(plan)
        b = as_tensor(weights, self._dtype, self._device)
        inputs = self._inputs([clock, b], [w, k1], nodes.times(plan), allowed=True)
        found = list(self._run("step", (self._method, wanted), function, inputs))
        count = 2 + ends + solver.stages - 1
        evaluated = [plan.stage_time(c) for c in nodes.evaluated]
        (w1, ratio, *slopes), rest = found[:count], found[count:]
        return CompiledAdjointStep(w1, ratio, slopes, self._folded(rest) if params else None, evaluated)

    def _folding(self, dt: Tensor, b: Tensor, of_stages: dict[int, list[Tensor]]) -> list[Tensor]:
        """In a program: what a step makes of the gradients of its later stages."""
        solver = self.solver
        if not of_stages:  # a method of one stage has none of them
            return []
        found = self._sum([b[stage - 1] for stage in of_stages], list(of_stages.values()))
        if solver.error_weights is not None:
            e = [float(solver.error_weights[stage]) for stage in of_stages]
            samples = [self._sampled(g) for g in of_stages.values()]
            found += [-dt * x for x in self._sum(e, samples)]
        return found + of_stages.get(solver.stages, [])

    def _folded(self, rest: list[Tensor]) -> Folded:
        n = sum(self._wanted)
        parts = [rest[i : i + n] for i in range(0, len(rest), n)] if n else []
        if len(parts) > 1 and any(self._batched):
            pairs = zip(self._strides, self._batched, strict=True)
            parts[1] = sampled(parts[1], [stride if batched else 1 for stride, batched in pairs])
        found: list[Any] = [self._by_target(part) for part in parts]
        found += [[None] * len(self._places)] * (2 - len(found))
        return Folded(found[0], found[1], found[2] if len(found) > 2 else None)

    def integral(self, step: Step, rule: Rule, known: bool) -> tuple[Folded, list[float]]:
        """The parameter integral over an accepted step; `known` leaves out the node at its start."""
        solver, plan = self.solver, step.plan
        matrix = solver.interpolant
        slopes = step.interpolated()
        xs = list(rule.nodes[known:])
        times = [plan.stage_time(x) for x in xs]
        weights = [-float(x) for x in rule.weights[known:]]
        gaps = [w + float(x) for w, x in zip(weights, rule.lower[known:], strict=True)]
        if self.pieces:
            return self._integral_in_pieces(step, times, weights, gaps), times

        def function(inputs: ProgramInputs) -> list[Tensor]:
            (clock,), (w, *slopes) = inputs.numbers, inputs.vectors
            of_nodes = []
            for i, x in enumerate(xs):
                place = combine(w, clock[0], sparse(weights_at(matrix, x)), slopes)
                of_nodes.append(self._slope(clock[1 + i], place, inputs, True, i)[1])
            total = [clock[0] * x for x in self._sum(weights, of_nodes)]
            differences = self._sum(gaps, [self._sampled(g) for g in of_nodes])
            return [*total, *(clock[0] * x for x in differences), *of_nodes[-1]]

        clock = as_tensor([plan.dt, *times], self._dtype, self._device)
        inputs = self._inputs([clock], [step.y0, *slopes], times)
        return self._folded(list(self._run("integral", (solver, rule, known), function, inputs))), times

    def _integral_in_pieces(
        self, step: Step, times: Sequence[float], weights: Sequence[float], gaps: Sequence[float]
    ) -> Folded:
        total, difference = Sums(len(self._places)), Sums(len(self._places))
        strides = [1 if place is None else self._strides[place] for place in self._places]
        grads: list[Tensor | None] = []
        for t, w, weight, gap in zip(times, step.at(times), weights, gaps, strict=True):
            grads = self.start(t, w, True)[1]
            total.add(grads, step.plan.dt * weight)
            difference.add(sampled(grads, strides), step.plan.dt * gap)
        return Folded(total.values, difference.values, grads)

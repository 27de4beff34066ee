"""The adjoint equation in compiled programs: its slope, a whole step of it, and the parameter integral over a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compile.capturing import warn_not_compiled
from ..._compile.engine import compiled_step
from ..._compile.graph import Capture, NotCompiled
from ..._compile.programs import (
    StartClock,
    Started,
    Tuned,
    chosen_of,
    first_length,
    key_of,
    large,
    nodes_of,
    replaced,
    tolerances,
    whole_step,
)
from ..._error_norm import ErrorNorm
from ..._field.pytree import real_dtype
from ..._stepping.combination import combine, sparse
from ..._stepping.engine import Begun, EvaluationLog, Evaluator, Stepper
from ..._stepping.interpolation import weights_at
from ..._stepping.schedule import Plan
from ..._stepping.step import Step
from ...solvers.base import Memory, Solver
from .._sums import Sums
from .parameter_integral import Folded, ParameterIntegral, sample_stride, sampled
from .quadrature_rules import Rule
from .system import AdjointSystem


class CompiledAdjointStep(NamedTuple):
    """What a program returns for a step of the adjoint system."""

    y1: Tensor
    ratio: Tensor
    slopes: list[Tensor]  # k_end if the error estimate reads it, then k2, k3, …
    folded: Folded | None  # Σ wᵢgᵢ of the later stages
    evaluated: list[float]  # the times at which the field was evaluated


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
        self._dtype, self._device = real_dtype(like), like.device
        self._in_state, self._sourced = system.integrals_in_state, system.source is not None
        shapes = tuple(x.shape for x in system.targets)
        self._ready: dict[Any, Any] = {}  # the programs of this solve
        self._allowed: list[Tensor] = []
        self._nodes: Any = None
        self._key = (system.reduction.key, wanted, tuple(self._places), shapes, self._in_state, self._sourced)
        self._method = solver, key_of(error)  # of programs that take whole steps

    def give_up(self, reason: NotCompiled) -> None:
        warn_not_compiled(reason)
        self.usable = False

    def _slope(
        self, t: Tensor, w: Tensor, given: Tensor | None, wholes: Sequence[Tensor], rest: Sequence[Tensor], params: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The slope of [z, a_z], and aᵀ∂f/∂θ; `given` is z where it is not solved for."""
        system = self._system
        wanted = self._wanted if params or self._in_state else (False,) * len(rest)
        z, a = system.split(w, *wholes)
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
        return sampled(grads, self._strides)

    def _sum(self, weights: Sequence[Any], grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Σ wᵢgᵢ for each tensor; weights of zero are left out."""
        pairs = [(w, g) for w, g in zip(weights, grads, strict=True) if not (isinstance(w, float) and w == 0.0)]
        if not pairs:
            return [torch.zeros_like(x) for x in grads[0]]
        columns = zip(*(g for _, g in pairs), strict=True)
        factors = [w for w, _ in pairs]
        scaled = ([w * x for w, x in zip(factors, column, strict=True)] for column in columns)
        return [functools.reduce(torch.add, terms) for terms in scaled]

    def _given(self, times: Sequence[float]) -> list[Tensor]:
        """z at these times, stacked, where it is not solved for."""
        source = self._system.source
        return [] if source is None else [source.at(times)]

    def _wholes(self) -> list[Tensor]:
        return [self._system.z, self._system.a]

    def _program(self, name: str, more: Any, function: Any, inputs: list[Tensor]) -> Any:
        key = name, more
        if key not in self._ready:  # long keys take time to look up
            whole = "adjoint", name, self._key, more, self._capture.layout
            self._ready[key] = self._capture.graph.program(whole, lambda: Tuned(function, inputs))
        return self._ready[key]

    def start(self, t: float, w: Tensor, params: bool) -> tuple[Tensor, list[Tensor | None]]:
        """The slope at one place and, with `params`, the gradients of the targets."""
        sourced = int(self._sourced)

        def function(t: Tensor, w: Tensor, *others: Tensor) -> list[Tensor]:
            wholes, given, rest = others[:2], others[2 : 2 + sourced], others[2 + sourced :]
            k, grads = self._slope(t, w, given[0][0] if given else None, wholes, rest, params)
            return [k, *grads]

        time = torch.full((), t, dtype=self._dtype, device=self._device)
        inputs = [time, w, *self._wholes(), *self._given([t]), *self._rest]
        k, *grads = self._program("start", params, function, inputs)(inputs)
        return k, self._by_target(grads) if params else []

    def begin(
        self, near: Plan, far: Plan, shortest: float, w: Tensor, params: bool
    ) -> tuple[Started, list[Tensor | None]]:
        """The slope at the start, with the gradients of the targets if `params`, and the length of the first step."""
        solver, error = self.solver, self._error
        assert error is not None

        def function(clock: Tensor, w: Tensor, rtol: Tensor, atol: Tensor, *others: Tensor) -> list[Tensor]:
            wholes, rest = others[:2], others[2:]
            k1, grads = self._slope(clock[0], w, None, wholes, rest, params)

            def evaluate(t: Tensor, w: Tensor) -> Tensor:
                return self._slope(t, w, None, wholes, rest, False)[0]

            order = solver.error_order or solver.order
            return [first_length(clock, w, k1, evaluate, error, (rtol, atol), order), k1, *grads]

        clock = StartClock(w).of(near, far, shortest)
        inputs = [clock, w, *self._tolerances(w), *self._wholes(), *self._rest]
        numbers, k1, *grads = self._program("begin", (self._method, params), function, inputs)(inputs)
        return Started.read(near, far, numbers, k1), self._by_target(grads) if params else []

    def _tolerances(self, w: Tensor) -> list[Tensor]:
        if not self._allowed:
            self._allowed = tolerances(self._error, w)
        return self._allowed

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
        solver, error, sourced = self.solver, self._error, int(self._sourced)
        ends, params = int(solver.error_needs_end_slope), any(wanted)
        if self._nodes is None:
            self._nodes = self._capture.graph.program(("adjoint nodes", solver), lambda: nodes_of(solver, w))
        nodes = self._nodes

        def function(clock: Tensor, w: Tensor, k1: Tensor, *others: Tensor) -> list[Tensor]:
            (rtol, atol, b), wholes = others[:3], others[3:5]
            given, rest = others[5 : 5 + sourced], others[5 + sourced :]
            of_stages: dict[int, list[Tensor]] = {}

            def evaluate(c: float, w: Tensor, *, stage: int) -> Tensor:
                index = nodes.index(c)
                wants = wanted[stage - 1]
                k, grads = self._slope(clock[1 + index], w, given[0][index] if given else None, wholes, rest, wants)
                if wants:
                    of_stages[stage] = grads
                return k

            found = whole_step(solver, error, evaluate, clock[0], w, k1, [rtol, atol])
            if of_stages:  # a method of one stage has none of them
                found += self._sum([b[stage - 1] for stage in of_stages], list(of_stages.values()))
                if solver.error_weights is not None:
                    e = [float(solver.error_weights[stage]) for stage in of_stages]
                    samples = [self._sampled(g) for g in of_stages.values()]
                    found += [-clock[0] * x for x in self._sum(e, samples)]
                found += of_stages.get(solver.stages, [])
            return found

        clock = nodes.clock(plan)
        b = torch.tensor(weights, dtype=self._dtype, device=self._device)
        inputs = [clock, w, k1, *self._tolerances(w), b, *self._wholes(), *self._given(nodes.times(plan)), *self._rest]
        found = list(self._program("step", (self._method, wanted), function, inputs)(inputs))
        count = 2 + ends + solver.stages - 1
        evaluated = [plan.stage_time(c) for c in nodes.evaluated]
        (w1, ratio, *slopes), rest = found[:count], found[count:]
        return CompiledAdjointStep(w1, ratio, slopes, self._folded(rest) if params else None, evaluated)

    def _folded(self, rest: list[Tensor]) -> Folded:
        n = sum(self._wanted)
        parts = [self._by_target(rest[i : i + n]) for i in range(0, len(rest), n)] if n else []
        parts += [[None] * len(self._places)] * (2 - len(parts))
        return Folded(parts[0], parts[1], parts[2] if len(parts) > 2 else None)

    def integral(self, step: Step, rule: Rule, known: bool) -> tuple[Folded, list[float]]:
        """The parameter integral over an accepted step; `known` leaves out the node at its start."""
        solver, plan, sourced = self.solver, step.plan, int(self._sourced)
        matrix = solver.interpolant
        slopes = step.interpolated()
        xs = list(rule.nodes[known:])
        times = [plan.stage_time(x) for x in xs]
        weights = [-float(x) for x in rule.weights[known:]]
        gaps = [w + float(x) for w, x in zip(weights, rule.lower[known:], strict=True)]
        if self.pieces:
            return self._integral_in_pieces(step, times, weights, gaps), times
        count = len(slopes)

        def function(clock: Tensor, w: Tensor, *others: Tensor) -> list[Tensor]:
            slopes, wholes, rest = others[:count], others[count : count + 2], others[count + 2 + sourced :]
            given = others[count + 2 : count + 2 + sourced]
            of_nodes = []
            for i, x in enumerate(xs):
                place = combine(w, clock[0], sparse(weights_at(matrix, x)), slopes)
                of_nodes.append(self._slope(clock[1 + i], place, given[0][i] if given else None, wholes, rest, True)[1])
            total = [clock[0] * x for x in self._sum(weights, of_nodes)]
            differences = self._sum(gaps, [self._sampled(g) for g in of_nodes])
            return [*total, *(clock[0] * x for x in differences), *of_nodes[-1]]

        clock = torch.tensor([plan.dt, *times], dtype=self._dtype, device=self._device)
        inputs = [clock, step.y0, *slopes, *self._wholes(), *self._given(times), *self._rest]
        return self._folded(list(self._program("integral", (solver, rule, known), function, inputs)(inputs))), times

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


class CompiledAdjointEvaluator:
    """Evaluates the slope of an adjoint system by a program.

    `times` says that the slope of the field itself is needed where a stretch begins, for the gradient of its time.
    """

    def __init__(
        self,
        programs: AdjointPrograms,
        system: AdjointSystem,
        integral: ParameterIntegral,
        eager: Evaluator,
        log: EvaluationLog,
        times: bool,
    ):
        self._programs, self._system, self._integral = programs, system, integral
        self._eager, self._log = eager, log
        self._times = times

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        programs, integral = self._programs, self._integral
        if not programs.usable or (stage == 0 and self._times):
            return self._eager(t, y, stage=stage)
        now, _ = integral.wanted(stage)
        try:
            k, grads = programs.start(t, y, now)
        except NotCompiled as reason:
            programs.give_up(reason)
            return self._eager(t, y, stage=stage)
        self._log.add(t)
        self._system.count_vjps(1, int(now))
        integral.stage(stage, grads, None)
        return k


class CompiledAdjointStarter:
    """Starts an interval of an adjoint system by one program."""

    def __init__(
        self, programs: AdjointPrograms, system: AdjointSystem, integral: ParameterIntegral, log: EvaluationLog
    ):
        self._programs, self._system, self._integral, self._log = programs, system, integral, log

    def __call__(self, near: Plan, far: Plan, shortest: float, y0: Tensor) -> Begun | None:
        programs, integral = self._programs, self._integral
        if not programs.usable or not programs.begins:
            return None
        now, _ = integral.wanted(0)
        try:
            started, grads = programs.begin(near, far, shortest, y0, now)
        except NotCompiled as reason:
            programs.give_up(reason)
            return None
        self._log.add(near.stage_time(0.0), started.probed)
        self._system.count_vjps(2, int(now))
        integral.stage(0, grads, None)
        return Begun(started.slope, started.finite, started.length)


class CompiledAdjointStepper:
    """Takes a whole step of an adjoint system by one program."""

    def __init__(
        self,
        solver: Solver,
        programs: AdjointPrograms,
        system: AdjointSystem,
        integral: ParameterIntegral,
        evaluate: Evaluator,
        eager: Stepper,
        log: EvaluationLog,
    ):
        self._solver, self._programs, self._system, self._integral = solver, programs, system, integral
        self._evaluate, self._eager, self._log = evaluate, eager, log

    def __call__(self, plan: Plan, y0: Tensor, memory: Memory) -> Step:
        k1 = self._evaluate(plan.stage_time(0.0), y0, stage=0) if memory is None else memory
        programs, integral = self._programs, self._integral
        if not programs.usable or programs.pieces:
            return self._eager(plan, y0, k1)
        integral.begin(plan)
        wanted = self._wanted(plan)
        try:
            taken = programs.step(plan, y0, k1, integral.weights() if any(wanted) else (), wanted)
        except NotCompiled as reason:
            programs.give_up(reason)
            integral.abandon()
            return self._eager(plan, y0, k1)
        self._log.add(*taken.evaluated)
        self._system.count_vjps(len(taken.evaluated), sum(wanted[: len(taken.evaluated)]))
        if taken.folded is not None:
            integral.fold(taken.folded)
        return compiled_step(self._solver, plan, y0, k1, taken.y1, taken.ratio, taken.slopes, self._evaluate)

    def _wanted(self, plan: Plan) -> tuple[bool, ...]:
        """Of which later stages, the end slope included, the gradients are computed.

        A gradient too many in the last step of a solve is better than another program for it.
        """
        integral, stages = self._integral, self._solver.stages
        wanted = [integral.wanted(stage)[0] for stage in range(1, stages + 1)]
        if not any(wanted):
            return tuple(wanted)
        cut = not math.isnan(integral.end)  # where a step ends early, stages count that do not count elsewhere
        return *(each or cut for each in wanted[:-1]), wanted[-1] or not plan.crosses_jump

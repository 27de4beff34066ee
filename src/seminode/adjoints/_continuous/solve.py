"""The backward pass of a continuous adjoint: the adjoint equation, solved from the last output to the first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ... import norms
from ..._error_norm import ErrorNorm
from ..._field.pytree import Layout, is_finite, real_dtype
from ..._stepping.beginning import begin_at_once, select_first_step
from ..._stepping.engine import EagerStepper, Engine, EvaluationLog, Starter, announced, eager_engine
from ..._stepping.loop import integrate
from ..._stepping.observers import Counter, Observer, Recorder
from ..._stepping.outputs import AtTimes, Sampler
from ..._stepping.schedule import Schedule
from ...controllers import Controller
from ...errors import NonFiniteState, SolveError
from ...norms import Norm
from ...solvers.base import Solver
from ...solvers.explicit import ExplicitRungeKutta
from .._autograd import BackwardRequest, Gradients, agreed_sizes, check_cotangents, check_samples
from .._drift import DRIFT, warn_of_drift
from .compiled import CompiledAdjointEvaluator, CompiledAdjointStarter, CompiledAdjointStepper
from .dense_state import DenseState
from .evaluator import AdjointEvaluator, AdjointStepper, IntegrandEvaluator
from .parameter_integral import ParameterIntegral
from .programs import AdjointPrograms
from .system import AdjointSystem, Reduction

#: Only a cotangent that enlarges a_z by more than this calls for a new first step.
GROWTH = 10.0


class Stop(NamedTuple):
    """An output time with a cotangent, and the outputs there."""

    t: float
    rows: list[int]


class Method(NamedTuple):
    """How the adjoint equation is solved."""

    name: str  # of the adjoint
    solver: Solver
    controller: Controller
    rtol: float | Tensor
    atol: float | Tensor
    norm: Norm
    fresh: bool  # every output time is a new beginning, as published
    integrals_in_state: bool  # a_θ and a_t are part of the solver's state
    max_steps: int
    every_stop: bool = False  # outputs without a cotangent are stops too
    time_in_state: bool = False  # a_t is part of the solver's state even if nobody asks for it
    observers: tuple[Observer, ...] = ()  # of the user
    check_drift: bool = True
    in_rows: bool = False  # entries of a_z are measured by the size of their sample too


class IntegralContext(NamedTuple):
    """The objects from which a parameter integral is computed."""

    system: AdjointSystem
    solver: Solver
    evaluate: IntegrandEvaluator
    programs: AdjointPrograms | None  # where steps are compiled
    rtol: float
    atol: float
    eps: float  # the rounding error of the field


class BackwardSolve:
    """One backward pass of a continuous adjoint."""

    def __init__(
        self,
        request: BackwardRequest,
        method: Method,
        dense_state: Callable[[BackwardRequest, Engine], DenseState | None],
        integral: Callable[[IntegralContext], ParameterIntegral],
    ):
        self.request, self.method = request, method
        self.forward = forward = request.forward
        self.problem = problem = forward.problem
        self.y0, self.ts = request.tensors[:2]
        self.needs = request.needs
        self.ys = request.kept[-1]
        self.order = method.solver.error_order or method.solver.order
        self.counter = Counter()
        self.recorder = None if forward.recorder is None else Recorder(method.controller.adaptive)
        self.log = EvaluationLog(self.counter, None if self.recorder is None else self.recorder.evaluations)
        self.proposal: float | None = None
        self.time = torch.zeros(len(self.ts), dtype=real_dtype(self.y0), device=self.y0.device)
        self.warned = False
        args = request.tensors[2 : 2 + len(request.inputs.args)]
        self.field, self.targets = request.inputs.independent(args, self.needs[2:])
        layout = self.field.layout
        self.reduction = Reduction(layout, problem.integrals or [False] * len(layout.names))
        steps = eager_engine(self.field, problem.solver, self.y0, forward.determinism, self.log)
        self.dense = dense_state(request, steps)
        computed = [x for x in request.inputs.params if not x.is_leaf] if problem.params is None else None
        self.system = AdjointSystem(
            self.field,
            self.reduction,
            self.targets,
            forward.determinism,
            self.counter,
            source=self.dense,
            source_slope=self.dense.slope if self.dense is not None and problem.solver.implicit else None,
            integrals_in_state=method.integrals_in_state,
            with_time=method.time_in_state or (self.needs[1] and method.integrals_in_state),
            computed=computed,
        )
        #: Of the state of the solver.
        self.layout = self.system.layout(self.y0)
        self.error = self._error_norm() if method.controller.adaptive else None
        self.programs = self._find_programs()
        rtol, atol = (float(x.min()) if isinstance(x, Tensor) else x for x in (method.rtol, method.atol))
        evaluate = IntegrandEvaluator(self.system, self.log, self.y0)
        self.integral = integral(
            IntegralContext(self.system, method.solver, evaluate, self.programs, rtol, atol, self.field.eps)
        )
        self.engine = self._engine()
        self.a_t = self.y0.new_zeros((), dtype=real_dtype(self.y0))

    @cached_property
    def drift(self) -> ErrorNorm:
        """The norm in which z and a_z are compared at output times."""
        method, problem = self.method, self.problem
        # Fixed steps have no tolerance to measure with: a hundredth is too much then.
        allowed = (_number(method.rtol), _number(method.atol)) if method.controller.adaptive else (1e-4, 1e-4)
        norm = norms.over_ranks(norms.mixed_per_tensor, problem.ranks)
        return ErrorNorm(self.field.layout, norm, *allowed, self.y0)

    def run(self) -> Gradients:
        grad_ys = self.request.cotangents[0]
        rows = agreed_sizes(grad_ys, self.problem.ranks)
        if grad_ys is None or not any(rows):
            return self._nothing(grad_ys)
        if self.problem.throw:
            check_cotangents(rows, self.forward.output_times, "output", self.counter.stats)
        # The adjoint is linear: scaled to order one, the scale of a loss does not change the steps.
        self.scale = 1.0 if self.method.fresh else max(rows)
        self.grads = grad_ys / self.scale
        if self.request.samples:
            check_samples(self.request, self.counter)
        try:
            adj = self._solve(list(self._stops(rows)))
        except SolveError as error:
            if error.stats is None:  # else of a solve inside the field
                error.stats, error.backward = self.counter.stats(), True
            raise
        return self._finish(adj)

    def _nothing(self, grad_ys: Tensor | None) -> Gradients:
        self._report()
        if grad_ys is None:
            return [None] * len(self.needs)
        zeros = [torch.zeros_like(x) if need else None for x, need in zip((self.y0, self.ts), self.needs, strict=False)]
        return [*zeros, *[None] * (len(self.needs) - 2)]

    def _find_programs(self) -> AdjointPrograms | None:
        """The programs of the adjoint equation, where the forward steps were compiled and these can be."""
        capture, solver, system = self.forward.capture, self.method.solver, self.system
        if capture is None or not isinstance(solver, ExplicitRungeKutta) or system.with_time:
            return None
        keys, wanted = self.request.inputs.wanted(capture, self.needs[2:])
        return AdjointPrograms(capture, system, solver, self.error, keys, wanted, self.y0)

    def _engine(self) -> Engine:
        """What takes the steps: compiled where there are programs, with eager steps to fall back to."""
        solver, system, integral, log = self.method.solver, self.system, self.integral, self.log
        evaluate = eager = AdjointEvaluator(system, integral, log)
        start: Starter | None = None
        if self.programs is not None:
            evaluate = CompiledAdjointEvaluator(self.programs, system, integral, eager, log, self.needs[1])
        eager_step = EagerStepper(solver, evaluate, self.error is not None, norm=self.error)
        step = AdjointStepper(solver, evaluate, eager_step, integral)
        if self.programs is not None:
            step = CompiledAdjointStepper(solver, self.programs, system, integral, evaluate, step, log)
            if not self.needs[1]:  # for the gradients of times, f is needed at the start
                start = CompiledAdjointStarter(self.programs, system, integral, log)
        engine = Engine(solver, self.layout, self.counter, evaluate, step, start=start)
        return announced(engine, self.method.observers)

    def _error_norm(self) -> ErrorNorm:
        layout = self.layout
        like = self.y0.new_empty(sum(shape.numel() for shape in layout.shapes))
        tolerances = []
        for value in map(_number, (self.method.rtol, self.method.atol)):
            if isinstance(value, Tensor):
                own = self.reduction.reduce(value.expand(self.y0.shape))
                front = [own.min().reshape(1)] if self.system.with_time else []
                rest = like.numel() - 2 * own.numel() - len(front)
                value = torch.cat([*front, own, own, own.min().expand(rest)])
            tolerances.append(value)
        norm = norms.over_ranks(self.method.norm, self.problem.ranks)
        in_rows = self._in_rows(layout) if self.method.in_rows else ()
        return ErrorNorm(layout, norm, tolerances[0], tolerances[1], like, in_rows)

    def _in_rows(self, layout: Layout) -> tuple[bool, ...]:
        """Which segments have samples and channels: those of a_z.

        What follows from a_z, the gradients, are sums over channels: an entry that is small among the others of its
        sample need not be known to as many digits as they are.
        """
        return tuple(name.startswith("a_z") and len(x) > 1 for name, x in zip(layout.names, layout.shapes, strict=True))

    def _stops(self, rows: Sequence[float]) -> Iterator[Stop]:
        """Output times with a cotangent, the last first. The value at the start is y0 itself: no stop."""
        begin = 0 if self.problem.save == "last" else 1
        times = self.forward.output_times
        stop: Stop | None = None
        for row in range(len(times) - 1, begin - 1, -1):
            if not rows[row] and (stop is None or not self.method.every_stop):
                continue
            if stop is not None and stop.t == times[row]:
                stop.rows.append(row)
                continue
            if stop is not None:
                yield stop
            stop = Stop(times[row], [row])
        if stop is not None:
            yield stop

    def _solve(self, stops: list[Stop]) -> Tensor:
        """a_z at the start, the cotangent of the output there included."""
        t0 = self.problem.times[0]
        adj: Tensor | None = None
        for stop, following in itertools.pairwise([*stops, Stop(t0, [])]):
            z = self.ys[stop.rows[0]]
            cotangent = self.grads[stop.rows].sum(0)
            renew = adj is None or self._outgrown(adj, adj + cotangent)
            adj = cotangent if adj is None else adj + cotangent
            if stop.t == t0:
                break
            z, adj = self._interval(stop, following.t, z, adj, renew)
            reference = self.ys[following.rows[0]] if following.rows else self.y0
            self._check_drift(z, reference, following.t)
        if self.needs[1] and adj is not None:
            self._time_at_start(adj, [stop for stop in stops if stop.t == t0])
        if self.problem.save != "last":
            adj = self.grads[0] if adj is None else adj + self.grads[0]
        assert adj is not None
        return adj

    def _outgrown(self, before: Tensor, after: Tensor) -> bool:
        """Whether a_z has grown so much that the steps taken so far say nothing about those to come."""
        if self.method.fresh or self.error is None:
            return self.method.fresh
        # Of the leaves that are solved for; nothing as large as the parameters is touched.
        parts = [self.reduction.restore(self.reduction.reduce(a), torch.zeros_like(a)) for a in (before, after)]
        sizes = [self.drift.size(a, a) for a in parts]
        return sizes[1] > GROWTH * sizes[0]

    def _totals(self) -> Sequence[Tensor | None]:
        return self.integral.total.values

    def _interval(self, stop: Stop, end: float, z: Tensor, a: Tensor, renew: bool) -> tuple[Tensor, Tensor]:
        """Solve from one stop to the next time; z and a_z as they were solved for there."""
        method, engine = self.method, self.engine
        w = self.system.pack(z, a, self.a_t, self._totals())
        times, places = (stop.t, end), () if self.dense is None else self.dense.places
        overshoots = method.fresh and method.controller.adaptive
        schedule = Schedule(
            method.controller, self.order, times, self.problem.jumps, real_dtype(z), not overshoots, places
        )
        memory = method.solver.start(w)
        proposal = self._first_step(stop.t) if renew else self.proposal
        if proposal is not None and method.controller.adaptive:
            schedule.begin(proposal)
        k1 = begin_at_once(engine, schedule, w, self.layout, stop.t, check=False)
        if k1 is None:
            k1 = engine.start_slope(schedule.plan(1.0), w, memory)
        if self.needs[1]:
            w = self._time_at(stop, w)
        if schedule.unset:
            assert self.error is not None
            select_first_step(engine, schedule, w, k1, self.error, self.order)
        observers: list[Observer] = [self.counter, self.integral]
        observers += [*method.observers, *([] if self.recorder is None else [self.recorder])]
        sampler = Sampler(AtTimes(times), [w]) if overshoots else None
        if sampler is not None:
            self.integral.end = end
            observers.append(sampler)
        memory = method.solver.with_slope(memory, k1)
        limits = {"error": self.error, "max_steps": method.max_steps, "check": method.controller.check}
        w, _ = integrate(engine, schedule, w, observers, memory=memory, ranks=self.problem.ranks, **limits)
        if sampler is not None:
            w = sampler.stacked(w)[-1]
        self.proposal = schedule.carried
        a_t, sums = self.system.integrals(w)
        self.a_t = self.a_t if a_t is None else a_t
        if self.system.integrals_in_state:
            self.integral.total.values = sums
        return self.system.split(w, self.system.z, self.system.a)

    def _first_step(self, t: float) -> float | None:
        """The forward solve knows how fast things change at a time, if it was kept; otherwise probe."""
        controller = self.method.controller
        if self.dense is None or not controller.adaptive or controller.first()[0] is not None:
            return None
        return self.dense.first_step(t)

    def _time_at(self, stop: Stop, w: Tensor) -> Tensor:
        """∂L/∂tᵢ = gᵢᵀf(tᵢ, zᵢ); the published method lets a_t, which then steers, take it up."""
        assert self.system.f is not None
        for row in stop.rows:
            found = torch.vdot(self.grads[row].reshape(-1), self.system.f.reshape(-1)).real
            index = self._moves_with(row)
            if index is not None:
                self.time[index] += found
            if self.system.with_time:
                w = torch.cat([w[:1] - found, w[1:]])
        return w

    def _time_at_start(self, adj: Tensor, stops: Sequence[Stop]) -> None:
        """∂L/∂t₀ = −a_z(t₀)ᵀf(t₀, y₀), which holds with jumps too, and needs no integral."""
        forward, solver = self.forward, self.problem.solver
        engine = eager_engine(self.field, solver, self.y0, forward.determinism, self.log)
        f = engine.start_slope(forward.start_plan, self.y0, solver.start(self.y0)).reshape(-1)
        self.time[0] -= torch.vdot(adj.reshape(-1), f).real
        for row in (row for stop in stops for row in stop.rows):
            index = self._moves_with(row)
            if index is not None:
                self.time[index] += torch.vdot(self.grads[row].reshape(-1), f).real

    def _moves_with(self, row: int) -> int | None:
        """The index of the time in `ts` with which an output's time moves."""
        if self.problem.save == "ts":
            return row
        if self.problem.save == "last":
            return len(self.ts) - 1
        plan = self.forward.plans[row - 1]
        return len(self.ts) - 1 if plan.final else 0 if plan.end_floats else None

    def _check_drift(self, z: Tensor, reference: Tensor, t: float) -> None:
        if self.system.source is not None or self.warned or not self.method.check_drift:
            return
        # Of the leaves that were solved for.
        z = self.reduction.restore(self.reduction.reduce(z), reference)
        drift = self.drift.size(z - reference, reference)
        if not drift <= DRIFT:
            self.warned = True
            warn_of_drift(self.method.name, drift, t)

    def _report(self, vjp_y: int = 0, vjp_params: int = 0, params_error: float | None = None) -> None:
        report = self.forward.report
        report.stats = self.counter.stats(vjp_y, vjp_params, params_error)
        if self.recorder is not None:
            report.record = self.recorder.record()

    def _finish(self, adj: Tensor) -> Gradients:
        totals = self._totals()
        if self.problem.throw:
            of_params = all(is_finite(x) for x in totals if x is not None)
            finite = self.problem.ranks.all(is_finite(adj), of_params)
            for what, good in zip(("the state", "a parameter or argument"), finite, strict=True):
                if not good:
                    raise NonFiniteState(
                        f"the gradient with respect to {what} became NaN or infinite",
                        t=self.problem.times[0],
                        stats=self.counter.stats(),
                        backward=True,
                    )
        self._report(self.system.vjp_y, self.system.vjp_params, self.integral.error)
        scaled = [None if x is None else x.mul_(self.scale) for x in totals]  # in place: they are large
        time = self.time * self.scale if self.needs[1] else None
        return self.request.inputs.gradients(self.request, adj * self.scale, time, scaled)


def _number(value: float | Tensor) -> float | Tensor:
    """A tolerance as a number, unless it differs from leaf to leaf."""
    return float(value) if isinstance(value, Tensor) and value.ndim == 0 else value

"""The backward pass of a continuous adjoint: the adjoint equation, solved from the last output to the first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import norms
from ..._field.capture import check_captures
from ..._field.pytree import is_finite, real_dtype
from ..._stepping.engine import Eager
from ..._stepping.loop import integrate, select_first_step
from ..._stepping.observers import AtTimes, Observer, Recorder, Sampler, Tally
from ..._stepping.schedule import Pace
from ...errors import DriftWarning, NonFiniteState, SolveError, warn
from ...norms import ErrorNorm
from ...solvers import ExplicitRungeKutta
from .._autograd import Asked, Gradients
from .._discrete.step_vjp import check_cotangents, row_sizes
from .compiled import AdjointPrograms, FusedAdjoint
from .system import AdjointEngine, AdjointSystem, Reduction

if TYPE_CHECKING:
    from .strategy import ContinuousAdjoint

#: A recovered state this many tolerances away from the stored one is worth a warning.
DRIFT = 100.0
#: Only a cotangent that enlarges a_z by more than this calls for a new first step.
GROWTH = 10.0


class Stop(NamedTuple):
    """An output time with a cotangent, and the outputs there."""

    t: float
    rows: list[int]


class BackwardSolve:
    """One backward pass of a continuous adjoint."""

    def __init__(self, adjoint: ContinuousAdjoint, asked: Asked):
        self.adjoint = adjoint
        self.call = call = asked.call
        self.problem = call.forward.problem
        self.y0, self.ts = asked.inputs[:2]
        self.args = asked.inputs[2 : 2 + call.n_args]
        self.needs = asked.needs
        self.cotangents = asked.grads[0]
        self.ys, self.kept = asked.kept[-1], asked.kept[:-1]
        self.solver, self.controller = adjoint.method(self.problem)
        self.order = self.solver.error_order or self.solver.order
        self.tally = Tally()
        adaptive = self.controller.adaptive
        self.recorder = None if call.backward_record is None else Recorder(adaptive)
        self.max_steps = adjoint.max_steps or self.problem.max_steps
        self.proposal: float | None = None
        self.time = torch.zeros(len(self.ts), dtype=real_dtype(self.y0), device=self.y0.device)
        self.warned = False

    def run(self) -> Gradients:
        grad_ys = self.cotangents
        rows = row_sizes(grad_ys)
        if grad_ys is None or not any(rows):
            return self._nothing(grad_ys)
        if self.problem.throw:
            check_cotangents(rows, self.call.output_times, "output", self.tally.stats)
        # The adjoint is linear: at order one the scale of a loss decides no step.
        self.scale = 1.0 if self.adjoint.fresh else max(rows)
        self.grads = grad_ys / self.scale
        self._prepare()
        try:
            adj = self._solve(list(self._stops(rows)))
        except SolveError as error:
            if error.stats is None:  # else of a solve inside the field
                error.stats, error.backward = self.tally.stats(), True
            raise
        return self._finish(adj)

    def _nothing(self, grad_ys: Tensor | None) -> Gradients:
        self._report()
        if grad_ys is None:
            return [None] * len(self.needs)
        zeros = [torch.zeros_like(x) if need else None for x, need in zip((self.y0, self.ts), self.needs, strict=False)]
        return [*zeros, *[None] * (len(self.needs) - 2)]

    def _prepare(self) -> None:
        """The adjoint system, its engine, its error norm."""
        problem, adjoint, flags = self.problem, self.adjoint, self.needs[2:]
        field, args, params = self.call.independent(self.args, flags[: len(self.args)])
        self.field = field
        self.targets = [x for x, need in zip([*args, *params], flags, strict=True) if need]
        self.reduction = Reduction(field.layout, problem.integrals or [False] * len(field.layout.names))
        source = adjoint.source(self, self.kept)
        self.system = AdjointSystem(
            field,
            self.reduction,
            self.targets,
            source=source,
            integrals_in_state=adjoint.integrals_in_state,
            with_time=self.needs[1],
            audit=self._audit,
        )
        self.watch = adjoint.watch(self)
        self.engine = self._engine(flags)
        self.watch.engine = self.engine
        self.places = tuple(adjoint.places(source))
        rtol, atol = adjoint.tolerances(problem)
        # Fixed steps have no tolerance to measure with: one in a hundred is too much then.
        allowed = (_number(rtol), _number(atol)) if self.controller.adaptive else (1e-4, 1e-4)
        self.drift = ErrorNorm(field.layout, norms.mixed_per_tensor, *allowed, self.y0)
        self.a_t = self.y0.new_zeros((), dtype=real_dtype(self.y0))

    def _engine(self, flags: Sequence[bool]) -> AdjointEngine:
        """What takes the steps: compiled, where the forward ones were."""
        forward, system = self.call.forward, self.system
        self.error = self._error_norm(*self.adjoint.tolerances(self.problem)) if self.controller.adaptive else None
        log = None if self.recorder is None else self.recorder.evaluations
        given = system, self.watch, self.solver, self.y0, forward.purity, self.tally, log
        if forward.capture is None or not isinstance(self.solver, ExplicitRungeKutta) or system.with_time:
            return AdjointEngine(*given)
        keys, wanted = self.call.wanted(flags)
        programs = AdjointPrograms(forward.capture, system, self.solver, self.error, keys, wanted, self.y0)
        self.watch.compiled = programs
        return FusedAdjoint(*given, programs=programs, times=self.needs[1])

    def _error_norm(self, rtol: float | Tensor, atol: float | Tensor) -> ErrorNorm:
        layout = self.system.layout(self.y0)
        like = self.y0.new_empty(sum(shape.numel() for shape in layout.shapes))
        tolerances = []
        for value in map(_number, (rtol, atol)):
            if isinstance(value, Tensor):
                own = self.reduction.reduce(value.expand(self.y0.shape))
                front = [own.min().reshape(1)] if self.system.with_time else []
                rest = like.numel() - 2 * own.numel() - len(front)
                value = torch.cat([*front, own, own, own.min().expand(rest)])
            tolerances.append(value)
        return ErrorNorm(layout, self.adjoint.backward_norm, tolerances[0], tolerances[1], like)

    def _audit(self, values: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        if self.problem.params is None:
            check_captures(values, known, [x for x in self.call.params if not x.is_leaf])

    def _stops(self, rows: Sequence[float]) -> Iterator[Stop]:
        """Output times with a cotangent, the last first. The value at the start is y0 itself: no stop."""
        begin = 0 if self.problem.save == "last" else 1
        times = self.call.output_times
        stop: Stop | None = None
        for row in range(len(times) - 1, begin - 1, -1):
            if not rows[row]:
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
        if self.adjoint.fresh or self.error is None:
            return self.adjoint.fresh
        # Of the leaves that are solved for; nothing as large as the parameters is touched.
        parts = [self.reduction.restore(self.reduction.reduce(a), torch.zeros_like(a)) for a in (before, after)]
        sizes = [self.drift.size(a, a) for a in parts]
        return sizes[1] > GROWTH * sizes[0]

    def _totals(self) -> Sequence[Tensor | None]:
        return self.watch.total.values

    def _interval(self, stop: Stop, end: float, z: Tensor, a: Tensor, renew: bool) -> tuple[Tensor, Tensor]:
        """Solve from one stop to the next time; z and a_z there."""
        fresh = self.adjoint.fresh
        w = self.system.pack(z, a, self.a_t, self._totals())
        times = (stop.t, end)
        controller = self.controller
        pace = Pace(controller, self.order, times, self.problem.jumps, real_dtype(z), not fresh, self.places)
        k1 = self.engine.start_slope(pace.plan(1.0), w)
        if self.needs[1]:
            w = self._time_at(stop, w)
        proposal = self.adjoint.first_step(self, stop.t) if renew else self.proposal
        if proposal is not None and controller.adaptive:
            pace.begin(proposal)
        if pace.unset:
            assert self.error is not None
            select_first_step(self.engine, pace, w, k1, self.error, self.order)
        observers: list[Observer] = [self.tally, self.watch]
        observers += [] if self.recorder is None else [self.recorder]
        sampler = Sampler(AtTimes(times), [w])
        if fresh:
            self.watch.end = end
            observers.append(sampler)
        w = integrate(self.engine, pace, w, observers, k1=k1, error=self.error, max_steps=self.max_steps)
        if fresh:
            w = sampler.stacked(w)[-1]
        self.proposal = pace.carried
        a_t, sums = self.system.integrals(w)
        self.a_t = self.a_t if a_t is None else a_t
        if self.system.integrals_in_state:
            self.watch.total.values = sums
        return self.system.unpack(w, end)

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
        forward = self.call.forward
        log = None if self.recorder is None else self.recorder.evaluations
        engine = Eager(self.field, self.problem.solver, self.y0, forward.purity, self.tally, None, log)
        f = engine.start_slope(forward.start(), engine.lift(self.y0)).reshape(-1)
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
        plan = self.call.forward.plans[row - 1]
        return len(self.ts) - 1 if plan.final else 0 if plan.end_floats else None

    def _check_drift(self, z: Tensor, reference: Tensor, t: float) -> None:
        if self.system.source is not None or self.warned:
            return
        # Of the leaves that were solved for.
        z = self.reduction.restore(self.reduction.reduce(z), reference)
        drift = self.drift.size(z - reference, reference)
        if not drift <= DRIFT:
            self.warned = True
            warn_of_drift(self.adjoint.name, drift, t)

    def _report(self, vjp_y: int = 0, vjp_params: int = 0, params_error: float | None = None) -> None:
        self.call.backward_stats[:] = [self.tally.stats(vjp_y, vjp_params, params_error)]
        if self.call.backward_record is not None and self.recorder is not None:
            self.call.backward_record[:] = [self.recorder.record()]

    def _finish(self, adj: Tensor) -> Gradients:
        totals = self._totals()
        if self.problem.throw:
            for what, x in (("the state", adj), *(("a parameter or argument", x) for x in totals if x is not None)):
                if not is_finite(x):
                    raise NonFiniteState(
                        f"the gradient with respect to {what} became NaN or infinite",
                        t=self.problem.times[0],
                        stats=self.tally.stats(),
                        backward=True,
                    )
        self._report(self.system.vjp_y, self.system.vjp_params, self.watch.params_error)
        scaled = [None if x is None else x.mul_(self.scale) for x in totals]  # ours, and large
        time = self.time * self.scale if self.needs[1] else None
        return self.call.gradients(self.needs, self.ts, self.args, adj * self.scale, time, scaled)


def warn_of_drift(name: str, drift: float, t: float) -> None:
    warn(
        f"{name}: the state recovered at t = {t:g} on the way back is {drift:.3g} tolerances away from the one that "
        "was there on the way forth, so the gradient is not to be trusted. Solving backwards is unstable where the "
        "solution contracts: use sn.Replay() or sn.Interpolating(), or tighter tolerances or smaller steps.",
        DriftWarning,
    )


def _number(value: float | Tensor) -> float | Tensor:
    """A tolerance as a number, unless it differs from leaf to leaf."""
    return float(value) if isinstance(value, Tensor) and value.ndim == 0 else value

"""What `solve` expects of an adjoint, and the forward pass that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._compile.engine import Fused, captured
from .._compile.graph import Capture
from .._field.determinism import Purity
from .._field.field import Field
from .._field.pytree import is_finite, real_dtype
from .._integrals.auto_norm import Recheck
from .._stepping.engine import Eager, Shifts
from .._stepping.loop import check_start, integrate, select_first_step
from .._stepping.observers import (
    AtTimes,
    EveryStep,
    LastOnly,
    Observer,
    Outputs,
    PolynomialTape,
    Progress,
    Recorder,
    Sampler,
    Tally,
    Tape,
)
from .._stepping.problem import Forward, Plan, Problem
from .._stepping.schedule import Pace, RecordedPace
from ..errors import NonFiniteState, SolveError


class Adjoint(ABC):
    """A way to differentiate a solve. It runs the forward pass and makes its result differentiable."""

    @abstractmethod
    def run(self, problem: Problem) -> Forward: ...


def transforms_active() -> bool:
    """Whether we are inside a torch.func transform, where tensors have no values to look at."""
    return torch._C._are_functorch_transforms_active()


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation is going on with respect to this tensor."""
    return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def outputs_of(problem: Problem) -> tuple[Outputs, list[Tensor]]:
    """What the problem wants saved, and which outputs are there before the first step."""
    times, y0 = problem.times, problem.y0
    if times[0] == times[-1]:
        return LastOnly(), [y0] * (len(times) if problem.save == "ts" else 1)
    if problem.save == "ts":
        return AtTimes(times), [y0]
    return (LastOnly(), []) if problem.save == "last" else (EveryStep(), [y0])


@dataclass
class ForwardPass:
    """One forward pass over a problem: everything that lives as long as it does."""

    problem: Problem
    purity: Purity
    tape: Tape | None = None  # what is kept for the way back
    tally: Tally = field(init=False, default_factory=Tally)
    recorder: Recorder | None = field(init=False)
    ranges: list[tuple[int, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.problem.error is not None) if self.problem.record else None
        if self.tape is None:
            self.keep_nothing()

    def keep_nothing(self) -> None:
        """There will be no backward pass: a long solve keeps no list of its steps unless the outputs need it."""
        self.tape = Tape() if self.problem.dense or self.problem.save == "steps" else None

    @property
    def plans(self) -> list[Plan]:
        """The steps that were taken, if they are kept."""
        return [] if self.tape is None else self.tape.plans

    @property
    def log(self) -> list[float] | None:
        """Where the times of evaluations are written down, if they are."""
        return None if self.recorder is None else self.recorder.evaluations

    def engine(self, field: Field | None = None, shifts: Shifts | None = None) -> Eager:
        """What takes the steps: compiled, where that was asked for and is possible."""
        problem = self.problem
        if problem.compile and field is None and shifts is None:
            return self.fused(self.tally, self.log)
        field = problem.field if field is None else field
        return Eager(field, problem.solver, problem.y0, self.purity, self.tally, shifts, self.log)

    def fused(self, tally: Tally, log: list[float] | None, kind: type[Fused] = Fused, **options: Any) -> Fused:
        """An engine that takes compiled steps."""
        problem = self.problem
        given = problem.field, problem.solver, problem.y0, self.purity, tally, log, self.capture, problem.error
        return kind(*given, **options)

    @cached_property
    def capture(self) -> Capture | None:
        """The field as a graph, where the solve is to be compiled and can be."""
        problem = self.problem
        if not problem.compile or problem.times[0] == problem.times[-1]:
            return None
        return captured(problem, self.start().stage_time(0.0), self.purity)

    def run(
        self,
        engine: Eager,
        y0: Tensor,
        *,
        shifts: Shifts | None = None,
        k1: Tensor | None = None,
        plans: Sequence[Plan] | None = None,
    ) -> Forward:
        """Integrate; with `plans`, along steps taken before. A k1 that the caller knows is not evaluated again."""
        problem = self.problem
        outputs, first = outputs_of(problem)
        sampler = Sampler(outputs, [y0] * len(first), shifts)
        dense = PolynomialTape() if problem.dense else None
        observers: list[Observer] = [self.tally, sampler]
        observers += [o for o in (self.tape, dense, self.recorder) if o is not None]
        if problem.progress:
            observers.append(Progress(problem.times))
        if problem.reader is not None and any(problem.integrals):
            observers.append(Recheck(problem))
        error = None
        try:
            with self.purity.solving():
                self._integrate(engine, y0, observers, k1, plans)
        except SolveError as found:
            if found.stats is not None:
                raise  # of a solve inside the field
            found.stats = self.tally.stats()
            if problem.throw:
                raise
            error = found.with_traceback(None)  # which would hold on to every tensor of every frame
        finally:
            self.purity.restore_buffers()
            for observer in observers:
                observer.close()
        self.ranges = sampler.ranges
        return Forward(
            ts=self._output_times(sampler.count),
            ys=sampler.stacked(y0),
            stats=self.tally.stats(),
            error=error,
            record=None if self.recorder is None else self.recorder.record(),
            plans=self.plans,
            coefficients=None if dense is None else dense.stacked(y0),
        )

    def _integrate(
        self,
        engine: Eager,
        y0: Tensor,
        observers: list[Observer],
        k1: Tensor | None,
        plans: Sequence[Plan] | None,
    ) -> None:
        problem = self.problem
        check = not transforms_active()
        start = engine.lift(y0)
        if problem.times[0] == problem.times[-1]:
            if check:
                check_start(y0, None, problem.field.layout, problem.times[0])
            return
        if plans is not None:
            # The same solve once more, not a new one: nothing is inspected or drawn afresh.
            integrate(engine, RecordedPace(plans), start, observers, check=False)
            return
        pace = self._pace()
        if k1 is None:
            k1 = engine.first_slope(pace.plan(1.0), start)
        if check:
            check_start(y0, k1, problem.field.layout, problem.times[0])
        if pace.unset:
            assert problem.error is not None
            select_first_step(engine, pace, y0, k1, problem.error, self._order)
        end = integrate(
            engine,
            pace,
            start,
            observers,
            k1=k1,
            error=problem.error,
            max_steps=problem.max_steps,
            check=check,
        )
        if check and not is_finite(end):
            # Reached only where the norm does not read the leaf that went wrong.
            leaf = problem.field.layout.culprit((end[0] if problem.solver.paired else end).detach())
            t1 = problem.times[-1]
            raise NonFiniteState(
                f"the solution at t = {t1:g} holds a NaN or an infinity (leaf {leaf})", t=t1, leaf=leaf
            )

    @property
    def _order(self) -> int:
        return self.problem.solver.error_order or self.problem.solver.order

    def _pace(self) -> Pace:
        problem, y0 = self.problem, self.problem.y0
        return Pace(problem.controller, self._order, problem.times, problem.jumps, real_dtype(y0))

    def start(self) -> Plan:
        """Some plan that starts where the solve does: the first evaluation needs its time."""
        return self._pace().plan(1.0)

    def _output_times(self, count: int) -> Tensor:
        problem = self.problem
        if problem.save == "ts":
            return problem.ts[:count]
        if problem.save == "last":
            return problem.ts[-1:][:count]
        steps = [problem.times[0], *(plan.t1 for plan in self.plans)]
        return torch.tensor(steps, dtype=problem.ts.dtype, device=problem.ts.device)

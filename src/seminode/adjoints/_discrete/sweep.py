"""The backward pass of a replayed solve, and its derivative."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..._compile.engine import warn_of
from ..._compile.graph import NotCompiled
from ..._compile.programs import no_sums, pull_program
from ..._field.capture import check_captures
from ..._field.field import Field
from ..._field.pytree import is_finite
from ..._stepping.engine import Eager, TimeShifts
from ..._stepping.loop import integrate
from ..._stepping.observers import Observer, Tally
from ..._stepping.problem import Plan, Problem, Record
from ..._stepping.schedule import RecordedPace
from ...errors import NonFiniteState
from .._autograd import Asked, Gradients, leaf_of
from .._continuous.parameter_integral import Sums
from ..base import ForwardPass, outputs_of
from .step_vjp import StepShifts, TimeGradient, check_cotangents, pull_back, row_sizes, spread


class States(ABC):
    """Where the state before each step comes from, on the way back. Asked with falling j."""

    @abstractmethod
    def before(self, j: int, sweep: Sweep) -> Tensor:
        """What the solver carried before step j."""

    def pull_back(self, j: int, sweep: Sweep, adj: Tensor) -> tuple[Tensor, list[Tensor | None]] | None:
        """Pull back through step j, which holds no output, in a way of its own; `None` if there is none."""
        return None

    def finish(self, sweep: Sweep) -> None:  # noqa: B027
        """The first step has been reached."""


class SparseStates(States):
    """Every k-th state was kept; those between are computed again, a segment at a time."""

    def __init__(self, kept: Sequence[Tensor], every: int):
        self._kept = kept
        self._every = every
        self._segment: list[Tensor] = []

    def before(self, j: int, sweep: Sweep) -> Tensor:
        index, offset = divmod(j, self._every)
        if len(self._segment) != offset + 1:
            self._segment = sweep.states_between(index * self._every, j, self._kept[index])
        return self._segment.pop()


class Sweep:
    """The backward pass of a replayed solve."""

    def __init__(self, asked: Asked, states: States):
        self.call = call = asked.call
        self.states = states
        self.plans = call.forward.plans
        self.problem: Problem = call.forward.problem
        self.y0, self.ts = asked.inputs[:2]
        self.args = asked.inputs[2 : 2 + call.n_args]
        self.needs = asked.needs
        self.grads = asked.grads
        self.tally = Tally()
        self.evaluations: list[float] | None = None if call.backward_record is None else []
        self.taken: list[Plan] = []
        self.pulled = 0  # evaluations that were pulled back; with every > 1 others are made, to get there

    def run(self) -> Gradients:
        """Step by step, from the end to the start."""
        grad_ys, grad_coefficients = self.grads
        if grad_ys is None and grad_coefficients is None:
            return [None] * len(self.needs)
        self._prepare_compiled()
        self.sums = Sums(sum(self.needs[2:]))
        self.time = TimeGradient(self.ts, self.y0) if self.needs[1] else None
        self.outputs, first = outputs_of(self.problem)
        self.rows = row_sizes(grad_ys), row_sizes(grad_coefficients)
        self._check_cotangents()
        adj: Tensor | None = None
        for j in range(len(self.plans) - 1, -1, -1):
            if adj is not None or self._holds_cotangent(j):
                adj = self._step(j, adj)
        self.states.finish(self)
        if self.capture is not None:
            self.sums.absorb(Sums.of(self.by_target(self.compiled)))
        if adj is not None and self.problem.solver.paired:
            adj = adj.sum(0)  # both copies began as y0
        if grad_ys is not None and first and (adj is None or any(self.rows[0][: len(first)])):
            direct = grad_ys[: len(first)].sum(0)
            adj = direct if adj is None else adj + direct
        if grad_coefficients is not None and not self.plans:
            direct = grad_coefficients[0, 0]
            adj = direct if adj is None else adj + direct
        self._check_sums()
        self._report()
        time = None if self.time is None else self.time.total
        return self.call.gradients(self.needs, self.ts, self.args, adj, time, self.sums.values)

    @cached_property
    def _bound(self) -> tuple[Field, list[Tensor]]:
        """The field, and of what there is a gradient to compute; compiled steps ask for neither."""
        flags = self.needs[2:]
        field, args, params = self.call.independent(self.args, flags[: len(self.args)])
        return field, [x for x, need in zip([*args, *params], flags, strict=True) if need]

    @property
    def targets(self) -> list[Tensor]:
        return self._bound[1]

    def _audit(self, values: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Once a backward pass: does the step lead to a tensor that was not found at the start of the solve?"""
        if self.problem.params is None:
            check_captures(values, known, [x for x in self.call.params if not x.is_leaf])

    def engine(self, shifts: StepShifts | None = None) -> Eager:
        return Eager(
            self._bound[0], self.problem.solver, self.y0, self.call.forward.purity, self.tally, shifts, self.evaluations
        )

    def advance(self, i: int, j: int, start: Tensor, observers: Sequence[Observer] = ()) -> Tensor:
        """Take steps i … j − 1 again, from what the solver carried before step i."""
        engine = self.engine()
        if self.capture is not None:
            engine = self.call.forward.fused(self.tally, self.evaluations)
        return integrate(engine, RecordedPace(self.plans[i:j]), start.detach(), observers, check=False)

    def states_between(self, i: int, j: int, start: Tensor) -> list[Tensor]:
        """What the solver carried before each of the steps i … j, from that before step i."""
        before = StatesBefore()
        last = self.advance(i, j, start, [before])
        return [*before.states, last]

    def _holds_cotangent(self, j: int) -> bool:
        low, high = self.call.forward.ranges[j]
        rows, dense_rows = self.rows
        return any(rows[low:high]) or any(dense_rows[j : j + 1])

    def _step(self, j: int, adj: Tensor | None) -> Tensor | None:
        plan = self.plans[j]
        low, high = self.call.forward.ranges[j]
        ys, coefficients = self.grads
        rows, dense_rows = self.rows
        adj_outputs = ys[low:high] if ys is not None and any(rows[low:high]) else None
        adj_dense = coefficients[j] if coefficients is not None and dense_rows[j] else None
        shifts = StepShifts(self.y0, high - low) if self.time is not None else None
        grad_times: list[Tensor | None] = []
        own: tuple[Tensor, list[Tensor | None]] | None = None
        if adj is not None and adj_outputs is None and adj_dense is None and shifts is None:
            own = self.states.pull_back(j, self, adj)
        if own is None and self.capture is not None and adj_dense is None and shifts is None:
            try:
                return self._pull_compiled(j, adj, adj_outputs)
            except NotCompiled as reason:
                warn_of(reason)
                self.capture = None
        if own is not None:
            grad_y, grad_targets = own
        else:
            y, before = self.states.before(j, self), self.tally.nfe
            grad_y, grad_times, grad_targets = pull_back(
                self.engine(shifts),
                plan,
                y,
                self.outputs,
                (low, high),
                (adj, adj_outputs, adj_dense),
                self.targets,
                shifts,
                self._audit if self.tally.steps == 0 else None,
            )
            self.pulled += self.tally.nfe - before
        self.tally.steps += 1
        self.taken.append(plan)
        self.unchecked = True
        self.sums.add(grad_targets)
        if self.time is not None:
            self.time.add(plan, low, *grad_times)
        self.check_gradient(grad_y, plan)
        return grad_y

    def check_gradient(self, grad_y: Tensor | None, plan: Plan) -> None:
        if self.problem.throw and grad_y is not None and not is_finite(grad_y):
            paired = self.problem.solver.paired
            leaf = self.problem.field.layout.culprit(grad_y.sum(0) if paired else grad_y)
            self._fail("the state", plan, leaf)

    def check_alive(self, alive: Tensor, grad_y: Tensor, plan: Plan) -> None:
        """Look at the number that a program hands out, and only if that is not finite at the gradients themselves."""
        if self.problem.throw and not math.isfinite(alive.item()):
            self.check_gradient(grad_y, plan)
            self.unchecked = True

    def _pull_compiled(self, j: int, adj: Tensor | None, adj_outputs: Tensor | None) -> Tensor:
        """Pull back through step j with one program."""
        assert self.capture is not None
        plan, solver = self.plans[j], self.problem.solver
        end, start, slopes = spread(adj, adj_outputs, self.outputs, plan, self.call.forward.ranges[j], solver)
        program = pull_program(self.capture, solver, self._wanted, self.y0, slopes is not None)
        y = self.states.before(j, self)
        cotangents = [torch.zeros_like(y) if end is None else end, *([] if slopes is None else [slopes])]
        grad_y, alive, *self.compiled = program(plan, y, cotangents, self._rest, self.compiled)
        evaluated = [plan.stage_time(c) for c in program.evaluated]
        self.tally.nfe += len(evaluated)
        self.pulled += len(evaluated)
        if self.evaluations is not None:
            self.evaluations.extend(evaluated)
        self.tally.steps += 1
        self.taken.append(plan)
        grad_y = grad_y if start is None else grad_y + start
        self.check_alive(alive, grad_y, plan)
        return grad_y

    def _prepare_compiled(self) -> None:
        """Which of the tensors that the graph takes get a gradient, and for which target each is."""
        self.capture = self.call.forward.capture
        self.unchecked = False
        if self.capture is None:
            return
        self._keys, self._wanted = self.choose()
        self._rest = self.capture.rest
        self._sources = [id(x) for x, want in zip(self._rest, self._wanted, strict=True) if want]
        self.compiled = no_sums(self._rest, self._wanted)  # in the order of the sources

    def choose(self) -> tuple[list[int], tuple[bool, ...]]:
        """The ids of the targets, and for which inputs of the graph programs compute gradients."""
        return self.call.wanted(self.needs[2:])

    def by_target(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of a program in the order of the targets; none for a target that the field does not use."""
        found = dict(zip(self._sources, grads, strict=True))
        return [found.get(key) for key in self._keys]

    def _check_cotangents(self) -> None:
        """Refuse what the loss handed us if it is not finite, before any work is done."""
        if not self.problem.throw:
            return
        steps = [plan.t0 for plan in self.plans] or [self.problem.times[0]]
        for sizes, times, what in zip(self.rows, (self.call.output_times, steps), ("output", "step"), strict=True):
            check_cotangents(sizes, times, what, self.tally.stats)

    def _fail(self, what: str, plan: Plan, leaf: str | None) -> NoReturn:
        raise NonFiniteState(
            f"the gradient with respect to {what} became NaN or infinite at t = {plan.t0:g}"
            f"{f' (leaf {leaf})' if leaf else ''}. Look for an operation in the field whose derivative is infinite "
            "there (sqrt, norm or pow at 0), or a gradient that grows beyond the dtype.",
            t=plan.t0,
            dt=plan.dt,
            stats=self.tally.stats(),
            leaf=leaf,
            backward=True,
        )

    def _check_sums(self) -> None:
        for total in self.sums.values if self.problem.throw and self.unchecked else ():
            if total is not None and not is_finite(total):
                what = f"a parameter or argument of shape {tuple(total.shape)}"
                self._fail(what, self.plans[0], None)

    def _report(self) -> None:
        params = self.pulled if any(self.needs[2:]) else 0
        self.call.backward_stats[:] = [self.tally.stats(vjp_y=self.pulled, vjp_params=params)]
        if self.call.backward_record is not None:
            self.call.backward_record[:] = [Record(tuple(self.evaluations or ()), tuple(self.taken), (), ())]


class StatesBefore(Observer):
    """What the solver carried before each step."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def accepted(self, step: Any, ratio: float) -> None:
        self.states.append(step.start)


def second_order(asked: Asked, grads: Sequence[Tensor | None]) -> Gradients:
    """Pull `grads`, the cotangents of the first-order gradients, back to the first cotangents and to the inputs.

    The taped steps are taken again under autograd, differentiated once with a graph, and that graph once more.
    """
    call, inputs, _, needs, cotangents = asked
    forward = ForwardPass(replace(call.forward.problem, record=False, progress=False), call.forward.purity)
    args = inputs[2 : 2 + call.n_args]
    with torch.enable_grad():
        y0, ts = leaf_of(inputs[0]), leaf_of(inputs[1])
        field, args, params = call.independent(args, needs[2 : 2 + call.n_args])
        leaves = [y0, ts, *args, *params]
        fresh = [None if c is None else leaf_of(c) for c in cotangents]
        shifts = TimeShifts(ts, y0) if needs[1] else None
        result = forward.run(forward.engine(field, shifts), y0, shifts=shifts, plans=call.forward.plans)
        pairs = [(v, c) for v, c in zip((result.ys, result.coefficients), fresh, strict=True) if c is not None]
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need]
        values, weights = zip(*pairs, strict=True)
        first = torch.autograd.grad(values, wanted, weights, create_graph=True, allow_unused=True)
    outer = [g for g, need in zip(grads, needs, strict=True) if need]
    pairs = [(f, g) for f, g in zip(first, outer, strict=True) if f is not None and g is not None and f.requires_grad]
    flags = [c is not None for c in fresh] + list(needs)
    if not pairs:
        return [None] * len(flags)
    values, weights = zip(*pairs, strict=True)
    targets = [x for x, flag in zip([*fresh, *leaves], flags, strict=True) if flag]
    found = iter(torch.autograd.grad(values, targets, weights, allow_unused=True))  # type: ignore[arg-type]
    return [next(found) if flag else None for flag in flags]

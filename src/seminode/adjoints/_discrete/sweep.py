"""The backward pass over the accepted steps: each is taken again, the last one first, and differentiated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..._compile.capturing import warn_not_compiled
from ..._compile.engine import compiled_engine
from ..._compile.graph import NotCompiled
from ..._compile.programs import no_sums, vjp_program
from ..._field.accounting import Accounting
from ..._field.determinism import SameAnswers
from ..._field.field import Field
from ..._stepping.engine import EagerEvaluator, EagerStepper, Engine, EvaluationLog
from ..._stepping.known_plans import RecordedSchedule
from ..._stepping.lane_outputs import LaneOutputs
from ..._stepping.loop import integrate
from ..._stepping.observers import Counter, Observer, State
from ..._stepping.problem import Problem
from ..._stepping.schedule import Plan
from ..._stepping.scipy_steps import refuse_gradient
from ..._stepping.step import Step
from ...grids import Grid
from ...solution import Record
from ...solvers.explicit import ExplicitRungeKutta
from .._autograd import (
    BackwardRequest,
    FunctionAdjoint,
    Gradients,
    Inputs,
    agreed_sizes,
    check_cotangents,
    check_samples,
)
from .._sums import Sums
from ..base import ForwardPass
from .finite import FiniteGradients
from .frozen import frozen_solve, repeatability
from .lane_vjp import LaneStepShifts, LaneTimeGradient
from .output_vjps import OutputVJPs, added
from .states import States, StatesBefore
from .step_vjp import (
    StepCotangents,
    StepGradients,
    StepShifts,
    TimeGradient,
    step_vjp,
)


class DiscreteAdjoint(FunctionAdjoint):
    """An adjoint that differentiates the steps that were taken.

    To write one, provide `tape` and `states(request)`: where the state before each step comes from.
    """

    samples = False

    def refuse(self, problem: Problem) -> None:
        if problem.solver.external:
            refuse_gradient()
        if problem.ts.requires_grad and isinstance(problem.controller, Grid):
            raise ValueError(
                f"adjoint: {self.name} treats the times of a grid as constants, so the gradient with respect to ts "
                "would be wrong; pass adjoint=sn.Direct(), or ts.detach()"
            )

    @abstractmethod
    def states(self, request: BackwardRequest) -> States: ...

    def engine(self, forward: ForwardPass, inputs: Inputs, field: Field | None) -> Engine:
        capture, problem = forward.capture, forward.problem
        if capture is None or field is not None or not capture.graph.unused or not _compiles_vjps(problem):
            return forward.engine(field)
        wanted = inputs.wanted(capture, inputs.differentiable())[1]
        vjp = vjp_program, problem.solver, wanted, problem.y0.detach(), problem.outputs_inside
        return forward.engine(later=[vjp])

    def backward(self, request: BackwardRequest) -> Gradients:
        return Sweep(request, self.states(request)).run()

    def frozen(self, request: BackwardRequest) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
        return frozen_solve(request)


def _compiles_vjps(problem: Problem) -> bool:
    """Whether the VJPs of steps are programs, and their kind is known before the solve."""
    known = problem.lanes is None and isinstance(problem.solver, ExplicitRungeKutta)
    return known and not problem.ts.requires_grad


class Sweep:
    """The backward pass of a replayed solve."""

    def __init__(self, request: BackwardRequest, states: States):
        self.request = request
        self.forward = forward = request.forward
        self.states = states
        self.plans: Sequence[Plan] = forward.plans
        self.problem: Problem = forward.problem
        self.y0, self.ts = request.tensors[:2]
        self.needs, self.grads = request.needs, request.cotangents
        self.counter = Counter()
        self.log = EvaluationLog(self.counter, None if forward.recorder is None else [])
        self.taken: list[Plan] = []
        self.differentiated = 0  # evaluations with a VJP; others are made only to recover states
        self.capture = forward.capture
        self._checked = False  # whether the field was compared with the samples
        self.finite = FiniteGradients(self.problem, self.counter)
        self._expected: State | None = None  # what the step must arrive at, unless it is the last one

    def run(self) -> Gradients:
        """Step by step, from the end to the start."""
        grad_ys, grad_coefficients = self.grads
        if grad_ys is None and grad_coefficients is None:
            return [None] * len(self.needs)
        self._prepare(grad_ys, grad_coefficients)
        adj: State | None = None
        for j in range(len(self.plans) - 1, -1, -1):
            if adj is None and self._holds_cotangent(j):
                self._recognise(j)
            if adj is not None or self._holds_cotangent(j):
                adj = self._step(j, adj)
        self._same.finish(self.problem.times[0])
        self.finite.close()
        self.states.finish(self)
        if self.capture is not None:
            self.sums.absorb(Sums.of(self.by_target(self.compiled)))
        total = None if adj is None else self._of_start(adj)
        direct = self._direct(total is None, grad_ys, grad_coefficients)
        total = direct if total is None else total if direct is None else total + direct
        if self.plans:
            self.finite.check_sums(self.sums.values, self.plans[0])
        self._report()
        times = None if self.time is None else self.time.total
        return self.request.inputs.gradients(self.request, total, times, self.sums.values)

    def _of_start(self, adj: State) -> Tensor:
        """The cotangent of y0 from those before the first step: copies of the state began as y0, the rest as zero."""
        solver, total = self.problem.solver, adj[0]
        for x, grad in zip(solver.carried(solver.start(self.y0)), adj[1:], strict=True):
            total = total + grad if x is self.y0 else total
        return total

    def _prepare(self, grad_ys: Tensor | None, grad_coefficients: Tensor | None) -> None:
        if self.capture is not None:
            self._keys, self._wanted = self.choose()
            self._rest = self.capture.rest
            self._sources = [id(x) for x, want in zip(self._rest, self._wanted, strict=True) if want]
            self.compiled = no_sums(self._rest, self._wanted)  # in the order of the sources
        self.sums = Sums(sum(self.needs[2:]))
        self._lanes = self.problem.lanes is not None
        gradient: Any = LaneTimeGradient if self._lanes else TimeGradient
        self.time = gradient(self.ts, self.y0) if self.needs[1] else None
        self.outputs, self._begun = self.forward.outputs, self.forward.begun
        ranks = self.problem.ranks
        self.rows = agreed_sizes(grad_ys, ranks), agreed_sizes(grad_coefficients, ranks)
        forward, solver = self.forward, self.problem.solver
        self.output_vjps = OutputVJPs(self.outputs, forward.ranges, self.plans, solver, self.y0, grad_ys, self.rows[0])
        # A step that was compiled and is taken again eagerly rounds in other places.
        explain, factor = self.request.inputs.check_unmodified, 1e3 if self.capture is None else 1e4
        self._same = SameAnswers(self.problem.field.eps, explain, factor, repeatability(self.problem))
        if self.problem.throw:
            steps = [plan.time for plan in self.plans] if self.rows[1] else []
            named = self.outputs.named if isinstance(self.outputs, LaneOutputs) else "output"
            check_cotangents(self.rows[0], self.forward.output_times, named, self.counter.stats)
            check_cotangents(self.rows[1], steps, "step", self.counter.stats)

    def _recognise(self, j: int) -> None:
        """Before the first step to be taken again: what will tell whether the field is still the same?"""
        if self.capture is None:
            self.check_field()
        if self.capture is not None or not self.states.exact:
            return
        self._expected = self.states.after(j)
        last = len(self.plans) - 1
        if self._expected is None and j < last:
            # Only states from which others are computed again were kept. So go on to the next of them, or to the end.
            stop, expected = self.states.beyond(j) or (last + 1, self.states.end())
            compare = self._same.compare if stop <= last else self._same.recognise
            count, before = self.counter.nfe, self.states.before(j, self)
            after = self.advance(j, stop, before)
            self.counter.checks += self.counter.nfe - count
            self.counter.nfe = count
            for again, kept, start in zip(after, expected, before, strict=False):
                compare(again, kept, lambda x=again - start: [x], self.plans[j].time)

    def check_field(self) -> None:
        """Before the field itself is evaluated: is it still the same, at the samples that were kept?"""
        if self.request.samples and not self._checked:
            check_samples(self.request, self.counter)
        self._checked = True

    def _direct(self, alone: bool, grad_ys: Tensor | None, grad_coefficients: Tensor | None) -> Tensor | None:
        """The cotangent of outputs that are y0 itself."""
        direct = None
        begun = self._begun
        if grad_ys is not None and begun and (alone or any(self.rows[0][:begun])):
            lanes = self.outputs if isinstance(self.outputs, LaneOutputs) else None
            direct = grad_ys[:begun].sum(0) if lanes is None else lanes.start_vjp(grad_ys[:begun], self.y0)
        if grad_coefficients is not None and not self.plans:
            constant = grad_coefficients[0, 0]
            direct = constant if direct is None else direct + constant
        return direct

    @cached_property
    def _bound(self) -> tuple[Field, list[Tensor]]:
        """The field as a function of leaves, and those that need a gradient; compiled steps ask for neither."""
        args = self.request.tensors[2 : 2 + len(self.request.inputs.args)]
        return self.request.inputs.independent(args, self.needs[2:], shared=self.forward.capture is not None)

    @property
    def targets(self) -> list[Tensor]:
        return self._bound[1]

    @cached_property
    def evaluate(self) -> EagerEvaluator:
        return EagerEvaluator(self._bound[0], self.y0, self.forward.determinism, self.log)

    @cached_property
    def _engine(self) -> Engine:
        return self.engine()

    def engine(self, shifts: StepShifts | None = None) -> Engine:
        """The engine that repeats steps eagerly."""
        solver = self.problem.solver
        step = EagerStepper(solver, self.evaluate, shifts=shifts, orders=1)
        return Engine(solver, self.problem.field.layout, self.counter, self.evaluate, step, shifts)

    def advance(self, i: int, j: int, start: State, observers: Sequence[Observer] = ()) -> State:
        """Take steps i … j − 1 again, from the state before step i."""
        solver = self.problem.solver
        engine = self.engine() if self.capture is None else self.compiled_engine
        y, memory = start[0].detach(), solver.recall([x.detach() for x in start[1:]])
        schedule = RecordedSchedule(self.plans[i:j])
        y, memory = integrate(engine.following(schedule), schedule, y, observers, memory=memory, check=False)
        return (y, *solver.carried(memory))

    @cached_property
    def compiled_engine(self) -> Engine:
        assert self.capture is not None
        return compiled_engine(self.problem, self.forward.determinism, self.log, self.capture)

    def states_between(self, i: int, j: int, start: State) -> list[State]:
        """The states before each of the steps i … j, from that before step i."""
        if i == j:
            return [start]
        before = StatesBefore()
        last = self.advance(i, j, start, [before])
        return [*before.states, last]

    def _holds_cotangent(self, j: int) -> bool:
        low, high = self.forward.ranges[j]
        rows, dense_rows = self.rows
        return any(rows[low:high]) or any(dense_rows[j : j + 1])

    def _outputs_at(self, j: int) -> Any:
        """Which entries of `ts` the outputs of step j belong to."""
        low, _ = self.forward.ranges[j]
        return self.outputs.rows(low) if isinstance(self.outputs, LaneOutputs) else low

    def _step(self, j: int, adj: State | None) -> State | None:
        """The cotangent of the state before step j, from that of the state after it."""
        plan, solver = self.plans[j], self.problem.solver
        coefficients, dense_rows = self.grads[1], self.rows[1]
        adj_outputs = self.output_vjps.rows(j)
        adj_dense = coefficients[j] if coefficients is not None and dense_rows[j] else None
        plain = adj_dense is None and self.time is None
        grads: StepGradients | None = None
        if plain and self.states.special and (adj_after := self._cotangents_after(j, adj, adj_outputs)) is not None:
            grads = self.states.own_vjp(j, self, adj_after)
        if grads is None and self.capture is not None and plain and isinstance(solver, ExplicitRungeKutta):
            try:
                return self._step_compiled(j, adj)
            except NotCompiled as reason:
                self.go_on_eagerly(reason)
        if grads is None:
            grads = self._step_eagerly(j, adj, adj_outputs, adj_dense)
        self.counter.n_accepted += 1
        self.taken.append(plan)
        self.finite.sums_unseen = True
        self.sums.add(grads.targets)
        if self.time is not None:
            self.time.add(plan, self._outputs_at(j), *grads.times)
        found = [x for x in grads.before if x is not None]
        for grad in found:
            self.finite.check(grad, plan)
        return tuple(found) or None

    def _cotangents_after(self, j: int, adj: State | None, adj_outputs: Tensor | None) -> State | None:
        """Cotangents of what step j leads to, if it has no others: outputs inside of a step read its slopes too."""
        if adj_outputs is None:
            return adj
        if self.capture is None:
            return None
        solver = self.problem.solver
        end = self.output_vjps.of(j).end
        if end is None:
            return None
        if adj is not None:
            return (adj[0] + end, *adj[1:])
        return (end, *(torch.zeros_like(x) for x in solver.carried(solver.start(self.y0))))

    def go_on_eagerly(self, reason: object) -> None:
        """Continue eagerly: a program could not be made."""
        warn_not_compiled(reason)
        self.sums.absorb(Sums.of(self.by_target(self.compiled)))
        self.capture = None

    def _step_eagerly(
        self, j: int, adj: State | None, adj_outputs: Tensor | None, adj_dense: Tensor | None
    ) -> StepGradients:
        bounds = self.forward.ranges[j]
        leaves: Any = LaneStepShifts if self._lanes else StepShifts
        shifts = leaves(self.y0, bounds[1] - bounds[0]) if self.time is not None else None
        before, count = self.states.before(j, self), self.counter.nfe
        cotangents = StepCotangents((None,) * len(before) if adj is None else adj, adj_outputs, adj_dense)
        self.check_field()
        self.evaluate.watched = []
        engine = self._engine if shifts is None else self.engine(shifts)
        grads = step_vjp(
            engine, self.plans[j], before, self.outputs, bounds, cotangents, self.targets, shifts, self._check_step
        )
        self._expected = before if self.states.exact else None
        solver = self.problem.solver
        self.differentiated += solver.evaluations if solver.implicit else self.counter.nfe - count
        return grads

    def _check_step(self, step: Step, leaves: Sequence[Tensor]) -> None:
        """Is this the step that was taken, and are all tensors known that it depends on?"""
        plan, last = step.plan, len(self.taken) == 0 and step.plan is self.plans[-1]
        expected = self.states.end() if last else self._expected
        compare = self._same.recognise if last else self._same.compare
        for again, before in zip(step.after, expected or (), strict=False):
            compare(again.detach(), before, lambda: [plan.length(k) * k.detach() for k in step.slopes], plan.time)
        self.check_graphs(leaves)

    def check_graphs(self, leaves: Sequence[Tensor]) -> None:
        """Refuse evaluations that depend on tensors which are not differentiated; `leaves` are, as the targets are."""
        watched, self.evaluate.watched = self.evaluate.watched, None  # which would keep the graphs alive
        if self.problem.params is None:
            self._accounting.check(watched or (), leaves)

    @cached_property
    def _accounting(self) -> Accounting:
        return Accounting(self.targets, [x for x in self.request.inputs.params if not x.is_leaf])

    def _step_compiled(self, j: int, adj: State | None) -> State:
        """The VJP of step j by one program."""
        assert self.capture is not None
        plan, solver = self.plans[j], self.problem.solver
        end, parts, _ = self.output_vjps.of(j)
        end = added(None if adj is None else adj[0], end)
        program = vjp_program(self.capture, solver, self._wanted, self.y0, parts is not None)
        (y,) = self.states.before(j, self)
        y = y if plan.failing is None else plan.enter(y)
        cotangents = [torch.zeros_like(y) if end is None else end, *([] if parts is None else [parts])]
        grad_y, finite, *self.compiled = program(plan, y, cotangents, self._rest, self.compiled)
        self.log.add_nodes(plan, program.evaluated)
        self.finish_compiled(plan, len(program.evaluated))
        self._expected = (y,)
        self.finite.check_number(finite, grad_y, plan)
        return (grad_y,)

    def finish_compiled(self, plan: Plan, evaluations: int) -> None:
        self.differentiated += evaluations
        self.counter.n_accepted += 1
        self.taken.append(plan)

    def choose(self) -> tuple[list[int], tuple[bool, ...]]:
        """The ids of the targets, and for which inputs of the graph programs compute gradients."""
        assert self.capture is not None
        return self.request.inputs.wanted(self.capture, self.needs[2:])

    def by_target(self, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of a program in the order of the targets; none for a target that the field does not use."""
        by_source = dict(zip(self._sources, grads, strict=True))
        return [by_source.get(key) for key in self._keys]

    def _report(self) -> None:
        params = self.differentiated if any(self.needs[2:]) else 0
        report = self.forward.report
        report.stats = self.counter.stats(vjp_y=self.differentiated, vjp_params=params)
        if self.log.times is not None:
            report.record = Record(tuple(self.log.times), tuple(self.taken), (), ())

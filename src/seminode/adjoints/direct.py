"""Direct: autograd through the accepted steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._compile.capturing import warn_not_compiled
from .._compile.engine import saving_engine
from .._compile.graph import NotCompiled
from .._compile.torch_private import is_wrapped, transforms_active
from .._field.accounting import Accounting
from .._field.capture import restricted
from .._field.determinism import Determinism
from .._field.field import Field
from .._field.reach import reachable
from .._stepping.budget import Budget, check_memory
from .._stepping.engine import EagerEvaluator, Engine
from .._stepping.problem import Problem
from .._untyped import register_hook
from ..solution import Record, Stats
from ..solvers import Solver
from ..solvers.explicit import ExplicitRungeKutta
from ._autograd import BackwardRequest, Gradients, Inputs
from ._discrete.recorded_steps import Keeper, recording_engine
from ._discrete.saved_activations import (
    ActivationTape,
    CompiledSteps,
    RecordedSteps,
    SavedSweep,
    states_and_activations,
    worth_saving,
)
from ._discrete.states import SparseStates
from ._discrete.sweep import DiscreteAdjoint, Sweep
from .base import ForwardPass, ForwardResult, has_tangent, time_shifts


@dataclass(frozen=True, repr=False)
class Direct(DiscreteAdjoint):
    """Backpropagation through the solver's own operations.

    The graph of a rejected step is dropped as soon as it is rejected, and step-size control is not part of the graph:
    the gradient is that of the accepted steps with their sizes held fixed. Memory grows with every activation of every
    accepted step. Eagerly, autograd itself does all of it, so that derivatives of any order and, with fixed steps,
    all of torch.func work. With `compile=True` each step is a program that also returns the activations which its VJP
    needs, and the VJP of a step is another program. Gradients for times and of dense output take the steps again
    there, as `Replay` does. So do batched solves. Where the field cannot be compiled, the solve runs eagerly.

    With `memory`, the activations of the first steps are kept for as long as the budget lasts. The remaining steps are
    taken again on the backward pass, as with `Replay`, which keeps one state per step. The gradient is the same.

    Arguments:
        memory: how many bytes of activations may be kept, as a whole number or as text such as "4GB", "512MB" or
            "2GiB"; 0 keeps none. States, of which one per step is kept, and the activations of the current step are
            not counted. Needs an explicit Runge–Kutta method and `batched=False`. By default, eager solves have no
            limit, and compiled ones may take half of the memory that is free.

    Example:
        >>> import torch
        >>> import seminode as sn
        >>> y0 = torch.ones(1000, dtype=torch.float64, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -y.sin(), y0, [0.0, 9.0], save="last", adjoint=sn.Direct(memory="500kB"))
        >>> sol.ys.sum().backward()
        >>> stats = sol.stats.backward
        >>> 0 < stats.kept < stats.accepted
        True
    """

    batches: ClassVar[bool] = True

    memory: int | str | None = None

    def __post_init__(self) -> None:
        check_memory(self.memory)

    def __repr__(self) -> str:
        return "Direct()" if self.memory is None else f"Direct(memory={self.memory!r})"

    @property
    def name(self) -> str:
        return "Direct" if self.memory is None else "Direct(memory=...)"

    def run(self, problem: Problem) -> ForwardResult:
        if self.memory is not None:
            return super().run(problem)
        reach = reachable(problem.field.reach)
        return self.bind(ForwardPass(problem, Determinism(problem.y0.device, reach)))

    def bind(self, forward: ForwardPass) -> ForwardResult:
        compiled = forward.problem.compile and not transforms_active() and forward.capture is not None
        if compiled or self.memory is not None:
            forward.budget = forward.budget or Budget(check_memory(self.memory), forward.problem.y0.device)
            return super().bind(forward)
        return self._run_eagerly(forward)

    def refuse(self, problem: Problem) -> None:
        super().refuse(problem)
        if self.memory is None:
            return
        if problem.lanes is not None:
            raise ValueError(
                "adjoint: Direct(memory=...) keeps activations of steps that all samples take together, found "
                "batched=True; pass adjoint=sn.Replay()"
            )
        if not isinstance(problem.solver, ExplicitRungeKutta):
            raise ValueError(
                "adjoint: Direct(memory=...) keeps activations of explicit Runge–Kutta steps, found solver "
                f"{problem.solver.name!r}; pass adjoint=sn.Direct() without memory, or sn.Replay()"
            )

    def _run_eagerly(self, forward: ForwardPass) -> ForwardResult:
        problem = forward.problem
        shifts = time_shifts(problem, problem.ts, problem.y0) if _differentiable(problem.ts) else None
        field = problem.field
        if problem.params is not None:
            field = field.bind(func=restricted(field.func, problem.params))
        try:
            result = forward.run(forward.engine(field, shifts), problem.y0, shifts=shifts)
        except RuntimeError as error:
            if problem.error is None or not transforms_active() or "vmap" not in str(error):
                raise
            raise ValueError(
                "controller: adaptive steps depend on the value of the error, which torch.func.vmap does not allow; "
                "pass controller=sn.FixedStep(...)"
            ) from error
        if not transforms_active():
            for output in (result.ys, result.coefficients):
                if output is not None and output.requires_grad:
                    _count_backward(output, result, len(forward.ranges), problem.solver)
        return result

    def tape(self, problem: Problem) -> ActivationTape:
        return ActivationTape(problem.outputs_inside)

    def engine(self, forward: ForwardPass, inputs: Inputs, field: Field | None) -> Engine:
        problem, capture, tape, budget = forward.problem, forward.capture, forward.tape, forward.budget
        assert isinstance(tape, ActivationTape)
        assert budget is not None
        tape.budget = budget
        if problem.ts.requires_grad or check_memory(self.memory) == 0:
            return forward.engine(field)
        if capture is not None and worth_saving(problem):
            wanted, inside = inputs.wanted(capture, inputs.differentiable())[1], problem.outputs_inside
            return saving_engine(problem, forward.determinism, forward.log, capture, wanted, inside, budget)
        # A field that is watched for parameters yet to be seen in use is not a function of known leaves.
        if capture is not None or field is not None:
            return forward.engine(field)
        return self._recording_engine(forward, inputs, tape, budget)

    def _recording_engine(self, forward: ForwardPass, inputs: Inputs, tape: ActivationTape, budget: Budget) -> Engine:
        problem, differentiable = forward.problem, inputs.differentiable()
        bound, tape.targets = inputs.independent(inputs.args, differentiable)
        accounting = None
        if problem.params is None:
            accounting = Accounting(tape.targets, [x for x in inputs.params if not x.is_leaf])
        record = EagerEvaluator(bound, problem.y0, forward.determinism, forward.log)
        keeper = Keeper(budget, inputs.tensors, problem.ranks)
        return recording_engine(problem, record, forward.engine(), accounting, keeper, problem.outputs_inside)

    def states(self, request: BackwardRequest) -> SparseStates:
        return states_and_activations(request)[0]

    def backward(self, request: BackwardRequest) -> Gradients:
        tape = request.forward.tape
        assert isinstance(tape, ActivationTape)
        states, activations = states_and_activations(request)
        recorded, tape.recorded = tape.recorded, []
        if not request.needs[1] and request.cotangents[1] is None:
            if recorded:
                kept = RecordedSteps(recorded, tape.targets, request.inputs.differentiable())
                return SavedSweep(request, states, kept).run()
            if tape.kind is not None:
                try:
                    return SavedSweep(request, states, CompiledSteps(activations, tape.sizes, tape.kind)).run()
                except NotCompiled as reason:
                    warn_not_compiled(reason)
        return Sweep(request, self.states(request)).run()


def _differentiable(ts: Tensor) -> bool:
    if ts.requires_grad and torch.is_grad_enabled():
        return True
    return is_wrapped(ts) or has_tangent(ts)


def _count_backward(output: Tensor, result: ForwardResult, steps: int, solver: Solver) -> None:
    # Autograd backpropagates through the stages of every accepted step and evaluates nothing again.
    stats, record = result.stats, result.record
    count = solver.evaluations * steps if solver.steady else stats.nfe
    backward = Stats(accepted=steps, vjp_y=count, vjp_params=count, kept=steps)
    # Of a solve with events, these are the latest ones.
    taken = () if record is None else record.accepted[len(record.accepted) - steps :]
    backward_record = None if record is None else Record((), taken[::-1], (), ())
    report = stats.report

    def note(_: Tensor) -> None:
        report.stats, report.record = backward, backward_record

    register_hook(output, note)

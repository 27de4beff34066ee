"""Direct: autograd through the accepted steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._compile.engine import saving_engine, warn_not_compiled
from .._compile.graph import NotCompiled
from .._compile.torch_private import is_wrapped, transforms_active
from .._field.capture import restricted
from .._field.determinism import Determinism
from .._field.field import Field
from .._field.reach import reachable
from .._stepping.engine import Engine
from .._stepping.problem import Problem
from .._untyped import register_hook
from ..solution import Record, Stats
from ..solvers import Solver
from ._autograd import BackwardRequest, Gradients, Inputs
from ._discrete.saved_activations import (
    ActivationTape,
    SavedSweep,
    outputs_inside,
    states_and_activations,
    worth_saving,
)
from ._discrete.states import SparseStates
from ._discrete.sweep import DiscreteAdjoint, Sweep
from .base import ForwardPass, ForwardResult, has_tangent, time_shifts


@dataclass(frozen=True)
class Direct(DiscreteAdjoint):
    """Backpropagation through the solver's own operations.

    The graph of a rejected step is dropped as soon as it is rejected, and step-size control is not part of the graph:
    the gradient is that of the accepted steps with their sizes held fixed. Memory grows with every activation of every
    accepted step. Eagerly, autograd itself does all of it, so that derivatives of any order and, with fixed steps,
    all of torch.func work. With `compile=True` each step is a program that also returns the activations which its VJP
    needs, and the VJP of a step is another program. Gradients for times and of dense output take the steps again
    there, as `Replay` does. So do batched solves. Where the field cannot be compiled, the solve runs eagerly.
    """

    batches: ClassVar[bool] = True

    def run(self, problem: Problem) -> ForwardResult:
        reach = reachable(problem.field.reach)
        return self.bind(ForwardPass(problem, Determinism(problem.y0.device, reach)))

    def bind(self, forward: ForwardPass) -> ForwardResult:
        if forward.problem.compile and not transforms_active() and forward.capture is not None:
            return super().bind(forward)
        return self._run_eagerly(forward)

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
                "controller: adaptive steps look at the error, which torch.func.vmap does not allow; "
                "pass controller=sn.FixedStep(...)"
            ) from error
        if not transforms_active():
            for output in (result.ys, result.coefficients):
                if output is not None and output.requires_grad:
                    _count_backward(output, result, len(forward.ranges), problem.solver)
        return result

    def tape(self, problem: Problem) -> ActivationTape:
        return ActivationTape(outputs_inside(problem), bool(problem.events))

    def engine(self, forward: ForwardPass, inputs: Inputs, field: Field | None) -> Engine:
        problem, capture = forward.problem, forward.capture
        if capture is None or not worth_saving(problem):
            return forward.engine(field)
        wanted = inputs.wanted(capture, inputs.differentiable())[1]
        return saving_engine(problem, forward.determinism, forward.log, capture, wanted, outputs_inside(problem))

    def states(self, request: BackwardRequest) -> SparseStates:
        return states_and_activations(request)[0]

    def backward(self, request: BackwardRequest) -> Gradients:
        tape = request.forward.tape
        assert isinstance(tape, ActivationTape)
        states, activations = states_and_activations(request)
        saved = len(tape.sizes) == len(tape.plans)
        if saved and not request.needs[1] and request.cotangents[1] is None:
            try:
                return SavedSweep(request, states, activations, tape.sizes).run()
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
    backward = Stats(accepted=steps, vjp_y=count, vjp_params=count)
    # Of a solve with events, these are the latest ones.
    taken = () if record is None else record.accepted[len(record.accepted) - steps :]
    backward_record = None if record is None else Record((), taken[::-1], (), ())
    report = stats.report

    def note(_: Tensor) -> None:
        report.stats, report.record = backward, backward_record

    register_hook(output, note)

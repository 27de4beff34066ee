"""Replay: keep the accepted steps, take each again on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..parameters import CaptureWatch, differentiable, reachable
from ..problem import Forward, Problem
from .base import Adjoint, ForwardPass, has_tangent, transforms_active
from .sweep import Call, Sweep, second_order


@dataclass(frozen=True)
class Replay(Adjoint):
    """Tape the accepted steps; going back, take each again and pull back through it. The default.

    The gradient is exactly that of the discrete solution, as with `Direct`, at the memory of one state a step: the
    activations of one step at a time are alive. Outputs inside a step are pulled back through the step's polynomial
    and cost one evaluation a step, however many there are. A step costs its stages once more, 6 for dopri5.

    Arguments:
        every: keep the state before each `every`-th step only; those between are computed once more.
    """

    every: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(f"every: expected a whole number of at least 1, found {self.every!r}")

    def run(self, problem: Problem) -> Forward:
        if transforms_active():
            raise ValueError(
                "adjoint: Replay cannot be used inside a torch.func transform, since it is an autograd function of "
                "its own; pass adjoint=sn.Direct()"
            )
        modules, tensors = reachable(problem.field.reach)
        if not torch.is_grad_enabled():
            plain = ForwardPass(problem, modules=modules)
            return plain.run(plain.engine(), problem.y0)
        forward = ForwardPass(problem, every=self.every, modules=modules)
        k1, params = _first_evaluation(forward, differentiable(modules, tensors))
        args = problem.field.arg_tensors
        inputs = [problem.y0, problem.ts, *args, *params]
        if any(map(has_tangent, inputs)):
            raise ValueError("adjoint: Replay has no forward-mode derivative; pass adjoint=sn.Direct()")
        if not any(x.requires_grad for x in inputs):
            forward.keep_no_states()
            with torch.no_grad():
                return forward.run(forward.engine(), problem.y0, k1=k1)
        call = Call(forward, k1, params, len(args))
        ys, coefficients = ReplayFunction.apply(call, *inputs)  # type: ignore[misc]
        assert call.result is not None
        result, call.result = call.result, None  # the graph must not hold its own outputs
        return result._replace(ys=ys, coefficients=coefficients)


def _first_evaluation(forward: ForwardPass, static: list[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """The first slope, and the tensors to differentiate: given by the user, or found by looking and by watching."""
    problem = forward.problem
    if problem.times[0] == problem.times[-1]:
        return None, []
    # Detached copies, so that a tensor which is also closed over counts as captured.
    y0 = problem.y0.detach()
    field = problem.field.bind([x.detach() for x in problem.field.arg_tensors])
    engine = forward.engine(field)
    watch = CaptureWatch([y0, *field.arg_tensors])
    start = forward.start()
    try:
        with torch.no_grad(), forward.purity.solving(), watch:
            k1 = engine.first_slope(start, y0)
    finally:
        forward.purity.restore_buffers()
    forward.purity.remember(watch.constants.values())
    if problem.params is not None:
        return k1, list(problem.params)
    found = {id(x): x for x in (*static, *watch.captured.values())}
    return k1, list(found.values())


class ReplayFunction(Function):
    """Binds a replayed solve into autograd. Inputs: the call, y0, ts, the tensors in args, the parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        forward = call.forward
        result = forward.run(forward.engine(), inputs[0].detach(), k1=call.k1)
        call.k1 = None
        call.result = result
        call.output_times = tuple(result.ts.tolist())
        call.backward_stats = result.stats._backward
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)  # so that a change in place before the backward pass is noticed
        return result.ys, result.coefficients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients for all inputs, from the cotangents of the outputs and of the dense coefficients."""
        needs = ctx.needs_input_grad[1:]
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *GradientFunction.apply(ctx.call, needs, *grads, *inputs)  # type: ignore[misc]
        with ctx.call.forward.purity.backward():
            return None, *Sweep(ctx.call, inputs, needs).run(*grads)


class GradientFunction(Function):
    """The backward pass as a function of its own, for second derivatives.

    Inputs: the call, what is needed, the two cotangents, then the inputs of `ReplayFunction`.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, needs: Sequence[bool], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call = call
        ctx.needs = needs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        with call.forward.purity.backward():
            return tuple(Sweep(call, inputs[2:], needs).run(*inputs[:2]))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        with ctx.call.forward.purity.backward():
            return None, None, *second_order(ctx.call, ctx.needs, saved[:2], saved[2:], grads)

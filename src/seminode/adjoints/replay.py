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
from ..purity import Purity
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
        purity = Purity(problem.y0.device, modules)
        if not torch.is_grad_enabled():
            plain = ForwardPass(problem, purity)
            return plain.run(plain.engine(), problem.y0)
        forward = ForwardPass(problem, purity, self.every)
        k1, params, used = _first_evaluation(forward, differentiable(modules, tensors))
        args = problem.field.arg_tensors
        inputs = [problem.y0, problem.ts, *args, *params]
        if any(map(has_tangent, inputs)):
            raise ValueError("adjoint: Replay has no forward-mode derivative; pass adjoint=sn.Direct()")
        if not any(x.requires_grad for x in inputs):
            forward.keep_no_states()
            with torch.no_grad():
                return forward.run(forward.engine(), problem.y0, k1=k1)
        call = Call(forward, k1, params, used, len(args))
        ys, coefficients = ReplayFunction.apply(call, *inputs)  # type: ignore[misc]
        assert call.result is not None
        result, call.result = call.result, None  # the graph must not hold its own outputs
        return result._replace(ys=ys, coefficients=coefficients)


def _first_evaluation(forward: ForwardPass, static: list[Tensor]) -> tuple[Tensor | None, list[Tensor], set[int]]:
    """The first slope, the tensors to differentiate (given by the user, or found by looking and by watching), and the
    ids of those that were seen in use."""
    problem = forward.problem
    if problem.times[0] == problem.times[-1]:
        return None, [], set()
    # Detached copies, so that a tensor which is also closed over counts as captured.
    y0, args = problem.y0.detach(), [x.detach() for x in problem.field.arg_tensors]
    watch = CaptureWatch([y0, *args])
    engine = forward.engine(problem.field.bind(args, watch.over(problem.field.func)))
    start = forward.start()
    try:
        with torch.no_grad(), forward.purity.solving():
            k1 = engine.first_slope(start, y0)
    finally:
        forward.purity.restore_buffers()
    forward.purity.remember(watch.constants.values())
    params = (*static, *watch.captured.values()) if problem.params is None else problem.params
    return k1, list({id(x): x for x in params}.values()), set(watch.captured)


class ReplayFunction(Function):
    """Binds a replayed solve into autograd. Inputs: the call, y0, ts, the tensors in args, the parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        forward = call.forward
        result = forward.run(forward.engine(), inputs[0].detach(), k1=call.k1)
        call.finish(result)
        ctx.call = call
        ctx.set_materialize_grads(False)
        # The inputs, so that a change in place is noticed; the tape, so that autograd frees it and hooks may move it.
        ctx.save_for_backward(*call.guarded(inputs), *forward.tape.hand_over())
        return result.ys.data, result.coefficients  # .data: a state on its own is not a view of anything

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients for all inputs, from the cotangents of the outputs and of the dense coefficients."""
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        inputs, states = call.split(ctx.saved_tensors)
        if torch.is_grad_enabled():
            return None, *GradientFunction.apply(call, needs, len(inputs), *grads, *inputs, *states)  # type: ignore[misc]
        with call.forward.purity.backward():
            return None, *Sweep(call, inputs, states, needs).run(*grads)


class GradientFunction(Function):
    """The backward pass as a function of its own, for second derivatives.

    Inputs: the call, what is needed, how many inputs; the two cotangents, the inputs of `ReplayFunction`, the tape.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, needs: Sequence[bool], count: int, *tensors: Any) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.needs, ctx.count = call, needs, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: 2 + count])
        grads, inputs, states = tensors[:2], tensors[2 : 2 + count], tensors[2 + count :]
        ctx.states = len(states)
        with call.forward.purity.backward():
            return tuple(Sweep(call, inputs, states, needs).run(*grads))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        with ctx.call.forward.purity.backward():
            found = second_order(ctx.call, ctx.needs, saved[:2], saved[2:], grads)
        return None, None, None, *found, *[None] * ctx.states

"""How a solve is bound into autograd: what an adjoint with a backward pass of its own shares with all others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._compile.graph import Capture
from .._field.capture import CaptureWatch, cut, differentiable, reachable, restricted
from .._field.determinism import Purity
from .._field.field import Field
from .._stepping.engine import Eager
from .._stepping.observers import Tape
from .._stepping.problem import Forward, Problem
from .base import Adjoint, ForwardPass, has_tangent, transforms_active

Gradients = list[Tensor | None]


class Asked(NamedTuple):
    """What a backward pass is asked for."""

    call: Call
    inputs: Sequence[Tensor]  # y0, ts, the tensors in args, the parameters
    kept: Sequence[Tensor]  # the tensors of the tape and, with `keeps_outputs`, the outputs
    needs: Sequence[bool]  # which inputs need a gradient
    grads: Sequence[Tensor | None]  # cotangents of the outputs and of the dense coefficients


class FunctionAdjoint(Adjoint):
    """An adjoint that is an autograd function: a forward pass without a graph, and a backward pass of its own.

    To write one, provide:

    1. `refuse(problem)`: raise `ValueError` for a combination that makes no sense, with the reason;
    2. `tape(problem)`: what the forward pass keeps of its steps, or `None`;
    3. `backward(asked)`: the gradients for y0, ts, the tensors in args and the parameters, where needed;
    4. `twice(asked, cotangents)`, if second derivatives work: the derivative of the backward pass, from the cotangents
       of what it returned to those it was asked with and to the inputs.
    """

    keeps_outputs: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self).__name__

    def refuse(self, problem: Problem) -> None:
        """Raise where the combination makes no sense. Asked only if there is a gradient to compute."""

    @abstractmethod
    def tape(self, problem: Problem) -> Tape | None: ...

    def engine(self, call: Call) -> Eager:
        """What takes the steps of the forward pass."""
        return call.forward.engine()

    @abstractmethod
    def backward(self, asked: Asked) -> Gradients: ...

    def twice(self, asked: Asked, cotangents: Sequence[Tensor | None]) -> Gradients:
        raise RuntimeError(f"{self.name} gives first derivatives only; for second ones use sn.Replay() or sn.Direct()")

    def run(self, problem: Problem) -> Forward:
        if transforms_active():
            raise ValueError(
                f"adjoint: {self.name} cannot be used inside a torch.func transform, since it is an autograd function "
                "of its own; pass adjoint=sn.Direct()"
            )
        modules, tensors = reachable(problem.field.reach)
        purity = Purity(problem.y0.device, modules)
        if not torch.is_grad_enabled():
            plain = ForwardPass(problem, purity)
            return plain.run(plain.engine(), problem.y0)
        forward = ForwardPass(problem, purity)
        k1, params, used = _first_evaluation(forward, lambda: differentiable(modules, tensors))
        args = problem.field.arg_tensors
        inputs = [problem.y0, problem.ts, *args, *params]
        if any(map(has_tangent, inputs)):
            raise ValueError(f"adjoint: {self.name} has no forward-mode derivative; pass adjoint=sn.Direct()")
        if not any(x.requires_grad for x in inputs):
            with torch.no_grad():
                return forward.run(forward.engine(), problem.y0, k1=k1)
        self.refuse(problem)
        forward.tape = self.tape(problem) or forward.tape
        call = Call(self, forward, k1, params, used, len(args))
        ys, coefficients = SolveFunction.apply(call, *inputs)  # type: ignore[misc]
        assert call.result is not None
        result, call.result = call.result, None  # the graph must not hold its own outputs
        return result._replace(ys=ys, coefficients=coefficients)


def _first_evaluation(
    forward: ForwardPass, static: Callable[[], list[Tensor]]
) -> tuple[Tensor | None, list[Tensor], set[int]]:
    """The first slope, the tensors to differentiate (given by the user, or found by looking and by watching), and the
    ids of those that were seen in use."""
    problem = forward.problem
    if problem.times[0] == problem.times[-1]:
        return None, [], set()
    if forward.capture is not None:
        return None, *_inputs_of(forward.capture, forward)
    # Detached copies, so that a tensor which is also closed over counts as captured.
    y0, args = problem.y0.detach(), [x.detach() for x in problem.field.arg_tensors]
    watch = CaptureWatch([y0, *args])
    engine = forward.engine(problem.field.bind(args, watch.over(problem.field.func)))
    start = forward.start()
    try:
        with torch.no_grad(), forward.purity.solving():
            k1 = engine.first_slope(start, engine.lift(y0))
    finally:
        forward.purity.restore_buffers()
    forward.purity.remember(watch.constants.values())
    params = (*static(), *watch.captured.values()) if problem.params is None else problem.params
    return k1, list({id(x): x for x in params}.values()), set(watch.captured)


def _inputs_of(capture: Capture, forward: ForwardPass) -> tuple[list[Tensor], set[int]]:
    """The tensors to differentiate of a field that is a graph: all that it can use are inputs of the graph."""
    args = {id(x) for x in forward.problem.field.arg_tensors}
    rest = [x for x in capture.rest if id(x) not in args]
    forward.purity.remember((x, x._version) for x in rest if not x.requires_grad and not x.is_inference())
    used = [x for x in rest if x.requires_grad]
    params = used if forward.problem.params is None else forward.problem.params
    return list({id(x): x for x in params}.values()), {id(x) for x in used}


class Call:
    """What one solve shares between its forward and its backward pass; the tensors themselves are kept by autograd."""

    def __init__(
        self,
        adjoint: FunctionAdjoint,
        forward: ForwardPass,
        k1: Tensor | None,
        params: Sequence[Tensor],
        used: set[int],
        n_args: int,
    ):
        self.adjoint = adjoint
        self.forward = forward
        self.k1 = k1
        self.params = params
        self.n_args = n_args
        self.result: Forward | None = None
        self.output_times: tuple[float, ...] = ()
        self.backward_stats: list[Any] = []
        self.backward_record: list[Any] | None = None  # where a record is wanted
        self._wanted: dict[tuple[bool, ...], tuple[list[int], tuple[bool, ...]]] = {}
        # Parameters that were only found within reach: autograd must not insist that they stay as they are.
        self._unseen = {i: (x, x._version) for i, x in enumerate(params, 2 + n_args) if id(x) not in used}

    def wanted(self, needs: Sequence[bool]) -> tuple[list[int], tuple[bool, ...]]:
        """Where the solve is compiled: the ids of the args and parameters in need, and which inputs of the graph they
        are."""
        asked = tuple(needs)
        if asked not in self._wanted:
            capture = self.forward.capture
            assert capture is not None
            given = [*self.forward.problem.field.arg_tensors, *self.params]
            keys = [id(x) for x, need in zip(given, needs, strict=True) if need]
            known = set(keys)
            self._wanted[asked] = keys, tuple(id(x) in known for x in capture.rest)
        return self._wanted[asked]

    def finish(self, result: Forward) -> None:
        """The forward pass is done."""
        self.k1, self.result = None, result
        self.output_times = tuple(result.ts.tolist())
        self.backward_stats = result.stats._backward
        self.backward_record = None if result.record is None else result.record._backward

    def guarded(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that autograd shall watch for changes."""
        return [x for i, x in enumerate(inputs) if i not in self._unseen]

    def split(self, saved: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs and what else was kept, from what autograd has saved."""
        count = 2 + self.n_args + len(self.params)
        kept = iter(saved)
        inputs = [self._unseen[i][0] if i in self._unseen else next(kept) for i in range(count)]
        return inputs, list(kept)

    def check_unseen(self, grads: Sequence[Tensor | None]) -> None:
        """One that does turn out to be in use must not have changed."""
        for i, (x, version) in self._unseen.items():
            if grads[i] is not None and x._version != version:
                raise RuntimeError(
                    f"a parameter of shape {tuple(x.shape)} that the field uses has been modified by an inplace "
                    "operation since the solve: the steps cannot be taken again. Change it after the backward pass."
                )

    def gradients(
        self,
        needs: Sequence[bool],
        ts: Tensor,
        args: Sequence[Tensor],
        adj: Tensor | None,
        time: Tensor | None,
        totals: Sequence[Tensor | None],
    ) -> Gradients:
        """What autograd is handed, from the gradients for y0, for times, and for the args and parameters in need."""
        sums = iter(totals)
        found = [next(sums) if need else None for need in needs[2:]]
        tensors = [*args, *self.params]
        rest = [None if g is None else g.to(x.dtype) for g, x in zip(found, tensors, strict=True)]
        of_times = None if time is None else time.to(device=ts.device, dtype=ts.dtype)
        grads = [adj if needs[0] else None, of_times, *rest]
        self.check_unseen(grads)
        return grads

    def independent(self, args: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Field, list[Tensor], list[Tensor]]:
        """The field, its args and its parameters as tensors that do not depend on each other, to pull back to."""
        fresh = [leaf_of(x) if need else x for x, need in zip(args, needs, strict=True)]
        problem = self.forward.problem
        field = problem.field
        own = field.func if problem.params is None else restricted(field.func, problem.params)
        func, params = cut(own, self.params)
        return field.bind(fresh, func), fresh, params


def leaf_of(x: Tensor) -> Tensor:
    """A leaf with the value of x."""
    return x.detach().requires_grad_()


class SolveFunction(Function):
    """Binds a solve into autograd. Inputs: the call, y0, ts, the tensors in args, the parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        forward = call.forward
        result = forward.run(call.adjoint.engine(call), inputs[0].detach(), k1=call.k1)
        call.finish(result)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ys = result.ys.data  # .data: a state on its own is not a view of anything
        kept = [] if forward.tape is None else forward.tape.hand_over()
        # The inputs, so that a change in place is noticed; the tape, so that autograd frees it and hooks may move it.
        ctx.save_for_backward(*call.guarded(inputs), *kept, *([ys] if call.adjoint.keeps_outputs else []))
        return ys, result.coefficients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients for all inputs, from the cotangents of the outputs and of the dense coefficients."""
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        inputs, kept = call.split(ctx.saved_tensors)
        if torch.is_grad_enabled():
            return None, *GradientFunction.apply(call, needs, len(inputs), *grads, *inputs, *kept)  # type: ignore[misc]
        with call.forward.purity.backward():
            return None, *call.adjoint.backward(Asked(call, inputs, kept, needs, grads))


class GradientFunction(Function):
    """The backward pass as a function of its own, for second derivatives.

    Inputs: the call, what is needed, how many inputs; the two cotangents, the inputs of `SolveFunction`, what was kept.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, needs: Sequence[bool], count: int, *tensors: Any) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.needs, ctx.count = call, needs, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: 2 + count])
        grads, inputs, kept = tensors[:2], tensors[2 : 2 + count], tensors[2 + count :]
        ctx.kept = len(kept)
        with call.forward.purity.backward():
            return tuple(call.adjoint.backward(Asked(call, inputs, kept, needs, grads)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, call = ctx.saved_tensors, ctx.call
        with call.forward.purity.backward():
            found = call.adjoint.twice(Asked(call, saved[2:], (), ctx.needs, saved[:2]), grads)
        return None, None, None, *found, *[None] * ctx.kept

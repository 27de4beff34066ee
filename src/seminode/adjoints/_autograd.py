"""How a solve becomes an autograd function: what adjoints with a backward pass of their own share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._compile.graph import Capture
from .._compile.torch_private import is_batched, transforms_active
from .._field.accounting import refuse_cut
from .._field.capture import UseWatch, as_leaf, restricted, substituted
from .._field.determinism import Determinism, SameAnswers, sum_and_norm
from .._field.field import Field
from .._field.reach import reachable
from .._ranks import Alone, rank_check
from .._stepping.engine import EagerEvaluator, Engine, EvaluationLog
from .._stepping.observers import Counter, Tape
from .._stepping.problem import Problem
from .._untyped import vector_norm
from ..errors import NonFiniteState
from ..solution import Stats, work_of
from ._detection import detect
from ._higher_order import differentiated, vjp
from .base import Adjoint, ForwardPass, ForwardResult, has_tangent

Gradients = list[Tensor | None]
#: Up to how many entries a copy of the cotangents does not matter.
SMALL = 2**16


class BackwardRequest(NamedTuple):
    """What a backward pass has to compute, and from what."""

    forward: ForwardPass
    inputs: Inputs
    tensors: Sequence[Tensor]  # y0, ts, the tensors in args, the parameters
    kept: Sequence[Tensor]  # the tensors of the tape and, with `keeps_outputs`, the outputs
    samples: Sequence[Tensor]  # states and slopes at which the field was evaluated, in turn
    needs: Sequence[bool]  # which of the tensors need a gradient
    cotangents: Sequence[Tensor | None]  # of the outputs and of the dense coefficients


class FunctionAdjoint(Adjoint):
    """An adjoint that is an autograd function: a forward pass without a graph, and a backward pass of its own.

    To write one, provide:

    1. `refuse(problem)`: raise `ValueError` for a combination that makes no sense, with the reason;
    2. `tape(problem)`: what the forward pass keeps of its steps, or `None`;
    3. `backward(request)`: the gradients for y0, ts, the tensors in args and the parameters, where needed;
    4. `frozen(request)`, if second derivatives work: the solve as a function of leaves, along the accepted steps.

    `samples` says whether some evaluations are kept to recognise the field by: set it unless `backward` compares every
    step that it takes again with the one that was taken. `leaves_programs` says whether the backward pass of a compiled
    solve may evaluate the field itself, so that they are needed there too.
    """

    keeps_outputs: ClassVar[bool] = False
    samples: ClassVar[bool] = True
    leaves_programs: ClassVar[bool] = False

    @property
    def repeats_steps(self) -> bool:
        """Whether its backward pass takes or checks steps of the forward pass again."""
        return True

    @property
    def name(self) -> str:
        return type(self).__name__

    def refuse(self, problem: Problem) -> None:
        """Raise where the combination makes no sense. Called only if there is a gradient to compute."""

    @abstractmethod
    def tape(self, problem: Problem) -> Tape | None: ...

    def engine(self, forward: ForwardPass, inputs: Inputs, field: Field | None) -> Engine:
        """The engine of the forward pass; `field` replaces the problem's own one while that is watched."""
        return forward.engine(field)

    @abstractmethod
    def backward(self, request: BackwardRequest) -> Gradients: ...

    def frozen(self, request: BackwardRequest) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
        raise RuntimeError(f"{self.name} gives first derivatives only; for second ones use sn.Replay() or sn.Direct()")

    def run(self, problem: Problem) -> ForwardResult:
        if transforms_active():
            raise ValueError(
                f"adjoint: {self.name} cannot be used inside a torch.func transform, since it is a custom autograd "
                "function; pass adjoint=sn.Direct()"
            )
        reach = reachable(problem.field.reach)
        return self.bind(ForwardPass(problem, Determinism(problem.y0.device, reach)))

    def bind(self, forward: ForwardPass) -> ForwardResult:
        """Run the forward pass and, where a gradient may be asked for, make an autograd function of it."""
        problem, y0 = forward.problem, forward.problem.y0
        if not torch.is_grad_enabled():
            return forward.run(forward.engine(), y0)
        found = forward.detected = forward.detected or detect(forward)
        args, params = problem.field.arg_tensors, found.params
        if any(map(has_tangent, (y0, problem.ts, *args, *params))):
            raise ValueError(f"adjoint: {self.name} has no forward-mode derivative; pass adjoint=sn.Direct()")
        if not any(x.requires_grad for x in (y0, problem.ts, *args, *params, *found.candidates)):
            with torch.no_grad():
                return forward.run(forward.engine(), y0)
        self.refuse(problem)
        if problem.solver.carries_slopes and self.repeats_steps:
            raise ValueError(
                f"adjoint: {self.name} takes single steps again, but a step of {problem.solver!r} depends on slopes of "
                "the one before it; pass adjoint=sn.Direct(), or sn.Backsolve(check=False)"
            )
        if problem.params is None:
            refuse_cut(found.cut, times_too=problem.ts.requires_grad)
        forward.tape = self.tape(problem) or forward.tape
        if self.samples and (forward.capture is None or self.leaves_programs):
            forward.keep_samples()
        watch = UseWatch(found.candidates) if found.candidates else None
        field = None if watch is None else problem.field.bind(func=watch.over(problem.field.func))
        inputs = Inputs(problem, params, found.used, found.others)
        with torch.no_grad():
            result = forward.run(self.engine(forward, inputs, field), y0.detach())
        forward.determinism.finish(forward.counter.nfe)
        if watch is not None and watch.used:
            used = {**{id(x): x for x in params}, **watch.used}
            params, used_ids = list(used.values()), found.used | set(watch.used)
            inputs = Inputs(forward.problem, params, used_ids, found.others)
        elif forward.problem is not problem:  # an event has cut it short
            inputs = Inputs(forward.problem, params, found.used, found.others)
        forward.mark = sum_and_norm(result.ys)
        # .data: an output that is a state on its own is not a view of anything.
        outputs = result.ys.data, result.coefficients
        ys, coefficients = SolveFunction.apply(self, forward, inputs, outputs, *inputs.tensors)  # type: ignore[misc]
        return result._replace(ys=ys, coefficients=coefficients)


class Inputs:
    """The tensors that a solve is differentiated by: y0, ts, the tensors in args, the parameters; each once."""

    def __init__(self, problem: Problem, params: Sequence[Tensor], used: set[int], others: bool = True):
        self._problem = problem
        self.args, self.params = problem.field.arg_tensors, params
        self.tensors = [problem.y0, problem.ts, *self.args, *params]
        self._wanted: dict[tuple[bool, ...], tuple[list[int], tuple[bool, ...]]] = {}
        self._restricted = problem.params is not None and others
        # Parameters that were only found within reach: autograd must not insist that they stay as they are.
        first = 2 + len(self.args)
        self._unseen = {i: (x, x._version) for i, x in enumerate(params, first) if id(x) not in used}
        self._count = len(self.tensors)

    def guarded(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that autograd watches for changes."""
        return [x for i, x in enumerate(tensors) if i not in self._unseen]

    def split(self, saved: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs and what else was kept, from what autograd has saved."""
        kept = iter(saved)
        tensors = [self._unseen[i][0] if i in self._unseen else next(kept) for i in range(self._count)]
        return tensors, list(kept)

    def differentiable(self) -> list[bool]:
        """For which args and parameters a gradient may be asked."""
        return [x.requires_grad for x in (*self.args, *self.params)]

    def wanted(self, capture: Capture, needs: Sequence[bool]) -> tuple[list[int], tuple[bool, ...]]:
        """For a compiled solve: the ids of the args and parameters in need, and which inputs of the graph they are."""
        asked = tuple(needs)
        if asked not in self._wanted:
            keys = [id(x) for x, need in zip((*self.args, *self.params), needs, strict=True) if need]
            known = set(keys)
            self._wanted[asked] = keys, tuple(id(x) in known for x in capture.rest)
        return self._wanted[asked]

    def independent(
        self, args: Sequence[Tensor], needs: Sequence[bool], shared: bool = False
    ) -> tuple[Field, list[Tensor]]:
        """The field as a function of leaves that do not depend on each other, and those leaves that need a gradient.

        `shared`: what is in args may also be closed over, as in the graph of a captured field.
        """
        fresh = [x.detach().requires_grad_() if need else x for x, need in zip(args, needs, strict=False)]
        flags = needs[len(args) :]
        leaves = [as_leaf(x, need) for x, need in zip(self.params, flags, strict=True)]
        targets = [x for x, need in zip((*fresh, *leaves), needs, strict=True) if need]
        return self.bound(fresh, leaves, shared), targets

    def bound(self, args: Sequence[Tensor], params: Sequence[Tensor], shared: bool = False) -> Field:
        """The field with other tensors in the place of its args and of its parameters."""
        field = self._problem.field
        func = restricted(field.func, self.params) if self._restricted else field.func
        if shared:
            return field.bind(args, substituted(func, [*self.args, *self.params], [*args, *params]))
        return field.bind(args, substituted(func, self.params, params))

    def gradients(
        self,
        request: BackwardRequest,
        adj: Tensor | None,
        of_times: Tensor | None,
        totals: Sequence[Tensor | None],
    ) -> Gradients:
        """The gradients in the order that autograd expects, from those for y0, times, args and parameters."""
        needs, ts = request.needs, request.tensors[1]
        sums = iter(totals)
        found = [next(sums) if need else None for need in needs[2:]]
        tensors = [*self.args, *self.params]
        pairs = zip(found, tensors, strict=True)
        rest = [g if g is None or g.dtype is x.dtype else g.to(x.dtype) for g, x in pairs]
        of_times = None if of_times is None else of_times.to(device=ts.device, dtype=ts.dtype)
        grads = [adj if needs[0] else None, of_times, *rest]
        self.check_unmodified(grads)
        return grads

    def check_unmodified(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """A parameter that does turn out to be in use, since it has a gradient, must not have changed."""
        for i, (x, version) in self._unseen.items():
            if (grads is None or grads[i] is not None) and x._version != version:
                raise RuntimeError(
                    f"a parameter of shape {tuple(x.shape)} that the field uses has been modified by an inplace "
                    "operation since the solve: the steps cannot be taken again. Change it after the backward pass."
                )


def check_samples(request: BackwardRequest, counter: Counter) -> None:
    """Evaluate the field again where it was evaluated on the forward pass: is it still the same function?"""
    forward = request.forward
    assert forward.samples is not None
    problem, log = forward.problem, EvaluationLog(Counter())
    evaluate = EagerEvaluator(problem.field, problem.y0, forward.determinism, log)
    same = SameAnswers(problem.field.eps, request.inputs.check_unmodified)
    states, slopes = request.samples[::2], request.samples[1::2]
    with torch.no_grad():
        for t, y, k in zip(forward.samples.times, states, slopes, strict=True):
            same.compare(evaluate(t, y), k, lambda k=k: [k], t)
    same.finish(problem.times[0])
    counter.checks += log.counter.nfe


def row_sizes(grad: Tensor | None) -> list[float]:
    """The largest magnitude in every row: zero where there is nothing to backpropagate."""
    if grad is None or len(grad) == 0:
        return []
    if not grad[0].numel():
        return [0.0] * len(grad)
    rows = grad.reshape(len(grad), -1)
    # The norm needs no copy, but takes longer to begin with.
    return (rows.abs().amax(1) if rows.numel() <= SMALL else vector_norm(rows, math.inf, 1)).tolist()


def check_cotangents(
    sizes: Sequence[float], times: Sequence[float], what: str | Callable[[int], str], stats: Callable[[], Stats]
) -> None:
    """Refuse non-finite gradients of the loss before any work is done."""
    if not all(map(math.isfinite, sizes)):
        i = next(i for i, size in enumerate(sizes) if not math.isfinite(size))
        named = f"{what} {i}" if isinstance(what, str) else what(i)
        message = f"the gradient of the loss with respect to {named} holds a NaN or an infinity"
        raise NonFiniteState(message, t=times[i], stats=stats(), backward=True)


def agreed_sizes(grad: Tensor | None, ranks: Alone) -> list[float]:
    """The largest magnitude in every row, on any rank."""
    return ranks.largest(row_sizes(grad))


def _zeros(kind: tuple[torch.Size, torch.dtype, torch.device] | None) -> Tensor | None:
    return None if kind is None else torch.zeros(kind[0], dtype=kind[1], device=kind[2])


class SolveFunction(Function):
    """Binds a finished forward pass into autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        adjoint: FunctionAdjoint,
        forward: ForwardPass,
        inputs: Inputs,
        outputs: tuple[Tensor, Tensor | None],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        ys, coefficients = outputs
        ctx.solve = adjoint, forward, inputs
        ctx.set_materialize_grads(False)
        kept = [] if forward.tape is None else forward.tape.hand_over()
        samples = [] if forward.samples is None else forward.samples.hand_over()
        ctx.samples = len(samples)
        ctx.outputs = [None if x is None else (x.shape, x.dtype, x.device) for x in outputs]
        # The inputs, so that a change in place is noticed; the tape, so that autograd frees it and hooks may move it.
        ctx.save_for_backward(*inputs.guarded(tensors), *samples, *kept, *([ys] if adjoint.keeps_outputs else []))
        return ys, coefficients

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Gradients for all inputs, from the cotangents of the outputs and of the dense coefficients."""
        adjoint, forward, inputs = ctx.solve
        if transforms_active() or any(map(is_batched, grads)):
            raise RuntimeError(
                f"{adjoint.name} cannot compute batches of gradients (is_grads_batched=True, or torch.func.vmap over a "
                "backward pass), since its backward pass reads values. Pass adjoint=sn.Direct() and compile=False to "
                "solve, or loop over the cotangents."
            )
        if forward.problem.ranks.several:  # all ranks backpropagate alike, whatever their own losses depend on
            grads = tuple(_zeros(shape) if g is None else g for g, shape in zip(grads, ctx.outputs, strict=True))
        tensors, kept = inputs.split(ctx.saved_tensors)
        samples, kept = kept[: ctx.samples], kept[ctx.samples :]
        request = BackwardRequest(forward, inputs, tensors, kept, samples, ctx.needs_input_grad[4:], grads)
        nothing = [None] * 4
        if torch.is_grad_enabled():
            return *nothing, *GradientFunction.apply(adjoint, request, *grads, *tensors)  # type: ignore[misc]
        check = rank_check()
        with forward.determinism.backward():
            found = adjoint.backward(request)
        if check is not None and forward.report.stats is not None:
            check.compare("a backward pass", work_of(forward.report.stats), forward.problem.ranks)
        return *nothing, *found


class GradientFunction(Function):
    """The backward pass as a function of its own, for derivatives of second and higher order.

    Inputs: the adjoint, the request; the two cotangents, and the inputs of the solve.
    """

    @staticmethod
    def forward(ctx: Any, adjoint: FunctionAdjoint, request: BackwardRequest, *tensors: Any) -> Any:
        ctx.solve = adjoint, request._replace(tensors=(), kept=(), samples=(), cotangents=())
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with request.forward.determinism.backward():
            grads = adjoint.backward(request)
        # Where the cotangents are zero, steps are left out and nothing flows. Derivatives of that are not zero.
        inputs = zip(grads, tensors[2:], request.needs, strict=True)
        return tuple(torch.zeros_like(x) if grad is None and need else grad for grad, x, need in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        adjoint, request = ctx.solve
        cotangents, tensors = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        present = [c is not None for c in cotangents]
        solved = adjoint.frozen(request._replace(tensors=tensors))

        def gradients(leaves: Sequence[Tensor]) -> list[Tensor | None]:
            """The gradients of the frozen solve, as a function of its cotangents and its inputs."""
            weights, inputs = leaves[: sum(present)], leaves[sum(present) :]
            values = [v for v, c in zip(solved(inputs), present, strict=True) if c]
            return vjp(values, inputs, weights, request.needs)

        with request.forward.determinism.backward():
            found = differentiated(gradients, [*(c for c in cotangents if c is not None), *tensors], grads)
        firsts = iter(found)
        return None, None, *[next(firsts) if c else None for c in present], *firsts

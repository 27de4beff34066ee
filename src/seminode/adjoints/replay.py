"""Replay: keep the accepted steps, take each again on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..engine import Eager, TimeShifts
from ..errors import NonFiniteState
from ..loop import integrate, is_finite
from ..observers import Observer, Tally
from ..pace import RecordedPace
from ..parameters import CaptureWatch, differentiable, reachable
from ..problem import Forward, Problem
from .base import Adjoint, ForwardPass, outputs_of, transforms_active
from .vjp import Accumulator, StepShifts, TimeGradient, pull_back


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
        modules, tensors = reachable(problem.field.func)
        if not torch.is_grad_enabled():
            plain = ForwardPass(problem, modules=modules)
            return plain.run(plain.engine(), problem.y0)
        forward = ForwardPass(problem, every=self.every, modules=modules)
        k1, params = _first_evaluation(forward, differentiable(modules, tensors))
        args = problem.field.arg_tensors
        inputs = [problem.y0, problem.ts, *args, *params]
        if not any(x.requires_grad for x in inputs):
            forward.tape = type(forward.tape)()
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
    with torch.no_grad():
        if problem.params is not None:
            return engine.first_slope(forward.start(), y0), list(problem.params)
        with watch:
            k1 = engine.first_slope(forward.start(), y0)
    found = {id(x): x for x in (*static, *watch.captured.values())}
    return k1, list(found.values())


class Call:
    """What one solve shares between its forward and its backward pass."""

    def __init__(self, forward: ForwardPass, k1: Tensor | None, params: Sequence[Tensor], n_args: int):
        self.forward = forward
        self.k1 = k1
        self.params = params  # live: a captured tensor is differentiated as it is, not the leaves behind it
        self.n_args = n_args
        self.result: Forward | None = None
        self.backward_stats: list[Any] = []


class ReplayFunction(Function):
    """Binds a replayed solve into autograd. Inputs: the call, y0, ts, the tensors in args, the parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        forward = call.forward
        result = forward.run(forward.engine(), inputs[0].detach(), k1=call.k1)
        call.k1 = None
        call.result = result
        call.backward_stats = result.stats._backward
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)  # so that a change in place before the backward pass is noticed
        return result.ys, result.coefficients

    @staticmethod
    def backward(ctx: Any, grad_ys: Tensor | None, grad_coefficients: Tensor | None) -> Any:  # type: ignore[override]
        call: Call = ctx.call
        sweep = Sweep(call, ctx.saved_tensors, ctx.needs_input_grad[1:])
        if grad_ys is None and grad_coefficients is None:
            return (None,) * len(ctx.needs_input_grad)
        with call.forward.purity.backward():
            if torch.is_grad_enabled():
                return (None, *sweep.differentiably(grad_ys, grad_coefficients))
            return (None, *sweep.run(grad_ys, grad_coefficients))


class Sweep:
    """The backward pass of a replayed solve."""

    def __init__(self, call: Call, inputs: Sequence[Tensor], needs: Sequence[bool]):
        self.call = call
        self.problem: Problem = call.forward.problem
        self.y0, self.ts = inputs[:2]
        self.args = inputs[2 : 2 + call.n_args]
        self.needs = needs
        self.tally = Tally()
        self.pulled = 0  # evaluations that were pulled back; with every > 1 others are made, to get there

    def differentiably(self, grad_ys: Tensor | None, grad_coefficients: Tensor | None) -> list[Tensor | None]:
        """The gradients with a graph of their own, for higher derivatives: autograd through the taped steps."""
        forward = ForwardPass(self.problem, modules=[])
        forward.purity = self.call.forward.purity
        shifts = TimeShifts(self.ts, self.y0) if self.needs[1] else None
        engine = forward.engine(self.problem.field.bind(self.args), shifts)
        result = forward.run(engine, self.y0, shifts=shifts, plans=self.call.forward.tape.plans)
        pairs = [(result.ys, grad_ys), (result.coefficients, grad_coefficients)]
        pairs = [(value, cotangent) for value, cotangent in pairs if cotangent is not None]
        inputs = [self.y0, self.ts, *self.args, *self.call.params]
        wanted = [x for x, need in zip(inputs, self.needs, strict=True) if need]
        values, cotangents = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(values, wanted, cotangents, create_graph=True, allow_unused=True))
        return [next(grads) if need else None for need in self.needs]

    def run(self, grad_ys: Tensor | None, grad_coefficients: Tensor | None) -> list[Tensor | None]:
        """Segment by segment, step by step, from the end to the start."""
        problem, tape = self.problem, self.call.forward.tape
        every = self.call.forward.every or 1
        args = [x.detach().requires_grad_() if need else x for x, need in zip(self.args, self.needs[2:], strict=False)]
        flags = self.needs[2:]
        self.targets = [x for x, need in zip([*args, *self.call.params], flags, strict=True) if need]
        self.sums = Accumulator(len(self.targets))
        self.time = TimeGradient(self.ts, self.y0) if self.needs[1] else None
        self.engine_of = lambda shifts: Eager(
            problem.field.bind(args), problem.solver, self.y0, self.call.forward.purity, self.tally, shifts
        )
        self.outputs, first = outputs_of(problem)
        self.grads = grad_ys, grad_coefficients
        self.rows = _nonzero_rows(grad_ys), _nonzero_rows(grad_coefficients)
        self._check_cotangents()
        adj: Tensor | None = None
        for segment in range(len(tape.states) - 1, -1, -1):
            start = segment * every
            plans = tape.plans[start : start + every]
            states = self._states(tape.states[segment], plans)
            for j in range(len(plans) - 1, -1, -1):
                adj = self._step(start + j, states.pop(), adj)
        if grad_ys is not None and first:
            direct = grad_ys[: len(first)].sum(0)
            adj = direct if adj is None else adj + direct
        if grad_coefficients is not None and not tape.plans:
            direct = grad_coefficients[0, 0]
            adj = direct if adj is None else adj + direct
        self._report()
        return self._assemble(adj)

    def _states(self, y: Tensor, plans: Sequence[Any]) -> list[Tensor]:
        """The states before each step of a segment, from the one that was kept."""
        if len(plans) == 1:
            return [y]
        before = StatesBefore()
        integrate(self.engine_of(None), RecordedPace(plans[:-1]), y.detach(), [before], check=False)
        return [*before.states, before.last]

    def _step(self, j: int, y: Tensor, adj: Tensor | None) -> Tensor | None:
        plan = self.call.forward.tape.plans[j]
        low, high = self.call.forward.ranges[j]
        ys, coefficients = self.grads
        rows, dense_rows = self.rows
        adj_outputs = ys[low:high] if ys is not None and any(rows[low:high]) else None
        adj_dense = coefficients[j] if coefficients is not None and dense_rows[j] else None
        if adj is None and adj_outputs is None and adj_dense is None:
            return None
        shifts = StepShifts(self.y0, high - low) if self.time is not None else None
        before = self.tally.nfe
        grad_y, grad_times, grad_targets = pull_back(
            self.engine_of(shifts),
            plan,
            y,
            self.outputs,
            (low, high),
            (adj, adj_outputs, adj_dense),
            self.targets,
            shifts,
        )
        self.tally.steps += 1
        self.pulled += self.tally.nfe - before
        self.sums.add(grad_targets)
        if self.time is not None:
            self.time.add(plan, low, *grad_times)
        if self.problem.throw and grad_y is not None and not is_finite(grad_y):
            self._fail(plan.t0, plan.dt, grad_y)
        return grad_y

    def _check_cotangents(self) -> None:
        ys = self.grads[0]
        if self.problem.throw and ys is not None and not is_finite(ys):
            finite = torch.isfinite(ys).flatten(1).all(1).tolist()
            i = finite.index(False)
            raise NonFiniteState(
                f"the gradient of the loss with respect to output {i} holds a NaN or an infinity",
                t=float(self.ts[i]) if i < len(self.ts) else self.problem.times[-1],
                stats=self.tally.stats(),
                backward=True,
            )

    def _fail(self, t: float, dt: float, grad: Tensor) -> None:
        leaf = self.problem.field.layout.culprit(grad)
        raise NonFiniteState(
            f"the gradient with respect to the state became NaN or infinite at t = {t:g} (leaf {leaf}). Look for an "
            "operation in the field whose derivative is infinite there (sqrt, norm or pow at 0), or a gradient "
            "that grows beyond the dtype.",
            t=t,
            dt=dt,
            stats=self.tally.stats(),
            leaf=leaf,
            backward=True,
        )

    def _report(self) -> None:
        params = self.pulled if any(self.needs[2 + self.call.n_args :]) else 0
        self.call.backward_stats[:] = [self.tally.stats(vjp_y=self.pulled, vjp_params=params)]

    def _assemble(self, adj: Tensor | None) -> list[Tensor | None]:
        sums = iter(self.sums.totals)
        rest = [next(sums) if need else None for need in self.needs[2:]]
        time = None if self.time is None else self.time.result()
        return [adj if self.needs[0] else None, time, *rest]


class StatesBefore(Observer):
    """The state before each step, and the last one reached."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.last: Tensor

    def accepted(self, step: Any, ratio: float) -> None:
        self.states.append(step.y0)
        self.last = step.y1


def _nonzero_rows(grad: Tensor | None) -> list[bool]:
    if grad is None:
        return []
    return (grad.flatten(1) != 0).any(1).tolist() if grad[0].numel() else [False] * len(grad)

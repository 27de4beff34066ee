"""The backward pass of a replayed solve, and its derivative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine import Eager, TimeShifts
from ..errors import NonFiniteState
from ..field import Field
from ..loop import integrate, is_finite
from ..observers import Observer, Tally
from ..pace import RecordedPace
from ..parameters import check_captures, cut, restricted
from ..problem import Forward, Plan, Problem
from .base import ForwardPass, outputs_of
from .vjp import Accumulator, StepShifts, TimeGradient, pull_back


class Call:
    """What one solve shares between its forward and its backward pass; the tensors themselves are kept by autograd."""

    def __init__(self, forward: ForwardPass, k1: Tensor | None, params: Sequence[Tensor], used: set[int], n_args: int):
        self.forward = forward
        self.k1 = k1
        self.params = params
        self.n_args = n_args
        self.result: Forward | None = None
        self.output_times: tuple[float, ...] = ()
        self.backward_stats: list[Any] = []
        # Parameters that were only found within reach: autograd must not insist that they stay as they are.
        self._unseen = {i: (x, x._version) for i, x in enumerate(params, 2 + n_args) if id(x) not in used}

    def finish(self, result: Forward) -> None:
        """The forward pass is done."""
        self.k1, self.result = None, result
        self.output_times = tuple(result.ts.tolist())
        self.backward_stats = result.stats._backward

    def guarded(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs that autograd shall watch for changes."""
        return [x for i, x in enumerate(inputs) if i not in self._unseen]

    def split(self, saved: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The inputs and the states on the tape, from what autograd has kept."""
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


class Sweep:
    """The backward pass of a replayed solve."""

    def __init__(self, call: Call, inputs: Sequence[Tensor], states: Sequence[Tensor], needs: Sequence[bool]):
        self.call = call
        self.states = states
        self.problem: Problem = call.forward.problem
        self.y0, self.ts = inputs[:2]
        self.args = inputs[2 : 2 + call.n_args]
        self.needs = needs
        self.tally = Tally()
        self.pulled = 0  # evaluations that were pulled back; with every > 1 others are made, to get there

    def run(self, grad_ys: Tensor | None, grad_coefficients: Tensor | None) -> list[Tensor | None]:
        """Segment by segment, step by step, from the end to the start."""
        if grad_ys is None and grad_coefficients is None:
            return [None] * len(self.needs)
        tape = self.call.forward.tape
        every = self.call.forward.every or 1
        flags = self.needs[2:]
        self.field, args, params = self.call.independent(self.args, flags[: len(self.args)])
        self.targets = [x for x, need in zip([*args, *params], flags, strict=True) if need]
        self.sums = Accumulator(len(self.targets))
        self.time = TimeGradient(self.ts, self.y0) if self.needs[1] else None
        self.outputs, first = outputs_of(self.problem)
        self.grads = grad_ys, grad_coefficients
        self.rows = _nonzero_rows(grad_ys), _nonzero_rows(grad_coefficients)
        self._check_cotangents()
        adj: Tensor | None = None
        for segment in range(len(self.states) - 1, -1, -1):
            start = segment * every
            plans = tape.plans[start : start + every]
            if adj is None and not any(map(self._holds_cotangent, range(start, start + len(plans)))):
                continue
            states = self._states(self.states[segment], plans)
            for j in range(len(plans) - 1, -1, -1):
                adj = self._step(start + j, states.pop(), adj)
        if grad_ys is not None and first:
            direct = grad_ys[: len(first)].sum(0)
            adj = direct if adj is None else adj + direct
        if grad_coefficients is not None and not tape.plans:
            direct = grad_coefficients[0, 0]
            adj = direct if adj is None else adj + direct
        self._check_sums()
        self._report()
        return self._assemble(adj)

    def _audit(self, values: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Once a backward pass: does the step lead to a tensor that was not found at the start of the solve?"""
        if self.problem.params is None:
            check_captures(values, known, [x for x in self.call.params if not x.is_leaf])

    def _engine(self, shifts: StepShifts | None) -> Eager:
        return Eager(self.field, self.problem.solver, self.y0, self.call.forward.purity, self.tally, shifts)

    def _states(self, y: Tensor, plans: Sequence[Any]) -> list[Tensor]:
        """The states before each step of a segment, from the one that was kept."""
        if len(plans) == 1:
            return [y]
        before = StatesBefore()
        integrate(self._engine(None), RecordedPace(plans[:-1]), y.detach(), [before], check=False)
        return [*before.states, before.last]

    def _holds_cotangent(self, j: int) -> bool:
        low, high = self.call.forward.ranges[j]
        rows, dense_rows = self.rows
        return any(rows[low:high]) or any(dense_rows[j : j + 1])

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
            self._engine(shifts),
            plan,
            y,
            self.outputs,
            (low, high),
            (adj, adj_outputs, adj_dense),
            self.targets,
            shifts,
            self._audit if self.tally.steps == 0 else None,
        )
        self.tally.steps += 1
        self.pulled += self.tally.nfe - before
        self.sums.add(grad_targets)
        if self.time is not None:
            self.time.add(plan, low, *grad_times)
        if self.problem.throw and grad_y is not None and not is_finite(grad_y):
            leaf = self.problem.field.layout.culprit(grad_y)
            self._fail("the state", plan, leaf)
        return grad_y

    def _check_cotangents(self) -> None:
        """Refuse what the loss handed us if it is not finite, before any work is done."""
        if not self.problem.throw:
            return
        plans = self.call.forward.tape.plans
        steps = [plan.t0 for plan in plans] or [self.problem.times[0]]
        for grad, times, what in zip(self.grads, (self.call.output_times, steps), ("output", "step"), strict=True):
            if grad is not None and not is_finite(grad):
                i = torch.isfinite(grad).flatten(1).all(1).tolist().index(False)
                message = f"the gradient of the loss with respect to {what} {i} holds a NaN or an infinity"
                raise NonFiniteState(message, t=times[i], stats=self.tally.stats(), backward=True)

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
        for total in self.sums.totals if self.problem.throw else ():
            if total is not None and not is_finite(total):
                what = f"a parameter or argument of shape {tuple(total.shape)}"
                self._fail(what, self.call.forward.tape.plans[0], None)

    def _report(self) -> None:
        params = self.pulled if any(self.needs[2:]) else 0
        self.call.backward_stats[:] = [self.tally.stats(vjp_y=self.pulled, vjp_params=params)]

    def _assemble(self, adj: Tensor | None) -> list[Tensor | None]:
        sums = iter(self.sums.totals)
        found = [next(sums) if need else None for need in self.needs[2:]]
        tensors = [*self.args, *self.call.params]
        rest = [None if g is None else g.to(x.dtype) for g, x in zip(found, tensors, strict=True)]
        time = None if self.time is None else self.time.result()
        grads = [adj if self.needs[0] else None, time, *rest]
        self.call.check_unseen(grads)
        return grads


class StatesBefore(Observer):
    """The state before each step, and the last one reached."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.last: Tensor

    def accepted(self, step: Any, ratio: float) -> None:
        self.states.append(step.y0)
        self.last = step.y1


def _nonzero_rows(grad: Tensor | None) -> list[bool]:
    if grad is None or len(grad) == 0:
        return []
    return (grad.flatten(1) != 0).any(1).tolist() if grad[0].numel() else [False] * len(grad)


def second_order(
    call: Call,
    needs: Sequence[bool],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Pull `grads`, the cotangents of the first-order gradients, back to the first cotangents and to the inputs.

    The taped steps are taken again under autograd, differentiated once with a graph, and that graph once more.
    """
    forward = ForwardPass(replace(call.forward.problem, record=False, progress=False), call.forward.purity)
    args = inputs[2 : 2 + call.n_args]
    with torch.enable_grad():
        y0, ts = leaf_of(inputs[0]), leaf_of(inputs[1])
        field, args, params = call.independent(args, needs[2 : 2 + call.n_args])
        leaves = [y0, ts, *args, *params]
        fresh = [None if c is None else leaf_of(c) for c in cotangents]
        shifts = TimeShifts(ts, y0) if needs[1] else None
        result = forward.run(forward.engine(field, shifts), y0, shifts=shifts, plans=call.forward.tape.plans)
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

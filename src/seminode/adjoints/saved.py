"""Compiled steps that keep what their pull-backs need: what `Direct` does when it is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine import Eager
from ..fused import FusedStep, Saving, evaluation_program, saving_program, warn_of
from ..graphs import NotCompiled
from ..observers import StateTape
from ..problem import Problem
from ..state import real_dtype
from .binding import Asked, Call, Gradients
from .replay import Replay
from .sweep import Sweep
from .vjp import spread


class SavedTape(StateTape):
    """The states before the steps and, of compiled steps, what they have kept."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Tensor] = []
        self.sizes: list[int] = []

    def accepted(self, step: Any, ratio: float) -> None:
        super().accepted(step, ratio)
        if isinstance(step, FusedStep) and step.kept:
            self._kept += step.kept
            self.sizes.append(len(step.kept))

    def hand_over(self) -> list[Tensor]:
        states = super().hand_over()
        kept, self._kept = self._kept, []
        return [*states, *kept]


@dataclass(frozen=True)
class Saved(Replay):
    """Goes back through compiled steps with what they have kept; like `Replay` where the field cannot be compiled."""

    def tape(self, problem: Problem) -> SavedTape:
        return SavedTape()

    def engine(self, call: Call) -> Eager:
        forward = call.forward
        if not _worth_saving(forward.problem):
            return forward.engine()
        engine = forward.engine(kind=Saving)
        assert isinstance(engine, Saving)
        engine.choose = lambda: call.wanted(_differentiable(call))[1]
        engine.slopes = _outputs_inside(forward.problem)
        return engine

    def backward(self, asked: Asked) -> Gradients:
        tape = asked.call.forward.tape
        assert isinstance(tape, SavedTape)
        steps = len(tape.plans)
        replayed = asked._replace(kept=asked.kept[:steps])
        # Gradients for times and of polynomials are Replay's business.
        if not tape.sizes or asked.needs[1] or asked.grads[1] is not None:
            return super().backward(replayed)
        try:
            return SavedSweep(replayed, self.states(replayed), asked.kept[steps:], tape.sizes).run()
        except NotCompiled as reason:
            warn_of(reason)
            return super().backward(replayed)


def _differentiable(call: Call) -> list[bool]:
    """Of which args and parameters a gradient may be asked for: what steps keep is for all of them."""
    return [x.requires_grad for x in (*call.forward.problem.field.arg_tensors, *call.params)]


def _outputs_inside(problem: Problem) -> bool:
    return problem.save == "ts" and len(problem.times) > 2


def _worth_saving(problem: Problem) -> bool:
    """Not where the polynomial of a step reads a slope that the step itself does not compute."""
    solver = problem.solver
    alone = len(solver.interpolant) <= solver.stages
    return solver.error_needs_end_slope or alone or not _outputs_inside(problem)


class SavedSweep(Sweep):
    """The backward pass over compiled steps and what they have kept.

    The last slope of a step is the first one of the next, unless there is a jump between them. So there are two
    cotangents to carry: of the state, and of the slope there.
    """

    def __init__(self, asked: Asked, states: Any, kept: Any, sizes: list[int]):
        super().__init__(asked, states)
        self._kept, self._sizes = list(kept), sizes
        self._adj_k: Tensor | None = None

    def choose(self) -> tuple[list[int], tuple[bool, ...]]:
        return self.call.wanted(self.needs[2:])[0], self.call.wanted(_differentiable(self.call))[1]

    def _step(self, j: int, adj: Tensor | None) -> Tensor | None:
        assert self.capture is not None
        plan, solver, problem = self.plans[j], self.problem.solver, self.problem
        y = self.states.before(j, self)
        bounds = self.call.forward.ranges[j]
        ys, rows = self.grads[0], self.rows[0]
        adj_outputs = ys[slice(*bounds)] if ys is not None and any(rows[slice(*bounds)]) else None
        end, start, slopes = spread(adj, adj_outputs, self.outputs, plan, bounds, solver)
        args = (self._wanted, _outputs_inside(problem), y, y)
        program = saving_program(self.capture, solver, problem.error, *args)
        split = len(self._kept) - self._sizes[j]
        kept, self._kept = self._kept[split:], self._kept[:split]
        grad_y, grad_k1, *grads = program.pull(kept, self._cotangents(y, end, slopes))
        evaluated = len(program.nodes.evaluated)
        if start is not None and slopes is not None:
            grad_y, grad_k1 = grad_y + start, grad_k1 + slopes[0]
        self.sums.add(self.by_target(grads))
        carried = solver.error_needs_end_slope and j > 0 and not self.plans[j - 1].crosses_jump
        self._adj_k = grad_k1 if carried else None
        if not carried:
            t = torch.full((), plan.stage_time(0.0), dtype=real_dtype(y), device=y.device)
            pulled, *grads = evaluation_program(self.capture, self._wanted, t, y)(t, y, grad_k1, self._rest)
            grad_y = grad_y + pulled
            self.sums.add(self.by_target(grads))
            self.tally.nfe += 1
            evaluated += 1
        self.pulled += evaluated
        self.tally.steps += 1
        self.taken.append(plan)
        self.check_gradient(grad_y, plan)
        return grad_y

    def _cotangents(self, y: Tensor, end: Tensor | None, slopes: Tensor | None) -> list[Tensor]:
        """Of y1, k_end and, if the program takes them, k2, k3, …"""
        solver, zero = self.problem.solver, torch.zeros_like(y)
        cotangents = [zero if end is None else end]
        stages = solver.stages
        if solver.error_needs_end_slope:
            last = slopes[stages] if slopes is not None and len(slopes) > stages else None
            parts = [x for x in (self._adj_k, last) if x is not None]
            cotangents.append(sum(parts[1:], parts[0]) if parts else zero)
        if _outputs_inside(self.problem):
            cotangents += [zero] * (stages - 1) if slopes is None else list(slopes[1:stages])
        return cotangents

"""Compiled steps that keep what their pull-backs need: what `Direct` does when it is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._compile.engine import FusedStep, Saving, warn_of
from ..._compile.graph import NotCompiled
from ..._compile.programs import saving_programs
from ..._stepping.engine import Eager
from ..._stepping.observers import StateTape
from ..._stepping.problem import Problem
from .._autograd import Asked, Call, Gradients
from ..replay import Replay
from .step_vjp import spread
from .sweep import Sweep

#: Of a step's end, its start and its slopes.
Cotangents = tuple[Tensor | None, Tensor | None, Tensor | None]


class SavedTape(StateTape):
    """The states before the steps and, of compiled steps, what they have kept."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self._ends = ends  # whether the slope at the end of a step may be read by outputs inside of it
        self._kept: list[Tensor] = []
        self.sizes: list[int] = []

    def accepted(self, step: Any, ratio: float) -> None:
        super().accepted(step, ratio)
        if isinstance(step, FusedStep) and step.kept:
            # Of the end slope only where no next step starts with it.
            kept = [*step.kept, *(step.kept_at_end if self._ends and step.plan.breaks else [])]
            self._kept += kept
            self.sizes.append(len(kept))

    def hand_over(self) -> list[Tensor]:
        states = super().hand_over()
        kept, self._kept = self._kept, []
        return [*states, *kept]


@dataclass(frozen=True)
class Saved(Replay):
    """Goes back through compiled steps with what they have kept; like `Replay` where the field cannot be compiled."""

    def tape(self, problem: Problem) -> SavedTape:
        return SavedTape(_outputs_inside(problem))

    def engine(self, call: Call) -> Eager:
        forward = call.forward
        if forward.capture is None or not _worth_saving(forward.problem):
            return forward.engine()
        wanted, slopes = call.wanted(_differentiable(call))[1], _outputs_inside(forward.problem)
        return forward.fused(forward.tally, forward.log, Saving, wanted=wanted, slopes=slopes)

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

    The slope at the end of a step is the first one of the next, unless something breaks between them. What outputs
    inside the step make of it is then pulled back with that next step.
    """

    def __init__(self, asked: Asked, states: Any, kept: Any, sizes: list[int]):
        super().__init__(asked, states)
        self._kept, self._sizes = list(kept), sizes
        self._latest: tuple[int, Cotangents] | None = None
        self._programs: Any = None
        self._zero = torch.zeros_like(self.y0)

    def choose(self) -> tuple[list[int], tuple[bool, ...]]:
        return self.call.wanted(self.needs[2:])[0], self.call.wanted(_differentiable(self.call))[1]

    def _step(self, j: int, adj: Tensor | None) -> Tensor | None:
        if self._programs is None:
            self._programs = self._find_programs()
        programs, plan = self._programs, self.plans[j]
        split = len(self._kept) - self._sizes[j]
        kept = self._kept[split:]
        del self._kept[split:]  # in place: a copy of the rest for every step would take quadratic time
        both = programs.kept + programs.at.kept
        end, start, slopes = self._outputs(j)
        end = _sum(adj, end)
        of_end = self._of_end(slopes)
        if of_end is not None and plan.breaks:
            pulled, _, *self.compiled = programs.at.pull(kept[both:], of_end, self.compiled)
            end = _sum(end, pulled)
            self.pulled += 1
        of_start = self._of_end(self._outputs(j - 1)[2]) if j > 0 and not self.plans[j - 1].breaks else None
        cotangents = self._cotangents(end, of_start, slopes)
        grad_y, alive, *self.compiled = programs.pull(plan, kept[:both], cotangents, self.compiled)
        self.pulled += self.problem.solver.evaluations
        self.tally.steps += 1
        self.taken.append(plan)
        grad_y = grad_y if start is None else grad_y + start
        self.check_alive(alive, grad_y, plan)
        return grad_y

    def _find_programs(self) -> Any:
        problem = self.problem
        assert self.capture is not None
        slopes, y0 = _outputs_inside(problem), self.y0.detach()
        return saving_programs(self.capture, problem.solver, problem.error, self._wanted, slopes, y0)

    def _outputs(self, j: int) -> Cotangents:
        """Cotangents of the end, the start and the slopes of a step, from the outputs in it."""
        if self._latest is None or self._latest[0] != j:
            bounds, ys = self.call.forward.ranges[j], self.grads[0]
            outputs = ys[slice(*bounds)] if ys is not None and any(self.rows[0][slice(*bounds)]) else None
            self._latest = j, spread(None, outputs, self.outputs, self.plans[j], bounds, self.problem.solver)
        return self._latest[1]

    def _of_end(self, slopes: Tensor | None) -> Tensor | None:
        """That of the slope at the end of a step."""
        stages = self.problem.solver.stages
        return slopes[stages] if slopes is not None and len(slopes) > stages else None

    def _cotangents(self, end: Tensor | None, of_start: Tensor | None, slopes: Tensor | None) -> list[Tensor]:
        """Of k1, y1 and, if the program takes them, k2, k3, …"""
        stages = self.problem.solver.stages
        own: Sequence[Tensor | None] = [None] * stages if slopes is None else slopes[:stages].unbind()
        found = [_sum(own[0], of_start), end, *(own[1:] if _outputs_inside(self.problem) else ())]
        return [self._zero if x is None else x for x in found]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b

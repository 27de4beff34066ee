"""The backward pass over compiled steps that have kept their activations: what `Direct` does when it is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compile.engine import Saved
from ..._compile.programs import saving_programs
from ..._stepping.observers import State, StateTape
from ..._stepping.problem import Problem
from ..._stepping.step import Step
from .._autograd import BackwardRequest
from .states import SparseStates
from .step_vjp import spread
from .sweep import Sweep

#: Of a step's end, its start and its slopes.
Cotangents = tuple[Tensor | None, Tensor | None, Tensor | None]


class ActivationTape(StateTape):
    """The states before the steps and, of compiled steps, the activations that they keep."""

    def __init__(self, ends: bool, may_end: bool = False) -> None:
        super().__init__()
        self._ends = ends  # whether outputs inside a step may read the slope at its end
        self._may_end = may_end  # whether any step may turn out to be the last one, before an event
        self._activations: list[Tensor] = []
        self.sizes: list[int] = []

    def accepted(self, step: Step, ratio: float) -> None:
        super().accepted(step, ratio)
        saved = step.saved
        if isinstance(saved, Saved):
            # Those of the end slope only where no next step starts with it.
            kept = [
                *saved.step,
                *saved.first,
                *(saved.end if self._ends and (step.plan.breaks or self._may_end) else []),
            ]
            self._activations += kept
            self.sizes.append(len(kept))

    def hand_over(self) -> list[Tensor]:
        activations, self._activations = self._activations, []
        return [*super().hand_over(), *activations]


def outputs_inside(problem: Problem) -> bool:
    """Whether outputs may lie inside of steps."""
    return problem.save == "ts" and (len(problem.times) > 2 or bool(problem.events))


def worth_saving(problem: Problem) -> bool:
    """Not where the polynomial of a step reads a slope that the step itself does not compute, nor with own steps."""
    if problem.lanes is not None:
        return False  # the slopes and activations of accepted and rejected samples would have to be merged
    solver = problem.solver
    alone = len(solver.interpolant) <= solver.stages
    return solver.error_needs_end_slope or alone or not outputs_inside(problem)


def states_and_activations(request: BackwardRequest) -> tuple[SparseStates, list[Tensor]]:
    """What an `ActivationTape` has handed over."""
    steps = len(request.forward.plans)
    return SparseStates(request.kept[: steps + 1], 1, steps), list(request.kept[steps + 1 :])


class SavedSweep(Sweep):
    """Backpropagates through compiled steps with the activations that they have kept.

    The slope at the end of a step is the first one of the next, unless something breaks between them. The cotangent
    that outputs inside the step give it is then part of the VJP of that next step.
    """

    def __init__(self, request: BackwardRequest, states: SparseStates, activations: list[Tensor], sizes: Sequence[int]):
        super().__init__(request, states)
        self._activations = activations
        self._starts = [0, *itertools.accumulate(sizes)]  # where the activations of each step begin
        self._latest: tuple[int, Cotangents] | None = None
        self._programs: Any = None
        self._zero = torch.zeros_like(self.y0)

    def choose(self) -> tuple[list[int], tuple[bool, ...]]:
        assert self.capture is not None
        inputs = self.request.inputs
        keys, _ = inputs.wanted(self.capture, self.needs[2:])
        return keys, inputs.wanted(self.capture, inputs.differentiable())[1]

    def _holds_cotangent(self, j: int) -> bool:
        if super()._holds_cotangent(j):
            return True
        # Outputs inside the step before this one may read its end slope, which is the first slope of this one.
        return j > 0 and not self.plans[j - 1].breaks and super()._holds_cotangent(j - 1)

    def _step(self, j: int, adj: State | None) -> State | None:
        if self._programs is None:
            self._programs = self._find_programs()
        programs, plan = self._programs, self.plans[j]
        kept = self._activations[self._starts[j] : self._starts[j + 1]]
        del self._activations[self._starts[j] :]  # in place: a copy of the rest for every step takes quadratic time
        both = programs.kept + programs.at.kept
        end, start, slopes = self._of_outputs(j)
        end = _sum(None if adj is None else adj[0], end)
        of_end = self._of_end(slopes)
        if of_end is not None and plan.breaks:
            grad, _, *self.compiled = programs.at.vjp(kept[both:], of_end, self.compiled)
            end = _sum(end, grad)
            self.differentiated += 1
        of_start = self._of_end(self._of_outputs(j - 1)[2]) if j > 0 and not self.plans[j - 1].breaks else None
        cotangents = self._cotangents(end, of_start, slopes)
        grad_y, finite, *self.compiled = programs.vjp(plan, kept[:both], cotangents, self.compiled)
        self.finish_compiled(plan, self.problem.solver.evaluations)
        grad_y = grad_y if start is None else grad_y + start
        self.check_finite(finite, grad_y, plan)
        return (grad_y,)

    def _find_programs(self) -> Any:
        problem = self.problem
        assert self.capture is not None
        slopes, y0 = outputs_inside(problem), self.y0.detach()
        return saving_programs(self.capture, problem.solver, problem.error, self._wanted, slopes, y0)

    def _of_outputs(self, j: int) -> Cotangents:
        """Cotangents of the end, the start and the slopes of a step, from the outputs in it."""
        if self._latest is None or self._latest[0] != j:
            bounds, ys = self.forward.ranges[j], self.grads[0]
            outputs = ys[slice(*bounds)] if ys is not None and any(self.rows[0][slice(*bounds)]) else None
            self._latest = j, spread(None, outputs, self.outputs, self.plans[j], bounds, self.problem.solver, self.y0)
        return self._latest[1]

    def _of_end(self, slopes: Tensor | None) -> Tensor | None:
        """That of the slope at the end of a step."""
        stages = self.problem.solver.stages
        return slopes[stages] if slopes is not None and len(slopes) > stages else None

    def _cotangents(self, end: Tensor | None, of_start: Tensor | None, slopes: Tensor | None) -> list[Tensor]:
        """Of k1, y1 and, if the program takes them, k2, k3, …"""
        stages = self.problem.solver.stages
        own: Sequence[Tensor | None] = [None] * stages if slopes is None else slopes[:stages].unbind()
        all_of_them = [_sum(own[0], of_start), end, *(own[1:] if outputs_inside(self.problem) else ())]
        return [self._zero if x is None else x for x in all_of_them]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b

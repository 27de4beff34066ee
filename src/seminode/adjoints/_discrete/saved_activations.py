"""The backward pass over steps that have kept their activations, while the budget for these lasted: `Direct`."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..._compile.engine import Saved, SavedKind
from ..._compile.programs import Wanted
from ..._stepping.budget import Budget
from ..._stepping.observers import State, StateTape
from ..._stepping.problem import Problem
from ..._stepping.step import Step
from ...solvers.explicit import ExplicitRungeKutta
from .._autograd import BackwardRequest
from .output_vjps import added
from .recorded_steps import RecordedStep
from .states import SparseStates
from .sweep import Sweep


class ActivationTape(StateTape):
    """The states before the steps, and the activations of the first of them, until the budget is used up.

    The first steps: whether there is room for a step is known before it is taken, and the later ones can be taken
    without keeping anything. With the latest steps instead, all would have to be taken in the slower way.

    Compiled steps keep tensors, which are handed over to autograd. Steps that were recorded eagerly are graphs. They
    stay here and are used up by a backward pass; a second one takes these steps again.
    """

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self._ends = ends  # whether outputs inside a step may read the slope at its end
        self._activations: list[Tensor] = []
        self._end_activations: list[Tensor] = []  # of the end slope of the latest step that was kept
        self.sizes: list[int] = []
        self.recorded: list[RecordedStep] = []
        self.targets: list[Tensor] = []  # the leaves in the graphs of recorded steps, for args and parameters
        self.kind: SavedKind | None = None  # of compiled steps
        self.budget: Budget | None = None

    def accepted(self, step: Step, ratio: float) -> None:
        index = len(self.plans)
        super().accepted(step, ratio)
        saved = step.saved
        if isinstance(saved, Saved) and len(self.sizes) == index:
            self._keep(saved, step.plan.crosses_jump)
        elif isinstance(saved, RecordedStep) and len(self.recorded) == index:
            self.recorded.append(saved)
            saved.keep(step.plan.crosses_jump)

    def _keep(self, saved: Saved, crosses_jump: bool) -> None:
        # Those of the end slope only where no next step starts with it.
        self.kind = saved.kind
        end = saved.end if self._ends else []
        kept = [*saved.step, *saved.first, *(end if crosses_jump else ())]
        self._end_activations = [] if crosses_jump else end
        self._activations += kept
        self.sizes.append(len(kept))
        assert self.budget is not None
        self.budget.used += saved.sizes.total if crosses_jump else saved.sizes.own

    def hand_over(self) -> list[Tensor]:
        activations, self._activations = [*self._activations, *self._end_activations], []
        if self.sizes:
            self.sizes[-1] += len(self._end_activations)
        self._end_activations = []
        return [*super().hand_over(), *activations]


def worth_saving(problem: Problem) -> bool:
    """Not where the polynomial of a step reads a slope that the step itself does not compute, nor with own steps."""
    if problem.lanes is not None:
        return False  # the slopes and activations of accepted and rejected samples would have to be merged
    if not isinstance(problem.solver, ExplicitRungeKutta):
        return False
    if problem.ts.requires_grad:
        return False  # all steps are taken again, with times that are differentiated
    solver = problem.solver
    alone = len(solver.interpolant) <= solver.stages
    return solver.error_needs_end_slope or alone or not problem.outputs_inside


def states_and_activations(request: BackwardRequest) -> tuple[SparseStates, list[Tensor]]:
    """What an `ActivationTape` has handed over."""
    tape = request.forward.tape
    assert isinstance(tape, ActivationTape)
    first = len(request.kept) - sum(tape.sizes)
    return SparseStates(request.kept[:first], 1, len(tape.plans)), list(request.kept[first:])


class KeptSteps(ABC):
    """The first `count` steps, as they were kept."""

    count: int
    #: For which inputs of the graph programs compute gradients, if there are programs.
    wanted: Wanted | None = None

    @abstractmethod
    def vjp(self, j: int, sweep: SavedSweep, end: Tensor | None, first: Tensor | None, parts: Tensor | None) -> Tensor:
        """The cotangent of the start of step j, from those of its end and of its first slope, and from those that
        outputs inside of it give to its parts. Asked with falling j."""

    @abstractmethod
    def end_vjp(self, j: int, sweep: SavedSweep, slope: Tensor) -> Tensor | None:
        """The cotangent of the end of step j, from that of the slope there; asked for before `vjp`."""


class CompiledSteps(KeptSteps):
    """Steps that have kept what programs made of them."""

    def __init__(self, activations: list[Tensor], sizes: Sequence[int], kind: SavedKind):
        self._activations = activations
        self._starts = [0, *itertools.accumulate(sizes)]  # where the activations of each step begin
        # Those that have kept the activations: which parameters require a gradient may have changed since.
        self._programs, self.wanted = kind
        self.count = len(sizes)

    def vjp(self, j: int, sweep: SavedSweep, end: Tensor | None, first: Tensor | None, parts: Tensor | None) -> Tensor:
        programs, kept = self._programs, self._kept(j)
        del self._activations[self._starts[j] :]  # in place: a copy of the rest for every step takes quadratic time
        cotangents = [sweep.zero if end is None else end]
        if sweep.inside:
            cotangents += [sweep.zero if first is None else first, sweep.no_parts if parts is None else parts]
        both = programs.kept + programs.at.kept
        grad_y, finite, *sweep.compiled = programs.vjp(sweep.plans[j], kept[:both], cotangents, sweep.compiled)
        sweep.finite.check_number(finite, grad_y, sweep.plans[j])
        return grad_y

    def end_vjp(self, j: int, sweep: SavedSweep, slope: Tensor) -> Tensor:
        programs = self._programs
        kept = self._kept(j)[programs.kept + programs.at.kept :]
        grad, _, *sweep.compiled = programs.at.vjp(kept, slope, sweep.compiled)
        return grad

    def _kept(self, j: int) -> list[Tensor]:
        return self._activations[self._starts[j] : self._starts[j + 1]]


class RecordedSteps(KeptSteps):
    """Steps whose graphs were kept. `differentiable` says for which args and parameters there are `targets`."""

    def __init__(self, recorded: list[RecordedStep], targets: Sequence[Tensor], differentiable: Sequence[bool]):
        self._recorded = recorded
        self._targets, self._differentiable = targets, differentiable
        self.count = len(recorded)

    def vjp(self, j: int, sweep: SavedSweep, end: Tensor | None, first: Tensor | None, parts: Tensor | None) -> Tensor:
        del self._recorded[j + 1 :]
        step, stages = self._recorded.pop(), sweep.problem.solver.stages
        end = end if parts is None else added(end, parts[0])
        slopes = [None] * stages if parts is None else parts[2 : 2 + stages].unbind()
        grad_y, *grads = step.vjp(end, [added(slopes[0], first), *slopes[1:]], self._needed(sweep))
        sweep.sums.add(grads)
        grad_y = sweep.zero if grad_y is None else grad_y
        sweep.finite.check(grad_y, sweep.plans[j])
        return grad_y if parts is None else grad_y + parts[1]

    def end_vjp(self, j: int, sweep: SavedSweep, slope: Tensor) -> Tensor | None:
        evaluation = self._recorded[j].end
        assert evaluation is not None  # an output has read it
        grad, *grads = evaluation.vjp(slope, self._needed(sweep))
        sweep.sums.add(grads)
        return grad

    def _needed(self, sweep: SavedSweep) -> list[Tensor]:
        targets, pairs = iter(self._targets), zip(self._differentiable, sweep.needs[2:], strict=True)
        return [target for there, need in pairs if there and (target := next(targets)) is not None and need]


class SavedSweep(Sweep):
    """Backpropagates through steps with the activations that they have kept, and takes the others again.

    The slope at the end of a step is the first one of the next, unless something breaks between them or the next step
    was not kept. The cotangent that outputs inside the step give it is then part of the VJP of that next step.
    """

    def __init__(self, request: BackwardRequest, states: SparseStates, kept: KeptSteps):
        super().__init__(request, states)
        self._kept = kept
        self.inside = self.problem.outputs_inside  # otherwise no output reads a slope
        self.zero = torch.zeros_like(self.y0)

    def choose(self) -> tuple[list[int], tuple[bool, ...]]:
        keys, wanted = super().choose()
        return keys, self._kept.wanted or wanted

    def _holds_cotangent(self, j: int) -> bool:
        if super()._holds_cotangent(j):
            return True
        # Outputs inside the step before this one may read its end slope, which is the first slope of this one.
        return self.inside and j > 0 and self._passes_on(j - 1) and super()._holds_cotangent(j - 1)

    def _passes_on(self, j: int) -> bool:
        """Whether the slope at the end of step j is part of the next step."""
        return j < self._kept.count - 1 and not self.plans[j].breaks

    def _step(self, j: int, adj: State | None) -> State | None:
        if j >= self._kept.count:
            return super()._step(j, adj)
        plan, solver = self.plans[j], self.problem.solver
        end, parts, end_slope = self.output_vjps.of(j)
        end = added(None if adj is None else adj[0], end)
        if end_slope is not None and not self._passes_on(j):
            end = added(end, self._kept.end_vjp(j, self, end_slope))
            self.differentiated += 1
        passed = self.inside and j > 0 and self._passes_on(j - 1)
        first = self.output_vjps.of(j - 1).end_slope if passed else None
        grad_y = self._kept.vjp(j, self, end, first, parts)
        self.finish_compiled(plan, solver.evaluations)
        self.counter.kept += 1
        return (grad_y,)

    @cached_property
    def no_parts(self) -> Tensor:
        """Cotangents of the parts of a step without outputs inside."""
        return self.y0.new_zeros((2 + len(self.problem.solver.interpolant), *self.y0.shape))

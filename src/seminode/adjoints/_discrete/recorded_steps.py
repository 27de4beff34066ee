"""Eager steps that are recorded when they are taken: autograd's graph of each is kept until its VJP is computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..._compile.torch_private import backpropagate
from ..._field.accounting import Accounting
from ..._ranks import ALONE, Alone
from ..._stepping.budget import Budget, storages
from ..._stepping.engine import EagerEvaluator, EagerStepper, Engine, Evaluator, Stepper
from ..._stepping.problem import Problem
from ..._stepping.schedule import Plan
from ..._stepping.step import Attempt, Step
from ...solvers.base import StepResult

#: The bytes of storages, by their addresses.
Storages = dict[int, int]


class Packed(NamedTuple):
    """A tensor that autograd keeps, and its version then."""

    tensor: Tensor
    version: int


def _unpack(packed: Packed) -> Tensor:
    # With hooks, autograd does not look at versions itself.
    if packed.tensor._version != packed.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(packed.tensor.shape)} that is needed for the gradient of a step has been "
            "modified by an inplace operation since the solve. Change it after the backward pass."
        )
    return packed.tensor


@contextmanager
def measured(held: Storages) -> Any:
    """With a graph; `held` is filled with the storages of the tensors that the graph keeps."""

    def pack(x: Tensor) -> Packed:
        held.update(storages([x]))
        # References to leaves are counted, to tell those apart that the field has made for itself.
        return Packed(x.detach() if x.is_leaf and x.requires_grad else x, x._version)

    with torch.enable_grad(), saved_tensors_hooks(pack, _unpack):
        yield


class RecordedEvaluation(NamedTuple):
    """An evaluation with its graph, which begins at a leaf."""

    y: Tensor
    k: Tensor
    held: Storages

    def vjp(self, cotangent: Tensor, targets: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """For the state and the targets."""
        if not self.k.requires_grad:
            return [None] * (1 + len(targets))
        return backpropagate([self.k], [self.y, *targets], [cotangent], retain_graph=True)


class Keeper:
    """Counts what is kept: each storage once, and no storage of the inputs of the solve.

    Of ranks that take the same steps, all keep a step or none does: otherwise some would take it again on the backward
    pass, alone, and a field that communicates would wait for the others.
    """

    def __init__(self, budget: Budget, inputs: Sequence[Tensor], ranks: Alone = ALONE):
        self._budget, self._ranks = budget, ranks
        self._counted = set(storages(inputs))
        self._largest = 0

    def expects_room(self) -> bool:
        """Whether there is room for a step as large as the largest so far."""
        return self._ranks.every(self._budget.fits(self._largest))

    def has_room(self, held: Storages, end: Storages) -> bool:
        """Whether there is room for a step and for an evaluation at its end."""
        size = sum(self._new(held).values()) + sum(self._new(end).values())
        self._largest = max(self._largest, size)
        return self._ranks.every(self._budget.fits(size))

    def keep(self, held: Storages) -> None:
        new = self._new(held)
        self._counted.update(new)
        self._budget.used += sum(new.values())

    def _new(self, held: Storages) -> Storages:
        return {key: size for key, size in held.items() if key not in self._counted}


class RecordedStep:
    """A step with its graph, from a leaf for its start to its end and its slopes."""

    def __init__(self, keeper: Keeper, y0: Tensor, y1: Tensor, slopes: Sequence[Tensor], held: Storages):
        self._keeper = keeper
        self._y0, self._y1, self._slopes, self._held = y0, y1, slopes, held
        self.end: RecordedEvaluation | None = None  # at its end, where that may be differentiated

    def keep(self, crosses_jump: bool) -> None:
        """It was accepted. The evaluation at its end counts with the next step, unless there is a jump between them."""
        self._keeper.keep(self._held)
        if crosses_jump and self.end is not None:
            self._keeper.keep(self.end.held)

    def vjp(
        self, end: Tensor | None, slopes: Sequence[Tensor | None], targets: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """For the start and the targets, from the cotangents of the end and of the slopes."""
        known = zip((self._y1, *self._slopes), (end, *slopes), strict=False)
        pairs = [(x, c) for x, c in known if c is not None and x.requires_grad]
        if not pairs:
            return [None] * (1 + len(targets))
        values, cotangents = zip(*pairs, strict=True)
        # Steps may share the graph of a weight that was computed in one of them and cached.
        return backpropagate(values, [self._y0, *targets], cotangents, retain_graph=True)


class RecordingEvaluator:
    """Evaluates the field, first slopes with a graph: that of a step begins with the graph of its first slope."""

    def __init__(self, record: EagerEvaluator, plain: Evaluator, accounting: Accounting | None):
        self._record, self._plain, self._accounting = record, plain, accounting
        self._record.watched = []
        self.recording = True
        #: The latest first slopes, as the loop knows them, with their graphs.
        self.first_slopes: list[tuple[Tensor, RecordedEvaluation]] = []

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        if not self.recording or stage != 0:
            return self._plain(t, y, stage=stage, shift=shift)
        k, evaluation = self.alone(t, y, stage)
        self.check(evaluation.y)
        self.first_slopes = [(k, evaluation)]
        return k

    def alone(self, t: float, y: Tensor, stage: int) -> tuple[Tensor, RecordedEvaluation]:
        """An evaluation with a graph of its own, and its value without."""
        leaf, held = y.detach().requires_grad_(), Storages()
        with measured(held):
            k = self._record(t, leaf, stage=stage)
        return k.detach(), RecordedEvaluation(leaf, k, held)

    def within(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        """An evaluation that is part of a recorded step."""
        return self._record(t, y, stage=stage, shift=shift)

    def check(self, leaf: Tensor) -> None:
        """Refuse evaluations that depend on tensors which are not differentiated."""
        watched, self._record.watched = self._record.watched, []
        if self._accounting is not None:
            self._accounting.check(watched or (), [leaf])


class RecordingStepper:
    """Takes steps with a graph while the budget lasts, and then without."""

    def __init__(self, problem: Problem, evaluate: RecordingEvaluator, plain: Stepper, keeper: Keeper, inside: bool):
        self._solver, self._controlled = problem.solver, problem.error is not None
        self._evaluate, self._plain, self._keeper = evaluate, plain, keeper
        self._inside = inside  # whether outputs may lie inside of steps, which read the slopes

    def __call__(self, plan: Plan, y0: Tensor, memory: Tensor | None) -> Step:
        evaluate = self._evaluate
        if evaluate.recording and not self._keeper.expects_room():
            self._stop()
        if not evaluate.recording:
            return self._plain(plan, y0, memory)
        if not any(k is memory for k, _ in evaluate.first_slopes):
            memory = evaluate(plan.stage_time(0.0), y0, stage=0)
        assert memory is not None
        first = next(evaluation for k, evaluation in evaluate.first_slopes if k is memory)
        step, end, held = self._recorded(plan, first)
        evaluate.check(first.y)
        slopes = step.slopes if self._inside else []
        held |= first.held | storages(slopes)
        saved = RecordedStep(self._keeper, first.y, step.y1, slopes, held)
        # A rejected step starts again from k1, an accepted one is followed by one that starts from its end.
        evaluate.first_slopes = [(memory, first), *end]
        if not self._keeper.has_room(held, (end[0][1] if end else first).held):
            self._stop()
            saved = None
        return self._detached(step, plan, y0, memory, end, saved)

    def _stop(self) -> None:
        self._evaluate.recording = False
        self._evaluate.first_slopes = []

    def _recorded(
        self, plan: Plan, first: RecordedEvaluation
    ) -> tuple[Step, list[tuple[Tensor, RecordedEvaluation]], Storages]:
        """The step with its graph, the evaluation at its end if it makes one, and what the graph of the step keeps."""
        evaluate, solver = self._evaluate, self._solver
        held, end = Storages(), list[tuple[Tensor, RecordedEvaluation]]()

        def at(t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
            if stage is None or stage != solver.stages:
                return evaluate.within(t, y, stage=stage)
            end.append(evaluate.alone(t, y, stage))
            return end[0][0]

        with measured(held):
            step = EagerStepper(solver, at, self._controlled)(plan, first.y, first.k)
        return step, end, held

    def _detached(
        self,
        step: Step,
        plan: Plan,
        y0: Tensor,
        memory: Tensor,
        end: list[tuple[Tensor, RecordedEvaluation]],
        saved: RecordedStep | None,
    ) -> Step:
        """The step as the loop sees it: without a graph."""
        evaluate, solver = self._evaluate, self._solver
        if saved is not None and end and self._inside:
            saved.end = end[0][1]

        def evaluate_end(later: Step) -> Tensor:
            if saved is None:
                return evaluate(plan.stage_time(1.0), later.end_anchor(), stage=solver.stages)
            found = evaluate.alone(plan.stage_time(1.0), later.end_anchor(), solver.stages)
            evaluate.check(found[1].y)
            evaluate.first_slopes.append(found)
            saved.end = found[1] if self._inside else None
            return found[0]

        result = StepResult(step.y1.detach(), [memory, *(k.detach() for k in step.slopes[1:])])
        attempted = Attempt(result, end[0][0] if end else None, step.error() if self._controlled else None)
        return Step(solver, plan, y0, memory, attempted, evaluate_end, dt=plan.dt, saved=saved)


def recording_engine(
    problem: Problem, record: EagerEvaluator, plain: Engine, accounting: Accounting | None, keeper: Keeper, inside: bool
) -> Engine:
    """An engine whose steps are recorded while there is room; `record` evaluates the field as a function of leaves."""
    evaluate = RecordingEvaluator(record, plain.evaluate, accounting)
    step = RecordingStepper(problem, evaluate, plain.step, keeper, inside)
    return Engine(problem.solver, problem.field.layout, plain.counter, evaluate, step)

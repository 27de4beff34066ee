"""Stub collaborators of the stepping loop: solver, evaluator, schedule, norm and observer without numerics.

Each follows a script and notes what it was asked, so that a test can say exactly what the loop does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from seminode._error_norm import ErrorNorm
from seminode._field.pytree import Layout
from seminode._stepping.engine import EagerStepper, Engine
from seminode._stepping.observers import Counter, Observer
from seminode._stepping.schedule import Plan
from seminode._stepping.step import Step
from seminode.controllers import Controller, History, Verdict
from seminode.solvers.base import Evaluate, Solver, StepResult


def number(x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


class Outcome(NamedTuple):
    """What one attempt at a step comes to: its error ratio, what it adds to the state, and why it failed, if it did."""

    ratio: float = 0.5
    change: float = 1.0
    failure: str | None = None


class StubMemory(NamedTuple):
    """A second copy of the state, which is carried; the first slope; and a guess, which is neither."""

    copy: Tensor
    slope: Tensor | None = None
    guess: str = ""


class StubSolver(Solver):
    """A solver that returns what its script says. The error of a step is its ratio, for a norm that reads it as it is.

    `fsal`: whether the error estimate reads the slope at the end. `asked` are the memories that steps began with.
    """

    order = error_order = 1
    weights = (1.0,)
    error_weights = None
    interpolant = ((1.0,),)
    interpolant_order = 1

    def __init__(self, outcomes: Sequence[Outcome] = (), fsal: bool = False, stages: int = 1):
        self._outcomes = iter(outcomes)
        self._latest = Outcome()
        self.error_needs_end_slope = fsal
        self.stages = stages
        self.asked: list[StubMemory] = []
        self.before_step: Callable[[], None] = lambda: None

    def start(self, y0: Tensor) -> StubMemory:
        return StubMemory(y0)

    def step(self, evaluate: Evaluate, dt: Any, y0: Tensor, memory: StubMemory) -> StepResult:
        self.before_step()
        self.asked.append(memory)
        self._latest = next(self._outcomes, Outcome())
        first = evaluate(0.0, y0, stage=0) if memory.slope is None else memory.slope
        slopes = [first, *(evaluate(0.5, y0, stage=i) for i in range(1, self.stages))]
        after = StubMemory(memory.copy + 1.0, None, f"{memory.guess}+")
        return StepResult(y0 + self._latest.change, slopes, after, self._latest.failure)

    def error(self, dt: Any, slopes: Sequence[Tensor]) -> Tensor:
        assert len(slopes) == self.stages + self.error_needs_end_slope
        return number(self._latest.ratio)

    def with_slope(self, memory: StubMemory, slope: Tensor) -> StubMemory:
        return memory._replace(slope=slope)

    def retry(self, memory: StubMemory, result: StepResult) -> StubMemory:
        return super().retry(memory, result)._replace(guess="retried")

    def carried(self, memory: StubMemory) -> tuple[Tensor, ...]:
        return (memory.copy,)

    def recall(self, carried: Sequence[Tensor]) -> StubMemory:
        return StubMemory(carried[0], None, "recalled")


class StubEvaluator:
    """Answers evaluation number n with the number n, in a tensor of its own, and notes where it was asked.

    `alive()` are the answers that are still referenced.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[float, int | None]] = []
        self._answers: list[Any] = []

    def __call__(self, t: float, y: Tensor, *, stage: int | None = None, shift: Tensor | None = None) -> Tensor:
        answer = number(len(self.asked))
        self.asked.append((t, stage))
        self._answers.append(ref(answer))
        return answer

    def alive(self) -> list[int]:
        return [i for i, answer in enumerate(self._answers) if answer() is not None]


class StubSchedule:
    """Hands out plans in order. A step is accepted if its ratio is at most one, or not a number; else tried again."""

    def __init__(self, plans: Sequence[Plan], smallest: float = 0.0):
        self.smallest = smallest
        self._plans = list(plans)
        self.judged: list[tuple[Plan, float]] = []

    def next(self) -> Plan | None:
        return self._plans[0] if self._plans else None

    def judge(self, plan: Plan, ratio: float) -> bool:
        self.judged.append((plan, ratio))
        rejected = ratio > 1.0
        if rejected:  # half as long
            dt = 0.5 * plan.dt
            self._plans[0] = plan._replace(t1=plan.t0 + dt, dt=dt, proposal=dt)
        else:
            self._plans.pop(0)
        return not rejected


def plans(count: int, **options: Any) -> list[Plan]:
    """Steps of length 1 from 0 on, the last of which ends the solve; `options` are for all of them."""
    made = [Plan(float(i), i + 1.0, 1.0, 1.0, **options) for i in range(count)]
    return [*made[:-1], made[-1]._replace(landing=True, final=True)]


class StubNorm(ErrorNorm):
    """Reads an error as the ratio that it is."""

    def __init__(self, layout: Layout):
        super().__init__(layout, lambda y: y, 1.0, 1.0, number(0.0))

    def ratio(self, error: Tensor, y0: Tensor, y1: Tensor) -> float:
        return error.item()


class StubObserver(Observer):
    """Notes every call, under its own name, in a list that it may share with others."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]):
        self._name, self._calls = name, calls

    def accepted(self, step: Step, ratio: float) -> None:
        self._calls.append((self._name, "accepted", step.plan.t0, step.plan.dt, ratio))

    def rejected(self, step: Step, ratio: float) -> None:
        self._calls.append((self._name, "rejected", step.plan.t0, step.plan.dt, ratio))


class StubEngine(NamedTuple):
    """An engine of a stub solver and a stub evaluator, and a norm that goes with it."""

    engine: Engine
    solver: StubSolver
    evaluate: StubEvaluator
    norm: StubNorm
    counter: Counter

    @classmethod
    def of(cls, *outcomes: Outcome, controlled: bool = True, **options: Any) -> StubEngine:
        solver, evaluate, counter = StubSolver(outcomes, **options), StubEvaluator(), Counter()
        layout = Layout.of(number(0.0))
        step = EagerStepper(solver, evaluate, controlled)
        return cls(Engine(solver, layout, counter, evaluate, step), solver, evaluate, StubNorm(layout), counter)


class StubController(Controller):
    """Proposes the steps of its script, one after each accepted step, and half of a rejected one; then endless ones."""

    adaptive = True

    def __init__(self, proposals: Sequence[float]):
        self._proposals = iter(proposals)

    def first(self) -> tuple[float, History]:
        return next(self._proposals, math.inf), ()

    def judge(self, dt: float, proposal: float, ratio: float, order: int, history: History) -> Verdict:
        if ratio > 1.0:
            return Verdict(False, 0.5 * dt, history)
        return Verdict(True, next(self._proposals, math.inf), history)

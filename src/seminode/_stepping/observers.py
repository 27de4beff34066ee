"""Observers: the loop tells each of them about every accepted and rejected step. They do not influence the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._field.determinism import fingerprint
from ..solution import BackwardReport, Record, Stats
from .checkpoints import Checkpoints
from .schedule import Plan

if TYPE_CHECKING:
    from .outputs import Outputs
    from .step import Step

#: What determines the rest of a solve: the state, and what the solver carries in addition.
State = tuple[Tensor, ...]


class Observer:
    """Watches the loop. Override what you need."""

    def tried(self, plan: Plan, y0: Tensor) -> None:
        """A step is about to be tried from the flat state y0. Only observers passed by the user are told."""

    def accepted(self, step: Step, ratio: float) -> None:
        """A step was taken."""

    def rejected(self, step: Step, ratio: float) -> None:
        """A step was attempted and rejected."""

    def close(self) -> None:
        """The loop has ended, successfully or with an error or an interrupt."""


class Counter(Observer):
    """Counts steps; evaluations are added by the evaluator, which makes them."""

    def __init__(self) -> None:
        self.nfe = 0
        self.n_accepted = 0
        self.n_rejected = 0
        self.jumps = 0
        self.checks = 0
        self.events = 0
        self.jacobians = 0
        self.factorisations = 0
        self.newton_iterations = 0
        self.products = 0
        self.kept = 0

    def accepted(self, step: Step, ratio: float) -> None:
        self.n_accepted += 1
        self.jumps += step.plan.crosses_jump

    def rejected(self, step: Step, ratio: float) -> None:
        self.n_rejected += 1

    def check(self) -> None:
        self.checks += 1

    @property
    def attempts(self) -> int:
        return self.n_accepted + self.n_rejected

    def stats(
        self,
        vjp_y: int = 0,
        vjp_params: int = 0,
        params_error: float | None = None,
        report: BackwardReport | None = None,
    ) -> Stats:
        return Stats(
            nfe=self.nfe,
            accepted=self.n_accepted,
            rejected=self.n_rejected,
            jumps=self.jumps,
            vjp_y=vjp_y,
            vjp_params=vjp_params,
            params_error=params_error,
            checks=self.checks,
            events=self.events,
            jacobians=self.jacobians,
            factorisations=self.factorisations,
            newton_iterations=self.newton_iterations,
            products=self.products,
            kept=self.kept,
            report=BackwardReport() if report is None else report,
        )


class Recorder(Observer):
    """Keeps the time of every evaluation and every step."""

    def __init__(self, adaptive: bool) -> None:
        self._adaptive = adaptive
        self.evaluations: list[float] = []
        self._accepted: list[Plan] = []
        self._rejected: list[Plan] = []
        self._ratios: list[float] = []

    def accepted(self, step: Step, ratio: float) -> None:
        self._accepted.append(step.plan)
        self._note(ratio)

    def rejected(self, step: Step, ratio: float) -> None:
        self._rejected.append(step.plan)
        self._note(ratio)

    def _note(self, ratio: float) -> None:
        if self._adaptive:
            self._ratios.append(ratio)

    def record(self, report: BackwardReport | None = None) -> Record:
        kept = tuple(self.evaluations), tuple(self._accepted), tuple(self._rejected), tuple(self._ratios)
        return Record(*kept) if report is None else Record(*kept, report)


class Tape(Observer):
    """The accepted steps. Subclasses also keep what an adjoint needs for its backward pass.

    Tensors are handed over to autograd, which keeps them for as long as a backward pass may come.
    """

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def accepted(self, step: Step, ratio: float) -> None:
        self.plans.append(step.plan)

    def hand_over(self) -> list[Tensor]:
        """Its tensors, which autograd keeps from now on."""
        return []


class StateTape(Tape):
    """The state before every k-th step, and what the one after the last step is recognised by."""

    def __init__(self, every: int = 1):
        super().__init__()
        self._every = every
        self._states: list[State] = []
        self._end: State = ()

    def accepted(self, step: Step, ratio: float) -> None:
        if len(self.plans) % self._every == 0:
            self._states.append(step.before)
        self._end = step.after
        super().accepted(step, ratio)

    def hand_over(self) -> list[Tensor]:
        states, self._states, end, self._end = self._states, [], self._end, ()
        return [*map(fingerprint, end), *(x for state in states for x in state)]


class CheckpointTape(Tape):
    """The states before a few steps, spread over all of them, and what the one after the last is recognised by."""

    def __init__(self, n: int):
        super().__init__()
        self.checkpoints: Checkpoints[State] = Checkpoints(n)
        self._end: State = ()

    def accepted(self, step: Step, ratio: float) -> None:
        self.checkpoints.offer(len(self.plans), step.before)
        self._end = step.after
        super().accepted(step, ratio)

    def hand_over(self) -> list[Tensor]:
        end, self._end = self._end, ()
        return list(map(fingerprint, end))


class Offer(Observer):
    """Offers the state after each step to be kept."""

    def __init__(self, checkpoints: Checkpoints[State], start: int):
        self._checkpoints = checkpoints
        self._step = start

    def accepted(self, step: Step, ratio: float) -> None:
        self._step += 1
        self._checkpoints.offer(self._step, step.after)


class EndTape(Tape):
    """The state after the last step; a copy of it, if it is handed out as an output, which the user may write into."""

    def __init__(self, copied: bool = False) -> None:
        super().__init__()
        self._copied = copied
        self._end: State = ()

    def accepted(self, step: Step, ratio: float) -> None:
        self._end = step.after
        super().accepted(step, ratio)

    def hand_over(self) -> list[Tensor]:
        end, self._end = self._end, ()
        return [x.clone() for x in end] if self._copied else list(end)


class PolynomialTape(Tape):
    """The polynomial of every step; a `quick` one to rounding, for an adjoint that nobody differentiates through."""

    def __init__(self, quick: bool = False) -> None:
        super().__init__()
        self._quick = quick
        self._coefficients: list[Tensor] = []

    def accepted(self, step: Step, ratio: float) -> None:
        self._coefficients.append(step.quick_coefficients() if self._quick else step.coefficients())
        super().accepted(step, ratio)

    def hand_over(self) -> list[Tensor]:
        coefficients, self._coefficients = self._coefficients, []
        return coefficients

    def stacked(self, y0: Tensor) -> Tensor:
        return torch.stack(self._coefficients) if self._coefficients else y0.reshape(1, 1, *y0.shape)


class Samples(Observer):
    """A few evaluations of the field with where they were made, to tell on a backward pass whether it has changed.

    One from each interval between outputs and jumps, at the start of the first step that begins there; of very many, an
    even selection. And two from later steps, however many there are: the latest whose number is a power of two.
    """

    INTERVALS = 32

    def __init__(self, outputs: Outputs, begun: int):
        self._outputs = outputs
        self._cursor = begun
        self._begins = True  # whether an interval begins
        self._of_intervals = Selection(self.INTERVALS)
        self._of_steps: list[Any] = []
        self._steps = 0

    def accepted(self, step: Step, ratio: float) -> None:
        if self._begins:
            self._of_intervals.offer(step.sample())
        else:
            self._steps += 1
            if self._steps & (self._steps - 1) == 0:
                self._of_steps = [*self._of_steps[-1:], step.sample()]
        cursor = self._outputs.claim(step.plan, self._cursor)
        self._begins, self._cursor = cursor > self._cursor or step.plan.crosses_jump, cursor

    @property
    def times(self) -> list[float]:
        return [sample[0] for sample in self._all()]

    def _all(self) -> list[Any]:
        return [*self._of_intervals.items, *self._of_steps]

    def hand_over(self) -> list[Tensor]:
        """The states and slopes in turn, which autograd keeps from now on."""
        tensors = [x for _, y, k in self._all() for x in (y, k)]
        self._of_intervals.items = [(t, None, None) for t, _, _ in self._of_intervals.items]
        self._of_steps = [(t, None, None) for t, _, _ in self._of_steps]
        return tensors


class Selection:
    """At most n of the items that are offered, evenly spread over them."""

    def __init__(self, n: int):
        self._n = n
        self._stride = 1
        self._offered = 0
        self.items: list[Any] = []

    def offer(self, item: Any) -> None:
        if self._offered % self._stride == 0:
            self.items.append(item)
            if len(self.items) > self._n:
                self._stride *= 2
                del self.items[1::2]
        self._offered += 1

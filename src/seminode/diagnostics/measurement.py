"""Measuring contenders in turns: a first run that compiles and counts, timed runs, and a last run for the memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import CompileWarning, MaxStepsReached, SolveError
from ..solution import Stats
from .contenders import Contender
from .isolation import Snapshot
from .memory import peak_bytes
from .progress import progress_bar
from .results import Row
from .subject import flat_gradient, now, relative_error


class Solved(Protocol):
    """The solution and its counters. After the backward pass, `stats` includes its counters."""

    @property
    def ys(self) -> Any: ...
    @property
    def stats(self) -> Stats: ...


class Measurable(Protocol):
    """Something that can be measured: a `Subject`, or a model with several solves."""

    @property
    def leaf(self) -> Tensor: ...
    @property
    def found(self) -> Sequence[Tensor]:
        """The parameters. They are the last targets."""
        ...

    @property
    def targets(self) -> list[Tensor]: ...
    @property
    def loss(self) -> Callable[[Any], Any]: ...
    def solve(self, contender: Contender, max_steps: int) -> Solved: ...


class Pass(NamedTuple):
    """One forward and one backward pass."""

    forward: Stats
    backward: Stats
    grads: Sequence[Tensor | None]
    forward_seconds: float
    backward_seconds: float
    warned: Sequence[Any] = ()

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def take_pass(subject: Measurable, contender: Contender, max_steps: int) -> Pass:
    """Solve, and differentiate the loss. No `.grad` is changed."""
    device, targets = subject.leaf.device, subject.targets
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = now(device)
        sol = subject.solve(contender, max_steps)
        value = subject.loss(sol.ys)
        turn = now(device)
        grads = torch.autograd.grad(value, targets, allow_unused=True)
        end = now(device)
    return Pass(sol.stats, sol.stats.backward or Stats(), grads, turn - begin, end - turn, caught)


@dataclass
class Draft:
    """A row that is not complete yet."""

    contender: Contender
    first: Pass | None = None
    error: float = float("nan")
    params_error: float = float("nan")
    rounds: list[Pass] = field(default_factory=list[Pass])
    memory: int | None = None
    notes: list[str] = field(default_factory=list[str])
    reason: str | None = None

    def row(self) -> Row:
        if self.reason is not None or self.first is None:
            return Row(self.contender, notes=tuple(self.notes), reason=self.reason or "not reached")
        return Row(
            self.contender,
            self.first.forward,
            self.first.backward,
            tuple(each.forward_seconds for each in self.rounds),
            tuple(each.backward_seconds for each in self.rounds),
            self.first.seconds,
            self.memory,
            self.error,
            tuple(self.notes),
            params_error=self.params_error,
        )


@dataclass
class Course:
    """The runs of all contenders."""

    subject: Measurable
    snapshot: Snapshot
    reference: Tensor | None
    repeats: int  # timed runs after the first run; with 0, the first run is the timed one
    time_limit: float
    max_steps: int
    seconds: float  # per evaluation of the field
    progress: bool
    memory: bool = True  # whether to measure the memory

    def run(self, contenders: Sequence[Contender]) -> list[Row]:
        drafts = [Draft(contender) for contender in contenders]
        for draft in self._turns(drafts, "first runs"):
            self._attempt(draft, self._first)
        for i in range(self.repeats):
            for draft in self._turns(drafts, f"timed runs {i + 1}/{self.repeats}"):
                self._attempt(draft, self._timed)
        if self.memory:
            for draft in self._turns(drafts, "memory"):
                self._attempt(draft, self._memory)
        return [draft.row() for draft in drafts]

    def _turns(self, drafts: Sequence[Draft], what: str) -> Iterator[Draft]:
        """The contenders that have not failed, each from the same state, with a progress bar on a terminal."""
        active = [draft for draft in drafts if draft.reason is None]
        with progress_bar(self.progress, what, total=len(active)) as bar:
            for draft in active:
                bar.set_postfix_str(draft.contender.label, refresh=True)
                self.snapshot.restore()
                yield draft
                bar.update()

    def _attempt(self, draft: Draft, run: Callable[[Draft], None]) -> None:
        try:
            run(draft)
        except Exception as error:
            draft.reason = self._reason(draft.contender, error)

    def _reason(self, contender: Contender, error: Exception) -> str:
        limit = self._steps(contender)
        if isinstance(error, MaxStepsReached) and limit < self.max_steps:
            where = "on the backward pass " if error.backward else ""
            return f"takes more than {limit} steps {where}and, by estimate, more than time_limit={self.time_limit:g} s"
        text = " ".join(str(error).split()) or "no message"
        plain = isinstance(error, ValueError | SolveError)
        return (text if plain else f"{type(error).__name__}: {text}")[:400]

    def _steps(self, contender: Contender) -> int:
        """The limit on steps that follows from the time limit, at 4 F per stage: two evaluations and the VJPs."""
        step = 4 * contender.solver.evaluations * max(self.seconds, 1e-5)
        return min(self.max_steps, max(1000, int(self.time_limit / step)))

    def _pass(self, draft: Draft) -> Pass:
        return take_pass(self.subject, draft.contender, self._steps(draft.contender))

    def _first(self, draft: Draft) -> None:
        found = self._pass(draft)
        for each in found.warned:
            if issubclass(each.category, DeprecationWarning | FutureWarning):  # from other libraries, for their authors
                continue
            message = " ".join(str(each.message).split())
            if draft.contender.compile and issubclass(each.category, CompileWarning):
                draft.reason = message
            note = f"{each.category.__name__}: {message}"
            if note not in draft.notes:
                draft.notes.append(note)
        if self.reference is not None:
            gradient = flat_gradient(found.grads, self.subject.targets)
            draft.error = relative_error(gradient, self.reference)
            draft.params_error = self._params_error(found.grads)
        draft.first = found._replace(grads=(), warned=())
        if self.repeats == 0:
            draft.rounds.append(draft.first)

    def _params_error(self, grads: Sequence[Tensor | None]) -> float:
        """The error of the gradients of the parameters only; NaN if there are none."""
        count = len(self.subject.found)
        if count == 0 or self.reference is None:
            return float("nan")
        gradient = flat_gradient(grads[-count:], self.subject.targets[-count:])
        return relative_error(gradient, self.reference[-len(gradient) :])

    def _timed(self, draft: Draft) -> None:
        if draft.rounds and sum(each.seconds for each in draft.rounds) > self.time_limit:
            return
        draft.rounds.append(self._pass(draft)._replace(grads=(), warned=()))

    def _memory(self, draft: Draft) -> None:
        if min(each.seconds for each in draft.rounds) > self.time_limit:
            draft.notes.append("memory: not measured, because a run takes longer than time_limit")
            return
        draft.memory = peak_bytes(lambda: self._pass(draft), self.subject.leaf.device)

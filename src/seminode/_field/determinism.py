"""What makes a field a *function*: it gives the same answer every time it is evaluated.

A solver may evaluate a field again (a rejected step, a replayed one) and must get the same answer. So every evaluation
of a solve, forward and backward, starts from one saved state of the random generators: a dropout mask is drawn once
per solve. A field that changes its own buffers does so once, in the first evaluation; all later ones see the buffers
as they were after it and leave no trace. Autocast is for the field, not for the solver's own arithmetic.

A backward pass that evaluates the field again must find the function that was solved. Modules get back the tensors
and the training flags that they had; whatever else may have changed is noticed, since the answers differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._untyped import vector_norm
from ..errors import StatefulFieldWarning, warn
from .buffers import Buffer, buffers_of
from .places import CACHE, Change, Contents
from .random_numbers import RandomNumbers, claim, releasing
from .reach import Reach


class Trial:
    """An evaluation that does not count: afterwards, whether it drew random numbers or changed a buffer."""

    stateful = False


class Determinism:
    """The circumstances of a solve's evaluations, kept the same for all of them."""

    def __init__(self, device: torch.device, reach: Reach):
        self._random = RandomNumbers(device)
        self.reach = reach
        self._buffers = buffers_of(reach.modules, reach.parts)
        self._changed: list[Buffer] = []
        self._restore: list[Callable[[], object]] = []
        self._constants: list[tuple[Tensor, int]] = []
        self._contents: Contents | None = None  # of all places where the field may keep values
        self._evaluated = 0
        self._caches = False  # whether evaluations have changed them
        self._where, self._device = device, device.type

    def remember(self, constants: Iterable[tuple[Tensor, int]], evaluations: int) -> None:
        """Note, after the first evaluation, the constants that it used with their versions, and what the field keeps.

        `evaluations` is how many there were so far.
        """
        changed = {id(buffer.value) for buffer in self._buffers if buffer.changed()}
        self._constants = [(tensor, version) for tensor, version in constants if id(tensor) not in changed]
        self._contents, self._evaluated = self.reach.contents(), evaluations

    def finish(self, evaluations: int) -> None:
        """After a forward pass: did its evaluations change what the field keeps? Tensors among it have no graph.

        Before each evaluation of a backward pass they are put back, so that it computes them again, with a graph.
        """
        if self._contents is not None and not self._contents.unchanged:
            self._contents.leave_counters(evaluations - self._evaluated)
            self._caches = bool(self._changes())

    def _changes(self) -> list[Change]:
        """What has changed of the values that the field keeps, except for buffers that it may change."""
        if self._contents is None or self._contents.unchanged:
            return []
        buffers = {id(buffer.value) for buffer in self._buffers if buffer in self._changed or buffer.counts}
        return [change for change in self._contents.changes() if id(change.then) not in buffers]

    def _put_back(self) -> list[Change]:
        """Put back what has changed, and say what it was."""
        changes = self._changes()
        for change in changes:
            change.place.write(change.key, change.then)
        return changes

    @property
    def stateful(self) -> bool:
        """Whether there is anything to put back before an evaluation."""
        return self._random.drawn or bool(self._restore)

    def _prepare(self) -> None:
        """Before an evaluation: the same random numbers, the same buffers."""
        if self._random.drawn:
            self._random.restore()
        self.restore_buffers()

    def evaluate(self, function: Callable[..., Tensor], *args: Tensor, repeated: Callable[[], None]) -> Tensor:
        """Evaluate a field that is `stateful`. `repeated` is called if it has to be evaluated twice."""
        self._prepare()
        k = function(*args)
        if self._random.drawn:

            def repeat() -> None:
                repeated()
                self.restore_buffers()
                function(*args)

            self._random.check(repeat)
        return k

    def restore_buffers(self) -> None:
        """Undo what the latest evaluation did to buffers."""
        for restore in self._restore:
            restore()

    def first(self, evaluate: Callable[[], Tensor], as_check: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        """Make the first evaluation. Does it draw random numbers? Does it change a buffer?

        Evaluations inside of `as_check` count as checks.
        Of changed buffers the new values are kept, and the evaluation is made again with them. A buffer of one number
        may be a counter of evaluations, if the answer does not depend on it: then it is left alone and goes on
        counting. Without random numbers the generators, which belong to the whole process, are left alone too.
        """

        def repeat() -> None:
            present = [buffer.snapshot() for buffer in self._buffers if buffer.changed()]
            try:
                with as_check():
                    evaluate()
            finally:
                for restore in present:
                    restore()

        k = self._random.first(evaluate, repeat)
        changed = [buffer for buffer in self._buffers if buffer.changed()]
        if not changed:
            return k
        counters = [buffer for buffer in changed if buffer.counts]
        self._keep_buffers([buffer for buffer in changed if not buffer.counts])
        present = [buffer.snapshot() for buffer in counters]
        if all(buffer.known_counter for buffer in changed):
            return k
        self._prepare()
        again = evaluate()
        if counters and not self._changed and torch.equal(again, k):
            for buffer in counters:
                buffer.known_counter = True
        elif counters:
            for restore in present:
                restore()
            self._keep_buffers([*self._changed, *counters])
        if self._changed:
            self._warn_of_buffers()
        return again

    def _keep_buffers(self, changed: list[Buffer]) -> None:
        """From here on, every evaluation sees these buffers as they are now."""
        self._changed = changed
        self._restore = [buffer.snapshot() for buffer in changed]

    def _warn_of_buffers(self) -> None:
        names = ", ".join(buffer.label for buffer in self._changed)
        warn(
            f"field: an evaluation changes {names}. A solver evaluates a field many times, so these buffers are "
            "updated once per solve, by the first evaluation. For batch normalisation call .eval(), or use a layer "
            "without running statistics (GroupNorm, LayerNorm).",
            StatefulFieldWarning,
        )

    @contextlib.contextmanager
    def trial(self) -> Iterator[Trial]:
        """A context for an evaluation that does not count: its random draws and changes of buffers are undone."""
        trial, random = Trial(), RandomNumbers(self._where)
        present = [buffer.snapshot() for buffer in self._buffers]
        try:
            with random.undone():
                yield trial
        finally:
            changed = any(buffer.changed() for buffer in self._buffers)
            for restore in present if changed else ():
                restore()
            trial.stateful = random.drawn or changed

    def solving(self) -> AbstractContextManager[Any]:
        """A context for the solver's own arithmetic, to which autocast must not apply."""
        if torch.is_autocast_enabled(self._device):
            return torch.autocast(self._device, enabled=False)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """A context for a backward pass, whose evaluations must have no lasting effect."""
        self._check_unchanged()
        present = [buffer.snapshot() for buffer in self._changed]
        with releasing():
            states: list[Tensor] = []
            if self._random.drawn:
                claim()
                states = self._random.states()
            try:
                with self.solving(), self._as_it_was():
                    yield
            finally:
                for restore in present:
                    restore()
                if states:
                    self._random.set(states)

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """A context in which modules have the tensors and training flags of the solve."""
        changes = self._put_back()
        if self._caches:
            self._restore.append(self._put_back)
        try:
            yield
        finally:
            if self._caches:
                self._restore.remove(self._put_back)
                self._put_back()
            for change in changes:
                if change.key != CACHE:
                    change.place.write(change.key, change.now)

    def _check_unchanged(self) -> None:
        """Autograd notices a change of a parameter that requires a gradient; of one that does not, we must."""
        for tensor, version in self._constants:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that the field uses has been modified by an inplace "
                    "operation since the solve: the steps cannot be taken again. Change it after the backward pass."
                )


class SameAnswers:
    """Compares what a backward pass computes again with what the forward pass has computed.

    The two are equal to the last bit where the arithmetic is the same, and within rounding where it is not: `eps` is
    the rounding error of the field's answers, `factor` how many of them are allowed. Where they differ, `explain` may
    raise an error that knows more. Steps that solve equations are the same within the tolerance of these only: `slack`
    is a relative and an absolute one. On an accelerator the comparison is left to the device until `finish`, so that
    the host does not wait.
    """

    def __init__(
        self,
        eps: float,
        explain: Callable[[], None],
        factor: float = 1e3,
        slack: tuple[float, float] = (0.0, 0.0),
    ):
        self._eps = eps
        self._explain = explain
        # In half precision, rounding errors are large: a difference of a twentieth always counts as a change.
        self._factor = min(factor, 0.05 / eps)
        self._excess: Tensor | None = None
        self._rtol, self._atol = slack

    def compare(self, again: Tensor, before: Tensor, moved: Callable[[], Sequence[Tensor]], t: float) -> None:
        """Refuse to go on if they differ by more than rounding, measured by the size of what `moved` returns."""
        if not before.numel() or (again.device.type == "cpu" and torch.equal(again, before)):
            return
        size = torch.stack([x.abs().amax() for x in moved()]).amax()
        largest = before.abs().amax()
        allowed = self._eps * (self._factor * size + 4.0 * largest) + self._rtol * largest + self._atol
        self._judge((again - before).abs().amax() - allowed, t)

    def recognise(self, again: Tensor, before: Tensor, moved: Callable[[], Sequence[Tensor]], t: float) -> None:
        """The same for a tensor of which only the `fingerprint` was kept."""
        found = fingerprint(again)
        if not again.numel() or (again.device.type == "cpu" and torch.equal(found, before)):
            return
        size = torch.stack([x.abs().sum() for x in moved()]).sum()
        total = again.abs().sum()
        allowed = self._eps * (self._factor * size + 4.0 * total) + self._rtol * total + self._atol * again.numel()
        self._judge((found - before).abs().amax() - allowed, t)

    def _judge(self, excess: Tensor, t: float) -> None:
        if excess.device.type != "cpu":
            self._excess = excess if self._excess is None else torch.maximum(self._excess, excess)
        elif excess > 0.0:  # not true of NaN, which is reported elsewhere
            self._refuse(t)

    def finish(self, t: float) -> None:
        """At the end of a backward pass: read the comparisons that were left to the device."""
        if self._excess is not None and self._excess > 0.0:
            self._refuse(t)

    def _refuse(self, t: float) -> NoReturn:
        self._explain()
        field_has_changed(t)


def fingerprint(x: Tensor) -> Tensor:
    """Two numbers to recognise a tensor by: the sum of its entries, and its norm."""
    return torch.stack(sum_and_norm(x))


def sum_and_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same as two tensors, which takes half of the time."""
    x = x.detach()
    return x.sum(), vector_norm(x).to(x.dtype)


def field_has_changed(t: float) -> NoReturn:
    raise RuntimeError(
        f"field: evaluated again on the backward pass, near t = {t:g}, it gives a different result than during the "
        "solve, so this would be the gradient of a different function. Something that the field reads has changed "
        "since then: a variable (a lambda reads a loop variable when it is called, not when it is made), an attribute, "
        "an entry of a list, or a random generator of its own. Call backward() before the change, pass such values in "
        "args= or bind them (lambda t, y, i=i: ...), draw random numbers from torch's default generator; or use "
        "adjoint=sn.Direct(), which differentiates what was computed."
    )


def present_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    """A function that opens the autocast context that is active now; `None` if none is."""
    if not torch.is_autocast_enabled(device.type):
        return None
    dtype, cache = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
    return partial(torch.autocast, device.type, dtype=dtype, cache_enabled=cache)

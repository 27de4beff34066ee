"""The random numbers that a field draws: every evaluation of a solve starts from the same state of the generators.

The default generators of torch belong to the whole process. Setting them back is wrong for any other thread that draws
from them, and what another thread draws is wrong for the field. Nothing is locked here. A thread *claims* the
generators for as long as it sets them back, and a second one is refused. After each evaluation the generators must be
in a state that such an evaluation leaves behind; if they are not, other code has drawn from them, and the solve is
refused.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._compile.dispatch_mode import DispatchMode
from .._compile.torch_private import MissingPrivateName

#: How many states are remembered in which evaluations have left the generators. They differ only for fields that draw
#: more numbers at some times than at others.
ENDS = 8

#: The thread that sets the generators back, under the key "thread". `dict.setdefault` is atomic.
_claim: dict[str, int] = {}
_claims = 0  # how many there were; only the thread that holds the claim counts
_own = threading.local()  # how many of them were this thread's

if hasattr(os, "register_at_fork"):  # a copy of the process has no other threads
    os.register_at_fork(after_in_child=_claim.clear)


def claim() -> None:
    """Note that this thread sets the generators back; refuse if another one does. Ends with `releasing`."""
    global _claims
    if _claim.setdefault("thread", threading.get_ident()) != threading.get_ident():
        refuse(CLAIMED)
    _claims += 1
    _own.claims = getattr(_own, "claims", 0) + 1


@contextlib.contextmanager
def releasing() -> Iterator[None]:
    """Around a solve or a backward pass: what it claims is free afterwards, unless it was claimed before."""
    held = _held()
    try:
        yield
    finally:
        if not held and _held():
            _claim.clear()


def beside_others() -> bool:
    """Whether there are other threads, which may draw too."""
    return threading.active_count() > 1


def _held() -> bool:
    return _claim.get("thread") == threading.get_ident()


def _claims_elsewhere() -> tuple[int, bool]:
    """How many claims there were in other threads so far, and whether one of them holds at present."""
    return _claims - getattr(_own, "claims", 0), bool(_claim) and not _held()


def refuse(found: str) -> NoReturn:
    raise RuntimeError(
        f"field: draws random numbers from torch's default generator, and {found}. The generator belongs to the whole "
        "process, so that both would get wrong numbers. Solve random fields in one thread at a time and draw no random "
        "numbers in other threads meanwhile; or draw the noise before the solve and pass it in args=; or use processes."
    )


class PrivateDraws(DispatchMode):
    """What this thread draws from the default generator comes from a private copy, which no other thread disturbs.

    Some operations cannot draw from another generator than the default one: then the copy is not `certain`.
    """

    def __init__(self, start: Tensor):
        super().__init__()
        self._generator = torch.Generator()
        self._generator.set_state(start)
        self.drew, self.certain = False, True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would load the whole compiler first

    @property
    def end(self) -> Tensor:
        return self._generator.get_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = *args, *kwargs.values()
        if torch.Tag.nondeterministic_seeded in func.tags and not any(isinstance(x, torch.Generator) for x in given):
            self.drew = True
            try:
                return func.overloadpacket(*args, **{**kwargs, "generator": self._generator})
            except (RuntimeError, TypeError, ValueError):
                self.certain = False
        return func(*args, **kwargs)


def _private_draws(start: Tensor) -> PrivateDraws | None:
    try:
        return PrivateDraws(start)
    except MissingPrivateName:
        return None


class RandomNumbers:
    """The states of the generators from which evaluations start, and those in which they leave them."""

    def __init__(self, device: torch.device):
        self._generators = [torch.default_generator, *device_generators(device)]
        self._start: list[Tensor] = []
        self._ends: deque[list[Tensor]] = deque(maxlen=ENDS)
        self._doubt: Callable[[], object] | None = None  # repeats the first evaluation, until that is known to be good
        self.drawn = False  # whether the field draws any

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def restore(self) -> None:
        """Before an evaluation: have it draw the same numbers."""
        self.set(self._start)

    def set(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def first(self, evaluate: Callable[[], Tensor], repeat: Callable[[], object]) -> Tensor:
        """Make the first evaluation: does it draw random numbers? `repeat` makes it again, without a trace.

        Beside other threads the generators alone do not tell. They may have drawn the numbers, or set them back.
        """
        before = _claims_elsewhere()
        self._start = self.states()
        k = evaluate()
        end = self.states()
        drawn, after = not _equal(end, self._start), _claims_elsewhere()
        overlap, good = after != before or after[1], False
        if (drawn and beside_others()) or overlap:
            drawn, own = self._own(repeat)
            if drawn and overlap:
                refuse(CLAIMED)
            good = not drawn or _same(own, end)
        if drawn:
            claim()
            self._ends.append(end)
            self._doubt = None if good else repeat
        self.drawn = drawn
        return k

    def check(self, repeat: Callable[[], object]) -> None:
        """After an evaluation: were all numbers that were drawn its own? In doubt, `repeat` it.

        As long as nothing has been compared with the first evaluation, that is in doubt too: another thread may even
        have drawn all its numbers.
        """
        end = self.states()
        if any(_equal(end, known) for known in self._ends):
            self._doubt = None
            return
        if self._doubt is not None:
            first, self._doubt = self._doubt, None
            self.drawn, own = self._own(first)
            if not self.drawn:
                self.set(self._ends[0])
                return
            _same(own, self._ends[0])
        _same(self._own(repeat)[1], end)
        self._ends.append(end)

    def _own(self, repeat: Callable[[], object]) -> tuple[bool, list[Tensor]]:
        """Whether an evaluation itself draws random numbers, and where it leaves the generators."""
        draws = _private_draws(self._start[0])
        drawn, self.drawn = self.drawn, False  # what is repeated here is not checked again
        try:
            if draws is not None:
                with draws:
                    repeat()
                if draws.certain:
                    return draws.drew, [draws.end, *self._start[1:]]
            claim()
            self.restore()
            repeat()
            return not _equal(self.states(), self._start), self.states()
        finally:
            self.drawn = drawn

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What is drawn inside will be drawn again. Afterwards, `drawn` says whether anything was."""
        before = self.states()
        draws = _private_draws(before[0]) if beside_others() else None
        try:
            with contextlib.nullcontext() if draws is None else draws:
                yield
        finally:
            moved = draws is None or not draws.certain
            self.drawn = not _equal(self.states(), before) if draws is None else draws.drew
            if self.drawn and moved:
                with releasing():
                    claim()
                    self.set(before)


CLAIMED = "another thread solves or differentiates a random field at the same time"
DISTURBED = "another thread has drawn from it, or has set it, during an evaluation"


def _same(own: list[Tensor], end: list[Tensor]) -> bool:
    """Refuse an evaluation that has left the generators in another state than its own draws lead to."""
    if not _equal(own, end):
        refuse(DISTURBED)
    return True


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def device_generators(device: torch.device) -> list[torch.Generator]:
    """The default generators of a device other than the processor."""
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return [generators[device.index or 0]] if generators else []

"""The random numbers of a solve's evaluations, which are the same for all of them, also if other threads solve.

Torch has one generator per process and device, and its operations draw from that. An evaluation that starts from a
saved state of the generator is therefore disturbed by whatever other threads draw meanwhile. Evaluations that draw
numbers take turns, and put the generator back as they found it. Threads that draw numbers outside of solves cannot be
held off, but they are noticed: the generator is then not where the same evaluation has left it before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from .locks import alone, exclusive

Result = TypeVar("Result")

WAIT = 600.0  # seconds, for other threads to finish their evaluations
TRIES = 20  # of an evaluation that is disturbed


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators from which operations on a device may draw."""
    return [torch.default_generator, *device_generators(device)]


def device_generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return [generators[device.index or 0]] if generators else []


class RandomNumbers:
    """Makes evaluations with the random numbers of the first one."""

    def __init__(self, device: torch.device):
        self._generators = generators_of(device)
        self._start: list[Tensor] = []
        self._end: list[Tensor] = []
        self.drawn = False  # whether the first evaluation was seen to draw numbers

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def first(self, evaluate: Callable[[], Result]) -> Result:
        """Make the first evaluation, and see whether it draws numbers."""
        with exclusive():
            for _ in range(TRIES):
                start = self.states()
                found = evaluate()
                end = self.states()
                drawn = not same(end, start)
                if drawn and not alone():
                    # Was it the field that drew, and nobody else? The same evaluation then ends in the same state.
                    self.set_states(start)
                    found = evaluate()
                    if not same(self.states(), end):
                        continue
                self._start, self._end, self.drawn = start, end, drawn
                return found
        raise disturbed()

    def repeat(self, evaluate: Callable[[], Result]) -> Result:
        """Make another evaluation, with the numbers of the first one if that has drawn any."""
        if not self.drawn:
            with exclusive():
                return evaluate()
        if alone():
            self.set_states(self._start)
            return evaluate()
        with exclusive(WAIT) as has_turn:
            if not has_turn:
                raise RuntimeError(
                    f"field: it draws random numbers, and another thread has been evaluating such a field for "
                    f"{WAIT:.0f} seconds. Does that field wait for this solve? Draw the numbers before the solve, and "
                    "pass them in args."
                )
            before = self.states()
            try:
                return self._undisturbed(evaluate)
            finally:
                self.set_states(before)

    def _undisturbed(self, evaluate: Callable[[], Result]) -> Result:
        end = self._end
        for _ in range(TRIES):
            self.set_states(self._start)
            found = evaluate()
            now = self.states()
            if same(now, end):
                return found
            # How many numbers a field draws may depend on the state: then it draws as many the next time.
            end = now
        raise disturbed()

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Put the generators back afterwards. With other threads each evaluation does that itself."""
        before = self.states() if self.drawn and alone() else None
        try:
            yield
        finally:
            if before is not None:
                self.set_states(before)


def same(states: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


def disturbed() -> RuntimeError:
    return RuntimeError(
        f"field: it draws random numbers from torch's default generator, and in each of {TRIES} attempts another "
        "thread drew numbers from it during the evaluation, so that the field is not the same function twice. Draw "
        "numbers in other threads from torch.Generator objects of their own, or draw those of the field before the "
        "solve and pass them in args."
    )

"""What makes a field a *function*: the same answer every time it is asked.

A solver may evaluate a field again (a rejected step, a replayed one) and must get the same answer. So every evaluation
of a solve, forward and backward, starts from one saved state of the random generators: a dropout mask is drawn once a
solve. A field that changes its own buffers does so once, in the first evaluation; all later ones see the buffers as
they were after it and leave no trace. And autocast is for the field, not for the solver's own arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import StatefulFieldWarning, warn


class Buffer:
    """A buffer of a module: how to notice that an evaluation changed it, and how to put it back."""

    def __init__(self, root: nn.Module, module: nn.Module, key: str, value: Tensor):
        self._root = root
        self._module = module
        self.value = value
        self.version = value._version
        self._slots = module._buffers
        self._key = key
        # Batch normalisation writes its running statistics behind the back of version counters.
        silent = isinstance(module, _NormBase) and module.training
        self._copy = value.detach().clone() if silent else None

    @property
    def label(self) -> str:
        path = next(name for name, module in self._root.named_modules() if module is self._module)
        return ".".join(filter(None, (type(self._root).__name__, path, self._key)))

    @property
    def current(self) -> Tensor | None:
        return self._slots[self._key]

    def changed(self) -> bool:
        if self.current is not self.value or self.value._version != self.version:
            return True
        return self._copy is not None and not torch.equal(self.value, self._copy)

    def snapshot(self) -> Callable[[], None]:
        """A function that puts the present value back: into the tensor, or the tensor back into the module."""
        tensor = self.current
        value = None if tensor is None or tensor is not self.value else tensor.detach().clone()
        # What was written silently is put back silently: autograd holds on to the statistics but does not read them.
        target = tensor.data if self._copy is not None and tensor is not None else tensor

        def restore() -> None:
            self._slots[self._key] = tensor
            if target is not None and value is not None:
                with torch.no_grad():
                    target.copy_(value)

        return restore


Slot = tuple[dict[str, Any], str, Tensor]


def slots_of(modules: Sequence[nn.Module]) -> tuple[list[Slot], list[Buffer]]:
    """Where the parameters and buffers of the modules are and which tensors are there now; the buffers also apart."""
    slots: list[Slot] = []
    buffers: list[Buffer] = []
    seen: set[nn.Module] = set()
    for root in modules:
        for part in root.modules():
            if part in seen:
                continue
            seen.add(part)
            for slot in (part._parameters, part._buffers):
                slots += [(slot, key, value) for key, value in slot.items() if value is not None]
            held = part._buffers.items()
            buffers += [Buffer(root, part, key, x) for key, x in held if x is not None and not x.is_inference()]
    return slots, buffers


class Purity:
    """The circumstances of a solve's evaluations, kept the same for all of them."""

    def __init__(self, device: torch.device, modules: Sequence[nn.Module]):
        self._generators = [torch.default_generator, *device_generators(device)]
        self._start: list[Tensor] = []
        self._random: list[Callable[[], object]] = []  # none, unless the field is seen to draw numbers
        self._slots, self._buffers = slots_of(modules)
        self._changed: list[Buffer] = []
        self._restore: list[Callable[[], None]] = []
        self._constants: list[tuple[Tensor, int]] = []
        self._device = device.type

    def remember(self, constants: Iterable[tuple[Tensor, int]]) -> None:
        """Tensors that an evaluation was seen to use, with their versions then; buffers that it changes apart."""
        changed = {id(buffer.value) for buffer in self._changed}
        self._constants = [(tensor, version) for tensor, version in constants if id(tensor) not in changed]

    @property
    def impure(self) -> bool:
        """Whether there is anything to put back before an evaluation."""
        return bool(self._random or self._restore)

    def prepare(self) -> None:
        """Before an evaluation: the same random numbers, the same buffers."""
        for restore in self._random:
            restore()
        for restore in self._restore:
            restore()

    def restore_buffers(self) -> None:
        """Undo what the latest evaluation did to buffers."""
        for restore in self._restore:
            restore()

    def begin(self) -> None:
        """Before the first evaluation: from here its random numbers come."""
        self._start = [generator.get_state() for generator in self._generators]

    def inspect(self) -> bool:
        """After the first evaluation: did it draw random numbers? Did it change a buffer?

        Of changed buffers the new values are the ones to keep. Without random numbers the generators, which belong to
        the whole process, are left alone from here on.
        """
        states = [generator.get_state() for generator in self._generators]
        if not all(torch.equal(a, b) for a, b in zip(states, self._start, strict=True)):
            self._random = [partial(g.set_state, state) for g, state in zip(self._generators, self._start, strict=True)]
        self._changed = [buffer for buffer in self._buffers if buffer.changed()]
        if not self._changed:
            return False
        self._restore = [buffer.snapshot() for buffer in self._changed]
        names = ", ".join(buffer.label for buffer in self._changed)
        warn(
            f"field: an evaluation changes {names}. A solver evaluates a field many times, so these buffers are "
            "updated once a solve, by the first evaluation. For batch normalisation call .eval(), or use a layer "
            "without running statistics (GroupNorm, LayerNorm).",
            StatefulFieldWarning,
        )
        return True

    def trial(self) -> Callable[[], bool]:
        """Before an evaluation that does not count. What it returns, asked afterwards, says whether that drew random
        numbers or changed a buffer, and puts them back."""
        self.begin()
        present = [buffer.snapshot() for buffer in self._buffers]

        def impure() -> bool:
            states = [generator.get_state() for generator in self._generators]
            drawn = not all(torch.equal(a, b) for a, b in zip(states, self._start, strict=True))
            changed = any(buffer.changed() for buffer in self._buffers)
            for generator, state in zip(self._generators, self._start, strict=True) if drawn else ():
                generator.set_state(state)
            for restore in present if changed else ():
                restore()
            return drawn or changed

        return impure

    def solving(self) -> AbstractContextManager[Any]:
        """Around a solver's own arithmetic, which autocast must not touch."""
        if torch.is_autocast_enabled(self._device):
            return torch.autocast(self._device, enabled=False)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass, whose evaluations leave no trace behind."""
        self._check_unchanged()
        random = [partial(g.set_state, g.get_state()) for g in self._generators] if self._random else []
        present = [buffer.snapshot() for buffer in self._changed]
        try:
            with self.solving(), self._as_it_was():
                yield
        finally:
            for restore in (*present, *random):
                restore()

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """With the modules' tensors of the solve: `torch.func.functional_call` lends them others, and only forward."""
        changed = {id(buffer.value) for buffer in self._changed}
        moved = [(slot, key, now, then) for slot, key, then in self._slots if (now := slot.get(key)) is not then]
        moved = [each for each in moved if id(each[3]) not in changed]
        for slot, key, _, then in moved:
            slot[key] = then
        try:
            yield
        finally:
            for slot, key, now, _ in moved:
                slot[key] = now

    def _check_unchanged(self) -> None:
        """Autograd notices a change of a parameter that requires a gradient; of one that does not, we must."""
        for tensor, version in self._constants:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that the field uses has been modified by an inplace "
                    "operation since the solve: the steps cannot be taken again. Change it after the backward pass."
                )


def present_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    """What opens the autocast context that is active now; `None` if none is."""
    if not torch.is_autocast_enabled(device.type):
        return None
    dtype, cache = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
    return partial(torch.autocast, device.type, dtype=dtype, cache_enabled=cache)


def device_generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return [generators[device.index or 0]] if generators else []

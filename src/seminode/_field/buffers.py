"""Buffers of a field's modules: which of them an evaluation changes, and how to put them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

#: Layers with running statistics. Their subclasses (lazy and synchronised ones) are among them.
_NORMALISATION = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

#: Buffers of modules, by name, that only count evaluations.
_COUNTERS: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class Buffer:
    """A buffer of a module: how to notice that an evaluation changed it, and how to put it back."""

    def __init__(self, roots: Sequence[nn.Module], module: nn.Module, key: str, value: Tensor):
        self._roots = roots
        self._module = module
        self.value = value
        self.version = value._version
        self._slots = module._buffers
        self._key = key
        # Batch normalisation writes its running statistics without changing their version counters.
        silent = isinstance(module, _NORMALISATION) and module.training
        self._copy = value.detach().clone() if silent else None

    @property
    def counts(self) -> bool:
        """Whether it may be a counter of evaluations: a single number outside of normalisation layers."""
        return self.value.numel() == 1 and not isinstance(self._module, _NORMALISATION)

    @property
    def known_counter(self) -> bool:
        """Whether the field was seen not to depend on it."""
        return self.counts and self._key in _COUNTERS.get(self._module, ())

    @known_counter.setter
    def known_counter(self, value: bool) -> None:
        assert value
        _COUNTERS.setdefault(self._module, set()).add(self._key)

    @property
    def label(self) -> str:
        named = ((root, name, part) for root in self._roots for name, part in root.named_modules())
        root, path = next((root, name) for root, name, part in named if part is self._module)
        return ".".join(filter(None, (type(root).__name__, path, self._key)))

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


def refuse_lazy(modules: Sequence[nn.Module]) -> None:
    """Refuse modules whose parameters have no shape yet: their first call would create parameters during a solve."""
    for root in modules:
        for name, x in (*root.named_parameters(), *root.named_buffers()):
            if is_lazy(x):
                raise ValueError(
                    f"field: {name!r} of {type(root).__name__} is a lazy parameter or buffer without a shape; call the "
                    "module once with an input of the right shape before you solve (and before you make an optimiser)"
                )


def buffers_of(modules: Sequence[nn.Module], parts: Sequence[nn.Module]) -> list[Buffer]:
    """The buffers of the parts of some modules, each once; modules must have their shapes already."""
    found: list[Buffer] = []
    for part in parts:
        parameters, buffers = part._parameters, part._buffers
        if not parameters and not buffers:
            continue
        if any(is_lazy(x) for x in (*parameters.values(), *buffers.values()) if x is not None):
            refuse_lazy(modules)
        items = buffers.items()
        found += [Buffer(modules, part, key, x) for key, x in items if x is not None and not x.is_inference()]
    return found

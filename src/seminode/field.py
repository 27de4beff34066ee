"""The user's field as a function of flat tensors, and the rule that makes it a *function*.

A solver may evaluate a field again (a rejected step, a replayed one) and must get the same answer. So every
evaluation of a solve, forward and backward, starts from one saved state of the random generators: a dropout mask is
drawn once a solve. A field that changes its own buffers does so once, in the first evaluation; all later ones see
the buffers as they were after it and leave no trace.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import StatefulFieldWarning
from .parameters import buffers
from .state import Layout, flatten, same_nesting, unflatten


class Field:
    """field(t, y, *args) over flat tensors: unpacks the state, checks and packs what comes back.

    Half-precision states are integrated in float32: the field sees them in the user's dtype, the solver does not.
    """

    def __init__(self, func: Callable[..., Any], layout: Layout, dtype: torch.dtype, args: tuple[Any, ...] = ()):
        self.func = func
        self.layout = layout
        self.dtype = dtype  # what the user's field takes and returns
        leaves, self._args_node = flatten(args)
        self._args: list[Any] = [leaf for _, leaf in leaves]
        self.args = args

    def bind(self, tensors: Sequence[Tensor], func: Callable[..., Any] | None = None) -> Field:
        """The same field with the tensors among its args, and maybe the callable itself, replaced."""
        fresh = iter(tensors)
        leaves = [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in self._args]
        return Field(func or self.func, self.layout, self.dtype, unflatten(self._args_node, iter(leaves)))

    @property
    def reach(self) -> tuple[Any, ...]:
        """Where to look for modules and captured tensors: the callable, and what it is passed but for tensors."""
        return self.func, *(leaf for leaf in self._args if not isinstance(leaf, Tensor))

    @property
    def arg_tensors(self) -> list[Tensor]:
        return [leaf for leaf in self._args if isinstance(leaf, Tensor)]

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        version = y._version
        if self.layout.single and y.dtype == self.dtype:
            k = self.func(t, y, *self.args)
        else:
            k = self.func(t, self.layout.unpack(y.to(self.dtype)), *self.args)
        if y._version != version:
            raise ValueError("field: changed y in place; y is the solver's own, expected a new tensor for the result")
        if self.layout.single and isinstance(k, Tensor) and k.shape == y.shape and k.dtype == y.dtype:
            return k
        self._check(k)
        return self.layout.pack(self._cast(k)).to(y.dtype)

    def _cast(self, k: Any) -> Any:
        # Under autocast a field answers in lower precision than it was asked in; that is what was wanted.
        leaves, node = flatten(k)
        return unflatten(node, iter([leaf.to(self.dtype) for _, leaf in leaves]))

    def _check(self, k: Any) -> None:
        if k is None:
            raise TypeError("field: returned None; expected the derivative of y (is a `return` missing?)")
        expected = unflatten(self.layout.node, iter(self.layout.names))
        if not same_nesting(expected, k):
            raise TypeError(f"field: expected the nesting of y0, {_describe(expected)}, found {_describe(k)}")
        for (name, leaf), shape in zip(flatten(k, "field(t, y)")[0], self.layout.shapes, strict=True):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{name}: expected a tensor, found {type(leaf).__name__}")
            if leaf.shape != shape:
                raise ValueError(f"{name}: expected shape {tuple(shape)} as in y0, found {tuple(leaf.shape)}")
            if leaf.dtype != self.dtype and not torch.is_autocast_enabled(leaf.device.type):
                raise TypeError(f"{name}: expected dtype {self.dtype} as in y0, found {leaf.dtype}")


def _describe(tree: Any) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, tuple | list):
        inside = ", ".join(map(_describe, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside},)"
    return "tensor" if isinstance(tree, Tensor | str) else type(tree).__name__


class Purity:
    """Makes evaluations repeatable: one random state, unchanged buffers, and the autocast mode of the forward pass."""

    def __init__(self, device: torch.device, modules: Sequence[nn.Module]):
        self._generators = [torch.default_generator, *_device_generators(device)]
        self._random = [partial(generator.set_state, generator.get_state()) for generator in self._generators]
        self._buffers = buffers(modules)
        self._versions = {key: buffer._version for key, (_, buffer) in self._buffers.items()}
        self._changed: dict[int, tuple[Tensor, Tensor]] = {}  # the buffer, and the value to restore
        frozen = (p for module in modules for p in module.parameters() if not p.requires_grad and not p.is_inference())
        self._frozen = {id(p): (p, p._version) for p in frozen}
        self._device = device.type
        self._autocast = (
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_cache_enabled(),
        )

    @property
    def stateful(self) -> bool:
        return bool(self._changed)

    def prepare(self) -> None:
        """Before an evaluation: the same random numbers, the same buffers."""
        for restore in self._random:
            restore()
        if self._changed:
            self.restore_buffers()

    def restore_buffers(self) -> None:
        """Undo what the latest evaluation did to buffers."""
        with torch.no_grad():
            for buffer, value in self._changed.values():
                buffer.copy_(value)

    def inspect(self) -> bool:
        """After the first evaluation: did it change a buffer? Then the changed values are the ones to keep."""
        for key, (_, buffer) in self._buffers.items():
            if buffer._version != self._versions[key]:
                self._changed[key] = (buffer, buffer.detach().clone())
        if self._changed:
            names = ", ".join(self._buffers[key][0] for key in self._changed)
            warnings.warn(
                f"field: an evaluation changes {names}. A solver evaluates a field many times, so "
                "these buffers are updated once a solve, by the first evaluation. For batch normalisation call "
                ".eval(), or use a layer without running statistics (GroupNorm, LayerNorm).",
                StatefulFieldWarning,
                stacklevel=2,
            )
        return self.stateful

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The forward pass's context for evaluations of the backward pass, which leave no trace behind."""
        self._check_unchanged()
        random = [generator.get_state() for generator in self._generators]
        enabled, dtype, cache = self._autocast
        try:
            with torch.autocast(self._device, enabled=enabled, dtype=dtype, cache_enabled=cache):
                yield
        finally:
            self.restore_buffers()
            for generator, state in zip(self._generators, random, strict=True):
                generator.set_state(state)

    def _check_unchanged(self) -> None:
        """Autograd notices a change of a parameter that requires a gradient; of one that does not, we must."""
        constants = [(b, self._versions[key]) for key, (_, b) in self._buffers.items() if key not in self._changed]
        for tensor, version in (*self._frozen.values(), *constants):
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that the field uses has been modified by an inplace "
                    "operation since the solve: the steps cannot be taken again. Change it after the backward pass."
                )


def _device_generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return [generators[device.index or 0]] if generators else []

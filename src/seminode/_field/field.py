"""The user's field as a function of flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .pytree import Layout, flatten, mapped, same_nesting, unflatten


class Field:
    """field(t, y, *args) over flat tensors: unpacks the state, checks and packs what comes back.

    Half-precision states are integrated in float32; the field itself sees them in the user's dtype.
    `autocast` opens the context in which the callable runs; the rest of a solve runs outside of it.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        layout: Layout,
        dtype: torch.dtype,
        args: tuple[Any, ...] = (),
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        copies: bool = False,
    ):
        self.func = func
        self.autocast = autocast
        self.run = func if autocast is None else _inside(autocast, func)
        self._copies = False
        if copies:
            self.copy_answers()
        self.layout = layout
        self.dtype = dtype  # what the user's field takes and returns
        self.args = args
        self._args = [leaf for _, leaf in flatten(args)[0]]

    def bind(self, tensors: Sequence[Tensor] | None = None, func: Callable[..., Any] | None = None) -> Field:
        """The same field with other tensors in the place of `arg_tensors`, and maybe another callable."""
        args = self.args
        if tensors is not None:
            fresh = {id(x): y for x, y in zip(self.arg_tensors, tensors, strict=True)}
            args = mapped(args, lambda leaf: fresh.get(id(leaf), leaf))
        return Field(self.func if func is None else func, self.layout, self.dtype, args, self.autocast, self._copies)

    def copy_answers(self) -> None:
        """From here on copy what the callable returns: it may write its next answer into the same memory."""
        if not self._copies:
            self._copies, self.run = True, _copied(self.run)

    @property
    def eps(self) -> float:
        """The rounding error of the callable's answers."""
        inside = getattr(self.autocast, "keywords", {}).get("dtype")
        return torch.finfo(self.dtype if inside is None else inside).eps

    @property
    def reach(self) -> tuple[Any, ...]:
        """Where to look for modules and captured tensors: the callable, and its args other than tensors."""
        return self.func, *(leaf for leaf in self._args if not isinstance(leaf, Tensor))

    @property
    def arg_tensors(self) -> list[Tensor]:
        """The tensors among the args, each once, however often it was passed."""
        return list({id(leaf): leaf for leaf in self._args if isinstance(leaf, Tensor)}.values())

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        version = y._version
        if self.layout.single and y.dtype == self.dtype:
            k = self.run(t, y, *self.args)
        else:
            k = self.run(t, self.layout.unpack(y.to(self.dtype)), *self.args)
        if y._version != version:
            raise ValueError("field: changed y in place; y is the solver's own, expected a new tensor for the result")
        plain = self.layout.single and isinstance(k, Tensor)
        if plain and k.shape == y.shape and k.dtype == y.dtype and k.device == y.device:
            return k
        leaves = self.layout.arrange(k)
        if leaves is None or any(x.dtype != self.dtype or x.device != y.device for x in leaves):
            leaves = self._checked(k, y.device)
        return self.layout.join(leaves).to(y.dtype)

    def _checked(self, k: Any, device: torch.device) -> list[Tensor]:
        """The leaves of what the field returned, in the order of y0."""
        if k is None:
            raise TypeError("field: returned None; expected the derivative of y (is a `return` missing?)")
        layout = self.layout
        expected = unflatten(layout.node, iter(layout.names))
        if not same_nesting(expected, k):
            raise TypeError(f"field: expected the nesting of y0, {_describe(expected)}, found {_describe(k)}")
        leaves = []
        for (name, leaf), shape in zip(flatten(k, "field(t, y)", layout.node)[0], layout.shapes, strict=True):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{name}: expected a tensor, found {type(leaf).__name__}")
            if leaf.shape != shape:
                raise ValueError(f"{name}: expected shape {tuple(shape)} as in y0, found {tuple(leaf.shape)}")
            if leaf.device != device:
                raise ValueError(f"{name}: expected device {device} as in y0, found {leaf.device}")
            # Under autocast a field returns a lower precision than that of its input, as intended.
            if leaf.dtype != self.dtype and self.autocast is None:
                raise TypeError(f"{name}: expected dtype {self.dtype} as in y0, found {leaf.dtype}")
            leaves.append(leaf.to(self.dtype))
        return leaves


def as_time(t: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A time as the field sees it: a 0-d tensor, or one entry per sample."""
    return t.to(device, dtype) if isinstance(t, Tensor) else torch.full((), t, dtype=dtype, device=device)


def _inside(context: Callable[[], AbstractContextManager[Any]], func: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any) -> Any:
        with context():
            return func(*args)

    return inner


def _copied(func: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any) -> Any:
        return mapped(func(*args), lambda x: x.clone() if isinstance(x, Tensor) else x)

    return inner


def _describe(tree: Any) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        inside = ", ".join(map(_describe, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside},)"
    return "tensor" if isinstance(tree, (Tensor, str)) else type(tree).__name__

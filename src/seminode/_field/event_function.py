"""The user's event functions and resets as functions of flat tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..events import Event
from .field import Field
from .pytree import flatten, same_nesting, unflatten


class EventFunction:
    """One event over flat tensors: unpacks the state, checks what the callables return. `index` names it in messages.

    `wrap` is applied to both callables: it takes the gradient away from tensors that are not to be differentiated.
    """

    def __init__(
        self,
        event: Event,
        index: int,
        field: Field,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda func: func,
    ):
        self.event, self._field = event, field
        self.name = f"event[{index}]"
        self._fn = wrap(event.fn)
        self._reset = None if event.reset is None else wrap(event.reset)

    @property
    def resets(self) -> bool:
        return self._reset is not None

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        """g(t, y), a 0-d tensor; of a batched solve, one number per sample."""
        value = self._called(self._fn, "fn", t, y)
        batch = y.shape[: self._field.layout.axis]
        expected = f"shape {tuple(batch)} with one number per sample" if batch else "a 0-d tensor"
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name}.fn: expected {expected}, found {type(value).__name__}")
        if value.shape != batch:
            hint = "; take a single number, as in y[0]" if value.numel() == 1 else "; pass an event for each of them"
            hint = "; with batched=True y has its batch axis first, as in y[:, 0]" if batch else hint
            raise ValueError(f"{self.name}.fn: expected {expected}, found shape {tuple(value.shape)}{hint}")
        if not value.is_floating_point():
            hint = "; an event is where a number changes its sign" if value.dtype == torch.bool else ""
            raise TypeError(f"{self.name}.fn: expected a real floating-point tensor, found {value.dtype}{hint}")
        return value

    def reset(self, t: Tensor, y: Tensor) -> Tensor:
        """The state to continue from."""
        assert self._reset is not None
        answer = self._called(self._reset, "reset", t, y)
        layout, dtype = self._field.layout, self._field.dtype
        leaves = layout.arrange(answer)
        if leaves is None or any(x.dtype != dtype or x.device != y.device for x in leaves):
            self._refuse(answer, y)
        assert leaves is not None
        return layout.join(leaves).to(y.dtype)

    def _called(self, func: Callable[..., Any], what: str, t: Tensor, y: Tensor) -> Any:
        field, versions = self._field, (t._version, y._version)
        answer = func(t, field.layout.unpack(y.to(field.dtype)), *field.args)
        for name, x, version in zip("ty", (t, y), versions, strict=True):
            if x._version != version:
                raise ValueError(f"{self.name}.{what}: changed {name} in place; expected a new tensor for the result")
        return answer

    def _refuse(self, answer: Any, y: Tensor) -> None:
        layout, name = self._field.layout, f"{self.name}.reset"
        if answer is None:
            raise TypeError(f"{name}: returned None; expected the new state (is a `return` missing?)")
        if not same_nesting(unflatten(layout.node, iter(layout.names)), answer):
            raise TypeError(
                f"{name}: expected the nesting of y0, found {type(answer).__name__} with a different nesting"
            )
        for (path, leaf), shape in zip(flatten(answer, name, layout.node)[0], layout.shapes, strict=True):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{path}: expected a tensor, found {type(leaf).__name__}")
            if leaf.shape != shape:
                raise ValueError(f"{path}: expected shape {tuple(shape)} as in y0, found {tuple(leaf.shape)}")
            if leaf.dtype != self._field.dtype:
                raise TypeError(f"{path}: expected dtype {self._field.dtype} as in y0, found {leaf.dtype}")
            if leaf.device != y.device:
                raise ValueError(f"{path}: expected device {y.device} as in y0, found {leaf.device}")

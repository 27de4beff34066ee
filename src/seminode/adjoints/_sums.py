"""Weighted sums of gradients, one for each differentiated tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._compile.torch_private import add_all
from .._field.pytree import HALF


class Sums:
    """A sum of weighted gradients, one for each tensor, made when the first contribution comes."""

    def __init__(self, count: int):
        self.values: list[Tensor | None] = [None] * count

    @classmethod
    def of(cls, values: list[Tensor | None]) -> Sums:
        """A sum that was made elsewhere."""
        new = cls(0)
        new.values = values
        return new

    def add(self, grads: Sequence[Tensor | None], weight: float = 1.0) -> None:
        if weight == 0.0 or not self.values:
            return
        for value, grad in zip(self.values, grads, strict=True):
            if value is None or grad is None:
                break
        else:
            add_all(self.values, grads, weight)  # type: ignore[arg-type]
            return
        for i, (value, grad) in enumerate(zip(self.values, grads, strict=True)):
            if grad is None:
                continue
            if value is not None:
                value.add_(grad, alpha=weight)
            else:
                # Many small contributions would be lost in a half-precision sum; a gradient may be an expanded view.
                self.values[i] = (grad.float() if grad.dtype in HALF else grad) * weight

    def adopt(self, fresh: Sequence[Tensor | None]) -> None:
        """Add gradients that no other code holds: the first ones become the sum itself."""
        several = len({id(x) for x in fresh if x is not None}) < sum(x is not None for x in fresh)
        if several or any(x is not None for x in self.values) or any(x is not None and x.dtype in HALF for x in fresh):
            self.add(fresh)
        elif self.values:
            self.values = list(fresh)

    def absorb(self, other: Sums) -> None:
        """Add another sum, which is used up."""
        if all(value is None for value in self.values):
            self.values = other.values
        else:
            self.add(other.values)
        other.clear()

    def clear(self) -> None:
        self.values = [None] * len(self.values)

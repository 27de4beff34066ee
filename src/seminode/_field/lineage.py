"""Which tensors were computed from others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Lineage:
    """Tells which tensors were computed from some others, by their graphs."""

    def __init__(self, origins: Iterable[Tensor]):
        origins = list(origins)
        self._leaves = {id(x) for x in origins if x.is_leaf}
        self._computed = {x.grad_fn for x in origins if not x.is_leaf}
        self._known: dict[int, tuple[Tensor, bool]] = {}

    def includes(self, x: Tensor) -> bool:
        """Whether x was computed from one of the tensors."""
        if id(x) not in self._known:
            self._known[id(x)] = x, self._reaches(x)
        return self._known[id(x)][1]

    def _reaches(self, x: Tensor) -> bool:
        queue: list[Any] = [x.grad_fn]
        seen: set[Any] = {None}
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._computed or id(getattr(node, "variable", None)) in self._leaves:
                return True
            queue += [function for function, _ in node.next_functions]
        return False

"""Which tensors of a control a field reads, and what they were computed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ._piecewise import PiecewisePolynomial


def control_tensors(control: Any) -> list[Tensor]:
    """The tensors of a control that require a gradient and are no parameters of it."""
    if not isinstance(control, nn.Module):
        return []
    tensors: list[Tensor] = []
    for module in control.modules():
        if isinstance(module, PiecewisePolynomial):
            tensors += module.slope_tensors()
        else:
            tensors += module.buffers(recurse=False)
    return list({id(x): x for x in tensors if x.requires_grad}.values())


def leading_to(tensors: Sequence[Tensor], origins: Sequence[Tensor]) -> list[Tensor]:
    """Those tensors that were computed from one of the others."""
    leaves = {id(x) for x in origins if x.is_leaf}
    computed = {x.grad_fn for x in origins if not x.is_leaf}
    return [x for x in tensors if _leads_to(x, leaves, computed)]


def _leads_to(x: Tensor, leaves: set[int], computed: set[Any]) -> bool:
    queue: list[Any] = [x.grad_fn]
    seen: set[Any] = {None}
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in computed or id(getattr(node, "variable", None)) in leaves:
            return True
        queue += [function for function, _ in node.next_functions]
    return False

"""Derivatives of any order of a function of leaves, by VJPs of VJPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._field.capture import as_leaves


def differentiated(
    function: Callable[[Sequence[Tensor]], list[Tensor | None]],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The VJP of a function of leaves; where grad mode is on, differentiable in turn, as often as one likes."""
    present = [c is not None for c in cotangents]
    given = [c for c in cotangents if c is not None]
    if not given:
        return [None] * len(inputs)
    return list(VJPFunction.apply(function, present, len(inputs), *inputs, *given))  # type: ignore[misc]


class VJPFunction(Function):
    """(x, c) ↦ Σ cᵢ ∂Fᵢ/∂x for a function F of leaves. Its own VJP is the same for another such function."""

    @staticmethod
    def forward(ctx: Any, function: Any, present: Sequence[bool], count: int, *tensors: Tensor) -> Any:
        ctx.function, ctx.present, ctx.count = function, present, count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():
            leaves = as_leaves(tensors)
            return tuple(_weighted(function, present, leaves[:count], leaves[count:], create_graph=False))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        function, present, count = ctx.function, ctx.present, ctx.count

        def vjp_of(leaves: Sequence[Tensor]) -> list[Tensor | None]:
            return _weighted(function, present, leaves[:count], leaves[count:], create_graph=True)

        return None, None, None, *differentiated(vjp_of, ctx.saved_tensors, grads)


def _weighted(
    function: Any, present: Sequence[bool], inputs: Sequence[Tensor], weights: Sequence[Tensor], create_graph: bool
) -> list[Tensor | None]:
    values = [v for v, c in zip(function(inputs), present, strict=True) if c]
    return vjp(values, inputs, weights, [x.requires_grad for x in inputs], create_graph)


def vjp(
    values: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    needs: Sequence[bool],
    create_graph: bool = True,
) -> list[Tensor | None]:
    """The gradients of Σ ⟨weights, values⟩ for the inputs in need; `None` where nothing flows."""
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None and v.requires_grad]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    if not pairs or not wanted:
        return [None] * len(inputs)
    outputs, cotangents = zip(*pairs, strict=True)
    grads = iter(torch.autograd.grad(outputs, wanted, cotangents, create_graph=create_graph, allow_unused=True))
    return [next(grads) if need else None for need in needs]

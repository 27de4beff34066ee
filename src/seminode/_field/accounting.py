"""Does the graph of an evaluation lead only to tensors that are differentiated?"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .capture import CAPTURED, STATE, TIME


class Unaccounted(RuntimeError):
    """The graph of an evaluation leads to a tensor that is not differentiated."""


class Evaluation(NamedTuple):
    """The arguments of a field, and its result."""

    t: Tensor
    y: Tensor
    k: Tensor


class Accounting:
    """Refuses graphs that lead to a tensor that is not accounted for: its gradient would be lost.

    `targets` are the tensors that every evaluation is differentiated by; `computed` are captured tensors that should
    have been replaced by some of them.
    """

    def __init__(self, targets: Iterable[Tensor], computed: Iterable[Tensor]):
        self._targets = {id(x): x for x in targets}
        self._computed = {x.grad_fn for x in computed}
        # Graphs are walked on every step. They end mostly here, so that a walk need not look at leaves.
        self._ends: set[Any] = {None, *map(_node, self._targets.values())}

    def check(self, evaluations: Sequence[Evaluation], leaves: Sequence[Tensor]) -> None:
        """Walk the graphs of the field's answers, back to the states at which it was evaluated.

        `leaves` are differentiated too. A leaf that was born during the evaluation is no parameter and is ignored,
        unless it is a copy of a state or of another leaf.
        """
        seen = self._ends.copy()
        seen.update([y.grad_fn for _, y, _ in evaluations])
        nodes: list[Any] = [node for _, _, k in evaluations if (node := k.grad_fn) not in seen]
        for node in nodes:  # which grows on the way
            following = node.next_functions
            if not following and hasattr(node, "variable"):
                self._check_leaf(node, evaluations, leaves)
            for function, _ in following:
                if function not in seen:
                    seen.add(function)
                    nodes.append(function)
        if self._computed and not self._computed.isdisjoint(nodes):
            refuse_unaccounted()

    def _check_leaf(self, node: Any, evaluations: Sequence[Evaluation], leaves: Sequence[Tensor]) -> None:
        leaf = id(node.variable)  # not the tensor: its references are counted below
        if any(leaf == id(y) for _, y, _ in evaluations):
            return
        known = self._targets | {id(x): x for x in (*leaves, *(t for t, _, _ in evaluations))}
        if leaf in known:
            return
        if _references(node) > _references_when_born():
            refuse_unaccounted(node.variable)
        if any(_copies(node.variable, x) for x in (*(y for _, y, _ in evaluations), *known.values())):
            refuse_cut(STATE, times_too=False)


def _node(x: Tensor) -> Any:
    """The node to which graphs that use x lead; `None` if x has no gradient, or only one of torch.func."""
    if x.grad_fn is not None or not x.requires_grad:
        return x.grad_fn
    with torch.enable_grad():
        view = x.view_as(x).grad_fn
    return None if view is None else view.next_functions[0][0]


def _references(node: Any) -> int:
    variable = node.variable
    return sys.getrefcount(variable)


@functools.cache
def _references_when_born() -> int:
    """How many references there are to a leaf that only a graph holds."""
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.ones(1).requires_grad_() * 2.0
    assert value.grad_fn is not None
    return _references(value.grad_fn.next_functions[0][0])


def _copies(leaf: Tensor, x: Tensor) -> bool:
    """Whether a leaf has the memory or the values of another tensor."""
    if leaf.numel() <= 1 or leaf.dtype != x.dtype:
        return leaf.numel() == 1 and leaf.data_ptr() == x.data_ptr()
    if leaf.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return True
    return leaf.shape == x.shape and leaf.device == x.device and torch.equal(leaf, x)


def refuse_unaccounted(variable: Tensor | None = None) -> None:
    shape = f" (shape {tuple(variable.shape)})" if variable is not None else ""
    raise Unaccounted(
        f"field: uses a tensor{shape} that requires a gradient and was not detected when the solve began. It may be "
        "used at some times only, be hidden in a custom autograd function, or have replaced another tensor since the "
        "solve. Name such tensors in params= or pass them in args=; or use adjoint=sn.Direct()."
    )


def refuse_cut(cut: int, times_too: bool) -> None:
    """Refuse a field that makes new leaves of its state or its parameters: the gradient would end there."""
    if cut & (STATE | CAPTURED) or (cut & TIME and times_too):
        what = "its state" if cut & STATE else "a parameter or argument" if cut & CAPTURED else "the time"
        raise Unaccounted(
            f"field: makes a new leaf of {what}, as `y.detach().requires_grad_()` does, so that the gradient ends "
            "there and would be lost. Call requires_grad_() on the tensor itself, without detach(), clone or copy."
        )

"""What a step keeps for its VJP, made smaller: large results of cheap operations are computed again.

Keeping an activation of several megabytes takes longer than it seems, because the operating system has to provide the
memory in each forward pass anew. Results of elementwise operations whose operands are kept anyway are better computed
again in the backward pass, in memory that is in use already. Smaller activations stay in the cache and are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .batch_axis import BatchAxis

aten = torch.ops.aten
#: From how many bytes on a tensor is large.
LARGE_BYTES = 1 << 20
CHEAP = {
    aten.softplus.default,
    aten.softplus_backward.default,
    aten.relu.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.neg.default,
}
VIEWS = {aten.permute.default, aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim}


def keep_less(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, axis: BatchAxis | None = None) -> None:
    """Change both halves: `forward` returns `outputs` values, then what it keeps, of which `backward` has inputs of the
    same names. An axis of unknown size counts with the size that it was first met with."""
    (end,) = forward.graph.find_nodes(op="output")
    results: tuple[fx.Node, ...] = tuple(end.args[0])
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    kept = {node: inputs[node.name] for node in results[outputs:] if node.name in inputs}
    needed: set[fx.Node] = set()
    dropped: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed([node for node in forward.graph.nodes if node in kept]):
        if node in needed or _bytes(node, axis) < LARGE_BYTES:
            continue
        chain = _from_kept(node, kept.keys() - dropped.keys() - {node})
        if chain is not None:
            dropped[node] = chain
            needed.update(operand for each in chain for operand in each.all_input_nodes if operand in kept)
    if not dropped:
        return
    for node in reversed(dropped):  # in the order of the forward half
        _recompute(backward, kept[node], dropped[node], kept)
    end.args = ([node for i, node in enumerate(results) if i < outputs or node not in dropped],)
    for half in (forward, backward):
        half.graph.eliminate_dead_code()
        half.graph.lint()
        half.recompile()


def _from_kept(node: fx.Node, kept: Iterable[fx.Node]) -> list[fx.Node] | None:
    """The cheap operations that lead from what is kept to this tensor, in order; `None` if there are none."""
    chain, sizes = [node], list[fx.Node]()
    while chain[0].target in VIEWS:
        first, *others = chain[0].all_input_nodes
        chain.insert(0, first)
        sizes += others  # of a batch of any size
    operands = chain[0].all_input_nodes
    if chain[0].target not in CHEAP or not operands or any(each not in kept for each in (*operands, *sizes)):
        return None
    return chain


def _bytes(node: fx.Node, axis: BatchAxis | None) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    entries = value.numel()
    return (entries if axis is None else axis.at(entries, axis.hint)) * value.element_size()


def _recompute(backward: fx.GraphModule, place: fx.Node, chain: list[fx.Node], kept: dict[Any, fx.Node]) -> None:
    """Replace an input of the backward half by the operations of `chain`, just before they are first read."""
    copies = dict(kept)
    first = next((node for node in backward.graph.nodes if node in place.users), None)
    if first is not None:
        with backward.graph.inserting_before(first):
            for node in chain:
                copies[node] = backward.graph.node_copy(node, copies.__getitem__)
        place.replace_all_uses_with(copies[chain[-1]])
    backward.graph.erase_node(place)

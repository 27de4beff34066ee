"""What a step keeps for its VJP, as fewer tensors: small ones of the same shape become one.

One program allocates each tensor, autograd keeps it, and another program takes it. For a small tensor, this takes
longer than to compute it. The compiler computes the parts of a joined tensor in their places, without copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .recompute import VIEWS

aten = torch.ops.aten
#: Up to how many bytes a tensor is small.
SMALL_BYTES = 1 << 16


def pack(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Change both halves: `forward` returns `outputs` values, then what it keeps, of which `backward` has inputs of the
    same names, in the same order."""
    (end,) = forward.graph.find_nodes(op="output")
    results: list[fx.Node] = list(end.args[0])
    kept = results[outputs:]
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for nodes in _groups([node for node in kept if node.name in inputs]):
        with forward.graph.inserting_before(end):
            joined = forward.graph.call_function(aten.cat.default, (nodes,))
            joined.meta["val"] = torch.cat([node.meta["val"] for node in nodes])
        kept[kept.index(nodes[0])] = joined
        kept = [node for node in kept if node not in nodes]
        _take_apart(backward, joined, [inputs[node.name] for node in nodes])
    end.args = ((*results[:outputs], *kept),)
    forward.recompile()
    backward.recompile()


def _groups(kept: list[fx.Node]) -> list[list[fx.Node]]:
    """Those that can be joined: small tensors of the same shape and dtype, in the memory of the host."""
    groups: dict[Any, list[fx.Node]] = {}
    for node in kept:
        value = node.meta["val"]
        if node.target not in VIEWS and node.op == "call_function" and _small(value):
            groups.setdefault((value.shape, value.dtype), []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def _small(value: Any) -> bool:
    # A GPU is behind the host anyway. Sizes of a batch of any size are symbols, which are no numbers.
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.ndim == 0:
        return False
    fixed = all(isinstance(n, int) for n in value.shape)
    return fixed and 0 < value.nbytes <= SMALL_BYTES and value.is_contiguous()


def _take_apart(backward: fx.GraphModule, joined: fx.Node, parts: list[fx.Node]) -> None:
    """Replace inputs by parts of a single one."""
    with backward.graph.inserting_before(parts[0]):
        whole = backward.graph.placeholder(f"{joined.name}_of_kept")
    whole.meta["val"] = joined.meta["val"]
    rows = len(joined.meta["val"]) // len(parts)
    last = list(backward.graph.find_nodes(op="placeholder"))[-1]
    for i, part in enumerate(parts):
        with backward.graph.inserting_after(last):
            piece = backward.graph.call_function(aten.slice.Tensor, (whole, 0, i * rows, (i + 1) * rows))
        piece.meta["val"] = part.meta["val"]
        part.replace_all_uses_with(piece)
        backward.graph.erase_node(part)

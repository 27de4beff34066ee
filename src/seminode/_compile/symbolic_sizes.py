"""Sizes of tensors that are symbols: which assumptions about them hold for a given number."""

from __future__ import annotations

from typing import Any

import torch


def guards_hold(size: Any, n: int, known: dict[tuple[int, int], bool]) -> bool:
    """Whether n has all properties that were assumed of a symbolic size. `known` are earlier answers."""
    env, symbol = size.node.shape_env, size.node._expr
    key = n, len(env.guards)
    if key not in known:
        # Sizes of zero and one are never assumed: they broadcast.
        known[key] = n > 1 and all(bool(guard.expr.subs({symbol: n}) == True) for guard in env.guards)  # noqa: E712
    return known[key]


def value_at(value: Any, size: Any, n: int) -> int:
    """An expression of a symbolic size, for the size n."""
    return int(value.node.expr.subs({size.node._expr: n})) if isinstance(value, torch.SymInt) else value


def ratio_to(value: Any, size: Any) -> int | None:
    """An expression as a multiple of a symbolic size, if it is one."""
    if not isinstance(value, torch.SymInt):
        return None
    ratio = value.node.expr / size.node._expr
    return int(ratio) if ratio.is_Integer else None


def is_open(size: Any) -> bool:
    """Whether a size is symbolic, and was not found to be a certain number."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def input_examples(module: torch.fx.GraphModule) -> list[Any]:
    """The inputs with which the front end has traced a graph, without values."""
    return [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]

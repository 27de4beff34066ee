"""Structures of tensors and the one flat tensor, with named segments, that a solver works on."""

from __future__ import annotations

import cmath
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def real_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the real part, in which times and tolerances are."""
    return x.dtype.to_real() if x.is_complex() else x.dtype


def wide_dtype(x: Tensor) -> torch.dtype:
    """The most precise dtype of its device."""
    return torch.float32 if x.device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Node:
    """The shape of a nesting: a leaf (no `kind`), or a container with its children and, of a dict, their keys."""

    kind: type | None = None
    children: tuple[Node, ...] = ()
    keys: tuple[Any, ...] | None = None

    def build(self, children: list[Any]) -> Any:
        """A container of this kind with other children."""
        assert self.kind is not None
        if self.keys is not None:
            return self.kind(zip(self.keys, children, strict=True))
        return self.kind(*children) if hasattr(self.kind, "_fields") else self.kind(children)


LEAF = Node()


def leaves_of(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        yield tree
        return
    for child in tree:
        yield from leaves_of(child)


def flatten(tree: Any, name: str = "", like: Node = LEAF) -> tuple[list[tuple[str, Any]], Node]:
    """Leaves of nested tuples, lists and dicts, each with its path, and the nesting itself.

    Given a nesting that the tree is known to have, dicts are read in that one's order of keys.

    >>> flatten({"q": 1, "p": (2, 3)}, "y")[0]
    [("y['q']", 1), ("y['p'][0]", 2), ("y['p'][1]", 3)]
    """
    keys = None
    if isinstance(tree, dict):
        keys = tuple(tree) if like.keys is None else like.keys
        items = [(f"{name}[{key!r}]", tree[key]) for key in keys]
    elif isinstance(tree, (tuple, list)):
        items = [(f"{name}[{i}]", child) for i, child in enumerate(tree)]
    else:
        return [(name, tree)], LEAF
    leaves: list[tuple[str, Any]] = []
    nodes: list[Node] = []
    for i, (path, child) in enumerate(items):
        below, node = flatten(child, path, like.children[i] if like.children else LEAF)
        leaves += below
        nodes.append(node)
    return leaves, Node(_kind(tree), tuple(nodes), keys)


def _kind(tree: Any) -> type:
    # A defaultdict and its like cannot be built from pairs alone.
    return dict if isinstance(tree, dict) and type(tree) is not OrderedDict else type(tree)


def unflatten(node: Node, leaves: Iterator[Any]) -> Any:
    """The inverse of `flatten`; takes as many leaves from the iterator as the nesting has."""
    if node.kind is None:
        return next(leaves)
    return node.build([unflatten(child, leaves) for child in node.children])


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The structure with a function applied to its leaves; a container in which nothing changes stays the same one."""
    if not isinstance(tree, (dict, tuple, list)):
        return function(tree)
    children = list(tree.values() if isinstance(tree, dict) else tree)
    new = [mapped(child, function) for child in children]
    if all(a is b for a, b in zip(new, children, strict=True)):
        return tree
    return Node(_kind(tree), keys=tuple(tree) if isinstance(tree, dict) else None).build(new)


def same_nesting(a: Any, b: Any) -> bool:
    """Whether two structures nest alike (kinds of containers, lengths and keys)."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_nesting(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        kinds = isinstance(b, tuple) if isinstance(a, tuple) else isinstance(b, list)
        return kinds and len(a) == len(b) and all(map(same_nesting, a, b))
    return not isinstance(b, (dict, tuple, list))


def _arrange(node: Node, tree: Any, leaves: list[Any]) -> bool:
    """Append the leaves of a tree in the order of a nesting; whether it has that nesting."""
    if node.kind is None:
        leaves.append(tree)
        return not isinstance(tree, (dict, tuple, list))
    if node.keys is not None:
        if not isinstance(tree, dict) or len(tree) != len(node.keys) or any(key not in tree for key in node.keys):
            return False
        return all(_arrange(child, tree[key], leaves) for key, child in zip(node.keys, node.children, strict=True))
    kind = tuple if issubclass(node.kind, tuple) else list
    if not isinstance(tree, kind) or len(tree) != len(node.children):
        return False
    return all(_arrange(child, x, leaves) for child, x in zip(node.children, tree, strict=True))


@dataclass(frozen=True)
class Layout:
    """Where each leaf of a structure sits in the flat tensor.

    A single tensor is its own flat tensor: it keeps its shape and memory layout, and `pack` and `unpack` return it
    untouched. With `axis=1` the flat tensor keeps the first axis, which all leaves share: it has one row per sample.
    """

    node: Node
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    axis: int = 0

    @classmethod
    def of(cls, tree: Any, name: str = "y", axis: int = 0) -> Layout:
        if isinstance(tree, Tensor):
            return cls(LEAF, (name,), (tree.shape,), axis)
        leaves, node = flatten(tree, name)
        return cls(node, tuple(n for n, _ in leaves), tuple(leaf.shape for _, leaf in leaves), axis)

    @cached_property
    def single(self) -> bool:
        return self.node.kind is None

    @cached_property
    def samples(self) -> int | None:
        """The size of the leading axis, if all leaves share one that could be that of a batch."""
        sizes = {shape[0] if shape else 0 for shape in self.shapes}
        return sizes.pop() if len(sizes) == 1 and min(sizes) > 1 else None

    @cached_property
    def open(self) -> bool:
        """Whether some of its sizes are not fixed."""
        return any(isinstance(n, torch.SymInt) for shape in self.shapes for n in shape)

    def of_size(self, n: int) -> Layout:
        """The same layout for n samples."""
        return Layout(self.node, self.names, tuple(torch.Size((n, *shape[1:])) for shape in self.shapes), self.axis)

    def fitting(self, flat: Tensor) -> Layout:
        """The same layout for as many samples as are in a flat tensor, if its size is not fixed."""
        if self.single or not isinstance(flat.shape[0], torch.SymInt) or self.open:
            return self
        return self.of_size(flat.shape[0] // sum(math.prod(shape[1:]) for shape in self.shapes))

    def pack(self, tree: Any) -> Tensor:
        """One flat tensor out of a structure with this layout."""
        if self.single and isinstance(tree, Tensor):
            return tree
        return self.join([leaf for _, leaf in flatten(tree, like=self.node)[0]])

    def arrange(self, tree: Any, shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor] | None:
        """The leaves in the order of this layout, or `None` if the tree does not fit it (or has not these shapes)."""
        leaves: list[Any] = []
        if not _arrange(self.node, tree, leaves):
            return None
        pairs = zip(leaves, self.shapes if shapes is None else shapes, strict=True)
        fits = all(isinstance(x, Tensor) and x.shape == shape for x, shape in pairs)
        return leaves if fits else None

    def join(self, leaves: list[Tensor]) -> Tensor:
        """One flat tensor out of the leaves."""
        if self.single:
            return leaves[0]
        return torch.cat([leaf.reshape(*leaf.shape[: self.axis], -1) for leaf in leaves], self.axis)

    def segments(self, flat: Tensor, lead: int = 0) -> list[Tensor]:
        """The leaves as views of a flat tensor that may have `lead` further axes in front."""
        if self.single:
            return [flat]
        front = flat.shape[:lead]
        sizes = [math.prod(shape[self.axis :]) for shape in self.shapes]
        pieces = flat.split(sizes, dim=lead + self.axis)
        return [piece.reshape((*front, *shape)) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def unpack(self, flat: Tensor, lead: int = 0) -> Any:
        """The structure back from a flat tensor."""
        if self.single:
            return flat
        return unflatten(self.node, iter(self.segments(flat, lead)))

    def non_finite_leaf(self, flat: Tensor) -> str | None:
        """Name of the first leaf that holds a NaN or an infinity."""
        for name, leaf in zip(self.names, self.segments(flat), strict=True):
            if not bool(torch.isfinite(leaf).all()):
                return name
        return None


def shares_memory(x: Tensor) -> bool:
    """Whether the memory of a tensor is that of a NumPy array too: what is written there leaves no trace on x."""
    return not x.untyped_storage().resizable()


def is_finite(x: Tensor) -> bool:
    # The sum is one kernel; it may overflow where no entry does, so if the sum is not finite, the entries are checked.
    x = x.detach()
    return cmath.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())

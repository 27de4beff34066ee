"""Programs for batches of any size: tensors without values whose leading axis has a size B that is not fixed.

A program is traced over such tensors once, and is then valid for every B that has the properties on which decisions
were based while it was made (its *guards*, such as B > 32).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .symbolic_sizes import guards_hold, input_examples, is_open, ratio_to, value_at
from .torch_private import static_fake, symbolic_size

#: How many graphs are remembered for comparison with the graph of the same field for another size.
REMEMBERED = 256
#: How many sets of guards programs of any size are made for, before sizes get programs of their own.
AXES = 4

#: In place of a tensor: the size itself is an input of a graph.
SIZE = "size"


class NotOfAnySize(Exception):
    """Why no program for any size can be made; each size needs its own."""


class BatchAxis:
    """An axis of unknown size; `size` stands for it in shapes, and `hint` is the size that it was first met with."""

    def __init__(self, hint: int):
        self.hint = hint
        self._mode, self.size = symbolic_size(hint)
        self._admitted: dict[tuple[int, int], bool] = {}

    def admits(self, n: int) -> bool:
        """Whether all that was decided so far about the size is true for n."""
        return guards_hold(self.size, n, self._admitted)

    def at(self, value: Any, n: int) -> int:
        """An expression of the size for the size n."""
        return value_at(value, self.size, n)

    def like(self, x: Tensor, shape: Sequence[Any]) -> Tensor:
        """A tensor without values, of this shape and in the memory layout of x."""
        if not any(isinstance(n, torch.SymInt) for n in shape):
            return static_fake(self._mode, x)
        order = sorted(range(x.ndim), key=lambda i: (x.stride(i), -i))
        strides: list[Any] = [1] * x.ndim
        actual, symbolic = 1, 1
        for i in order:
            if x.shape[i] != 1 and x.stride(i) != actual:
                raise NotOfAnySize("a tensor with a batch axis has gaps in memory")
            strides[i] = symbolic
            actual, symbolic = actual * x.shape[i], symbolic * shape[i]
        with self._mode:
            return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)

    def batched(self, x: Tensor, axes: Sequence[bool]) -> Tensor:
        """As `like`, with the size in place of some axes of x."""
        return self.like(x, [self.size if batch else n for n, batch in zip(x.shape, axes, strict=True)])

    def marker(self) -> Tensor:
        """A tensor from which a program can read the size."""
        with self._mode:
            return torch.empty((self.size, 0))

    def ratio(self, value: Any) -> int:
        """A size as a multiple of that of the axis."""
        ratio = ratio_to(value, self.size)
        if ratio is None:
            raise NotOfAnySize("a size is kept that is no multiple of that of the batch")
        return ratio

    def source(self, examples: Sequence[Tensor]) -> Source:
        """Where the size can be read from."""
        found = [
            Source(i, j, ratio)
            for i, x in enumerate(examples)
            for j, n in enumerate(x.shape)
            if (ratio := ratio_to(n, self.size)) is not None
        ]
        if not found:
            raise NotOfAnySize("no input of a program has a batch axis")
        return min(found, key=lambda source: source.ratio)


class Source(NamedTuple):
    """The axis of an input whose size is B times a number."""

    place: int
    axis: int
    ratio: int

    def read(self, inputs: Sequence[Tensor]) -> int:
        return inputs[self.place].shape[self.axis] // self.ratio


class Strides:
    """The memory layout for which a program was compiled."""

    def __init__(self, examples: Sequence[Tensor], axis: BatchAxis | None):
        self._axis, self._strides = axis, [x.stride() for x in examples]
        if axis is not None and any(isinstance(n, torch.SymInt) for strides in self._strides for n in strides):
            self._source = axis.source(examples)
        else:
            self._axis = None
        self._known: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()

    def of(self, inputs: Sequence[Tensor]) -> list[tuple[int, ...]]:
        axis = self._axis
        if axis is None:
            return self._strides
        n = self._source.read(inputs)
        if n not in self._known:
            self._known[n] = [tuple(axis.at(stride, n) for stride in strides) for strides in self._strides]
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return self._known[n]


Signature = tuple[Any, ...]


def signature_of(module: torch.fx.GraphModule) -> Signature | None:
    """For each input of a graph: `SIZE`, or which of its axes have the size of the batch. `None` if none has."""
    examples = input_examples(module)
    sizes = [x.shape if isinstance(x, Tensor) else (x,) for x in examples]
    symbolic = [tuple(map(is_open, shape)) for shape in sizes]
    if not any(map(any, symbolic)):
        return None
    return tuple(axes if isinstance(x, Tensor) else SIZE for x, axes in zip(examples, symbolic, strict=True))


def has_size(inputs: Sequence[Any], signature: Signature, n: int) -> bool:
    """Whether all axes with the size of the batch have this size."""
    return all(
        x == n if axes is SIZE else all(m == n for m, batch in zip(x.shape, axes, strict=True) if batch)
        for x, axes in zip(inputs, signature, strict=True)
    )


#: The shapes of the inputs of graphs, by what graphs of the same field for other sizes have in common.
_remembered: OrderedDict[Hashable, list[tuple[torch.Size, ...]]] = OrderedDict()


def batch_axes(
    module: Any, inputs: Sequence[Any], states: Sequence[int | None], family: Hashable
) -> list[tuple[int, int]]:
    """Which axes of the inputs have the size of the batch: (input, axis).

    They are found by comparison with the graph of the same field for a batch of another size. Empty if there is none.
    """
    nodes = [(node.op, node.target, node.name) for node in module.graph.nodes]
    key = family, tuple(nodes), tuple((x.ndim, x.dtype, x.device) for x in inputs)
    others = _remembered.setdefault(key, [])
    _remembered.move_to_end(key)
    while len(_remembered) > REMEMBERED:
        _remembered.popitem(last=False)
    shapes = tuple(x.shape for x in inputs)
    for other in others:
        axes = list(_differing(shapes, other))
        pairs = {(shapes[i][j], other[i][j]) for i, j in axes}
        if len(pairs) == 1 and all(i is None or (i, 0) in axes for i in states):
            return axes
    if shapes not in others:
        others.append(shapes)
        del others[:-8]
    return []


def _differing(a: Sequence[torch.Size], b: Sequence[torch.Size]) -> Iterable[tuple[int, int]]:
    return (
        (i, j)
        for i, pair in enumerate(zip(a, b, strict=True))
        for j, (n, m) in enumerate(zip(*pair, strict=True))
        if n != m
    )

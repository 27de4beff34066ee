"""Follows NaNs through the operations of an evaluation: an operation that loses one without need has read it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from .._compile.dispatch_mode import DispatchMode
from .._compile.torch_private import without_torch_dispatch, without_torch_function
from .._field.pytree import leaves_of

#: Operations that need a tensor for its shape and dtype, or as a place to write to.
BLIND = {
    *("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "zero", "zero_"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "is_same_size", "_has_same_storage_numel"),
    *("exponential_", "normal_", "random_", "uniform_", "is_pinned"),
}
#: Operations that put entries elsewhere as they are. So do views, which are known by their schema.
MOVES = {
    *("_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy", "copy_", "fill", "fill_", "flip", "stack"),
    *("gather", "index", "index_put", "index_put_", "index_select", "repeat", "roll", "select_scatter"),
    *("slice_scatter", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
}
#: Functions that hand out values, or the memory they are in, with no operation that could be seen.
EXPORTS = {
    *("__bool__", "__complex__", "__deepcopy__", "__float__", "__index__", "__int__", "apply_", "data_ptr", "item"),
    *("map_", "map2_", "share_memory_", "tolist"),
}
#: What a function may return without having given away a value.
INSIDE = (Tensor, type(None), int, torch.dtype, torch.device, torch.layout, torch.memory_format, Node)


class NanProbe(DispatchMode):
    """Follows NaNs through the operations of an evaluation, and undoes what these write to tensors.

    An operation may drop a NaN by its place (a slice) and may move it (a concatenation); an entrywise one must keep it
    where it is; any other must answer with nothing but NaNs. If it does not, the NaN was `read`.
    """

    def __init__(self, given: Sequence[Tensor], followed: Sequence[Tensor]):
        super().__init__()
        self.read = False
        self.met = 0  # how often an operation was given NaNs
        self._given = {_address(x) for x in given}  # the state, which nobody may write to
        # By address, so that views and operations in place need no care. The storages are kept: an address may be
        # reused as soon as its owner dies.
        self._tainted: dict[int, torch.UntypedStorage] = {}
        self._new: set[int | None] = set()  # what was made on the way need not be put back
        self._written: dict[Any, tuple[Tensor, Tensor]] = {}
        for x in followed:
            self._taint(x)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would load the whole compiler first

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with without_torch_function():
            given = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
            marks = [] if self.read else [mark for mark in map(self._mark, given) if mark is not None]
            written = self._keep_written(func, args, kwargs)
        self.met += len(marks)
        try:
            result = func(*args, **kwargs)
            with without_torch_function():
                results = [x for x in (*leaves_of(result), *written) if x is not None]
                self._new |= {_address(x) for x in results if isinstance(x, Tensor)} - {_address(x) for x in given}
                if marks:
                    self._examine(_nature(func), marks, results)
        except Exception:
            self.read |= bool(marks)
            raise
        return result

    def _examine(self, nature: str, marks: list[Tensor], results: list[Any]) -> None:
        self.read |= not results
        for x in results if nature != "blind" else ():
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                self.read = True
                return
            if nature != "move":
                nan = torch.isnan(x.real) & torch.isnan(x.imag) if x.is_complex() else torch.isnan(x)
                self.read |= not all(bool((nan if nature == "other" else nan | ~mark).all()) for mark in marks)
            self._taint(x)

    def look(self, things: Any) -> None:
        """These were handed out: is there a NaN that is followed?"""
        with without_torch_dispatch():
            self.read |= any(_address(x) is None or self._mark(x) is not None for x in _tensors(things) if x.numel())

    def close(self) -> None:
        """Put back what was written, the latest first."""
        with torch.no_grad():
            for x, old in reversed(self._written.values()):
                x.copy_(old)

    def _mark(self, x: Tensor) -> Tensor | None:
        """Where a tensor holds NaNs, if it holds any that are followed."""
        mark = torch.isnan(x) if _address(x) in self._tainted else None
        return mark if mark is not None and bool(mark.any()) else None

    def _taint(self, x: Tensor) -> None:
        if (address := _address(x)) is not None:
            self._tainted[address] = x.untyped_storage()
        elif x.numel():
            self.read = True

    def _keep_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        places = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_by(func)]
        written = list(_tensors(places))
        for x in written:
            if (address := _address(x)) is not None and address not in self._new:
                self.read |= address in self._given
                if (key := (address, x.storage_offset(), x.shape, x.stride())) not in self._written:
                    self._written[key] = x.detach(), x.detach().clone()
        return written


class Exits(TorchFunctionMode):
    """Notices values that leave a watched evaluation with no operation to be seen: to numpy, to lists, to addresses."""

    def __init__(self, watch: NanProbe):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        everything = (*args, *kwargs.values())
        met = self._watch.met
        try:
            result = func(*args, **kwargs)
        except Exception:
            self._watch.look(everything)
            raise
        if getattr(func, "__name__", "") in EXPORTS or not all(isinstance(x, INSIDE) for x in leaves_of(result)):
            self._watch.look(everything)
        elif self._watch.met == met and func is not torch.autograd.grad:
            # Numbers in a list become a tensor, as in torch.tensor([x[0], x[1]]), by no operation.
            self._watch.look([x for x in everything if isinstance(x, Sequence)])
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for item in tree:
            yield from _tensors(item)


def _address(x: Tensor) -> int | None:
    """Where the memory of a tensor is; `None` if it has none of its own (empty, sparse, wrapped by a transform)."""
    try:
        return x.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


@functools.cache
def _nature(func: Any) -> str:
    space, _, name = func._schema.name.partition("::")
    if space == "aten":
        if name in BLIND:
            return "blind"
        view = func.is_view and func is not torch.ops.aten.view.dtype  # which makes numbers of the bits of a NaN
        if name in MOVES or view or torch.Tag.inplace_view in func.tags:
            return "move"
    return "entrywise" if torch.Tag.pointwise in func.tags else "other"


@functools.cache
def _written_by(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments whose memory an operation writes to."""
    arguments = enumerate(() if torch.Tag.inplace_view in func.tags else func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]

"""Which leaves of a state are only integrals? Those that the field never reads: a flow's log-probability, a cost.

A NaN written into such a leaf disturbs nothing. That a NaN does not come out again is not enough, though: `leaf > 0`
makes an ordinary number of it. So the NaN is followed through every operation, and one that loses it without having to
has read the leaf. What cannot be followed counts as read.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .field import Field
from .parameters import reachable
from .purity import _device_generators, buffers
from .state import Layout, flatten, leaves_of, mapped, real_dtype, unflatten

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
#: So many times between the first and the last are looked at, and at most so many of the given ones.
BETWEEN, GIVEN = 7, 16
Value = Callable[[Tensor], Tensor]


def _nan(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, complex(math.nan, math.nan) if leaf.is_complex() else math.nan)


def _shaken(leaf: Tensor) -> Tensor:
    noise = torch.randn(leaf.shape, dtype=leaf.dtype, generator=torch.Generator().manual_seed(0))
    return leaf + noise.to(leaf.device) * (1.0 + leaf.abs())


#: Other values that a leaf might have. The first are ordinary ones, at which the gradient is looked at.
OTHERS: tuple[Value, ...] = (
    _shaken,
    torch.neg,
    torch.zeros_like,
    lambda leaf: torch.full_like(leaf, torch.finfo(leaf.dtype).max / 2),
    lambda leaf: torch.full_like(leaf, torch.finfo(leaf.dtype).min / 2),
)


def integral_leaves(
    field: Callable[..., Any], y0: Any, ts: Sequence[float] | Tensor = (0.0,), *, args: tuple[Any, ...] = ()
) -> Any:
    """The leaves of a state that the field never reads, so that they are plain integrals along the solution.

    The answer is a structure like y0 with `True` for these. A leaf counts as one only if, at every time looked at, NaNs
    in it reach no output of the field and are lost in no operation that could have read them, other values in it leave
    the output the same to the last bit, and no gradient flows to it. In doubt it does not: a check such as
    `isnan(leaf)` is a read. Random numbers and buffers are put back; what the field keeps elsewhere (a count or a list
    of its calls, say) is not.

    Args:
        field: f(t, y, *args), as for `solve`.
        y0: a tensor, or nested tuples, lists and dicts of tensors.
        ts: the times to look at; of an interval, some between its ends are added.
        args: further arguments of the field.

    Example:
        >>> def flow(t, y):
        ...     z, logp = y
        ...     return -z, torch.full_like(logp, 2.0)
        >>> integral_leaves(flow, (torch.ones(3, 2), torch.zeros(3)))
        (False, True)
    """
    _check(callable(field), "field", "a callable field(t, y, *args)", type(field).__name__)
    _check(isinstance(args, tuple | list), "args", "a tuple of extra arguments for the field", type(args).__name__)
    layout = _layout_of(y0)
    like, times, grad = next(leaves_of(y0)), looked_at(_times(ts)), torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):  # a field may take a gradient of its own
        args = mapped(tuple(args), lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x)
        reader = Reader(lambda t, y: field(t, y, *args), layout)
        unread = None
        for time in times:
            unread = reader.unread(torch.tensor(time, dtype=real_dtype(like), device=like.device), y0, unread)
            if not any(unread):
                break
    return unflatten(layout.node, iter(unread or ()))


def looked_at(times: Sequence[float]) -> tuple[float, ...]:
    """The times given, or an even choice if they are many, and some between the first and the last.

    >>> looked_at([0.0, 2.0])
    (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    """
    first, last = times[0], times[-1]
    if len(times) > GIVEN:
        times = [times[round(i * (len(times) - 1) / (GIVEN - 1))] for i in range(GIVEN)]
    between = [first + (last - first) * i / (BETWEEN + 1) for i in range(1, BETWEEN + 1)]
    return tuple(sorted({*times, *between}, reverse=last < first))


class Reader:
    """Evaluates field(t, y) on altered states to see which leaves of y it reads.

    No evaluation leaves a trace on random numbers and buffers, nor one at an altered state on any tensor. They are
    counted in `evaluations`.
    """

    def __init__(self, field: Callable[[Tensor, Any], Any], layout: Layout, modules: Sequence[nn.Module] | None = None):
        self._field = field
        self._layout = layout
        self._modules = reachable(field)[0] if modules is None else modules
        self.evaluations = 0

    def unread(self, t: Tensor, y: Any, among: Sequence[bool] | None = None) -> list[bool]:
        """Which leaves the field does not read at this time and state, each on its own.

        `among`, if given, are the leaves in question. They are tried all at once first.
        """
        leaves, chosen = self._choose(y, among)
        if torch._C._are_functorch_transforms_active():  # inside a transform, which hides the values
            return [False] * len(leaves)
        same = functools.partial(self._same, t, leaves, self._true(t, leaves))
        if among is None or not (same(chosen, _nan) and same(chosen, _shaken)):
            alone = among is not None and len(chosen) == 1
            chosen = [] if alone else [i for i in chosen if same([i], _nan)]
            # Against kernels whose operations torch does not see; all at once, since most often it is in vain.
            if not all(same(chosen, other) for other in OTHERS):
                chosen = [i for i in chosen if len(chosen) > 1 and all(same([i], other) for other in OTHERS)]
        return [i in chosen for i in range(len(leaves))]

    def still_unread(self, t: Tensor, y: Any, mask: Sequence[bool]) -> bool:
        """Whether the values of the masked leaves, taken together, are not read here either: one evaluation."""
        answer = self._altered(t, *self._choose(y, mask), _nan)
        return answer is not None and not bool(torch.isnan(answer).any())

    def _choose(self, y: Any, mask: Sequence[bool] | None) -> tuple[list[Tensor], list[int]]:
        leaves = self._layout.arrange(y)
        assert leaves is not None
        return leaves, [i for i, leaf in enumerate(leaves) if leaf.numel() and (mask is None or mask[i])]

    def _same(self, t: Tensor, leaves: list[Tensor], true: Tensor, chosen: list[int], value: Value) -> bool:
        """Whether the answer is the same, to the last bit, with other values in the chosen leaves."""
        answer = self._altered(t, leaves, chosen, value) if chosen else true
        return answer is not None and torch.equal(answer.view(torch.uint8), true.view(torch.uint8))

    def _true(self, t: Tensor, leaves: list[Tensor]) -> Tensor:
        """The answer to the true state. What the field raises is the caller's to see."""
        with self._without_trace(leaves[0].device):
            given = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
            return self._evaluate(t, given).detach().clone()

    def _altered(self, t: Tensor, leaves: list[Tensor], chosen: list[int], value: Value) -> Tensor | None:
        """The answer with other values in the chosen leaves; `None` if the field was seen to read them."""
        gradient = value is _shaken
        given = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        for i in chosen:
            given[i] = value(leaves[i].detach()).requires_grad_(gradient)
        changed = [given[i] for i in chosen]
        watch = Watch(given, changed if value is _nan else [])
        with self._without_trace(leaves[0].device), warnings.catch_warnings(), contextlib.closing(watch):
            warnings.simplefilter("ignore")  # of overflows and the like, which are of our making
            try:
                with torch.set_grad_enabled(gradient or torch.is_grad_enabled()):
                    answer = self._evaluate(t, given, watch, Exits(watch))
                    if watch.read or (gradient and _has_gradient(answer, changed)):
                        return None
                return answer.detach().clone()  # before what was written is put back
            except Exception:  # whatever the field makes of a value it did not expect, it has looked at it
                return None

    def _evaluate(self, t: Tensor, leaves: list[Tensor], *modes: contextlib.AbstractContextManager[Any]) -> Tensor:
        self.evaluations += 1
        layout, dtype = self._layout, leaves[0].dtype
        y = unflatten(layout.node, iter(leaves))
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            k = self._field(t.detach().clone(), y)
        slopes = layout.arrange(k)
        if slopes is None:
            return Field(lambda t, y: k, layout, dtype)(t, layout.pack(y))  # which says what is wrong with it
        return layout.join([slope.to(dtype) for slope in slopes]).flatten()

    @contextlib.contextmanager
    def _without_trace(self, device: torch.device) -> Iterator[None]:
        """The same random numbers for every evaluation; afterwards the generators and buffers as they were."""
        generators = [torch.default_generator, *_device_generators(device)]
        restore: list[Callable[[], object]] = [functools.partial(g.set_state, g.get_state()) for g in generators]
        restore += [buffer.snapshot() for buffer in buffers(self._modules)]
        # What a compiler has fused cannot be followed. It is not loaded here for this alone.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        try:
            with eager:
                yield
        finally:
            for put_back in restore:
                put_back()


class Watch(TorchDispatchMode):
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
        with torch._C.DisableTorchFunction():
            given = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
            marks = [] if self.read else [mark for mark in map(self._mark, given) if mark is not None]
            written = self._keep_written(func, args, kwargs)
        self.met += len(marks)
        try:
            result = func(*args, **kwargs)
            with torch._C.DisableTorchFunction():
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
        with torch._C._DisableTorchDispatch():
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

    def __init__(self, watch: Watch):
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


def _has_gradient(answer: Tensor, leaves: list[Tensor]) -> bool:
    """Whether anything but zeros flows back from the answer to the leaves."""
    if not answer.requires_grad:
        return False
    uneven = torch.linspace(1.0, 2.0, answer.numel(), device=answer.device).to(answer.dtype)  # lest they cancel
    grads = torch.autograd.grad(answer, leaves, uneven, allow_unused=True)
    return any(grad is not None and bool(grad.any()) for grad in grads)


def _check(good: bool, name: str, expected: str, found: Any, error: type[Exception] = TypeError) -> None:
    if not good:
        raise error(f"{name}: expected {expected}, found {found}")


def _layout_of(y0: Any) -> Layout:
    leaves, _ = flatten(y0, "y0")
    _check(bool(leaves), "y0", "at least one tensor", f"an empty {type(y0).__name__}", ValueError)
    for name, leaf in leaves:
        _check(isinstance(leaf, Tensor), name, "a tensor", type(leaf).__name__)
        _check(leaf.dtype.is_floating_point or leaf.is_complex(), name, "a floating-point or complex dtype", leaf.dtype)
        _check(leaf.dtype == leaves[0][1].dtype, name, f"{leaves[0][1].dtype} as in {leaves[0][0]}", leaf.dtype)
    return Layout.of(y0, "y0")


def _times(ts: Any) -> list[float]:
    try:
        times = [float(t) for t in (ts.tolist() if isinstance(ts, Tensor) else ts)]
    except (TypeError, ValueError):
        raise TypeError(f"ts: expected a 1-D tensor or a sequence of times, found {type(ts).__name__}") from None
    _check(bool(times), "ts", "at least one time", "none", ValueError)
    _check(all(map(math.isfinite, times)), "ts", "finite times", times, ValueError)
    return times

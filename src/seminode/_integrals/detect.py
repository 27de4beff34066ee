"""Which leaves of a state are only integrals? Those that the field never reads: a flow's log-probability, a cost.

A NaN written into such a leaf does not change the result. A result without NaN is not sufficient, though: `leaf > 0`
turns a NaN into an ordinary number. So the NaN is followed through every operation, and an operation that loses it
without need has read the leaf. A leaf that cannot be followed counts as read.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compile.stance import uncompiled
from .._compile.torch_private import transforms_active
from .._field.buffers import buffers_of
from .._field.field import Field
from .._field.pytree import HALF, Layout, flatten, leaves_of, mapped, real_dtype, unflatten
from .._field.random_numbers import RandomNumbers
from .._field.reach import Reach, reachable
from .nan_probe import Exits, NanProbe

#: How many times between the first and the last are examined, and how many of the given ones at most.
BETWEEN, GIVEN = 7, 16
Value = Callable[[Tensor], Tensor]


def not_a_number(leaf: Tensor) -> Tensor:
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

    The result is a structure like y0 with `True` for these leaves. A leaf counts as an integral only if, at every time
    that is examined, NaNs in it reach no output of the field and no operation that could have read them loses them,
    other values in it leave the output the same to the last bit, and no gradient flows to it. In case of doubt it does
    not count: a check such as `isnan(leaf)` is a read. Random numbers and buffers are restored; other state of the
    field, such as a count or a list of its calls, is not.

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
    dtype = torch.float32 if like.dtype in HALF else real_dtype(like)
    with torch.inference_mode(False), torch.set_grad_enabled(grad):  # a field may take a gradient of its own
        args = mapped(tuple(args), lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x)
        reader = Reader(lambda t, y: field(t, y, *args), layout)
        unread = None
        for time in times:
            unread = reader.unread(torch.tensor(time, dtype=dtype, device=like.device), y0, unread)
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
    counted in `evaluations`. `agreed` says whether something holds on all ranks of a distributed solve.
    """

    def __init__(
        self,
        field: Callable[[Tensor, Any], Any],
        layout: Layout,
        reach: Reach | None = None,
        agreed: Callable[[bool], bool] = bool,
    ):
        self._field = field
        self._agreed = agreed
        self._layout = layout
        self._reach = reachable(field) if reach is None else reach
        self.evaluations = 0

    def unread(self, t: Tensor, y: Any, among: Sequence[bool] | None = None) -> list[bool]:
        """Which leaves the field does not read at this time and state, each on its own.

        `among`, if given, are the leaves in question. They are tried all at once first.
        """
        leaves, chosen = self._choose(y, among)
        if transforms_active():  # which hide the values
            return [False] * len(leaves)
        same = functools.partial(self._same, t, leaves, self._true(t, leaves))
        if among is None or not (same(chosen, not_a_number) and same(chosen, _shaken)):
            alone = among is not None and len(chosen) == 1
            chosen = [] if alone else [i for i in chosen if same([i], not_a_number)]
            # This detects reads by kernels that torch does not see; all leaves at once, since usually none is read.
            if not all(same(chosen, other) for other in OTHERS):
                chosen = [i for i in chosen if len(chosen) > 1 and all(same([i], other) for other in OTHERS)]
        return [i in chosen for i in range(len(leaves))]

    def answer(self, t: Tensor, y: Any) -> Tensor:
        """The flat answer at a state. What is written to tensors on the way is undone."""
        leaves, _ = self._choose(y, None)
        given = [leaf.detach().clone() for leaf in leaves]
        watch = NanProbe(given, [])
        with self._without_trace(given[0].device), warnings.catch_warnings(), contextlib.closing(watch):
            warnings.simplefilter("ignore")
            return self._evaluate(t, given, watch).detach().clone()

    def still_unread(self, t: Tensor, y: Any, mask: Sequence[bool]) -> bool:
        """Whether the values of the masked leaves, taken together, are not read here either: one evaluation."""
        answer = self._altered(t, *self._choose(y, mask), not_a_number)
        return self._agreed(answer is not None and not bool(torch.isnan(answer).any()))

    def _choose(self, y: Any, mask: Sequence[bool] | None) -> tuple[list[Tensor], list[int]]:
        leaves = self._layout.arrange(y)
        assert leaves is not None
        everything = self._agreed is not bool  # what is empty here may have entries on another rank
        chosen = [i for i, leaf in enumerate(leaves) if (everything or leaf.numel()) and (mask is None or mask[i])]
        return leaves, chosen

    def _same(self, t: Tensor, leaves: list[Tensor], true: Tensor, chosen: list[int], value: Value) -> bool:
        """Whether the answer is the same, to the last bit, with other values in the chosen leaves."""
        answer = self._altered(t, leaves, chosen, value) if chosen else true
        same = answer is not None and torch.equal(answer.view(torch.uint8), true.view(torch.uint8))
        return self._agreed(same)

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
        watch = NanProbe(given, changed if value is not_a_number else [])
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
        # A buffer that was not changed is not written to either: other code may watch its version.
        present = [(buffer, buffer.snapshot()) for buffer in buffers_of(self._reach.modules, self._reach.parts)]
        try:
            with uncompiled(), RandomNumbers(device).undone():
                yield
        finally:
            for buffer, put_back in present:
                if buffer.changed():
                    put_back()


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

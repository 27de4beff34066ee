"""What makes a field a *function*: it gives the same answer every time it is evaluated.

A solver may evaluate a field again (a rejected step, a replayed one) and must get the same answer. So every evaluation
of a solve, forward and backward, starts from one saved state of the random generators: a dropout mask is drawn once
per solve. A field that changes its own buffers does so once, in the first evaluation; all later ones see the buffers
as they were after it and leave no trace. Autocast is for the field, not for the solver's own arithmetic.

A backward pass that evaluates the field again must find the function that was solved. Modules get back the tensors
and the training flags that they had; whatever else may have changed is noticed, since the answers differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import StatefulFieldWarning, warn
from .places import CACHE, Change, Contents
from .reach import Reach

#: Layers with running statistics. Their subclasses (lazy and synchronised ones) are among them.
_NORMALISATION = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)

#: Buffers of modules, by name, that only count evaluations.
_COUNTERS: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


class Buffer:
    """A buffer of a module: how to notice that an evaluation changed it, and how to put it back."""

    def __init__(self, roots: Sequence[nn.Module], module: nn.Module, key: str, value: Tensor):
        self._roots = roots
        self._module = module
        self.value = value
        self.version = value._version
        self._slots = module._buffers
        self._key = key
        # Batch normalisation writes its running statistics without changing their version counters.
        silent = isinstance(module, _NORMALISATION) and module.training
        self._copy = value.detach().clone() if silent else None

    @property
    def counts(self) -> bool:
        """Whether it may be a counter of evaluations: a single number outside of normalisation layers."""
        return self.value.numel() == 1 and not isinstance(self._module, _NORMALISATION)

    @property
    def known_counter(self) -> bool:
        """Whether the field was seen not to depend on it."""
        return self.counts and self._key in _COUNTERS.get(self._module, ())

    @known_counter.setter
    def known_counter(self, value: bool) -> None:
        assert value
        _COUNTERS.setdefault(self._module, set()).add(self._key)

    @property
    def label(self) -> str:
        named = ((root, name, part) for root in self._roots for name, part in root.named_modules())
        root, path = next((root, name) for root, name, part in named if part is self._module)
        return ".".join(filter(None, (type(root).__name__, path, self._key)))

    @property
    def current(self) -> Tensor | None:
        return self._slots[self._key]

    def changed(self) -> bool:
        if self.current is not self.value or self.value._version != self.version:
            return True
        return self._copy is not None and not torch.equal(self.value, self._copy)

    def snapshot(self) -> Callable[[], None]:
        """A function that puts the present value back: into the tensor, or the tensor back into the module."""
        tensor = self.current
        value = None if tensor is None or tensor is not self.value else tensor.detach().clone()
        # What was written silently is put back silently: autograd holds on to the statistics but does not read them.
        target = tensor.data if self._copy is not None and tensor is not None else tensor

        def restore() -> None:
            self._slots[self._key] = tensor
            if target is not None and value is not None:
                with torch.no_grad():
                    target.copy_(value)

        return restore


def refuse_lazy(modules: Sequence[nn.Module]) -> None:
    """Refuse modules whose parameters have no shape yet: their first call would create parameters during a solve."""
    for root in modules:
        for name, x in (*root.named_parameters(), *root.named_buffers()):
            if is_lazy(x):
                raise ValueError(
                    f"field: {name!r} of {type(root).__name__} is a lazy parameter or buffer without a shape; call the "
                    "module once with an input of the right shape before you solve (and before you make an optimiser)"
                )


def buffers_of(reach: Reach) -> list[Buffer]:
    """The buffers of all modules within reach, each once; modules must have their shapes already."""
    found: list[Buffer] = []
    for part in reach.parts:
        parameters, buffers = part._parameters, part._buffers
        if not parameters and not buffers:
            continue
        if any(is_lazy(x) for x in (*parameters.values(), *buffers.values()) if x is not None):
            refuse_lazy(reach.modules)
        items = buffers.items()
        found += [Buffer(reach.modules, part, key, x) for key, x in items if x is not None and not x.is_inference()]
    return found


class Determinism:
    """The circumstances of a solve's evaluations, kept the same for all of them."""

    def __init__(self, device: torch.device, reach: Reach):
        self._generators = [torch.default_generator, *device_generators(device)]
        self._start: list[Tensor] = []
        self._random: list[Callable[[], object]] = []  # none, unless the field is seen to draw numbers
        self.reach = reach
        self._buffers = buffers_of(reach)
        self._changed: list[Buffer] = []
        self._restore: list[Callable[[], object]] = []
        self._constants: list[tuple[Tensor, int]] = []
        self._contents: Contents | None = None  # of all places where the field may keep values
        self._evaluated = 0
        self._caches = False  # whether evaluations have changed them
        self._device = device.type

    def remember(self, constants: Iterable[tuple[Tensor, int]], evaluations: int) -> None:
        """Note, after the first evaluation, the constants that it used with their versions, and what the field keeps.

        `evaluations` is how many there were so far.
        """
        changed = {id(buffer.value) for buffer in self._buffers if buffer.changed()}
        self._constants = [(tensor, version) for tensor, version in constants if id(tensor) not in changed]
        self._contents, self._evaluated = self.reach.contents(), evaluations

    def finish(self, evaluations: int) -> None:
        """After a forward pass: did its evaluations change what the field keeps? Tensors among it have no graph.

        Before each evaluation of a backward pass they are put back, so that it computes them again, with a graph.
        """
        if self._contents is not None and not self._contents.unchanged:
            self._contents.leave_counters(evaluations - self._evaluated)
            self._caches = bool(self._changes())

    def _changes(self) -> list[Change]:
        """What has changed of the values that the field keeps, except for buffers that it may change."""
        if self._contents is None or self._contents.unchanged:
            return []
        buffers = {id(buffer.value) for buffer in self._buffers if buffer in self._changed or buffer.counts}
        return [change for change in self._contents.changes() if id(change.then) not in buffers]

    def _put_back(self) -> list[Change]:
        """Put back what has changed, and say what it was."""
        changes = self._changes()
        for change in changes:
            change.place.write(change.key, change.then)
        return changes

    @property
    def stateful(self) -> bool:
        """Whether there is anything to put back before an evaluation."""
        return bool(self._random or self._restore)

    def prepare(self) -> None:
        """Before an evaluation: the same random numbers, the same buffers."""
        for restore in self._random:
            restore()
        for restore in self._restore:
            restore()

    def restore_buffers(self) -> None:
        """Undo what the latest evaluation did to buffers."""
        for restore in self._restore:
            restore()

    def begin(self) -> None:
        """Before the first evaluation: the random numbers of every evaluation are those of this one."""
        self._start = [generator.get_state() for generator in self._generators]

    def first(self, evaluate: Callable[[], Tensor]) -> Tensor:
        """Make the first evaluation. Does it draw random numbers? Does it change a buffer?

        Of changed buffers the new values are kept, and the evaluation is made again with them. A buffer of one number
        may be a counter of evaluations, if the answer does not depend on it: then it is left alone and goes on
        counting. Without random numbers the generators, which belong to the whole process, are left alone too.
        """
        self.begin()
        k = evaluate()
        states = [generator.get_state() for generator in self._generators]
        if not all(torch.equal(a, b) for a, b in zip(states, self._start, strict=True)):
            self._random = [partial(g.set_state, state) for g, state in zip(self._generators, self._start, strict=True)]
        changed = [buffer for buffer in self._buffers if buffer.changed()]
        if not changed:
            return k
        counters = [buffer for buffer in changed if buffer.counts]
        self._keep_buffers([buffer for buffer in changed if not buffer.counts])
        present = [buffer.snapshot() for buffer in counters]
        if all(buffer.known_counter for buffer in changed):
            return k
        self.prepare()
        again = evaluate()
        if counters and not self._changed and torch.equal(again, k):
            for buffer in counters:
                buffer.known_counter = True
        elif counters:
            for restore in present:
                restore()
            self._keep_buffers([*self._changed, *counters])
        if self._changed:
            self._warn_of_buffers()
        return again

    def _keep_buffers(self, changed: list[Buffer]) -> None:
        """From here on, every evaluation sees these buffers as they are now."""
        self._changed = changed
        self._restore = [buffer.snapshot() for buffer in changed]

    def _warn_of_buffers(self) -> None:
        names = ", ".join(buffer.label for buffer in self._changed)
        warn(
            f"field: an evaluation changes {names}. A solver evaluates a field many times, so these buffers are "
            "updated once per solve, by the first evaluation. For batch normalisation call .eval(), or use a layer "
            "without running statistics (GroupNorm, LayerNorm).",
            StatefulFieldWarning,
        )

    def trial(self) -> Callable[[], bool]:
        """Before an evaluation that does not count. Call the result afterwards: it says whether the evaluation drew
        random numbers or changed a buffer, and puts them back."""
        self.begin()
        present = [buffer.snapshot() for buffer in self._buffers]

        def stateful() -> bool:
            states = [generator.get_state() for generator in self._generators]
            drawn = not all(torch.equal(a, b) for a, b in zip(states, self._start, strict=True))
            changed = any(buffer.changed() for buffer in self._buffers)
            for generator, state in zip(self._generators, self._start, strict=True) if drawn else ():
                generator.set_state(state)
            for restore in present if changed else ():
                restore()
            return drawn or changed

        return stateful

    def solving(self) -> AbstractContextManager[Any]:
        """Around a solver's own arithmetic, which autocast must not touch."""
        if torch.is_autocast_enabled(self._device):
            return torch.autocast(self._device, enabled=False)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass, whose evaluations leave no trace behind."""
        self._check_unchanged()
        random = [partial(g.set_state, g.get_state()) for g in self._generators] if self._random else []
        present = [buffer.snapshot() for buffer in self._changed]
        try:
            with self.solving(), self._as_it_was():
                yield
        finally:
            for restore in (*present, *random):
                restore()

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """With the tensors and training flags of the solve in their places."""
        changes = self._put_back()
        if self._caches:
            self._restore.append(self._put_back)
        try:
            yield
        finally:
            if self._caches:
                self._restore.remove(self._put_back)
                self._put_back()
            for change in changes:
                if change.key != CACHE:
                    change.place.write(change.key, change.now)

    def _check_unchanged(self) -> None:
        """Autograd notices a change of a parameter that requires a gradient; of one that does not, we must."""
        for tensor, version in self._constants:
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that the field uses has been modified by an inplace "
                    "operation since the solve: the steps cannot be taken again. Change it after the backward pass."
                )


class SameAnswers:
    """Compares what a backward pass computes again with what the forward pass has computed.

    The two are equal to the last bit where the arithmetic is the same, and within rounding where it is not: `eps` is
    the rounding error of the field's answers, `factor` how many of them are allowed. Where they differ, `explain` may
    raise an error that knows more. Steps that solve equations are the same within the tolerance of these only: `slack`
    is a relative and an absolute one. On an accelerator the comparison is left to the device until `finish`, so that
    the host does not wait.
    """

    def __init__(
        self,
        eps: float,
        explain: Callable[[], None],
        factor: float = 1e3,
        slack: tuple[float, float] = (0.0, 0.0),
    ):
        self._eps = eps
        self._explain = explain
        # Of half precision not much is left to compare with: a twentieth is too much in any case.
        self._factor = min(factor, 0.05 / eps)
        self._excess: Tensor | None = None
        self._rtol, self._atol = slack

    def compare(self, again: Tensor, before: Tensor, moved: Callable[[], Sequence[Tensor]], t: float) -> None:
        """Refuse to go on if they differ by more than rounding, measured by the size of what `moved` returns."""
        if not before.numel() or (again.device.type == "cpu" and torch.equal(again, before)):
            return
        size = torch.stack([x.abs().amax() for x in moved()]).amax()
        largest = before.abs().amax()
        allowed = self._eps * (self._factor * size + 4.0 * largest) + self._rtol * largest + self._atol
        self._judge((again - before).abs().amax() - allowed, t)

    def recognise(self, again: Tensor, before: Tensor, moved: Callable[[], Sequence[Tensor]], t: float) -> None:
        """The same for a tensor of which only the `fingerprint` was kept."""
        found = fingerprint(again)
        if not again.numel() or (again.device.type == "cpu" and torch.equal(found, before)):
            return
        size = torch.stack([x.abs().sum() for x in moved()]).sum()
        total = again.abs().sum()
        allowed = self._eps * (self._factor * size + 4.0 * total) + self._rtol * total + self._atol * again.numel()
        self._judge((found - before).abs().amax() - allowed, t)

    def _judge(self, excess: Tensor, t: float) -> None:
        if excess.device.type != "cpu":
            self._excess = excess if self._excess is None else torch.maximum(self._excess, excess)
        elif excess > 0.0:  # not true of NaN, which is reported elsewhere
            self._refuse(t)

    def finish(self, t: float) -> None:
        """At the end of a backward pass: look at what was left to the device."""
        if self._excess is not None and self._excess > 0.0:
            self._refuse(t)

    def _refuse(self, t: float) -> NoReturn:
        self._explain()
        field_has_changed(t)


def fingerprint(x: Tensor) -> Tensor:
    """Two numbers to recognise a tensor by: the sum of its entries, and its norm."""
    x = x.detach()
    return torch.stack([x.sum(), torch.linalg.vector_norm(x).to(x.dtype)])


def field_has_changed(t: float) -> NoReturn:
    raise RuntimeError(
        f"field: evaluated again on the backward pass, near t = {t:g}, it gives another answer than during the solve, "
        "so this would be the gradient of another function. Something that the field reads has changed since: a "
        "variable (a lambda reads a loop variable when it is called, not when it is made), an attribute, an entry of a "
        "list, or a random generator of its own. Call backward() before the change, pass such values in args= or bind "
        "them (lambda t, y, i=i: ...), draw random numbers from torch's default generator; or use adjoint=sn.Direct(), "
        "which differentiates what was computed."
    )


def present_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    """What opens the autocast context that is active now; `None` if none is."""
    if not torch.is_autocast_enabled(device.type):
        return None
    dtype, cache = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
    return partial(torch.autocast, device.type, dtype=dtype, cache_enabled=cache)


def device_generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return [generators[device.index or 0]] if generators else []

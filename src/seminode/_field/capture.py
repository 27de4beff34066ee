"""Which tensors does a field use? Detected by looking at the callable and by watching one evaluation."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._compile.stance import uncompiled
from .lineage import Lineage
from .pytree import leaves_of, mapped

#: Where a tensor comes from: the state, the time, a tensor that the field has captured; and whether the graph between
#: them is cut, which is a shift of these flags.
STATE, TIME, CAPTURED = 1, 2, 4
CUT = 3
ORIGINS = STATE | TIME | CAPTURED


class CaptureWatch(TorchFunctionMode):
    """Records the tensors that enter a torch function and were not made under the watch.

    `captured` are those that require a gradient; `constants` the others, with their versions. `cut` says from what
    a leaf was made inside the evaluation, as by `y.detach().requires_grad_()`: the gradient ends there.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.captured: dict[int, Tensor] = {}
        self.constants: dict[int, tuple[Tensor, int]] = {}
        self.cut = 0
        # The tensors themselves are kept: an id may be reused as soon as its owner dies.
        self._inside: dict[int, Tensor] = {id(x): x for x in known}
        self._arguments = set(self._inside)
        self._origins: dict[int, int] = dict.fromkeys(self._inside, STATE)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        origin = 0
        for tensor in _tensors((args, kwargs)):
            if self._is_capture(tensor):
                self.captured.setdefault(id(tensor), tensor)
                origin |= CAPTURED
            elif id(tensor) in self._inside:
                origin |= self._origins.get(id(tensor), 0)
            elif not tensor.is_inference():
                self.constants.setdefault(id(tensor), (tensor, tensor._version))
        name = getattr(func, "__name__", "")
        if origin & ORIGINS and (name in _CUTTING or func is _GET_DATA or not torch.is_grad_enabled()):
            origin = (origin >> CUT | origin & ORIGINS) << CUT
        if origin >> CUT and self._makes_leaf(func, name, args, kwargs):
            self.cut |= origin >> CUT
        return self._keep(func(*args, **kwargs), origin)

    def _makes_leaf(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an operation makes a tensor require a gradient that did not, and that is not the field's argument."""
        if getattr(_inner_solve, "makes_leaf", False):
            return False
        if name in ("requires_grad_", "__set__"):
            x = args[0]
            on = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            setter = name == "requires_grad_" or func is _SET_REQUIRES_GRAD
            return setter and bool(on) and not x.requires_grad and id(x) not in self._arguments
        return bool(kwargs.get("requires_grad"))

    def _is_capture(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad and id(x) not in self._inside

    def _keep(self, result: Any, origin: int = 0) -> Any:
        for tensor in _tensors(result):
            key = id(tensor)
            if key not in self.captured and key not in self.constants:
                self._inside.setdefault(key, tensor)
                self._origins[key] = self._origins.get(key, 0) | origin
        return result

    def over(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """A callable, watched."""

        def inner(*args: Any) -> Any:
            with uncompiled(), self:
                return func(*args)

        return inner

    def over_field(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The callable field(t, y, *args), watched; its arguments are told apart."""

        def inner(t: Tensor, y: Any, *args: Any) -> Any:
            for tensor, origin in itertools.chain(
                [(t, TIME)], ((x, STATE) for x in _tensors(y)), ((x, CAPTURED) for x in _tensors(args))
            ):
                self._inside[id(tensor)] = tensor
                self._arguments.add(id(tensor))
                self._origins[id(tensor)] = origin
            with uncompiled(), self:
                answer = func(t, y, *args)
            for tensor in _tensors(answer):
                if self._is_capture(tensor):  # handed out as it is
                    self.captured.setdefault(id(tensor), tensor)
            return answer

        return inner

    def held(self) -> list[Tensor]:
        """Tensors with a gradient that were made under the watch and outlive it: the field caches them.

        The answer of the evaluation must be gone by now, and with it the graph. The watch itself ends here.
        """
        made = [x for key, x in self._inside.items() if x.requires_grad and key not in self._arguments]
        references = [weakref.ref(x) for x in made]
        made.clear()
        self._inside.clear()
        alive = [x for reference in references if (x := reference()) is not None]
        # A thread that communicates may hold a tensor for some time after the collective has ended.
        return [x for x in alive if _held_by_python(x, alive)] if alive and communicates() else alive


def communicates() -> bool:
    """Whether this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _held_by_python(x: Tensor, alive: list[Tensor]) -> bool:
    return any(each is not alive and not isinstance(each, FrameType) for each in gc.get_referrers(x))


#: Of each thread: whether a solve makes a leaf for its own use. If it is inside a field, a watch sees that.
_inner_solve = threading.local()


def own_leaf(x: Tensor, needed: bool) -> Tensor:
    """A leaf with the value of x, by which a solve learns about its field. No gradient ends there."""
    _inner_solve.makes_leaf = True
    try:
        return x.detach().requires_grad_(needed)
    finally:
        _inner_solve.makes_leaf = False


_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
#: Operations after which a tensor has no graph.
_CUTTING = frozenset({"detach", "detach_", "tensor", "from_numpy", "frombuffer"})


class UseWatch(TorchFunctionMode):
    """Notes which of some tensors enter a torch function."""

    def __init__(self, candidates: Iterable[Tensor]):
        super().__init__()
        self._candidates = {id(x): x for x in candidates}
        self.used: dict[int, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        _with_tensors(args, kwargs, self._note)
        return func(*args, **(kwargs or {}))

    def _note(self, x: Tensor) -> Tensor:
        if id(x) in self._candidates:
            self.used[id(x)] = x
        return x

    def over(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The callable, watched."""

        def inner(*args: Any) -> Any:
            with uncompiled(), self:
                return func(*args)

        return inner


class Restriction(CaptureWatch):
    """Takes the gradient away from captured tensors other than the given ones and those computed from them."""

    def __init__(self, arguments: Iterable[Tensor], params: Sequence[Tensor], lineage: Lineage):
        super().__init__([*arguments, *params])
        self._lineage = lineage

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kept, named = _with_tensors(args, kwargs, self._constant)
        result = func(*kept, **named)
        if isinstance(result, Tensor):
            self._inside.setdefault(id(result), result)
            return result
        return self._keep(result)

    def _constant(self, x: Tensor) -> Tensor:
        return x.detach() if self._is_capture(x) and not self._lineage.includes(x) else x


def restricted(func: Callable[..., Any], params: Sequence[Tensor]) -> Callable[..., Any]:
    """A callable that is differentiable in its arguments and in `params` alone."""
    lineage = Lineage(params)

    def inner(*args: Any) -> Any:
        with uncompiled(), Restriction(_tensors(args), params, lineage):
            return func(*args)

    return inner


class Substitution(TorchFunctionMode):
    """Hands torch functions other tensors in place of some, wherever those are used."""

    def __init__(self, others: dict[int, Tensor]):
        super().__init__()
        self._others = others

    def __torch_function__(self, func, types, args=(), kwargs=None):
        swapped, named = _with_tensors(args, kwargs, self._other)
        return func(*swapped, **named)

    def _other(self, x: Tensor) -> Tensor:
        return self._others.get(id(x), x)


def as_leaf(x: Tensor, needed: bool = False) -> Tensor:
    """A tensor to differentiate by: x itself, if it is a leaf without hooks, or a leaf with its value.

    One that was frozen since the solve is `needed` all the same.

    A captured tensor that was itself computed (by a hypernetwork, say) may depend on another captured one; a leaf
    stands for each of them alone. Hooks are meant for the whole gradient and not for every contribution to it.
    """
    if not x.requires_grad:
        return x.detach().requires_grad_() if needed else x
    return x if x.is_leaf and not x._backward_hooks else x.detach().requires_grad_()


def as_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Leaves to differentiate by, one per position; of a tensor that occurs twice, the last is the tensor itself."""
    seen: set[int] = set()
    leaves = []
    for x in reversed(tensors):
        leaf = as_leaf(x)
        leaves.append(x.detach().requires_grad_() if id(leaf) in seen and x.requires_grad else leaf)
        seen.add(id(leaf))
    return leaves[::-1]


def substituted(func: Callable[..., Any], params: Sequence[Tensor], leaves: Sequence[Tensor]) -> Callable[..., Any]:
    """A callable that uses `leaves` in the place of its parameters."""
    others = {id(x): leaf for x, leaf in zip(params, leaves, strict=True) if leaf is not x}
    if not others:
        return func

    def inner(*args: Any) -> Any:
        with uncompiled(), Substitution(others):
            answer = func(*args)
        return mapped(answer, lambda x: others.get(id(x), x))  # a parameter may be the answer itself

    return inner


def _with_tensors(
    args: Sequence[Any], kwargs: dict[str, Any] | None, function: Callable[[Tensor], Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an operation with a function applied to the tensors among them.

    This runs for every operation of a field. Most arguments are tensors, which need no walk through a structure.
    """

    def applied(x: Any) -> Any:
        return function(x) if isinstance(x, Tensor) else x

    changed = [
        function(x) if isinstance(x, Tensor) else mapped(x, applied) if isinstance(x, tuple | list | dict) else x
        for x in args
    ]
    return changed, mapped(kwargs, applied) if kwargs else {}


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor))


def chosen(params: Any) -> tuple[Tensor, ...]:
    """The tensors of a user's own `params=`: a module or an iterable of tensors."""
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    elif isinstance(params, Tensor):
        params = [params]
    try:
        tensors = list(params)
    except TypeError:
        raise TypeError(f"params: expected a module or an iterable of tensors, found {type(params).__name__}") from None
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"params[{i}]: expected a tensor, found {type(tensor).__name__}")
    unique = {id(x): x for x in tensors if x.requires_grad}
    return tuple(unique.values())

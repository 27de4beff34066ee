"""Which tensors does a field use? Found by looking at the callable and by watching one evaluation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .pytree import leaves_of, mapped


def uncompiled() -> AbstractContextManager[Any]:
    """Where a field must be followed operation by operation, what is compiled in it runs eagerly.

    Compiled code hides its operations; and a compiler that first meets a function under a watch gives up on that
    function for good. The compiler is not loaded for this.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


class CaptureWatch(TorchFunctionMode):
    """Records the tensors that enter a torch function and were not made under the watch.

    `captured` are those that require a gradient; `constants` the others, with their versions.
    """

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.captured: dict[int, Tensor] = {}
        self.constants: dict[int, tuple[Tensor, int]] = {}
        # The tensors themselves are kept: an id may be reused as soon as its owner dies.
        self._inside: dict[int, Tensor] = {id(x): x for x in known}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if self._is_capture(tensor):
                self.captured.setdefault(id(tensor), tensor)
            elif id(tensor) not in self._inside and not tensor.is_inference():
                self.constants.setdefault(id(tensor), (tensor, tensor._version))
        return self._keep(func(*args, **kwargs))

    def _is_capture(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.requires_grad and id(x) not in self._inside

    def _keep(self, result: Any) -> Any:
        for tensor in _tensors(result):
            if id(tensor) not in self.captured and id(tensor) not in self.constants:
                self._inside[id(tensor)] = tensor
        return result

    def over(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The callable, watched."""

        def inner(*args: Any) -> Any:
            with uncompiled(), self:
                return func(*args)

        return inner


class Restriction(CaptureWatch):
    """Takes the gradient away from captured tensors other than the given ones."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kept, named = mapped((args, kwargs or {}), lambda x: x.detach() if self._is_capture(x) else x)
        return self._keep(func(*kept, **named))


def restricted(func: Callable[..., Any], params: Sequence[Tensor]) -> Callable[..., Any]:
    """A callable that is differentiable in its arguments and in `params` alone."""

    def inner(*args: Any) -> Any:
        with uncompiled(), Restriction([*_tensors(args), *params]):
            return func(*args)

    return inner


class Substitution(TorchFunctionMode):
    """Hands torch functions other tensors in place of some, wherever those are used."""

    def __init__(self, others: dict[int, Tensor]):
        super().__init__()
        self._others = others

    def __torch_function__(self, func, types, args=(), kwargs=None):
        swapped, named = mapped((args, kwargs or {}), lambda x: self._others.get(id(x), x))
        return func(*swapped, **named)


def cut(func: Callable[..., Any], params: Sequence[Tensor]) -> tuple[Callable[..., Any], list[Tensor]]:
    """A callable and its parameters, made independent of each other.

    A captured tensor that was itself computed (by a hypernetwork, say) may depend on another captured one. To pull back
    to each of them alone, computed ones are replaced by leaves of the same value while the callable runs. So are those
    with hooks, which are for the gradient as a whole and not for every contribution to it.
    """
    leaves = {id(x): x.detach().requires_grad_() for x in params if not x.is_leaf or x._backward_hooks}
    if not leaves:
        return func, list(params)

    def substituted(*args: Any) -> Any:
        with uncompiled(), Substitution(leaves):
            return func(*args)

    return substituted, [leaves.get(id(x), x) for x in params]


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor))


def reachable(start: Any) -> tuple[list[nn.Module], list[Tensor]]:
    """Modules and bare tensors that callables can reach: themselves, what they are bound to, close over or name."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(start, 0)]
    # Bounded, since a bound method may hang on an object that owns a whole data set; the watch finds what is used.
    while queue and len(seen) < 10_000:
        item, depth = queue.pop()
        if id(item) in seen or depth > 6:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            modules[id(item)] = item
        elif isinstance(item, Tensor):
            tensors[id(item)] = item
        else:
            queue += [(part, depth + 1) for part in itertools.islice(_parts(item), 1000)]
    return list(modules.values()), list(tensors.values())


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if inspect.ismethod(item):
        return [item.__self__, item.__func__]
    if inspect.isfunction(item):
        parts = [item.__defaults__, item.__kwdefaults__, getattr(item, "__wrapped__", None)]
        return [*parts, *_closed_over(item), *_named(item.__code__, item.__globals__)]
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set):
        return item
    if inspect.ismodule(item) or inspect.isclass(item) or inspect.isbuiltin(item):
        return ()
    # A plain object of the user's own: what it holds, and how it is called.
    held = list(vars(item).values()) if hasattr(item, "__dict__") else []
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        held += [getattr(item, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots)]
    call = vars(type(item)).get("__call__")
    return [*held, *([call] if inspect.isfunction(call) else [])]


def _closed_over(func: FunctionType) -> Iterator[Any]:
    for cell in func.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield cell.cell_contents


def _named(code: CodeType, namespace: dict[str, Any]) -> Iterator[Any]:
    """Globals that a function, or one defined inside it, may refer to by name."""
    for name in code.co_names:
        if name in namespace:
            value = namespace[name]
            yield value
            if inspect.ismodule(value):  # `config.weight`: follow the names that may be its attributes
                yield from (vars(value)[n] for n in code.co_names if isinstance(vars(value).get(n), Tensor | nn.Module))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, namespace)


def differentiable(modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Parameters of the modules and bare tensors that require a gradient, each once.

    Leaves only: a computed tensor that is merely within reach may belong to another iteration; the watch sees those
    that are in use.
    """
    found: dict[int, Tensor] = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    found.update((id(x), x) for x in tensors if x.requires_grad and x.is_leaf)
    return list(found.values())


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


def check_captures(values: Sequence[Tensor], known: Iterable[Tensor], computed: Iterable[Tensor]) -> None:
    """Refuse a graph that leads to a tensor nobody has accounted for: its gradient would be lost in silence.

    `known` are the leaves that are differentiated; `computed` are captured tensors that should have been replaced.
    """
    leaves = {id(x) for x in known}
    forbidden = {x.grad_fn for x in computed}
    queue = [value.grad_fn for value in values]
    seen = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if node in forbidden or (variable is not None and id(variable) not in leaves):
            shape = tuple(variable.shape) if variable is not None else "unknown"
            raise RuntimeError(
                f"field: uses a tensor (shape {shape}) that requires a gradient and was not found when the solve "
                "began: it may be used at some times only, or by a custom autograd function. Name such tensors in "
                "params= or pass them in args=."
            )
        queue += [function for function, _ in node.next_functions]

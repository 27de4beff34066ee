"""Which tensors does a field use? Found by looking at the callable and by watching one evaluation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .state import flatten


class CaptureWatch(TorchFunctionMode):
    """Records tensors that require a gradient, enter a torch function, and were not made under the watch."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.captured: dict[int, Tensor] = {}
        # The tensors themselves are kept: an id may be reused as soon as its owner dies.
        self._inside: dict[int, Tensor] = {id(x): x for x in known}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad and id(tensor) not in self._inside:
                self.captured.setdefault(id(tensor), tensor)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if id(tensor) not in self.captured:
                self._inside[id(tensor)] = tensor
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    for _, leaf in flatten(tree)[0]:
        if isinstance(leaf, Tensor):
            yield leaf


def reachable(func: Callable[..., Any]) -> tuple[list[nn.Module], list[Tensor]]:
    """Modules and bare tensors that a callable can reach: itself, what it is bound to, closes over or names."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(func, 0)]
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
            queue += [(part, depth + 1) for part in _parts(item)]
    return list(modules.values()), list(tensors.values())


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if inspect.ismethod(item):
        return [item.__self__, item.__func__]
    if inspect.isfunction(item):
        inside = inspect.getclosurevars(item)
        parts = [*inside.nonlocals.values(), *inside.globals.values()]
        parts += [item.__defaults__, item.__kwdefaults__, getattr(item, "__wrapped__", None)]
        return parts
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set):
        return item
    if inspect.ismodule(item) or inspect.isclass(item) or inspect.isbuiltin(item):
        return ()
    # A plain object of the user's own: what it holds, and how it is called.
    held = vars(item).values() if hasattr(item, "__dict__") else ()
    call = vars(type(item)).get("__call__")
    return [*held, *([call] if inspect.isfunction(call) else [])]


def differentiable(modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Parameters of the modules and bare tensors that require a gradient, each once."""
    found: dict[int, Tensor] = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    found.update((id(x), x) for x in tensors if x.requires_grad)
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


def buffers(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Named buffers of the modules, for noticing a field that changes them."""
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, buffer in module.named_buffers():
            if not torch.is_inference(buffer):
                found[f"{type(module).__name__}.{name}"] = buffer
    return found

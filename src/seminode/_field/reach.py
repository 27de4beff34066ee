"""What a callable can reach: modules, tensors and dicts, found by looking at it."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .places import AttributesPlace, CachePlace, CellPlace, Contents, DictPlace, ListPlace, NamesPlace, Place


class Reach(NamedTuple):
    """What a callable can reach: itself, what it is bound to, closes over, holds or names."""

    modules: list[nn.Module]  # each stands for all its parts
    parts: list[nn.Module]  # the modules with all their parts, each once
    tensors: list[Tensor]
    places: list[Place]  # outside of modules

    def contents(self) -> Contents:
        """What is now in the places where the callable may keep tensors."""
        # Those of a scripted module are no dicts, and cannot be rebound.
        dicts = [x for m in self.parts for x in (m._parameters, m._buffers, m.__dict__) if isinstance(x, dict)]
        return Contents(dicts, self.places)

    def leaves(self) -> list[Tensor]:
        """Parameters of the modules and bare tensors that require a gradient, each once.

        Leaves only: a computed tensor that is merely within reach may belong to another iteration.
        """
        held = itertools.chain.from_iterable(part._parameters.values() for part in self.parts)
        found: dict[int, Tensor] = {id(x): x for x in held if x is not None and x.requires_grad}
        found.update((id(x), x) for x in self.tensors if x.requires_grad and x.is_leaf)
        return list(found.values())

    def computed(self) -> list[Tensor]:
        """Bare tensors with a graph behind them. They may be in use, or belong to another iteration."""
        return [x for x in self.tensors if x.requires_grad and not x.is_leaf]


#: What every module has; the rest of its attributes belongs to the user.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def reachable(start: Any) -> Reach:
    """Modules, bare tensors and places that callables can reach."""
    modules: dict[int, nn.Module] = {}
    parts: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    places: list[Place] = []
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(start, 0)]
    # Bounded, since a bound method may belong to an object that owns a whole data set; the watch sees what is used.
    while queue and len(seen) < 10_000:
        item, depth = queue.pop()
        if id(item) in seen or depth > 6 or isinstance(item, _ATOMS):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            modules[id(item)] = item
            modules_in = parts_of(item)
            parts.update((id(part), part) for part in modules_in)
            for kind in {type(each) for each in modules_in}:
                if _own_bases(kind):
                    places += _places_of_class(kind)
                    queue += [(part, depth + 1) for part in _parts_of_class(kind)]
            queue += [(part, depth + 1) for part in itertools.islice(_attributes_of(modules_in), 1000)]
        elif isinstance(item, Tensor):
            tensors[id(item)] = item
        else:
            places += _places_in(item)
            queue += [(part, depth + 1) for part in itertools.islice(_parts(item), 1000)]
    return Reach(list(modules.values()), list(parts.values()), list(tensors.values()), places)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all its parts, each once, in the order of `module.modules()`, which takes several times as long."""
    found: dict[int, nn.Module] = {}
    stack = [module]
    while stack:
        part = stack.pop()
        if id(part) not in found:
            found[id(part)] = part
            if part._modules:
                stack += [x for x in reversed(part._modules.values()) if x is not None]
    return list(found.values())


def _places_in(item: Any) -> list[Place]:
    """Where an object keeps values."""
    if isinstance(item, dict):
        return [DictPlace(item)] if len(item) <= 1000 else []
    if isinstance(item, list | deque):
        return [ListPlace(item)] if len(item) <= 1000 else []
    if inspect.isfunction(item):
        names = [name for name in item.__code__.co_names if name in item.__globals__]
        return [*map(CellPlace, item.__closure__ or ()), NamesPlace(item.__globals__, names)]
    if hasattr(item, "cache_info") and hasattr(item, "cache_clear"):
        return [CachePlace(item)]
    if (
        inspect.ismodule(item)
        or inspect.isroutine(item)
        or isinstance(item, tuple | set | frozenset | functools.partial)
    ):
        return []
    slots = [name for kind in type(item).__mro__ for name in _slots_of(kind)]
    attributes = getattr(item, "__dict__", None)
    found: list[Place] = [DictPlace(attributes)] if isinstance(attributes, dict) and len(attributes) <= 1000 else []
    return [*found, *([AttributesPlace(item, slots)] if slots else []), *_places_of_class(type(item))]


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _foreign_module(name: str | None) -> bool:
    return (name or "").split(".")[0] in (
        "builtins",
        "torch",
        "collections",
        "functools",
        "seminode",
        "numpy",
        "typing",
    )


def _places_of_class(kind: type) -> list[Place]:
    """The attributes of a user's class, and the variables that its methods name, which hold a tensor or nothing yet."""
    found: list[Place] = []
    for base in _own_bases(kind):
        names = [name for name, x in vars(base).items() if _holds(x)]
        found += [AttributesPlace(base, names)] if names else []
        for method, globals_ in _methods_of(base):
            held = [name for name in globals_ if _holds(method.__globals__.get(name, method))]
            found += [NamesPlace(method.__globals__, held)] if held else []
            found += [
                cell for cell in map(CellPlace, method.__closure__ or ()) if any(map(_holds, cell.read().values()))
            ]
    return found


def _parts_of_class(kind: type) -> Iterator[Any]:
    """The tensors of a user's class, and where its methods may cache others.

    Of what a method names, only caches and functions that may have one: modules and tensors are seen when it uses them.
    """
    for base in _own_bases(kind):
        attributes = (_unwrapped(x) for name, x in vars(base).items() if not name.startswith("__"))
        yield from (x for x in attributes if _caches(x) or isinstance(x, Tensor))
        for method, globals_ in _methods_of(base):
            named = (method.__globals__.get(name) for name in globals_)
            yield from (x for x in (*named, *_closed_over(method)) if _caches(x) or _own_function(x))


@functools.cache
def _own_bases(kind: type) -> tuple[type, ...]:
    return tuple(base for base in kind.__mro__ if not _foreign_module(base.__module__))


def _holds(x: Any) -> bool:
    return x is None or isinstance(x, Tensor)


def _caches(x: Any) -> bool:
    if isinstance(x, dict | list | deque):
        return True
    return not isinstance(x, _NO_CACHES) and hasattr(x, "cache_clear")


def _own_function(x: Any) -> bool:
    return inspect.isfunction(x) and not _foreign_module(x.__module__)


def _unwrapped(x: Any) -> Any:
    """The function behind a property, a static method or a class method."""
    return getattr(x, "fget", None) or getattr(x, "__func__", x)


#: The methods of a class that load globals which may hold values, or have a closure. It takes long to find them. Of
#: constructors, which have run before a solve, none: they often name functions that build layers, and these others.
_LOADED: WeakKeyDictionary[type, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def _methods_of(kind: type) -> Iterator[tuple[FunctionType, tuple[str, ...]]]:
    """These methods, with the names of the globals."""
    if kind not in _LOADED:
        named = ((name, _unwrapped(x)) for name, x in vars(kind).items() if name != "__init__")
        methods = {name: method for name, method in named if inspect.isfunction(method)}
        loaded = {name: tuple(_globals_loaded(x.__code__, x.__globals__)) for name, x in methods.items()}
        _LOADED[kind] = {name: names for name, names in loaded.items() if names or methods[name].__closure__}
    for name, names in _LOADED[kind].items():
        method = _unwrapped(vars(kind).get(name))
        if inspect.isfunction(method):
            yield method, names


def _globals_loaded(code: CodeType, namespace: dict[str, Any]) -> set[str]:
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    names = {name for name in names if not isinstance(namespace.get(name), ModuleType | type) and name not in _BUILTINS}
    return names.union(*(_globals_loaded(each, namespace) for each in code.co_consts if isinstance(each, CodeType)))


_BUILTINS = frozenset(dir(builtins))
_ATOMS = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_NO_CACHES = (FunctionType, ModuleType, Tensor, *_ATOMS)


def _attributes_of(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """What modules hold besides parameters, buffers and modules."""
    for part in modules:
        for name, value in part.__dict__.items():
            if name not in _OF_EVERY_MODULE and not isinstance(value, _ATOMS):
                yield value


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
    if isinstance(item, list | tuple | set | frozenset | deque):
        return item
    if inspect.ismodule(item) or inspect.isclass(item) or inspect.isbuiltin(item):
        return ()
    # A plain object of the user's own: what it holds, and how it is called.
    held = list(vars(item).values()) if hasattr(item, "__dict__") else []
    held += [getattr(item, name, None) for kind in type(item).__mro__ for name in _slots_of(kind)]
    call = vars(type(item)).get("__call__")
    return [*held, *([call] if inspect.isfunction(call) else []), *_parts_of_class(type(item))]


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

"""Which tensors does a field use? Detected by looking at the callable and by watching one evaluation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .pytree import leaves_of, mapped

#: Where a tensor comes from: the state, the time, a tensor that the field has captured; and whether the graph between
#: them is cut, which is a shift of these flags.
STATE, TIME, CAPTURED = 1, 2, 4
CUT = 3
ORIGINS = STATE | TIME | CAPTURED


def uncompiled() -> AbstractContextManager[Any]:
    """Where a field must be followed operation by operation, what is compiled in it runs eagerly.

    Compiled code hides its operations, and a compiler that first meets a function under a watch gives up on that
    function for good. The compiler is not loaded for this.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


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
                return func(t, y, *args)

        return inner

    def held(self) -> list[Tensor]:
        """Tensors with a gradient that were made under the watch and outlive it: the field caches them.

        The answer of the evaluation must be gone by now, and with it the graph. The watch itself ends here.
        """
        made = [x for key, x in self._inside.items() if x.requires_grad and key not in self._arguments]
        references = [weakref.ref(x) for x in made]
        made.clear()
        self._inside.clear()
        return [x for reference in references if (x := reference()) is not None]


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
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            if id(tensor) in self._candidates:
                self.used[id(tensor)] = tensor
        return func(*args, **kwargs)

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


def as_leaf(x: Tensor) -> Tensor:
    """A tensor to differentiate by: x itself, if it is a leaf without hooks, or a leaf with its value.

    A captured tensor that was itself computed (by a hypernetwork, say) may depend on another captured one; a leaf
    stands for each of them alone. Hooks are meant for the whole gradient and not for every contribution to it.
    """
    if not x.requires_grad or (x.is_leaf and not x._backward_hooks):
        return x
    return x.detach().requires_grad_()


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
            return func(*args)

    return inner


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor))


class Reach(NamedTuple):
    """What a callable can reach: itself, what it is bound to, closes over, holds or names."""

    modules: list[nn.Module]
    tensors: list[Tensor]
    dicts: list[dict[Any, Any]]  # including those of plain objects

    def mappings(self) -> Iterator[dict[Any, Any]]:
        """Every dict in which the tensors of the callable may be."""
        for root in self.modules:
            for part in root.modules():
                yield part._parameters
                yield part._buffers
                yield part.__dict__
        yield from self.dicts

    def leaves(self) -> list[Tensor]:
        """Parameters of the modules and bare tensors that require a gradient, each once.

        Leaves only: a computed tensor that is merely within reach may belong to another iteration.
        """
        found: dict[int, Tensor] = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        found.update((id(x), x) for x in self.tensors if x.requires_grad and x.is_leaf)
        return list(found.values())

    def computed(self) -> list[Tensor]:
        """Bare tensors with a graph behind them. They may be in use, or belong to another iteration."""
        return [x for x in self.tensors if x.requires_grad and not x.is_leaf]


#: What every module has; the rest of its attributes belongs to the user.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def reachable(start: Any) -> Reach:
    """Modules, bare tensors and dicts that callables can reach."""
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}
    dicts: dict[int, dict[Any, Any]] = {}
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
            queue += [(part, depth + 1) for part in itertools.islice(_attributes_of(item), 1000)]
        elif isinstance(item, Tensor):
            tensors[id(item)] = item
        else:
            own = item if isinstance(item, dict) else _dict_of(item)
            if own is not None and len(own) <= 1000:
                dicts[id(own)] = own
            queue += [(part, depth + 1) for part in itertools.islice(_parts(item), 1000)]
    return Reach(list(modules.values()), list(tensors.values()), list(dicts.values()))


_ATOMS = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)


def _dict_of(item: Any) -> dict[Any, Any] | None:
    """The attributes of a plain object of the user's own."""
    if inspect.ismodule(item) or inspect.isroutine(item) or isinstance(item, functools.partial):
        return None
    attributes = getattr(item, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _attributes_of(module: nn.Module) -> Iterator[Any]:
    """What a module and its parts hold besides parameters, buffers and modules."""
    for part in module.modules():
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


class Unaccounted(RuntimeError):
    """The graph of an evaluation leads to a tensor that is not differentiated."""


def check_accounted(
    values: Sequence[Tensor], known: Iterable[Tensor], computed: Iterable[Tensor], states: Sequence[Tensor] = ()
) -> None:
    """Refuse a graph that leads to a tensor that is not accounted for: its gradient would be lost.

    `known` are the leaves that are differentiated; `computed` are captured tensors that should have been replaced;
    `states` are those at which the field was evaluated. A leaf that was born during the evaluation is no parameter and
    is ignored, unless it is a copy of a state or of a known leaf.
    """
    leaves = {id(x): x for x in known}
    forbidden = {x.grad_fn for x in computed}
    queue: list[Any] = [value.grad_fn for value in values]
    seen: set[Any] = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = node.next_functions
        if following:
            if forbidden and node in forbidden:
                refuse_unaccounted()
            queue += [function for function, _ in following]
        elif hasattr(node, "variable") and id(node.variable) not in leaves:
            if _references(node) > _references_when_born():
                refuse_unaccounted(node.variable)
            if any(_copies(node.variable, x) for x in (*states, *leaves.values())):
                refuse_cut(STATE, times_too=False)


def _references(node: Any) -> int:
    variable = node.variable
    return sys.getrefcount(variable)


@functools.cache
def _references_when_born() -> int:
    """How many references there are to a leaf that only a graph holds."""
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.ones(1).requires_grad_() * 2.0
    assert value.grad_fn is not None
    return _references(value.grad_fn.next_functions[0][0])


def _copies(leaf: Tensor, x: Tensor) -> bool:
    """Whether a leaf has the memory or the values of another tensor."""
    if leaf.numel() <= 1 or leaf.dtype != x.dtype:
        return leaf.numel() == 1 and leaf.data_ptr() == x.data_ptr()
    if leaf.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return True
    return leaf.shape == x.shape and leaf.device == x.device and torch.equal(leaf, x)


def refuse_unaccounted(variable: Tensor | None = None) -> None:
    shape = f" (shape {tuple(variable.shape)})" if variable is not None else ""
    raise Unaccounted(
        f"field: uses a tensor{shape} that requires a gradient and was not detected when the solve began. It may be "
        "used at some times only, hidden in a custom autograd function, or have taken the place of another one since "
        "the solve. Name such tensors in params= or pass them in args=; or use adjoint=sn.Direct()."
    )


def refuse_cut(cut: int, times_too: bool) -> None:
    """Refuse a field that makes new leaves of its state or its parameters: the gradient would end there."""
    if cut & (STATE | CAPTURED) or (cut & TIME and times_too):
        what = "its state" if cut & STATE else "a parameter or argument" if cut & CAPTURED else "the time"
        raise Unaccounted(
            f"field: makes a new leaf of {what}, as `y.detach().requires_grad_()` does, so that the gradient ends "
            "there and would be lost. Call requires_grad_() on the tensor itself, without detach(), clone or copy."
        )

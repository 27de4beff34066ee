"""A field as a graph of tensor operations, and programs that are made of it and compiled.

The compiler's front end (TorchDynamo) looks at the field once per solve. It checks whether a graph that it has seen
before still represents the field (its *guards*: Python values, shapes, dtypes), and makes a new one if not. During a
solve a field does not change. So all later calls bypass the front end and go straight to programs that the back end
(Inductor) has compiled from the graph: a whole step, or the VJP of a whole step.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._field.pytree import Layout, shares_memory
from .stance import tracing
from .torch_private import forget_code, make_fx, recompile_limit, transforms_unwound

Trial = Callable[[], AbstractContextManager[Any]]

#: How many graphs a front end may keep: of different fields, arguments and Python values.
GRAPHS = 64
#: How many front ends are kept, one for each structure, shape, dtype and device of the state; the oldest make room.
FRONT_ENDS = 16
#: How many programs are kept with a graph; those that were not used for longest make room.
PROGRAMS = 64


#: Held by the thread that traces a field or makes a program: the tracers of torch keep their state in the process.
_compiling = [threading.RLock()]

if hasattr(os, "register_at_fork"):  # in a copy of the process there is no other thread that could release it
    os.register_at_fork(after_in_child=lambda: _compiling.__setitem__(0, threading.RLock()))


class NotCompiled(Exception):
    """Why a program could not be made."""


class Unavailable(NamedTuple):
    """In place of a program that could not be made: the reason. It would take as long to fail again."""

    reason: str


class FieldGraph:
    """k = f(t, y) as a graph whose inputs are all tensors that the field uses, and the programs made of it."""

    def __init__(self, module: Callable[..., tuple[Tensor]]):
        self._module = module
        self._lowered: Callable[..., tuple[Tensor]] | None = None
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()
        self.reason = _own_rules(module)  # why it cannot be used

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        assert self._lowered is not None
        return self._lowered(*inputs)[0]

    def lower(self, inputs: Sequence[Tensor], y: Tensor, trial: Trial) -> None:
        """Once, to plain tensor operations: derivatives that the field takes itself are worked out."""
        if self._lowered is not None or self.reason is not None:
            return
        inputs = [x.detach() for x in inputs]
        # In the grad mode of the capture, which derivatives inside the field rely on.
        with trial() as outcome, torch.enable_grad(), transforms_unwound():
            lowered = make_fx(self._module)(*inputs)
            answers = lowered(*inputs)
        if outcome.stateful:
            self.reason = "the field draws random numbers or changes buffers"
        elif len(answers) != 1:
            self.reason = "the field stores a tensor that it computes"
        elif answers[0].shape != y.shape or answers[0].dtype != y.dtype:
            self.reason = "the field answers in another shape or dtype than that of the state"
        self._lowered = lowered

    @cached_property
    def size(self) -> int:
        """How many operations it is made of."""
        graph = getattr(self._lowered, "graph", None)
        return 0 if graph is None else sum(node.op == "call_function" for node in graph.nodes)

    def program(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A program of this graph, made when it is first asked for."""
        with _compiling[0]:
            if key not in self._programs:
                self._programs[key] = self._made(make)
                while len(self._programs) > PROGRAMS:
                    self._programs.popitem(last=False)
            self._programs.move_to_end(key)
            program = self._programs[key]
        if isinstance(program, Unavailable):
            raise NotCompiled(program.reason)
        return program

    @staticmethod
    def _made(make: Callable[[], Any]) -> Any:
        with transforms_unwound():
            try:
                return make()
            except NotCompiled as reason:  # of a program that this one is made of
                return Unavailable(str(reason))
            except Exception as error:
                return Unavailable(described(error))


def _own_rules(module: Any) -> str | None:
    """What makes the gradient of a field another one than that of its operations, as a reason not to compile it."""
    for each in module.modules() if isinstance(module, torch.nn.Module) else ():
        for node in getattr(each, "graph", torch.fx.Graph()).nodes:
            name = getattr(node.target, "__name__", str(node.target))
            if name == "_set_grad_enabled" and node.args[:1] == (False,):
                return "the field switches gradients off for a part of it (torch.no_grad)"
            if name in ("register_hook", "_enter_inference_mode") or "autograd_function" in name:
                return f"the field has rules of its own for gradients ({name})"
    return None


class Capture(NamedTuple):
    """A field at the start of a solve: its graph, and the tensors that the graph takes."""

    graph: FieldGraph
    inputs: tuple[Tensor, ...]
    t: int | None  # where among the inputs the time is, if the field reads it
    y: int | None
    lanes: int | None = None  # how many samples have a step size of their own, if they have

    @property
    def rest(self) -> list[Tensor]:
        """The inputs other than t and y: parameters, args, what is closed over."""
        return [x for i, x in enumerate(self.inputs) if i not in (self.t, self.y)]

    def evaluate(self, t: Tensor, y: Tensor, rest: Sequence[Tensor]) -> Tensor:
        """The field as a function of tensors alone."""
        others = iter(rest)
        return self.graph([t if i == self.t else y if i == self.y else next(others) for i in range(len(self.inputs))])


def described(error: Exception) -> str:
    """The first line of an error; the compiler's go on for pages."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


class Captured(Exception):
    """Carries a graph and its inputs out of the front end's call.

    The call ends here: there is no answer to go on with, and what the field stores must not be overwritten.
    """

    def __init__(self, graph: FieldGraph, inputs: tuple[Tensor, ...]):
        super().__init__()
        self.graph, self.inputs = graph, inputs


#: Graphs by their structure, for as long as some front end holds them.
_known: WeakValueDictionary[Hashable, FieldGraph] = WeakValueDictionary()


def _structure(module: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Hashable | None:
    """What is the same for graphs that do the same; none for graphs with values of their own."""
    nodes = [node for each in module.modules() for node in getattr(each, "graph", torch.fx.Graph()).nodes]
    children = {name for name, _ in module.named_children()}
    if any(node.op == "call_module" or (node.op == "get_attr" and node.target not in children) for node in nodes):
        return None
    code = tuple((node.op, node.target, node.name, repr(node.args), repr(node.kwargs)) for node in nodes)
    return code, tuple((x.shape, x.stride(), x.dtype, x.device) for x in examples)


def _backend(module: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
    """What the front end hands its graphs to."""
    # A field that counts its evaluations is another one to the front end in every solve; its graph is the same.
    key = _structure(module, examples)
    graph = _known.get(key)
    if graph is None or key is None:
        graph = FieldGraph(module)
        if key is not None:
            _known[key] = graph

    def run(*inputs: Tensor) -> NoReturn:
        raise Captured(graph, inputs)

    return run


def _evaluate(func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...]) -> Tensor:
    # The value of an input is known to the front end, and `float(t) < 0.5` would become a constant; that of a result is
    # not.
    t = t.clone()
    if layout.single:
        return func(t, y, *args)
    leaves = layout.arrange(func(t, layout.unpack(y), *args))
    assert leaves is not None
    return layout.join(leaves)


class FrontEnd:
    """Captures fields. One for each layout of the state, so that none is held up by the number of others."""

    def __init__(self) -> None:
        code = _evaluate.__code__
        # A function of its own to the front end, which counts graphs by code.
        own = FunctionType(code.replace(co_name="evaluate"), globals())
        self._code = own.__code__
        self._evaluate = torch.compile(own, backend=_backend, fullgraph=True, dynamic=False, **recompile_limit(GRAPHS))
        self._graphs: set[FieldGraph] = set()

    def forget(self) -> None:
        """Free its graphs and their programs. It is not used again."""
        forget_code(self._code)

    def renewed(self) -> FrontEnd | None:
        """A new one, if this one is full of few graphs seen often, which are those of fields that count."""
        if len(self._graphs) > GRAPHS // 2:
            return None
        new = FrontEnd()
        new._graphs = self._graphs
        return new

    def capture(
        self, func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...], trial: Trial
    ) -> Capture:
        # With a graph, as on a backward pass: rules for gradients inside the field are then seen.
        y.requires_grad_()
        try:
            with torch.enable_grad(), transforms_unwound():
                self._evaluate(func, layout, t, y, args)
        except Captured as captured:
            graph, inputs = captured.graph, captured.inputs
        else:
            raise NotCompiled("the field has no operations to compile")
        self._graphs.add(graph)
        y.requires_grad_(False)
        graph.lower(inputs, y, trial)
        if graph.reason is not None:
            raise NotCompiled(graph.reason)
        if any(x.is_complex() for x in inputs):
            raise NotCompiled("the compiler does not support complex numbers")
        where = {id(x): i for i, x in enumerate(inputs)}
        # A backward pass needs arrays as they are now.
        copied = tuple(x if x.requires_grad or x is y or not shares_memory(x) else x.clone() for x in inputs)
        lanes = len(t) if t.ndim else None
        return Capture(graph, copied, where.get(id(t)), where.get(id(y)), lanes)


_front_ends: OrderedDict[Hashable, FrontEnd] = OrderedDict()


def capture(
    func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...], trial: Trial
) -> Capture:
    """The field's graph and its inputs. Raises whatever the compiler raises about the field.

    `trial` opens a context for evaluations that do not count; its result says afterwards whether they drew random
    numbers or changed a buffer.
    """
    with _compiling[0], tracing():
        return _capture(func, layout, t, y, args, trial)


def _capture(
    func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...], trial: Trial
) -> Capture:
    key = layout, y.dtype, y.device
    front_end = _front_ends[key] if key in _front_ends else _front_ends.setdefault(key, FrontEnd())
    _front_ends.move_to_end(key)
    while len(_front_ends) > FRONT_ENDS:
        _front_ends.popitem(last=False)[1].forget()
    inputs = func, layout, t.detach(), y.detach(), args, trial
    try:
        return front_end.capture(*inputs)
    except Exception as error:
        full = type(error).__name__.endswith("LimitHit")  # its name has changed over the versions of torch
        renewed = front_end.renewed() if full else None
        if renewed is None:
            raise
    front_end.forget()
    _front_ends[key] = renewed
    return renewed.capture(*inputs)

"""From a field to its graph, once per solve.

The compiler's front end (TorchDynamo) checks whether a graph that it has seen before still represents the field (its
*guards*: Python values, shapes, dtypes), and makes a new one if not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._field.pytree import Layout, shares_memory, unflatten
from .batch_axis import batch_axes, has_size, signature_of
from .collector import collector_paused
from .graph import Capture, FieldGraph, NotCompiled, Trial, compiling
from .stance import tracing
from .symbolic_sizes import input_examples
from .torch_private import forget_code, hooks_guarded, of_any_size, recompile_limit, transforms_unwound

#: How many graphs a front end may keep: of different fields, arguments and Python values.
GRAPHS = 64
#: How many front ends are kept, one for each structure, shape, dtype and device of the state; the oldest make room. As
#: many are kept for batches of any size.
FRONT_ENDS = 16


class Captured(Exception):
    """Carries a graph and its inputs out of the front end's call.

    The call ends here: there is no answer to go on with, and what the field stores must not be overwritten.
    """

    def __init__(self, graph: FieldGraph, inputs: tuple[Any, ...]):
        super().__init__()
        self.graph, self.inputs = graph, inputs


#: Graphs by their structure, for as long as some front end holds them.
_known: WeakValueDictionary[Hashable, FieldGraph] = WeakValueDictionary()


def _structure(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Hashable | None:
    """What is the same for graphs that do the same; none for graphs with values of their own."""
    nodes = [node for each in module.modules() for node in getattr(each, "graph", torch.fx.Graph()).nodes]
    children = {name for name, _ in module.named_children()}
    if any(node.op == "call_module" or (node.op == "get_attr" and node.target not in children) for node in nodes):
        return None
    code = tuple((node.op, node.target, node.name, repr(node.args), repr(node.kwargs)) for node in nodes)
    # Of an axis of unknown size, its name.
    inputs = [(str(x.shape), str(x.stride()), x.dtype, x.device) if isinstance(x, Tensor) else str(x) for x in examples]
    return code, tuple(inputs)


def _backend(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """The backend to which the front end passes its graphs."""
    signature = signature_of(module)
    # A field that counts its evaluations is another one to the front end in every solve; its graph is the same.
    key = _structure(module, examples if signature is None else input_examples(module))
    graph = _known.get(key)
    if graph is None or key is None:
        graph = FieldGraph(module, signature)
        if key is not None:
            _known[key] = graph

    def run(*inputs: Any) -> NoReturn:
        raise Captured(graph, inputs)

    return run


class Call(NamedTuple):
    """An evaluation of a field."""

    func: Callable[..., Any]
    layout: Layout
    t: Tensor
    leaves: list[Tensor]
    args: tuple[Any, ...]


def _evaluate(
    func: Callable[..., Any], layout: Layout, t: Tensor, leaves: list[Tensor], args: tuple[Any, ...]
) -> Tensor:
    # The value of an input is known to the front end, and `float(t) < 0.5` would become a constant; that of a result is
    # not.
    t = t.clone()
    if layout.single:
        answer = func(t, leaves[0], *args)
        assert isinstance(answer, Tensor)  # otherwise nothing is captured, and an eager evaluation names the mistake
        return answer
    # In the shapes of these leaves, which need not be those of the layout: a batch may have any size.
    answers = layout.arrange(func(t, unflatten(layout.node, iter(leaves)), *args), [x.shape for x in leaves])
    assert answers is not None
    return layout.join(answers)


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

    def graph_of(self, call: Call) -> tuple[FieldGraph, tuple[Any, ...]]:
        """The graph of an evaluation, and its inputs. Raises whatever the compiler raises about the field."""
        try:
            with torch.enable_grad(), transforms_unwound(), hooks_guarded():
                self._evaluate(*call)
        except Captured as captured:
            self._graphs.add(captured.graph)
            return captured.graph, captured.inputs
        raise NotCompiled("the field has no operations to compile")


def _lowered(graph: FieldGraph, inputs: tuple[Any, ...], call: Call, y: Tensor, trial: Trial) -> Capture:
    graph.lower(inputs, y, call.layout.samples, trial)
    if graph.reason is not None:
        raise NotCompiled(graph.reason)
    if any(x.is_complex() for x in inputs if isinstance(x, Tensor)):
        raise NotCompiled("the compiler does not support complex numbers")
    if any(x.is_neg() for x in (y, *inputs) if isinstance(x, Tensor)):
        # Programs read memory, in which the sign is missing.
        raise NotCompiled("a tensor is an imaginary part whose sign is not stored; call its resolve_neg() before")
    for leaf in call.leaves:
        leaf.requires_grad_(False)
    where = {id(x): i for i, x in enumerate(inputs)}
    places = tuple(where.get(id(leaf)) for leaf in call.leaves)
    # A backward pass needs arrays as they are now.
    copied = tuple(
        _copy(x) if isinstance(x, Tensor) and not x.requires_grad and i not in places and shares_memory(x) else x
        for i, x in enumerate(inputs)
    )
    lanes = len(call.t) if call.t.ndim else None
    return Capture(graph, copied, where.get(id(call.t)), places, call.layout, lanes)


def _copy(x: Tensor) -> Tensor:
    """In the same memory layout, gaps included, since programs are made for the layout of x."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,)).clone().as_strided(x.shape, x.stride(), 0)


#: By the layout, dtype and device of the state; and for batches of any size by the same without the size.
_front_ends: OrderedDict[Hashable, FrontEnd] = OrderedDict()
_wide_front_ends: OrderedDict[Hashable, FrontEnd] = OrderedDict()


def _latest(front_ends: OrderedDict[Hashable, FrontEnd], key: Hashable) -> FrontEnd:
    found = front_ends.get(key) or front_ends.setdefault(key, FrontEnd())
    front_ends.move_to_end(key)
    while len(front_ends) > FRONT_ENDS:
        front_ends.popitem(last=False)[1].forget()
    return found


def capture(
    func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...], trial: Trial
) -> Capture:
    """The field's graph and its inputs. Raises whatever the compiler raises about the field.

    `trial` opens a context for evaluations that do not count; its result says afterwards whether they drew random
    numbers or changed a buffer.

    The first size of a batch has a graph of its own. For a field that is solved with another size, there is one graph
    for all further sizes, if the field does not depend on the size otherwise than by the shapes of its tensors.
    """
    with compiling(), tracing(), collector_paused():
        return _capture(func, layout, t, y.detach(), args, trial)


def _capture(
    func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...], trial: Trial
) -> Capture:
    # They require gradients, as on a backward pass: rules for gradients inside the field are then seen.
    leaves = [y.detach()] if layout.single else [x.clone() for x in layout.segments(y)]
    call = Call(func, layout, t.detach(), [x.requires_grad_() for x in leaves], args)
    key = layout, y.dtype, y.device
    new = key not in _front_ends
    if new and _wide_front_ends and (family := _family(call, y)) in _wide_front_ends:
        found = _of_any_size(_latest(_wide_front_ends, family), call, (), y, trial)
        if found is not None:
            return found
    graph, inputs = _of_one_size(key, call)
    if graph.unused and graph.reason is None and (family := _family(call, y)) is not None:
        found = _widened(graph, inputs, call, family, y, trial)
        if found is not None:
            if new:
                _front_ends.pop(key).forget()
            return found
    return _lowered(graph, inputs, call, y, trial)


def _family(call: Call, y: Tensor) -> Hashable | None:
    """What states of different batch sizes have in common; `None` if there is no batch axis that all leaves share."""
    layout = call.layout
    if layout.samples is None or call.t.ndim:
        return None
    func = call.func.func if isinstance(call.func, partial) else call.func
    kind = getattr(func, "__code__", type(func))  # others may use the size in other places
    return kind, layout.node, tuple(shape[1:] for shape in layout.shapes), y.dtype, y.device


def _of_one_size(key: Hashable, call: Call) -> tuple[FieldGraph, tuple[Any, ...]]:
    front_end = _latest(_front_ends, key)
    try:
        return front_end.graph_of(call)
    except Exception as error:
        full = type(error).__name__.endswith("LimitHit")  # its name has changed over the versions of torch
        renewed = front_end.renewed() if full else None
        if renewed is None:
            raise
    front_end.forget()
    _front_ends[key] = renewed
    return renewed.graph_of(call)


def _widened(
    graph: FieldGraph, inputs: tuple[Any, ...], call: Call, family: Hashable, y: Tensor, trial: Trial
) -> Capture | None:
    """The field for batches of any size, if it has been solved with a batch of another size."""
    if not graph.compared:
        places = [next((i for i, x in enumerate(inputs) if x is leaf), None) for leaf in call.leaves]
        graph.batch_axes, graph.compared = batch_axes(graph.module, inputs, places, family), True
    if not graph.batch_axes:
        return None
    axes = [(inputs[i], axis) for i, axis in graph.batch_axes]
    found = _of_any_size(_latest(_wide_front_ends, family), call, axes, y, trial)
    if found is None:
        graph.batch_axes = []
    return found


def _of_any_size(
    front_end: FrontEnd, call: Call, axes: Sequence[tuple[Tensor, int]], y: Tensor, trial: Trial
) -> Capture | None:
    samples = call.layout.samples
    assert samples is not None
    try:
        with of_any_size([*((leaf, 0) for leaf in call.leaves), *axes]):
            graph, inputs = front_end.graph_of(call)
        if graph.signature is None or not has_size(inputs, graph.signature, samples):
            return None
        found = _lowered(graph, inputs, call, y, trial)
    except Exception:  # whatever it is about, it is reported for this size alone
        return None
    return found if graph.admits(samples) else None

"""A field as a graph of tensor operations, and programs that are made of it and compiled.

The compiler's front end (TorchDynamo) looks at the field once a solve. It finds out whether a graph that it has seen
before still stands for the field (its *guards*: Python values, shapes, dtypes), and makes a new one if not. During a
solve a field cannot change. So all later calls go around the front end, straight to programs that were compiled out
of the graph by the back end (Inductor): a whole step, or the pull-back of a whole step.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._field.pytree import Layout
from .rewrites import slow, table

Program = Callable[[list[Any]], Sequence[Tensor]]
Trial = Callable[[], Callable[[], bool]]

#: How many graphs the front end may keep of one kind of solve: fields, shapes, dtypes.
GRAPHS = 64


class NotCompiled(Exception):
    """Why a program could not be made."""


class FieldGraph:
    """k = f(t, y) as a graph whose inputs are all tensors that the field uses, and the programs made of it."""

    def __init__(self, module: Callable[..., tuple[Tensor]]):
        self._module = module
        self._lowered: Callable[..., tuple[Tensor]] | None = None
        self._programs: dict[Hashable, Any] = {}
        self.reason: str | None = None  # why it is no use

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        assert self._lowered is not None
        return self._lowered(*inputs)[0]

    def lower(self, inputs: Sequence[Tensor], y: Tensor, trial: Trial) -> None:
        """Once, to plain tensor operations: what the field differentiates itself is worked out."""
        if self._lowered is not None:
            return
        from torch.fx.experimental.proxy_tensor import make_fx

        impure = trial()
        try:
            with torch.no_grad(), _transforms_unwound():
                lowered = make_fx(self._module)(*inputs)
                (k,) = lowered(*inputs)
        finally:
            drawn = impure()
        if drawn:
            self.reason = "the field draws random numbers or changes buffers"
        elif k.shape != y.shape or k.dtype != y.dtype:
            self.reason = "the field answers in another shape or dtype than that of the state"
        self._lowered = lowered

    @property
    def size(self) -> int:
        """How many operations it is made of."""
        graph = getattr(self._lowered, "graph", None)
        return 0 if graph is None else sum(node.op == "call_function" for node in graph.nodes)

    def program(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A program of this graph, made when it is first asked for."""
        if key not in self._programs:
            with _transforms_unwound():
                try:
                    self._programs[key] = make()
                except NotCompiled as reason:  # of a program that this one is made of
                    self._programs[key] = reason
                except Exception as error:
                    # Kept as well: it would take as long to fail again.
                    self._programs[key] = NotCompiled(described(error))
        found = self._programs[key]
        if isinstance(found, NotCompiled):
            raise found
        return found


class Capture(NamedTuple):
    """A field at the start of a solve: its graph, and the tensors that the graph takes."""

    graph: FieldGraph
    inputs: tuple[Tensor, ...]
    t: int | None  # where among the inputs the time is, if the field reads it
    y: int | None

    @property
    def rest(self) -> list[Tensor]:
        """The inputs other than t and y: parameters, args, what is closed over."""
        return [x for i, x in enumerate(self.inputs) if i not in (self.t, self.y)]

    def evaluate(self, t: Tensor, y: Tensor, rest: Sequence[Tensor]) -> Tensor:
        """The field as a function of tensors alone."""
        others = iter(rest)
        return self.graph([t if i == self.t else y if i == self.y else next(others) for i in range(len(self.inputs))])


@contextlib.contextmanager
def _transforms_unwound() -> Iterator[None]:
    """A transform of torch.func that fails half-way may leave its layers behind, and nothing would work any more."""
    from torch._C import _functorch as layers  # pyright: ignore[reportMissingModuleSource, reportAttributeAccessIssue]

    depth = layers.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if layers.get_dynamic_layer_stack_depth() > depth:
            layers.pop_dynamic_layer_stack_and_undo_to_depth(depth)


def described(error: Exception) -> str:
    """The first line of an error; the compiler's go on for pages."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


_latest = threading.local()


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

    def run(*inputs: Tensor) -> tuple[Tensor]:
        # Nobody reads the answer: what is wanted is the graph, and the tensors it takes.
        _latest.seen = graph, inputs
        return (torch.empty(0),)

    return run


def _evaluate(func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...]) -> Tensor:
    if layout.single:
        return func(t, y, *args)
    leaves = layout.arrange(func(t, layout.unpack(y), *args))
    assert leaves is not None
    return layout.join(leaves)


#: Older versions of torch have one limit for all functions, and stop at eight graphs.
_LIMIT: Any = {"recompile_limit": GRAPHS} if "recompile_limit" in signature(torch.compile).parameters else {}


class FrontEnd:
    """Captures fields. One for each layout of the state, so that none is held up by the number of others."""

    def __init__(self) -> None:
        code = _evaluate.__code__
        # A function of its own to the front end, which counts graphs by code.
        own = FunctionType(code.replace(co_name="evaluate"), globals())
        self._evaluate = torch.compile(own, backend=_backend, fullgraph=True, dynamic=False, **_LIMIT)
        self._graphs: set[FieldGraph] = set()

    def renewed(self) -> FrontEnd | None:
        """One with room again, if what filled it up were few graphs seen often: those of fields that count."""
        if len(self._graphs) > GRAPHS // 2:
            return None
        new = FrontEnd()
        new._graphs = self._graphs
        return new

    def capture(
        self, func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...], trial: Trial
    ) -> Capture:
        _latest.seen = None
        with torch.no_grad(), _transforms_unwound():
            self._evaluate(func, layout, t, y, args)
        if _latest.seen is None:
            raise NotCompiled("the field has no operations to compile")
        seen: Any = _latest.seen
        graph, inputs = seen
        _latest.seen = None
        self._graphs.add(graph)
        graph.lower(inputs, y, trial)
        if graph.reason is not None:
            raise NotCompiled(graph.reason)
        where = {id(x): i for i, x in enumerate(inputs)}
        return Capture(graph, inputs, where.get(id(t)), where.get(id(y)))


_front_ends: dict[Hashable, FrontEnd] = {}


def capture(
    func: Callable[..., Any], layout: Layout, t: Tensor, y: Tensor, args: tuple[Any, ...], trial: Trial
) -> Capture:
    """The field's graph and its inputs. Raises whatever the compiler does not like about the field.

    `trial` is called before an evaluation that does not count; what it returns, called afterwards, says whether that
    drew random numbers or changed a buffer.
    """
    key = layout, y.dtype, y.device
    if key not in _front_ends:
        _front_ends[key] = FrontEnd()
    given = func, layout, t.detach(), y.detach(), args, trial
    try:
        return _front_ends[key].capture(*given)
    except Exception as error:
        full = type(error).__name__.endswith("LimitHit")  # its name has changed over the versions of torch
        new = _front_ends[key].renewed() if full else None
        if new is None:
            raise
    _front_ends[key] = new
    return new.capture(*given)


def compile_graph(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Program:
    """A function of tensors, traced over the examples and compiled; the result takes a list, which it empties."""
    return back_end(traced(function, examples, rewritten=True), list(examples))


def back_end(module: torch.fx.GraphModule, examples: list[Any]) -> Program:
    # On a CPU it is faster to have all kernels called from C++; on a GPU the host is ahead of them anyway.
    if all(x.device.type == "cpu" for x in examples):
        # Channels last makes convolutions no faster there, and everything around them slower.
        try:
            made = _inductor(copy.deepcopy(module), examples, {"cpp_wrapper": True, "layout_optimization": False})
        except Exception:  # not everything can be
            made = _inductor(module, examples, {"layout_optimization": False})
        return _bare(made)
    return _inductor(module, examples, {})


def _inductor(module: torch.fx.GraphModule, examples: list[Any], options: dict[str, Any]) -> Any:
    import torch._functorch.config
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Tensors without values: else those would be part of the name by which a program is found on disk again. And there
    # it is looked for only if nobody waits for a bundle of both passes to be stored.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = [mode.from_tensor(x, static_shapes=True) for x in examples]
    alone = torch._functorch.config.patch(bundled_autograd_cache=False)
    with tracing(TracingContext(mode)), config.patch(options), alone:
        return compile_fx_inner(module, given, cpp_wrapper=options.get("cpp_wrapper", False))


def _bare(made: Any) -> Program:
    """Without what is around a program: profilers, and what the first call on a GPU still has to tune."""
    inner = getattr(made, "current_callable", None)
    if inner is None:
        return made

    def run(inputs: list[Any], owner: Any = made) -> Sequence[Tensor]:
        return inner(inputs)

    return run


def traced(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], rewritten: bool
) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(function, remove="mutations")
    # Without values: with them, shapes are worked out beside every operation all the same, in twice the time. Tensors
    # that the function has closed over are real ones.
    trace = make_fx(functional, table(rewritten), tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad():
        module = trace(*examples)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


class Halves(NamedTuple):
    """A function and its pull-back as two graphs.

    The first takes the inputs and returns the outputs, then what it keeps; the second takes what was kept, then the
    cotangents, and returns the gradients.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    kept: int  # how many tensors


def split(
    function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], outputs: int
) -> Halves:
    """Cut (*inputs, *cotangents) ↦ (outputs, gradients) in two. What is kept between the halves is for the compiler
    to decide, but that nothing is computed twice which takes long."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    module = traced(function, [*inputs, *cotangents], rewritten=False)
    # The names by which the partitioner knows what belongs where.
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        own = i - len(inputs)
        node.name = node.target = f"primals_{i + 1}" if own < 0 else f"tangents_{own + 1}"
    for node in module.graph.nodes:
        if slow(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    module.recompile()
    forward, backward = min_cut_rematerialization_partition(module, None, num_fwd_outputs=outputs)
    (found,) = forward.graph.find_nodes(op="output")
    return Halves(forward, backward, len(found.args[0]) - outputs)

"""From a function of tensors to a compiled program: tracing, the cut into forward and VJP, and the back end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch_axis import BatchAxis, Source
from .library import Building, Library, Program, quickly_built, unfinished
from .packing import pack
from .recompute import keep_less
from .rewrites import slow, table
from .torch_private import all_without_values, inductor, libraries_by, make_fx, partition


def compile_graph(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], axis: BatchAxis | None = None
) -> Program:
    """A function of tensors, traced over the examples and compiled; the result takes a list, which it empties.

    Examples with an axis of unknown size make a program for batches of any size.
    """
    if axis is not None:
        source = axis.source(examples)
        if source.ratio > 1:  # the compiler does not divide to find the size
            return _told_the_size(function, examples, axis, source)
    return back_end(traced(function, examples, rewritten=True), list(examples))


def _told_the_size(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], axis: BatchAxis, source: Source
) -> Program:
    def function_of_size(marker: Tensor, *inputs: Tensor) -> Sequence[Tensor]:
        return function(*inputs)

    run = compile_graph(function_of_size, [axis.marker(), *examples], axis)

    def run_at_size(inputs: list[Any]) -> Sequence[Tensor]:
        return run([torch.empty((source.read(inputs), 0)), *inputs])

    return run_at_size


def back_end(module: torch.fx.GraphModule, examples: list[Any]) -> Program:
    # On a CPU it is faster to have all kernels called from C++; on a GPU the host is ahead of them anyway.
    if all(x.device.type == "cpu" for x in examples):
        # Channels last makes convolutions no faster there, and everything around them slower.
        libraries: list[Library] = []

        def library(build: Callable[..., Callable[..., Any]]) -> Library:
            libraries.append(Library(lambda: quickly_built(build)))
            return libraries[-1]

        def otherwise() -> Program:
            return _bare(inductor(module, examples, {"layout_optimization": False}))

        try:
            with libraries_by(library):
                made = inductor(copy.deepcopy(module), examples, {"cpp_wrapper": True, "layout_optimization": False})
        except Exception:  # not everything can be
            return otherwise()
        return unfinished.add(Building(_bare(made), libraries, otherwise, output_strides(made)))
    return inductor(module, examples, {})


def _bare(made: Any) -> Program:
    """The program without its wrappers: profilers, and what the first call on a GPU still has to tune."""
    inner = getattr(made, "current_callable", None)
    if inner is None:
        return made

    def run(inputs: list[Any], owner: Any = made) -> Sequence[Tensor]:
        return inner(inputs)

    return run


def traced(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], rewritten: bool
) -> torch.fx.GraphModule:
    functional = torch.func.functionalize(function, remove="mutations")
    # Without values: with them, shapes are worked out beside every operation all the same, in twice the time. Tensors
    # that the function has closed over are real ones.
    trace = make_fx(functional, table(rewritten), tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad():
        module = trace(*all_without_values(examples))
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


class Halves(NamedTuple):
    """A function and its VJP as two graphs.

    The first takes the inputs and returns the outputs, then what it keeps; the second takes what was kept, then the
    cotangents, and returns the gradients.
    """

    forward: torch.fx.GraphModule
    backward: Callable[..., Sequence[Tensor]]
    shapes: list[Any]  # of what is kept
    dtypes: list[torch.dtype]  # the same

    @property
    def kept(self) -> int:
        """How many tensors."""
        return len(self.shapes)


def split(
    function: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    outputs: int,
    axis: BatchAxis | None = None,
) -> Halves:
    """Cut (*inputs, *cotangents) ↦ (outputs, gradients) in two. What is kept between the halves is for the compiler
    to decide, but that nothing is computed twice which takes long."""
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
    forward, backward = partition(module, outputs)
    keep_less(forward, backward, outputs, axis)
    pack(forward, backward, outputs)
    _allow_any_layout(backward)
    (end,) = forward.graph.find_nodes(op="output")
    kept = [node.meta["val"] for node in end.args[0][outputs:]]
    sizes = [x for x in kept if not isinstance(x, Tensor)]
    shapes = [x.shape for x in kept if isinstance(x, Tensor)]
    dtypes = [x.dtype for x in kept if isinstance(x, Tensor)]
    if not sizes or axis is None:
        return Halves(forward, backward, shapes, dtypes)
    # Sizes are kept last, and the VJP takes them first. They are found again from the cotangents instead.
    end.args = (end.args[0][: outputs + len(shapes)],)
    forward.recompile()
    return Halves(forward, _without_sizes(backward, sizes, cotangents, axis), shapes, dtypes)


def _allow_any_layout(backward: torch.fx.GraphModule) -> None:
    """The back end chooses the memory layouts of what is kept: not all that was a view in the trace can be one."""
    for node in backward.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    backward.recompile()


def _without_sizes(
    backward: Callable[..., Sequence[Tensor]], sizes: Sequence[Any], cotangents: Sequence[Tensor], axis: BatchAxis
) -> Callable[..., Sequence[Tensor]]:
    source, ratios = axis.source(cotangents), [axis.ratio(size) for size in sizes]

    def function(*tensors: Tensor) -> Sequence[Tensor]:
        samples = source.read(tensors[-len(cotangents) :])
        return backward(*(ratio * samples for ratio in ratios), *tensors)

    return function


def output_strides(made: Any) -> list[tuple[int, ...] | None] | None:
    """The strides of the outputs of a compiled graph; `None` for those that are not numbers known beforehand."""
    found = getattr(made, "output_strides", None)
    if found is None:
        return None
    numbers = [None if each is None or not all(str(x).isdigit() for x in each) else each for each in found]
    return [None if each is None else tuple(int(x) for x in each) for each in numbers]

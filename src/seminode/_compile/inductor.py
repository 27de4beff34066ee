"""From a function of tensors to a compiled program: tracing, the cut into forward and VJP, and the back end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rewrites import slow, table
from .torch_private import inductor, make_fx, partition

Program = Callable[[list[Any]], Sequence[Tensor]]


def compile_graph(function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor]) -> Program:
    """A function of tensors, traced over the examples and compiled; the result takes a list, which it empties."""
    return back_end(traced(function, examples, rewritten=True), list(examples))


def back_end(module: torch.fx.GraphModule, examples: list[Any]) -> Program:
    # On a CPU it is faster to have all kernels called from C++; on a GPU the host is ahead of them anyway.
    if all(x.device.type == "cpu" for x in examples):
        # Channels last makes convolutions no faster there, and everything around them slower.
        try:
            made = inductor(copy.deepcopy(module), examples, {"cpp_wrapper": True, "layout_optimization": False})
        except Exception:  # not everything can be
            made = inductor(module, examples, {"layout_optimization": False})
        return _bare(made)
    return inductor(module, examples, {})


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
    """A function and its VJP as two graphs.

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
    (found,) = forward.graph.find_nodes(op="output")
    return Halves(forward, backward, len(found.args[0]) - outputs)

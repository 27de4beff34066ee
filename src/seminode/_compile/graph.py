"""A field as a graph of tensor operations, and programs that are made of it and compiled.

During a solve a field does not change. So once its graph is known, calls bypass the compiler's front end and go
straight to programs that the back end (Inductor) has compiled from the graph: a whole step, or the VJP of a whole step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._field.pytree import Layout
from .batch_axis import AXES, SIZE, BatchAxis, Signature
from .collector import collector_paused
from .library import Building, unfinished
from .torch_private import make_fx, transforms_unwound

Trial = Callable[[], AbstractContextManager[Any]]

#: How many programs are kept with a graph; those that were not used for longest make room.
PROGRAMS = 64


#: Held by the thread that traces a field or makes a program: the tracers of torch keep their state in the process.
_compiling = [threading.RLock()]

if hasattr(os, "register_at_fork"):  # in a copy of the process there is no other thread that could release it
    os.register_at_fork(after_in_child=lambda: _compiling.__setitem__(0, threading.RLock()))


def compiling() -> AbstractContextManager[Any]:
    """A context for tracing and compiling: only one thread at a time enters it."""
    return _compiling[0]


class NotCompiled(Exception):
    """Why a program could not be made."""


class Unavailable(NamedTuple):
    """The reason why a program could not be made. It is kept, because failing again would take as long."""

    reason: str


class FieldGraph:
    """k = f(t, y) as a graph whose inputs are all tensors that the field uses, and the programs made of it.

    `signature` says which axes of its inputs have the size of the batch, if the graph is one for any size.
    """

    def __init__(self, module: Callable[..., tuple[Tensor]], signature: Signature | None = None):
        self.module = module
        self._lowered: Callable[..., tuple[Tensor]] | None = None
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()
        self._building: dict[Hashable, list[Building]] = {}  # what some of them still wait for
        self._ahead = False  # whether nobody waits for programs now
        self.reason = _own_rules(module)  # why it cannot be used
        self.signature = signature
        self._axis: BatchAxis | None = None  # of its own, while that was worked out
        self._axes: list[BatchAxis] = []  # of programs
        #: Of a graph for one size: whether it was compared with those for other sizes, and what differed.
        self.compared = False
        self.batch_axes: list[tuple[int, int]] = []

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        assert self._lowered is not None
        return self._lowered(*inputs)[0]

    def lower(self, inputs: Sequence[Any], y: Tensor, samples: int | None, trial: Trial) -> None:
        """Once, to plain tensor operations: derivatives that the field takes itself are worked out."""
        if self._lowered is not None or self.reason is not None:
            return
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        examples = inputs
        if self.signature is not None:
            assert samples is not None
            self._axis = BatchAxis(samples)
            examples = self.examples(inputs, self._axis)
        # In the grad mode of the capture, which derivatives inside the field rely on.
        with trial() as outcome, torch.enable_grad(), transforms_unwound():
            lowered = make_fx(self.module)(*examples)
            answers = lowered(*inputs)
        if outcome.stateful:
            self.reason = "the field draws random numbers or changes buffers"
        elif len(answers) != 1:
            self.reason = "the field stores a tensor that it computes"
        elif answers[0].shape != y.shape or answers[0].dtype != y.dtype:
            self.reason = "the field answers in another shape or dtype than that of the state"
        self._lowered = lowered

    def examples(self, inputs: Sequence[Any], axis: BatchAxis) -> list[Any]:
        """The inputs with an axis of unknown size."""
        assert self.signature is not None
        pairs = zip(inputs, self.signature, strict=True)
        return [axis.size if batch is SIZE else axis.batched(x, batch) for x, batch in pairs]

    def admits(self, samples: int) -> bool:
        """Whether the graph represents the field for batches of this size."""
        return self._axis is None or self._axis.admits(samples)

    def axes(self, samples: int) -> Iterator[BatchAxis]:
        """Axes of unknown size for whose programs a size is allowed, as far as that is known."""
        for i in range(AXES):
            if i == len(self._axes):
                self._axes.append(BatchAxis(samples))
            if self._axes[i].admits(samples):
                yield self._axes[i]

    @property
    def unused(self) -> bool:
        """Whether no program has been made from it yet."""
        return not self._programs

    @cached_property
    def size(self) -> int:
        """How many operations it is made of."""
        graph = getattr(self._lowered, "graph", None)
        return 0 if graph is None else sum(node.op == "call_function" for node in graph.nodes)

    def program(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A program of this graph, made when it is first asked for."""
        with compiling():
            if key not in self._programs:
                self._programs[key], self._building[key] = self._made(make)
                while len(self._programs) > PROGRAMS:
                    self._building.pop(self._programs.popitem(last=False)[0], None)
            self._programs.move_to_end(key)
            if key in self._building and not self._ahead:
                self._wait_for(key)
            program = self._programs[key]
        if isinstance(program, Unavailable):
            raise NotCompiled(program.reason)
        return program

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """A context: programs requested in it will be needed soon, and are built in parallel, without waiting."""
        with compiling():
            before, self._ahead = self._ahead, True
            try:
                yield
            finally:
                self._ahead = before

    def _wait_for(self, key: Hashable) -> None:
        try:
            for program in self._building.pop(key):
                program.wait()
        except Exception as error:
            self._programs[key] = Unavailable(described(error))

    @staticmethod
    def _made(make: Callable[[], Any]) -> tuple[Any, list[Building]]:
        with transforms_unwound(), collector_paused():
            try:
                return unfinished.made_by(make)
            except NotCompiled as reason:  # of a program that this one is made of
                return Unavailable(str(reason)), []
            except Exception as error:
                return Unavailable(described(error)), []


def _own_rules(module: Any) -> str | None:
    """Why the gradient of a field differs from that of its operations, as a reason not to compile it."""
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
    inputs: tuple[Any, ...]  # tensors, and the size of the batch if the graph is one for any size
    t: int | None  # where among the inputs the time is, if the field reads it
    y: tuple[int | None, ...]  # where the leaves of the state are
    layout: Layout
    lanes: int | None = None  # how many samples have a step size of their own, if they have
    axis: BatchAxis | None = None  # of inputs that stand for a batch of any size

    @property
    def rest(self) -> list[Tensor]:
        """The inputs other than t and y: parameters, args, what is closed over."""
        return [self.inputs[i] for i in self._places_of_rest()]

    def _places_of_rest(self) -> list[int]:
        return [i for i in range(len(self.inputs)) if i != self.t and i not in self.y and not self._is_size(i)]

    def batched_rest(self) -> list[bool]:
        """Which of them have an axis of unknown size, if the graph is one for any size."""
        signature = self.graph.signature
        return [signature is not None and any(signature[i]) for i in self._places_of_rest()]

    @property
    def kind(self) -> Layout:
        """The layout of the state; if the graph is one for any size, that of no samples in place of all others."""
        return self.layout if self.graph.signature is None else self.layout.of_size(0)

    def _is_size(self, i: int) -> bool:
        return self.graph.signature is not None and self.graph.signature[i] is SIZE

    def evaluate(self, t: Tensor, y: Tensor, rest: Sequence[Tensor]) -> Tensor:
        """The field as a function of tensors alone."""
        others = iter(rest)
        leaves = self.layout.fitting(y).segments(y)

        def entering(i: int) -> Any:
            if self._is_size(i):
                return leaves[0].shape[0]
            return t if i == self.t else leaves[self.y.index(i)] if i in self.y else next(others)

        return self.graph([entering(i) for i in range(len(self.inputs))])

    def program(self, key: Hashable, make: Callable[[Capture], Any]) -> Any:
        """A program of the graph: one for batches of any size if there can be one, else one for this size."""
        graph, samples = self.graph, self.layout.samples
        if graph.signature is None or samples is None:
            return graph.program(key, lambda: make(self))
        if self.axis is not None:  # for a part of a program
            return graph.program((key, self.axis), lambda: make(self))
        for axis in graph.axes(samples):
            try:
                program = graph.program((key, axis), lambda axis=axis: make(self._of_any_size(axis)))
            except NotCompiled:
                break
            if axis.admits(samples):  # known only now
                return program
        return graph.program((key, samples), lambda: make(self))

    def _of_any_size(self, axis: BatchAxis) -> Capture:
        return self._replace(inputs=tuple(self.graph.examples(self.inputs, axis)), axis=axis)

    def example(self, x: Tensor) -> Tensor:
        """What a program is traced over in place of a tensor like y."""
        if self.axis is None:
            return x
        shape = [self.axis.size * (n // self._samples) if i == 0 else n for i, n in enumerate(x.shape)]
        return self.axis.like(x, shape)

    @property
    def _samples(self) -> int:
        assert self.layout.samples is not None
        return self.layout.samples


def described(error: Exception) -> str:
    """The first line of an error; those of the compiler are pages long."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])

"""Chains: a program called several times by C++, each time with what it returned before, without Python in between."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .torch_private import handles_of, tensors_of

#: How the source of a library says how many tensors it takes, and where it returns each of its own.
_INPUTS = re.compile(r"steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\)")
_OUTPUT = re.compile(r"output_handles\[(\d+)\] = ")


def with_chain(code: str) -> str:
    """The source of a library that can also be called as a chain; as it is, if it is not of the usual form."""
    inputs, outputs = _INPUTS.findall(code), {int(i) for i in _OUTPUT.findall(code)}
    if len(inputs) != 1 or outputs != set(range(len(outputs))) or not outputs:
        return code
    sizes = f"#define SEMINODE_INPUTS {inputs[0]}\n#define SEMINODE_OUTPUTS {len(outputs)}\n"
    return f"{code}\n{sizes}{_source()}"


@functools.cache
def _source() -> str:
    return Path(__file__).with_name("chain.cpp").read_text(encoding="utf-8")


class Foretold(NamedTuple):
    """Steps whose plans follow from the errors of those before: what a `Forecast` in `chain.cpp` begins with.

    `nodes` are those at which the program evaluates the field, in the order of its clock.
    """

    numbers: Sequence[float]
    nodes: Sequence[float]


class Chain:
    """The functions that `with_chain` has added to a library."""

    def __init__(self, path: str):
        library = ctypes.PyDLL(path)
        self._steps = library.seminode_steps
        self._steps.restype = ctypes.py_object
        lists, long = ctypes.py_object, ctypes.c_long
        self._steps.argtypes = [ctypes.c_void_p, *[lists] * 5, long, lists, lists, long, long]
        library.seminode_entry.restype = ctypes.c_void_p
        self.entry: int = library.seminode_entry()
        self.inputs: int = library.seminode_inputs()
        self.outputs: int = library.seminode_outputs()

    def steps(
        self,
        clocks: Sequence[Tensor],
        start: Sequence[Tensor],
        shared: Sequence[Tensor],
        end: int | None,
        slope: Chain | None,
        times: Sequence[Tensor],
        rest: Sequence[Tensor],
        foretold: Foretold = Foretold((), ()),
    ) -> tuple[list[list[Tensor]], list[float]]:
        """A step per clock: the outputs of each, and for predicted steps, t0, t1, dt and the error ratio.

        `start` are y and k1; each later step starts from output 0 of the one before, and from output `end`. Without an
        end, its first slope is evaluated by `slope` instead, and comes before its outputs. Predicted steps write to
        the clocks and times, and may end before them.
        """
        groups = [handles_of([*group]) for group in (clocks, times, start, shared, rest)]
        entry, numbers = None if slope is None else slope.entry, [float(x) for x in foretold.numbers]
        kind = clocks[0].numel(), clocks[0].dtype == torch.float64
        taken, report = self._steps(entry, *groups, -1 if end is None else end, numbers, [*foretold.nodes], *kind)
        return [tensors_of(handles) for handles in taken], report

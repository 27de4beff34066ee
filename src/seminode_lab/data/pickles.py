"""A reader for pickled arrays of bytes that runs no code from the pickle.

A pickle is a program for a machine with a stack and a memo. This module is such a machine, with only those instructions
that pickles of plain data and of uint8 arrays contain. The few functions that pickled arrays call are replaced by
functions that only record their arguments; all others are refused. Neither `pickle` nor NumPy is called.

A short program can make large or endless data: by writing the same list into many others, by keys that take for ever to
hash, by huge numbers of entries in the memo. So the machine counts its instructions and the bytes that it copies, its
memo is a dict, and keys are strings and numbers only.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import DataError
from .files import explained
from .reading import content

LIMIT = 1 << 26  # bytes of a file; a batch of CIFAR-10 has 31 million
INSTRUCTIONS = 300_000  # a batch of CIFAR-10 has about 60,000
DEPTH = 50  # levels of lists, tuples and dicts
_MARK = object()


class Refused(ValueError):
    """A pickle that is corrupted, too large, or not of plain data."""


class _Function:
    """A function that a pickle may call."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call


class _Dtype:
    """The data type of an array; only bytes are supported."""

    def __init__(self, kind: Any = None, *_: Any):
        self.kind = kind

    def build(self, state: Any) -> None:
        pass  # byte order and alignment, which do not matter for bytes


class _Array:
    """An array: its shape and its bytes."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def build(self, state: Any) -> None:
        if self.tensor is not None or not (isinstance(state, tuple) and len(state) == 5):
            raise Refused("expected one state of five entries for an array")
        _, shape, dtype, fortran, data = state
        self.tensor = _tensor(data, dtype, shape, fortran)


def _tensor(data: Any, dtype: Any, shape: Any, fortran: Any) -> Tensor:
    kind = dtype.kind if isinstance(dtype, _Dtype) else dtype
    if kind not in ("u1", b"u1"):
        raise Refused(f"expected an array of uint8 ('u1'), found {kind!a:.40}")
    if not (isinstance(shape, tuple) and len(shape) <= 8 and all(type(n) is int and 0 <= n <= LIMIT for n in shape)):
        raise Refused("expected a shape of at most 8 sizes")
    if math.prod(max(1, n) for n in shape) > LIMIT:
        raise Refused(f"expected at most {LIMIT:,} bytes, found the shape {shape}")
    if not isinstance(data, str | bytes | bytearray):
        raise Refused(f"expected bytes, found {type(data).__name__}")
    data = data.encode("latin1") if isinstance(data, str) else data
    if len(data) != math.prod(shape):
        raise Refused(f"expected {math.prod(shape)} bytes for shape {shape}, found {len(data)}")
    if not data:
        return torch.empty(shape, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if fortran:
        return flat.reshape(shape[::-1]).permute(*reversed(range(len(shape)))).contiguous()
    return flat.reshape(shape)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.tensor = _tensor(data, dtype, shape, order == "F")
    return array


def _encode(text: Any, encoding: Any = None) -> bytes:
    """Bytes as old protocols write them."""
    if not isinstance(text, str) or encoding != "latin1":
        raise Refused("refused to encode anything but bytes written as latin1")
    return text.encode("latin1")


def _empty_bytes(*args: Any) -> bytes:
    """Empty bytes as old protocols write them."""
    if args:
        raise Refused("expected bytes without arguments")
    return b""


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): lambda *_: None,  # used only as the argument of _reconstruct
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{(module, "bytes"): _empty_bytes for module in ("__builtin__", "builtins")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}
#: Instructions that do nothing here, that push their argument, and that push something else.
IDLE = {"PROTO", "FRAME"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
ARGUMENTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
#: Strings of Python 2, which are bytes.
STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}


class _Machine:
    """Runs the instructions of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.copied = 0

    def pop(self, kind: type | tuple[type, ...] = object) -> Any:
        if not self.stack or self.stack[-1] is _MARK or not isinstance(self.stack[-1], kind):
            raise Refused("an instruction does not find what it needs")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        for start in range(len(self.stack) - 1, -1, -1):
            if self.stack[start] is _MARK:
                found = self.stack[start + 1 :]
                del self.stack[start:]
                return found
        raise Refused("an instruction does not find its mark")

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise Refused(f"expected a {kind.__name__} to fill")
        return self.stack[-1]

    def run(self, program: bytes) -> Any:
        for count, (code, argument, _) in enumerate(pickletools.genops(io.BytesIO(program))):
            if count > INSTRUCTIONS:
                raise Refused(f"more than {INSTRUCTIONS:,} instructions")
            if code.name == "STOP":
                return self.pop()
            self._do(code.name, argument)
        raise Refused("it ends too early")

    def _do(self, name: str, argument: Any) -> None:
        if name in IDLE:
            return
        if name in ARGUMENTS:
            if isinstance(argument, int) and argument.bit_length() > 64:
                raise Refused(f"a number of {argument.bit_length():,} bits")
            self.stack.append(argument)
        elif name in STRINGS:
            self.stack.append(argument.encode("latin1"))
        elif name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in TUPLES:
            self.stack.append(tuple([self.pop() for _ in range(TUPLES[name])][::-1]))
        elif name in INSTRUCTION:
            INSTRUCTION[name](self)
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memoise(argument)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise Refused(f"the memo has no entry {argument}")
            self.stack.append(self.memo[argument])
        elif name == "GLOBAL":
            self.function(*argument.split(" ", 1))
        else:
            raise Refused(f"refused the instruction {name}, which plain data do not need")

    def memoise(self, index: int) -> None:
        if not self.stack or self.stack[-1] is _MARK:
            raise Refused("there is nothing to memoise")
        self.memo[index] = self.stack[-1]

    def fill_list(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def fill_dict(self, values: list[Any]) -> None:
        keys = values[::2]
        if len(values) % 2 or not all(isinstance(key, str | bytes | int) for key in keys):
            raise Refused("expected keys that are strings or numbers, with a value each")
        self.top(dict).update(zip(keys, values[1::2], strict=True))

    def function(self, module: Any, name: Any) -> None:
        call = ALLOWED.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if call is None:
            raise Refused(f"refused {f'{module}.{name}'!a:.90}, which arrays of bytes do not need")
        self.stack.append(_Function(call))

    def reduce(self) -> None:
        arguments, function = self.pop(tuple), self.pop(_Function)
        self.count(arguments)
        self.stack.append(function.call(*arguments))

    def build(self) -> None:
        state, thing = self.pop(), self.pop((_Array, _Dtype))
        self.count(state if isinstance(state, tuple) else ())
        thing.build(state)
        self.stack.append(thing)

    def count(self, arguments: tuple[Any, ...]) -> None:
        """Count bytes that are about to be copied: one string can be copied any number of times."""
        self.copied += sum(len(each) for each in arguments if isinstance(each, str | bytes | bytearray))
        if self.copied > 2 * LIMIT:
            raise Refused(f"it makes more than {2 * LIMIT:,} bytes")


def _stack_global(machine: _Machine) -> None:
    name, module = machine.pop(str), machine.pop(str)
    machine.function(module, name)


def _pairs(values: list[Any]) -> dict[Any, Any]:
    machine = _Machine()
    machine.stack.append({})
    machine.fill_dict(values)
    return machine.stack[0]


def _fill_one_entry(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.fill_dict([key, value])


INSTRUCTION: dict[str, Callable[[_Machine], Any]] = {
    "MARK": lambda machine: machine.stack.append(_MARK),
    "POP": lambda machine: machine.stack.pop(),
    "POP_MARK": lambda machine: machine.pop_to_mark(),
    "MEMOIZE": lambda machine: machine.memoise(len(machine.memo)),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "TUPLE": lambda machine: machine.stack.append(tuple(machine.pop_to_mark())),
    "LIST": lambda machine: machine.stack.append(machine.pop_to_mark()),
    "DICT": lambda machine: machine.stack.append(_pairs(machine.pop_to_mark())),
    "APPEND": lambda machine: machine.fill_list([machine.pop()]),
    "APPENDS": lambda machine: machine.fill_list(machine.pop_to_mark()),
    "SETITEM": _fill_one_entry,
    "SETITEMS": lambda machine: machine.fill_dict(machine.pop_to_mark()),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}


def read_pickle(path: Path) -> Any:
    """The content of a pickle of dicts, lists, tuples, numbers, strings and uint8 arrays.

    Arrays become tensors, and strings of Python 2 become bytes.
    """
    try:
        program = content(path, LIMIT)
    except OSError as error:
        raise explained(error, path) from error
    try:
        return _plain(_Machine().run(program), {}, DEPTH)
    except Exception as error:  # pickletools raises any error for a corrupted pickle
        raise DataError(f"{path}: corrupted or not to be trusted ({str(error)[:200]})") from error


def _plain(thing: Any, done: dict[int, Any], depth: int) -> Any:
    """The same with tensors in place of arrays. What is shared stays shared, and is converted once."""
    if isinstance(thing, int | float | str | bytes | bytearray | None):
        return thing
    if id(thing) in done:
        if done[id(thing)] is _MARK:
            raise Refused("something contains itself")
        return done[id(thing)]
    if not depth:
        raise Refused(f"nested more than {DEPTH} levels")
    done[id(thing)] = _MARK
    if isinstance(thing, _Array):
        if thing.tensor is None:
            raise Refused("an array without content")
        found: Any = thing.tensor
    elif isinstance(thing, dict):
        found = {key: _plain(value, done, depth - 1) for key, value in thing.items()}
    elif isinstance(thing, list | tuple):
        found = type(thing)([_plain(each, done, depth - 1) for each in thing])
    else:
        raise Refused(f"expected plain data, found {type(thing).__name__.strip('_').lower()}")
    done[id(thing)] = found
    return found

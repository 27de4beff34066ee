"""A reader for pickled arrays of bytes that runs no code from the pickle.

A pickle is a program. This reader replaces the few functions that pickled uint8 arrays call by functions that only
record their arguments, and refuses all others. Not even NumPy is called.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import DataError


class _Function:
    """A function that a pickle may call. Unlike a class or a plain function, it cannot be modified by the pickle."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("refused to change a function")


class _Dtype:
    """The data type of an array; only bytes are supported."""

    def __init__(self, kind: Any, *_: Any):
        self.kind = kind

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment, which do not matter for bytes


class _Array:
    """An array: its shape and its bytes."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        self.tensor = _tensor(content, dtype, shape, fortran)


def _tensor(content: Any, dtype: Any, shape: Any, fortran: Any) -> Tensor:
    kind = dtype.kind if isinstance(dtype, _Dtype) else dtype
    if kind not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"expected an array of uint8 ('u1'), found {kind!r}")
    if not (isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise pickle.UnpicklingError(f"expected a shape, found {shape!r}")
    content = content.encode("latin1") if isinstance(content, str) else bytes(content)
    if len(content) != math.prod(shape):
        raise pickle.UnpicklingError(f"expected {math.prod(shape)} bytes for shape {shape}, found {len(content)}")
    if not content:
        return torch.empty(shape, dtype=torch.uint8)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if fortran:
        return flat.reshape(shape[::-1]).permute(*reversed(range(len(shape)))).contiguous()
    return flat.reshape(shape)


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.tensor = _tensor(content, dtype, shape, order == "F")
    return array


def _encode(text: Any, encoding: Any = None) -> bytes:
    """Bytes as old protocols write them."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("refused to encode anything but bytes written as latin1")
    return text.encode("latin1")


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): lambda *_: None,  # used only as the argument of _reconstruct
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        call = ALLOWED.get((module, name))
        if call is None:
            raise pickle.UnpicklingError(f"refused {module}.{name}, which arrays of bytes do not need")
        return _Function(call)


def read_pickle(path: Path) -> Any:
    """The content of a pickle of dicts, lists, tuples, numbers, strings and uint8 arrays.

    Arrays become tensors, and strings of Python 2 become bytes.
    """
    try:
        content = path.read_bytes()
        return _plain(_Reader(io.BytesIO(content), encoding="bytes").load())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise DataError(f"{path}: corrupted or not to be trusted (nested too deeply)") from error
    except Exception as error:  # a corrupted pickle may cause any error
        raise DataError(f"{path}: corrupted or not to be trusted ({error})") from error


def _plain(thing: Any) -> Any:
    if isinstance(thing, _Array):
        if thing.tensor is None:
            raise pickle.UnpicklingError("an array without content")
        return thing.tensor
    if isinstance(thing, dict):
        return {_plain(key): _plain(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)(_plain(each) for each in thing)
    if isinstance(thing, int | float | str | bytes | bytearray | None):
        return thing
    raise pickle.UnpicklingError(f"expected plain data, found {type(thing).__name__}")

"""Named tensors in a safetensors file, with a digest of all that the file says.

The format holds only numbers and text, no code. A safetensors file has no checksum of its own, so that a changed bit is
a changed number. The digest is an entry of the header, `sha256`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import DataError
from .reading import opened, parsed

DIGEST = "sha256"
HEADER = 16 << 20  # bytes; a model of 10,000 tensors needs 2 MB
LIMIT = 16 << 30  # bytes; the features of Speech Commands need 0.5 GB


class Damaged(DataError):
    """The content of a file is not what was written."""


class Stored(NamedTuple):
    """The tensors of a file, its text entries, and whether a digest proves that they are what was written."""

    tensors: dict[str, Tensor]
    about: dict[str, str]
    proven: bool


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors and text entries."""
    whole = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    entries = {**about, DIGEST: _digest(whole, about)}
    try:
        _safetensors().torch.save_file(whole, path, metadata=entries)
    except _safetensors().SafetensorError as error:  # its own exception, for a full disk too
        raise OSError(f"{error}") from error


def load_tensors(path: Path, limit: int = LIMIT) -> Stored:
    """Read tensors and text entries. This runs no code from the file."""
    library = _safetensors()
    _check_header(path, limit)
    try:
        with library.safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
    except library.SafetensorError as error:
        raise Damaged(f"{path}: damaged ({error})") from error
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # torch does not know the type or the shape
        raise Damaged(f"{path}: damaged ({type(error).__name__}: {error})") from error
    expected = about.pop(DIGEST, None)
    if expected is not None and expected != _digest(tensors, about):
        raise Damaged(f"{path}: damaged (its content differs from its digest)")
    return Stored(tensors, about, expected is not None)


def _check_header(path: Path, limit: int) -> None:
    """Refuse a header that no such file has, before the library allocates what it asks for."""
    with opened(path, limit) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > HEADER:
            raise Damaged(f"{path}: damaged (expected a header of at most {HEADER:,} bytes, found {size:,})")
        text = file.read(size)
    try:
        found = parsed(text.decode(), depth=4)
        entries = [entry for name, entry in found.items() if name != "__metadata__"]
        shapes = [entry["shape"] for entry in entries]
        if any(len(shape) > 64 or math.prod(max(1, n) for n in shape) >= 1 << 48 for shape in shapes):
            raise ValueError("a shape that is too large")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path}: damaged ({error})") from error


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    total = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        total.update(f"{name!r} {x.dtype} {tuple(x.shape)}\n".encode())
        if x.numel():
            total.update(x.reshape(-1).view(torch.uint8).numpy().data)
    total.update(repr(sorted(about.items())).encode())
    return total.hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of tensors need safetensors: pip install 'seminode[lab]'") from error
    return safetensors

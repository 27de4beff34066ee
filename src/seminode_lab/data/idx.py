"""The idx format of MNIST: a header of big-endian numbers, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from .errors import DataError
from .files import explained
from .reading import opened

UINT8 = 0x08
LIMIT = 1 << 26  # bytes; the largest file of MNIST has 47,040,016
DIMENSIONS = 8  # at most; MNIST has three


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in an idx file, compressed if its name ends in .gz."""
    try:
        with opened(path, LIMIT + 4 + 4 * DIMENSIONS) as raw:
            if path.suffix != ".gz":
                return _array(path, raw)
            with gzip.GzipFile(fileobj=raw) as file:
                return _array(path, file)  # type: ignore[arg-type]  # it can be read like any other file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: corrupted gzip file ({error})") from error
    except OSError as error:
        raise explained(error, path) from error


def _array(path: Path, file: IO[bytes]) -> Tensor:
    shape = _shape(path, file)
    # An empty array may have any other sizes, whose product is no number of bytes but must not overflow either.
    if math.prod(max(1, n) for n in shape) > LIMIT:
        raise DataError(f"{path}: expected at most {LIMIT:,} bytes, found the shape {shape}")
    count = math.prod(shape)
    found = file.read(count)
    # Looking for the end makes gzip verify its checksum.
    if len(found) != count or file.read(1):
        seen = f"{len(found):,}" if len(found) < count else "more"
        raise DataError(f"{path}: expected {count:,} bytes for the shape {shape}, found {seen}")
    if not count:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).reshape(shape)


def _shape(path: Path, file: IO[bytes]) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise DataError(f"{path}: expected an idx file, which starts with two zero bytes, found {magic[:2]!r}")
    if magic[2] != UINT8:
        raise DataError(f"{path}: expected bytes (type 0x08), found type 0x{magic[2]:02x}")
    if magic[3] > DIMENSIONS:
        raise DataError(f"{path}: expected at most {DIMENSIONS} dimensions, found {magic[3]}")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path}: ends within its header")
    return struct.unpack(f">{magic[3]}I", sizes)

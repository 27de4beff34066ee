"""The idx format of MNIST: a header of big-endian numbers, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor

from .errors import DataError
from .files import explained

UINT8 = 0x08
LIMIT = 1 << 31  # bytes; larger than any file of MNIST


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in an idx file, compressed if its name ends in .gz."""
    try:
        with _opened(path) as file:
            shape = _shape(path, file)
            count = math.prod(shape)
            if count > LIMIT:
                raise DataError(f"{path}: expected at most {LIMIT:,} bytes, found the shape {shape}")
            content = file.read(count + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: corrupted gzip file ({error})") from error
    except OSError as error:
        raise explained(error, path) from error
    if len(content) != count:
        found = "more" if len(content) > count else f"{len(content):,}"
        raise DataError(f"{path}: expected {count:,} bytes for the shape {shape}, found {found}")
    if not count:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(shape)


def _opened(path: Path) -> IO[bytes]:
    # A GzipFile can be read like any other file but is not typed as one.
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _shape(path: Path, file: IO[bytes]) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0":
        raise DataError(f"{path}: expected an idx file, which starts with two zero bytes, found {magic[:2]!r}")
    if magic[2] != UINT8:
        raise DataError(f"{path}: expected bytes (type 0x08), found type 0x{magic[2]:02x}")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path}: ends within its header")
    return struct.unpack(f">{magic[3]}I", sizes)

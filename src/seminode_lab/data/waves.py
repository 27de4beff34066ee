"""Sound: 16-bit mono wav files."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from .errors import DataError
from .files import explained
from .reading import opened

RATE = 16_000
LIMIT = 1 << 26  # bytes, half an hour of sound
CHUNKS = 1_000  # parts of a file before its samples
PCM, EXTENSIBLE = 1, 0xFFFE


class _Format(NamedTuple):
    """The first entries of a format chunk."""

    tag: int
    channels: int
    rate: int
    bytes_per_second: int
    bytes_per_frame: int
    bits: int


def read_wav(path: Path, samples: int | None = None, rate: int = RATE) -> Tensor | None:
    """The int16 samples of a mono wav file; `None` if `samples` is given and the file has another length.

    Of a file of another length, only the header is read.
    """
    try:
        with opened(path, LIMIT) as file:
            form, size = _header(path, file)
            _check(path, "channel", 1, form.channels)
            _check(path, "bits per sample", 16, form.bits)
            _check(path, "samples per second", rate, form.rate)
            count = size // 2
            if samples is not None and count != samples:
                return None
            content = file.read(min(2 * count, LIMIT))
    except OSError as error:
        raise explained(error, path) from error
    if len(content) != 2 * count:
        raise DataError(f"{path}: truncated: expected {count:,} samples from its header, found {len(content) // 2:,}")
    if not count:
        return torch.empty(0, dtype=torch.int16)
    found = torch.frombuffer(bytearray(content), dtype=torch.int16)
    # The numbers of the file are little-endian.
    return (
        found if sys.byteorder == "little" else found.view(torch.uint8).reshape(-1, 2).flip(1).view(torch.int16)[:, 0]
    )


def _header(path: Path, file: BinaryIO) -> tuple[_Format, int]:
    """The format and the number of bytes of the samples, at whose start the file is left."""
    start = file.read(12)
    if len(start) < 12 or start[:4] != b"RIFF" or start[8:] != b"WAVE":
        raise _unreadable(path, "it does not start with RIFF and WAVE")
    form = None
    for _ in range(CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            raise _unreadable(path, "it ends too early")
        kind, size = struct.unpack("<4sI", head)
        if kind == b"data":
            if form is None:
                raise _unreadable(path, "its samples come before their format")
            return form, size
        if kind == b"fmt ":
            form = _format(path, file.read(min(size, 40)))
            file.seek(max(0, size - 40), os.SEEK_CUR)
        else:
            file.seek(size, os.SEEK_CUR)
        file.seek(size % 2, os.SEEK_CUR)  # chunks start at even places
    raise _unreadable(path, f"its samples do not follow within {CHUNKS:,} chunks")


def _format(path: Path, content: bytes) -> _Format:
    if len(content) < 16:
        raise _unreadable(path, "its format ends too early")
    form = _Format(*struct.unpack("<HHIIHH", content[:16]))
    tag = int.from_bytes(content[24:26], "little") if form.tag == EXTENSIBLE else form.tag
    if tag != PCM:
        raise _unreadable(path, f"expected plain samples, format 1, found format {tag}")
    return form


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: not a wav file that can be read ({reason})")


def _check(path: Path, what: str, expected: int, found: int) -> None:
    if found != expected:
        raise DataError(f"{path}: expected {expected:,} {what}, found {found:,}")

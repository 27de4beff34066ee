"""NumPy arrays in npz files, which are zip archives of npy files."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any, cast

import numpy as np

from .errors import DataError
from .reading import content

#: Bytes of a file and of all its arrays, and their number.
LIMIT, EXPANDED, MEMBERS = 64 << 20, 256 << 20, 1_000
KINDS = "biufc"  # numbers


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of numbers in an npz file."""
    packed = content(path, LIMIT)
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            members = archive.infolist()
            if len(members) > MEMBERS:
                raise ValueError(f"expected at most {MEMBERS:,} arrays, found {len(members):,}")
            if sum(member.file_size for member in members) > EXPANDED:
                raise ValueError(f"it expands to more than {EXPANDED:,} bytes")
            return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except Exception as error:  # zipfile and NumPy raise any error for a damaged file
        raise DataError(
            f"{path}: damaged ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})"
        ) from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if not member.filename.isprintable():
        raise ValueError(f"the name {member.filename!a:.60} cannot be printed")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"expected arrays that are stored or deflated, found compression {member.compress_type}")
    with archive.open(member) as file:
        # The size in the directory is a promise. `read` stops there, and verifies the checksum.
        data = file.read(member.file_size + 1)
    if len(data) != member.file_size:
        raise ValueError(f"expected {member.file_size:,} bytes, found {len(data):,}")
    return _of_npy(data)


def _of_npy(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"expected version 1.0 or 2.0 of the npy format, found {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = cast("tuple[tuple[Any, ...], bool, np.dtype]", read(file))
    if dtype.kind not in KINDS:
        raise ValueError(f"expected numbers, found {dtype!s:.60}")
    count = math.prod(shape)
    if len(shape) > 8 or min(shape, default=0) < 0 or math.prod(max(1, n) for n in shape) > EXPANDED:
        raise ValueError(f"expected at most 8 sizes of at most {EXPANDED:,} entries, found the shape {shape!s:.60}")
    if len(data) - file.tell() != count * dtype.itemsize:
        raise ValueError(f"expected {count * dtype.itemsize:,} bytes for the shape {shape!s:.60}")
    found = np.frombuffer(data, dtype, count, file.tell()) if count else np.empty(0, dtype)
    return found.reshape(shape, order="F" if fortran else "C").copy()

"""Atomic writing and checksums of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from .errors import DataError
from .reading import opened

CHUNK = 1 << 20


def size_text(size: int) -> str:
    """A size with its unit.

    >>> size_text(4542), size_text(2428923189)
    ('4.54 kB', '2.43 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} bytes"


def explained(error: OSError, path: Path) -> DataError:
    """A one-sentence error about a file that cannot be read or written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            free = size_text(shutil.disk_usage(path.parent).free)
            return DataError(f"{path}: no space left on the disk ({free} free); free some space and run it again")
        return DataError(f"{path}: no space left on the disk; free some space and run it again")
    return DataError(f"{path}: {error.strerror or error}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary file in the folder of `path`, which replaces `path` on success and is removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        yield scratch
        with scratch.open("rb") as written:
            os.fsync(written.fileno())  # otherwise a crash may leave an empty file
        scratch.chmod(0o666 & ~_umask())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def digest(path: Path, algorithm: str, progress: bool = False) -> str:
    """The checksum of a file, in hexadecimal digits."""
    total = hashlib.new(algorithm)
    try:
        with opened(path, sys.maxsize) as file, _bar(path, progress) as bar:
            while chunk := file.read(CHUNK):
                total.update(chunk)
                bar.update(len(chunk))
    except OSError as error:
        raise explained(error, path) from error
    return total.hexdigest()


def _bar(path: Path, progress: bool) -> tqdm:
    # None shows the bar only on a terminal.
    disable = None if progress else True
    total = path.stat().st_size
    return tqdm(total=total, desc=f"{path.name}: checksum", unit="B", unit_scale=True, leave=False, disable=disable)


def mismatch(path: Path, checksum: str, progress: bool = False) -> str | None:
    """Compare a file with a checksum such as "md5:…"; the difference in words, or `None` if they agree."""
    algorithm, _, expected = checksum.partition(":")
    found = digest(path, algorithm, progress)
    return None if found == expected else f"expected {algorithm} {expected}, found {found}"

"""Bounded reading: every reader of the lab opens its files here.

A file may come from anybody. Only regular files are opened, links are not followed, and nothing is read or expanded
beyond what the format of the file can need. What is refused raises a `DataError`; what the system refuses raises an
`OSError`, as usual.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any, BinaryIO

from .errors import DataError

#: Flags that not every system has. Without O_NONBLOCK, opening a FIFO waits until a process writes to it.
NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_READ: int = os.O_RDONLY | NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: Bytes of a JSON file, and levels of lists and objects in it. Files of the lab have less than a tenth of both.
JSON_SIZE, JSON_DEPTH = 16 << 20, 64


def opened(path: Path, limit: int) -> BinaryIO:
    """A regular file of at most `limit` bytes, open for reading."""
    try:
        handle = os.open(path, _READ)
    except OSError as error:
        raise _is_link(path) if error.errno == errno.ELOOP or path.is_symlink() else error from error
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise DataError(f"{path}: expected a file, found {_kind(about.st_mode)}; remove it")
        if not NOFOLLOW and path.is_symlink():
            raise _is_link(path)
        if about.st_size > limit:
            raise DataError(f"{path}: expected at most {limit:,} bytes, found {about.st_size:,}")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _is_link(path: Path) -> DataError:
    return DataError(f"{path}: is a symbolic link, which is not followed; put the file itself there")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def content(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with opened(path, limit) as file:
        return at_most(file, limit, path)


def at_most(file: IO[bytes], limit: int, path: Path) -> bytes:
    """The rest of an open file, which may grow or expand, if that is at most `limit` bytes."""
    # In chunks: a single large read would allocate the limit.
    found = bytearray()
    while chunk := file.read(min(1 << 20, limit + 1 - len(found))):
        found += chunk
        if len(found) > limit:
            raise DataError(f"{path}: expected at most {limit:,} bytes, found more")
    return bytes(found)


def read_json(path: Path, limit: int = JSON_SIZE) -> Any:
    """The content of a JSON file."""
    try:
        return parsed(content(path, limit).decode())
    except ValueError as error:
        raise DataError(f"{path}: expected JSON, found something else ({error})") from error


def parsed(text: str, depth: int = JSON_DEPTH) -> Any:
    """JSON that is nested at most `depth` levels, and whose strings can be printed; otherwise a `ValueError`.

    >>> parsed("[[1], {}]", depth=2)
    [[1], {}]
    >>> parsed("[[[1]]]", depth=2)
    Traceback (most recent call last):
    ...
    ValueError: nested more than 2 levels
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {depth} levels") from None
    _check(found, depth, depth)
    return found


def _check(found: Any, left: int, depth: int) -> None:
    if isinstance(found, str):
        found.encode()  # raises a ValueError for half of a surrogate pair, which JSON can express
    elif isinstance(found, list | dict):
        if not left:
            raise ValueError(f"nested more than {depth} levels")
        for each in (*found, *found.values()) if isinstance(found, dict) else found:
            _check(each, left - 1, depth)

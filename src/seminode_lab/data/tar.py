"""A reader of tar archives that needs no more memory than a block, whatever the archive says.

`tarfile` reads names and extended headers of any size into memory, and takes a damaged header for the end. Here every
header is one that `tarfile.TarInfo` accepts, extended ones are short, and the sum of all sizes is limited.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO

BLOCK, CHUNK = tarfile.BLOCKSIZE, 1 << 20
#: Bytes of an extended header, which holds a long name, and members of an archive. Speech Commands has 106,000.
EXTENDED, MEMBERS = 1 << 16, 1_000_000


class Tar:
    """The members of an uncompressed archive, one after the other.

    Arguments:
        file: where it is read from.
        limit: bytes that the archive may have.
    """

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file, self._limit, self._read = file, limit, 0
        self._left = self._padding = 0  # bytes of the present member

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        name, everywhere = None, None
        for _ in range(MEMBERS):
            self._skip()
            block = self._take(BLOCK)
            if not any(block):
                return
            member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
            if member.size < 0:
                raise ValueError(f"a member of {member.size} bytes")
            if member.type == tarfile.GNUTYPE_LONGNAME:
                name = self._extended(member).rstrip(b"\0").decode()
            elif member.type == tarfile.XHDTYPE:
                name = _path(self._extended(member)) or name
            elif member.type == tarfile.XGLTYPE:
                everywhere = _path(self._extended(member)) or everywhere
            else:
                member.name = name or everywhere or member.name
                name = None
                # Links, devices and folders have no content, whatever size they state.
                self._left = member.size if member.isreg() else 0
                self._padding = -self._left % BLOCK
                yield member
        raise ValueError(f"more than {MEMBERS:,} members")

    def content(self) -> Iterator[bytes]:
        """The content of the member that was last seen, in chunks."""
        while self._left:
            chunk = self._take(min(CHUNK, self._left))
            self._left -= len(chunk)
            yield chunk

    def read_to_end(self) -> None:
        """Read what follows the last member, which is filled with zeros."""
        while chunk := self._file.read(CHUNK):
            self._count(len(chunk))

    def _skip(self) -> None:
        for _ in self.content():
            pass
        self._take(self._padding)
        self._padding = 0

    def _extended(self, member: tarfile.TarInfo) -> bytes:
        if member.size > EXTENDED:
            raise ValueError(f"expected at most {EXTENDED:,} bytes for a name, found {member.size:,}")
        content = self._take(member.size)
        self._take(-member.size % BLOCK)
        return content

    def _take(self, size: int) -> bytes:
        found = self._file.read(size) if size else b""
        self._count(len(found))
        if len(found) < size:
            raise EOFError("it ends too early")
        return found

    def _count(self, size: int) -> None:
        self._read += size
        if self._read > self._limit:
            raise ValueError(f"it expands to more than {self._limit:,} bytes")


def _path(records: bytes) -> str | None:
    """The path in an extended header, which has records "length key=value". What changes the content is refused.

    >>> _path(b"12 path=a/b\\n15 mtime=123.5\\n")
    'a/b'
    """
    found = None
    while records.rstrip(b"\0"):
        digits, _, _ = records.partition(b" ")
        size = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        record = records[len(digits) + 1 : size]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if not equals or size > len(records) or not record.endswith(b"\n"):
            raise ValueError("an extended header that cannot be read")
        if key == b"size" or key.startswith(b"GNU.sparse"):
            raise ValueError(f"an extended header with {key!r}, which is not supported")
        found = value.decode() if key == b"path" else found
        records = records[size:]
    return found

"""Downloads, which are resumed after interruptions and moved into place after their checksum was verified."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from .errors import DataError
from .files import CHUNK, explained, mismatch, size_text
from .reading import NOFOLLOW

TIMEOUT = 30.0  # seconds without a byte
ANSWER = 120.0  # seconds until a server has answered, redirections included
SLOWEST = 10_000.0  # bytes per second; a transfer that takes longer than its size at this rate is given up
ATTEMPTS = 5  # per address; each resumes the previous one
PAUSE = 1.0  # seconds before the second attempt; the pause grows with every attempt


@dataclass(frozen=True)
class Resource:
    """A file to download.

    Arguments:
        addresses: URLs in the order in which they are tried.
        name: the name of the file.
        checksum: for example "sha256:…".
        size: bytes.
    """

    addresses: tuple[str, ...]
    name: str
    checksum: str
    size: int


class Interrupted(Exception):
    """A transfer ended early and can be resumed."""


class Unreachable(Exception):
    """An address does not provide the file."""


def download(resource: Resource, folder: Path, progress: bool = True) -> Path:
    """Download a file into `folder`, unless it exists there with the right checksum; return its path.

    An incomplete download is kept in a file that ends in .part, and the next call resumes it.
    """
    target = folder / resource.name
    if os.path.lexists(target):
        wrong = mismatch(target, resource.checksum, progress)
        if wrong is not None:
            raise DataError(f"{target}: {wrong}; it is not overwritten; move it away to download it again")
        return target
    part = target.with_name(f"{target.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explained(error, folder) from error
    with _alone(part):
        _from_any_address(resource, part, progress)
        wrong = mismatch(part, resource.checksum, progress)
        if wrong is not None:
            part.unlink()
            raise DataError(f"{resource.name}: the download differs from the published file: {wrong}; it was removed")
        os.replace(part, target)
    return target


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Lock the file, because two processes that append to it would corrupt it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    lock = part.with_name(f"{part.name}.lock")
    with _unfollowed(lock, os.O_RDWR | os.O_CREAT) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"{part}: another process is downloading it") from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _from_any_address(resource: Resource, part: Path, progress: bool) -> None:
    reasons = []
    for address in resource.addresses:
        try:
            _from_address(address, resource, part, progress)
            return
        except Unreachable as error:
            reasons.append(f"{address}: {error}")
    kept = f"; {size_text(_size(part))} are kept, and the next fetch resumes from there" if _size(part) else ""
    raise DataError(f"could not download {resource.name}: {'; '.join(reasons)}{kept}")


def _from_address(address: str, resource: Resource, part: Path, progress: bool) -> None:
    reason = ""
    for attempt in range(ATTEMPTS):
        before = _size(part)
        if attempt:
            time.sleep(PAUSE * attempt)
        try:
            _transfer(address, resource, part, progress)
            return
        except Interrupted as error:
            reason = str(error)
            if _size(part) <= before:
                break
    raise Unreachable(reason)


def _transfer(address: str, resource: Resource, part: Path, progress: bool) -> None:
    """Append the missing bytes to `part`."""
    have = _size(part)
    if have == resource.size:
        return  # complete, but not yet moved into place
    if have > resource.size:
        have = 0
    with _answer(address, have) as response:
        # If the server does not support ranges, the download starts from the beginning.
        resumed = have > 0 and response.status == 206 and _start(response) == have
        have = have if resumed else 0
        _check_space(part, resource.size - have)
        deadline = time.monotonic() + TIMEOUT + (resource.size - have) / SLOWEST
        bar = tqdm(
            total=resource.size,
            initial=have,
            desc=resource.name,
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
        )
        try:
            mode = os.O_APPEND if resumed else os.O_TRUNC
            with _unfollowed(part, os.O_WRONLY | os.O_CREAT | mode) as file, bar:
                while have <= resource.size and (chunk := _read(response)):
                    if time.monotonic() > deadline:
                        raise Interrupted(f"slower than {SLOWEST:,.0f} bytes per second")
                    file.write(chunk)
                    have += len(chunk)
                    bar.update(len(chunk))
        except OSError as error:
            raise explained(error, part) from error
    if have < resource.size:
        raise Interrupted(f"the connection ended after {have:,} of {resource.size:,} bytes")
    if have > resource.size:
        part.unlink()
        raise Unreachable(f"expected {resource.size:,} bytes, found more")


def _unfollowed(path: Path, flags: int) -> BinaryIO:
    """A regular file, open for writing. A link in its place would lead to another file."""
    try:
        handle = os.open(path, flags | NOFOLLOW | getattr(os, "O_NONBLOCK", 0), 0o666)
    except OSError as error:
        if path.is_symlink():
            raise DataError(f"{path}: is a symbolic link, which is not followed; remove it") from error
        raise explained(error, path) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{path}: expected a file, found something else; remove it")
    return os.fdopen(handle, "r+b" if flags & os.O_RDWR else "wb")


def _answer(address: str, have: int) -> Any:
    """The answer of a server. A server that sends its header byte by byte is given up, too.

    Only the time between two bytes can be limited for a connection, so that another thread waits for the answer.
    """
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(_opened(address, have))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER)
    if not found:
        raise Interrupted(f"no answer within {ANSWER:.0f} seconds")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _opened(address: str, have: int) -> Any:
    headers = {"User-Agent": "seminode", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if have and error.code == 416:  # there is no such range, but the whole file may exist
                return _opened(address, 0)
            raise Unreachable(f"the server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise Interrupted(f"cannot be reached ({error.reason}); is there a network?") from error
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(f"cannot be reached ({error or type(error).__name__}); is there a network?") from error


def _read(response: Any) -> bytes:
    """Read a chunk. Errors of the network are told apart from those of the disk, which are also OSErrors."""
    try:
        return response.read1(CHUNK)  # `read` would wait until there are so many bytes
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(f"the connection broke ({error or type(error).__name__})") from error


def _start(response: Any) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _check_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if free < needed:
        raise DataError(f"{part}: no space left on the disk: {size_text(needed)} needed, {size_text(free)} free")


def _size(part: Path) -> int:
    try:
        return part.lstat().st_size
    except FileNotFoundError:
        return 0

"""Archives, which are unpacked completely or not at all, and never outside the target folder."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from .errors import DataError
from .files import digest, explained
from .reading import content as content_of
from .reading import opened
from .tar import Tar

SUMS = "SHA256SUMS"
SUMS_SIZE = 64 << 20  # bytes at most; 100,000 files need 11 MB
#: An archive may expand this many times, or to this many bytes: sound and images can hardly be compressed.
RATIO, EXPANDED = 20, 64 << 20


def unpack(archive: Path, target: Path, inside: str = "", progress: bool = True) -> None:
    """Unpack a tar.gz file. Its folder `inside`, or the whole archive, becomes `target`, which must not exist.

    The file `SHA256SUMS` with the checksums of all files is added, for `wrong_sums` and `sha256sum --check`.
    """
    if os.path.lexists(target):
        raise DataError(f"{target}: exists already and is not overwritten; move it away to unpack {archive.name}")
    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
        content = scratch / "content"
        content.mkdir()
        sums = dict(_written(archive, content, progress))
        source = content / inside
        if not source.is_dir():
            raise DataError(f"{archive}: expected a folder {inside!r} in it, found {_some(content)}")
        kept = {PurePosixPath(name).relative_to(inside): total for name, total in sums.items() if _is_in(name, inside)}
        text = "".join(f"{total}  {name}\n" for name, total in sorted(kept.items()))
        (source / SUMS).write_text(text, encoding="utf-8")
        os.rename(source, target)
    except OSError as error:
        raise explained(error, target) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _written(archive: Path, folder: Path, progress: bool) -> Iterator[tuple[str, str]]:
    """Write every file, and yield its name and checksum."""
    try:
        with opened(archive, sys.maxsize) as file, gzip.GzipFile(fileobj=file) as raw:
            limit = max(EXPANDED, RATIO * os.fstat(file.fileno()).st_size)
            tar = Tar(raw, limit)  # type: ignore[arg-type]  # it can be read like any other file
            for member in tqdm(tar, desc=archive.name, unit=" files", leave=False, disable=None if progress else True):
                name = _safe(archive, member)
                path = folder / name
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                yield name.as_posix(), _copy(tar.content(), path)
            # The checksum of a gzip file is at its end, and gzip verifies it there.
            tar.read_to_end()
    except (tarfile.TarError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{archive}: corrupted archive ({error})") from error
    except OSError as error:
        # Errors of gzip have no errno; those of the disk do.
        if error.errno is None:
            raise DataError(f"{archive}: corrupted archive ({error})") from error
        raise


def _safe(archive: Path, member: tarfile.TarInfo) -> PurePosixPath:
    """The name of a member, if it is a plain file or a folder and stays inside the target folder."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or re.match(r"[A-Za-z]:", member.name):
        raise DataError(f"{archive}: refused: {member.name!a} is outside the folder that it is unpacked into")
    if not member.name.isprintable():
        raise DataError(f"{archive}: refused: {member.name!a} has characters that cannot be printed")
    if not (member.isreg() or member.isdir()):
        raise DataError(f"{archive}: refused: {member.name!a} is a link or a device; expected files and folders")
    return name


def _copy(content: Iterator[bytes], path: Path) -> str:
    total = hashlib.sha256()
    with path.open("xb") as file:
        for chunk in content:
            file.write(chunk)
            total.update(chunk)
    return total.hexdigest()


def _is_in(name: str, inside: str) -> bool:
    return PurePosixPath(name).is_relative_to(inside)


def _some(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"


def wrong_sums(folder: Path, progress: bool = True) -> list[str] | None:
    """The files of a folder that differ from its `SHA256SUMS`; `None` if there is no such file."""
    listing = folder / SUMS
    if not listing.is_file():
        return None
    wrong = []
    try:
        lines = content_of(listing, SUMS_SIZE).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{listing}: expected a list of checksums, found something else ({error})") from error
    for line in tqdm(lines, desc=f"{folder.name}: checksums", leave=False, disable=None if progress else True):
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif digest(path, "sha256") != expected:
            wrong.append(f"{name} has changed since it was unpacked")
    return wrong

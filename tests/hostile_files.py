"""Files as an attacker or a failing disk would make them: formats, their readers, and ways to damage a file.

Run as a program, it reads damaged files of one format in a process with little memory, and prints what happened:

    python hostile_files.py FORMAT EXAMPLES SEED [FILE]
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import resource
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seminode_lab.data import DataError
from seminode_lab.data.archives import unpack
from seminode_lab.data.arrays import read_npz
from seminode_lab.data.idx import read_idx
from seminode_lab.data.pickles import read_pickle
from seminode_lab.data.reading import read_json
from seminode_lab.data.tensors import load_tensors
from seminode_lab.data.waves import read_wav
from seminode_lab.store import Checkpoint, StoreError

CORPUS = Path(__file__).parent / "seminode_lab" / "data" / "corpus"
MEGABYTE = 1 << 20


def _unpack(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unpack(path, Path(folder) / "out", progress=False)
        outside = [each.name for each in path.parent.iterdir() if each != path and each.name != Path(folder).name]
        assert not outside, f"unpacked outside its folder: {outside}"


#: The readers of each format. What a reader does not accept raises an error of `REFUSED`, and no other.
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "wav": ("a.wav", read_wav),
    "idx": ("a", read_idx),
    "idx.gz": ("a.gz", read_idx),
    "pickle": ("a", read_pickle),
    "npz": ("a.npz", read_npz),
    "safetensors": ("a.safetensors", load_tensors),
    "checkpoint": ("a.safetensors", Checkpoint.load),
    "json": ("a.json", read_json),
    "tar.gz": ("a.tar.gz", _unpack),
}
REFUSED = (DataError, StoreError)


def corpus(form: str) -> list[bytes]:
    """The committed files of a format, good ones and those that once did harm."""
    return [path.read_bytes() for path in sorted((CORPUS / form).iterdir())]


def read(form: str, content: bytes, folder: Path) -> str | None:
    """Read a file of this content; the message of the error if it was refused."""
    name, reader = READERS[form]
    path = folder / name
    path.write_bytes(content)
    try:
        reader(path)
    except REFUSED as error:
        message = str(error)
        message.encode()  # it can be printed ...
        assert len(message) < 2_000  # ... and read
        return message
    return None


#: Numbers at the ends of ranges, as headers have them.
NUMBERS = tuple(
    n.to_bytes(size, order)  # type: ignore[arg-type]
    for size in (1, 2, 4, 8)
    for n in (0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, 2 ** (4 * size))
    for order in ("little", "big")
)


def damaged(content: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """A file after one to four accidents."""
    found = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randint(0, len(found))
        size = min(chance.choice((1, 2, 4, 8, 64, 1000)), len(found) - place)
        accident = chance.randrange(7)
        if accident == 0 and size:
            found[place] = (found[place] ^ 1 << chance.randrange(8)) if place < len(found) else 0
        elif accident == 1:
            number = chance.choice(NUMBERS)
            found[place : place + len(number)] = number
        elif accident == 2:
            del found[place : place + size]
        elif accident == 3:
            found[place:place] = found[place : place + size] * chance.choice((1, 2, 50))
        elif accident == 4:
            del found[place:]
        elif accident == 5:
            other = chance.choice(others)
            start = chance.randint(0, len(other))
            found[place : place + size] = other[start : start + size]
        else:
            found[place : place + size] = chance.randbytes(size)
    return bytes(found)


def repacked(form: str, chance: random.Random) -> bytes:
    """A damaged file. Of compressed ones, often the content before compression, so that its checksum is right."""
    others = corpus(form)
    content = chance.choice(others)
    if form.endswith(".gz") and chance.random() < 0.8:
        try:
            plain = gzip.decompress(content)
        except (OSError, EOFError):
            return damaged(content, others, chance)
        return gzip.compress(damaged(plain, [plain], chance), 1)
    return damaged(content, others, chance)


def run(form: str, examples: int, seed: int, *paths: str) -> dict[str, Any]:
    """Read files, and damaged ones of the corpus, with at most one gigabyte of memory more than now."""
    chance = random.Random(seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + 1024 * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        contents = (Path(path).read_bytes() for path in paths)
        for content in itertools.chain(contents, (repacked(form, chance) for _ in range(examples))):
            try:
                refused += read(form, content, Path(folder)) is not None
            except BaseException as error:
                return {"format": form, "error": f"{type(error).__name__}: {error}", "content": content[:4000].hex()}
    # Not by getrusage, whose peak may be that of the process that started this one.
    peak = (
        next(
            int(line.split()[1])
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        / 1024
    )
    return {"format": form, "examples": examples, "refused": refused, "peak_megabytes": round(peak)}


def zeros(size: int) -> bytes:
    """A gzip file that expands to so many zeros: members of 16 MB, one after the other."""
    return gzip.compress(bytes(1 << 24)) * (size >> 24)


def tar_bomb(size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo("a")
    info.size, info.type = size, kind
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT)) + zeros(size)


def zip_bomb(size: int) -> bytes:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("x.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(size >> 24):
            member.write(bytes(1 << 24))
    return file.getvalue()


def bomb(kind: str) -> tuple[str, bytes]:
    size = 3 << 30
    if kind == "idx":
        return "idx.gz", gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, size)) + zeros(size)
    if kind == "npz":
        return "npz", zip_bomb(size >> 2)
    if kind == "json":
        return "json", b"[" + b"[]," * 5_000_000 + b"[]]"
    if kind == "pickle":
        return "pickle", b"\x80\x02" + b"}" * (60 << 20) + b"."
    return "tar.gz", tar_bomb(size, {"tar": tarfile.REGTYPE, "name": tarfile.GNUTYPE_LONGNAME}[kind])


#: Files that expand, by what does.
BOMBS = ("idx", "npz", "json", "pickle", "tar", "name")


def in_a_small_process(*arguments: str) -> dict[str, Any]:
    """Run this file as a program, which may allocate one gigabyte; what it found."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments], capture_output=True, text=True, timeout=1800
    )
    if found.returncode:
        raise RuntimeError(found.stderr[-2000:])
    return json.loads(found.stdout)


def expand(kind: str) -> dict[str, Any]:
    """What a file that expands needs."""
    form, content = bomb(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bomb"
        path.write_bytes(content)
        return in_a_small_process(form, "0", "0", str(path)) | {"bytes": len(content)}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])))

"""Readers get damaged files: each is read or refused with one line, without other errors and with little memory."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest
from hostile_files import CORPUS, READERS, read, repacked, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

QUICK = settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.simplefilter("ignore", UserWarning)  # old checkpoints


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_of_the_corpus(path: Path, tmp_path: Path) -> None:
    refused = read(path.parent.name, path.read_bytes(), tmp_path)
    if path.name.startswith("good"):
        assert refused is None


@pytest.mark.parametrize("form", READERS)
@QUICK
@given(chance=st.randoms(use_true_random=False))
def test_damaged_files(form: str, chance: random.Random, tmp_path: Path) -> None:
    read(form, repacked(form, chance), tmp_path)


@pytest.mark.parametrize("form", READERS)
@QUICK
@given(content=st.binary(max_size=200))
def test_any_bytes(form: str, content: bytes, tmp_path: Path) -> None:
    read(form, content, tmp_path)


# In a process that may allocate one gigabyte, which counts what it needs.


def in_a_small_process(*arguments: str) -> dict[str, int | str]:
    program = Path(sys.modules[run.__module__].__file__ or "")
    command = [sys.executable, "-W", "ignore", str(program), *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("form", READERS)
def test_thousands_of_damaged_files(form: str) -> None:
    found = in_a_small_process(form, "5000", "0")
    print(found)
    assert "error" not in found, found
    assert int(found["peak_megabytes"]) < 1000


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["idx", "npz", "json", "pickle", "tar", "name"])
def test_files_that_expand_need_little_memory(kind: str) -> None:
    form, content = bomb(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bomb"
        path.write_bytes(content)
        found = in_a_small_process(form, "0", "0", str(path))
    print(kind, len(content), found)
    assert "error" not in found, found
    assert int(found["peak_megabytes"]) < 1000
    assert bool(found["refused"]) == (kind != "json")

"""Formats: what is read is what was written, and what is not in the format is refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import Malicious, idx, wav

from seminode_lab.data import DataError
from seminode_lab.data.idx import read_idx
from seminode_lab.data.pickles import read_pickle
from seminode_lab.data.waves import read_wav


def test_samples_of_a_wav_file(tmp_path: Path) -> None:
    samples = np.array([0, 1, -1, 32767, -32768, 258])
    path = wav(tmp_path / "a.wav", samples)
    found = read_wav(path)
    assert found is not None
    assert found.dtype == torch.int16
    assert found.tolist() == samples.tolist()
    assert read_wav(path, samples=6) is not None
    assert read_wav(path, samples=7) is None
    empty = read_wav(wav(tmp_path / "b.wav", samples[:0]))
    assert empty is not None
    assert len(empty) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 2}, "expected 1 channel, found 2"),
        ({"rate": 8000}, "expected 16,000 samples per second, found 8,000"),
        ({"width": 1}, "expected 16 bits per sample, found 8"),
    ],
)
def test_other_kinds_of_sound_are_refused(options: dict[str, int], message: str, tmp_path: Path) -> None:
    path = wav(tmp_path / "a.wav", np.zeros(100), **options)
    with pytest.raises(DataError, match=rf"a\.wav: {message}"):
        read_wav(path)


def test_broken_wav_files_are_refused(tmp_path: Path) -> None:
    path = wav(tmp_path / "a.wav", np.zeros(100))
    content = path.read_bytes()
    path.write_bytes(content[:-50])
    with pytest.raises(DataError, match=r"a\.wav: truncated: expected 100 samples from its header, found 75"):
        read_wav(path, samples=100)
    for broken in (b"", content[:20], b"not a sound at all, but some text"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.wav: not a wav file that can be read"):
            read_wav(path)
    with pytest.raises(DataError, match=r"nowhere\.wav: No such file"):
        read_wav(tmp_path / "nowhere.wav")


@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_an_idx_file(name: str, tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    content = idx(array)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_idx(tmp_path / name).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected an idx file"),
        (b"PK\x03\x04aaaa", r"expected an idx file, which starts with two zero bytes, found b'PK'"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "expected bytes .type 0x08., found type 0x0d"),
        (b"\0\0\x08\x03\0\0\0\x01", "ends within its header"),
        (b"\0\0\x08\x01\0\0\0\x05abc", r"expected 5 bytes for the shape \(5,\), found 3"),
        (b"\0\0\x08\x01\0\0\0\x02abc", r"expected 2 bytes for the shape \(2,\), found more"),
        (b"\0\0\x08\x02\xff\xff\xff\xff\xff\xff\xff\xff", "expected at most"),
    ],
)
def test_what_is_no_idx_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "a")


def test_broken_gzip_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    whole = gzip.compress(idx(np.arange(200, dtype=np.uint8)))
    for content in (b"no gzip", whole[:-20], whole[:30] + b"spoilt" + whole[36:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.gz: corrupted gzip file"):
            read_idx(path)


# Pickles.

ARRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickled_bytes_of_every_protocol(protocol: int, order: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps({b"data": np.array(ARRAY, order=order), b"labels": [1, 2]}, protocol))
    found = read_pickle(tmp_path / "a")
    assert found[b"labels"] == [1, 2]
    assert found[b"data"].tolist() == ARRAY.tolist()


def python2(array: np.ndarray) -> bytes:
    """A dict with an array as Python 2 and its NumPy pickled it, in protocol 2, as in the official batches."""

    def text(content: bytes) -> bytes:
        if len(content) < 256:
            return b"U" + bytes([len(content)]) + content
        return b"T" + struct.pack("<i", len(content)) + content

    shape = b"".join(b"M" + struct.pack("<H", n) for n in array.shape)
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    made = start + b"(K\x01" + shape + b"\x86" + dtype + b"\x89" + text(array.tobytes()) + b"tb"
    return b"\x80\x02}(" + text(b"data") + made + text(b"labels") + b"](K\x03K\x04eu."


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(python2(ARRAY))
    found = read_pickle(tmp_path / "a")
    assert found[b"data"].tolist() == ARRAY.tolist()
    assert found[b"labels"] == [3, 4]
    # The hand-made one is a pickle indeed.
    trusted = pickle.loads(python2(ARRAY).replace(b"numpy.core.", b"numpy._core."), encoding="bytes")
    assert np.array_equal(trusted[b"data"], ARRAY)


@pytest.mark.parametrize(
    "thing",
    [
        Malicious(os.system, "touch evil"),
        Malicious(eval, "open('evil', 'w')"),
        Malicious(getattr, "a", "upper"),
        Malicious(io.open, "evil", "w"),
        Malicious(np.load, "evil"),
        Path("somewhere"),
        np.arange(3.0),
        {"data": Malicious(os.mkdir, "evil")},
    ],
    ids=["system", "eval", "getattr", "open", "numpy.load", "an object", "float64", "in a dict"],
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_run_something_is_refused(
    thing: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(pickle.dumps(thing, protocol))
    with pytest.raises(DataError, match="a: corrupted or not to be trusted"):
        read_pickle(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "program",
    [
        b"cnumpy\ndtype\n}S'_call'\nI1\nsb.",  # changes a function that it was given
        b"cnumpy.core.multiarray\n_reconstruct\n(tR.",  # an array without content
        b"cnumpy\ndtype\n.",  # a function as the result
        b"\x80\x04\x8c\x05numpy\x8c\x10dtype.__init__\x93.",  # a name with a dot
        b"Pname\n.",  # a persistent id
        b"\x82\x01.",  # an extension
        b"c_codecs\nencode\n(Vx\nVrot13\ntR.",  # another encoding
        b"",
        b"garbage",
        pickle.dumps(ARRAY)[:-30],
        pickle.dumps(ARRAY).replace(b"K\x03K\x04", b"K\x04K\x04"),  # the shape and the bytes disagree
    ],
)
def test_programs_that_are_no_data_are_refused(program: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(program)
    with pytest.raises(DataError, match="a: corrupted or not to be trusted"):
        read_pickle(tmp_path / "a")

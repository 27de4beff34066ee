"""Reading files from anybody: links, pipes and files that are more than they seem are refused, in one line."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import idx, wav

from seminode_lab.data import DataError, cifar
from seminode_lab.data.arrays import read_npz
from seminode_lab.data.cache import cached
from seminode_lab.data.files import digest
from seminode_lab.data.idx import read_idx
from seminode_lab.data.pickles import read_pickle
from seminode_lab.data.reading import content, parsed, read_json
from seminode_lab.data.tensors import load_tensors, save_tensors
from seminode_lab.data.waves import read_wav

READERS: dict[str, Callable[[Path], Any]] = {
    "a.wav": read_wav,
    "a.idx": read_idx,
    "a.gz": read_idx,
    "a.pickle": read_pickle,
    "a.npz": read_npz,
    "a.safetensors": load_tensors,
    "a.json": read_json,
    "a.bin": lambda path: digest(path, "sha256"),
}


@pytest.mark.parametrize("name", READERS)
def test_links_pipes_and_folders_are_refused(name: str, tmp_path: Path) -> None:
    path, other = tmp_path / name, tmp_path / "other"
    other.write_bytes(b"{}")
    path.symlink_to(other)
    with pytest.raises(DataError, match=f"{name}: is a symbolic link, which is not followed; put the file itself"):
        READERS[name](path)
    path.unlink()
    os.mkfifo(path)  # opening it would wait for a writer
    with pytest.raises(DataError, match=f"{name}: expected a file, found a FIFO; remove it"):
        READERS[name](path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=f"{name}: expected a file, found a folder"):
        READERS[name](path)


@pytest.mark.parametrize("name", [name for name in READERS if name != "a.bin"])
def test_a_file_larger_than_its_format_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole, which takes no space
    with pytest.raises(DataError, match=rf"{name}: expected at most [\d,]+ bytes, found 1,099,511,627,776"):
        READERS[name](path)


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert content(tmp_path / "link" / "a", 3) == b"abc"
    with pytest.raises(DataError, match="expected at most 2 bytes, found 3"):
        content(tmp_path / "link" / "a", 2)


# Sound.


def test_a_format_chunk_of_any_stated_size(tmp_path: Path) -> None:
    path = wav(tmp_path / "a.wav", np.arange(100))
    whole = path.read_bytes()
    path.write_bytes(whole[:16] + struct.pack("<I", 1 << 30) + whole[20:])
    with pytest.raises(DataError, match=r"a\.wav: not a wav file that can be read \(it ends too early\)"):
        read_wav(path)


def test_other_chunks_of_a_wav_file_are_skipped(tmp_path: Path) -> None:
    path = wav(tmp_path / "a.wav", np.arange(5))
    whole = path.read_bytes()
    path.write_bytes(whole[:12] + b"LIST" + struct.pack("<I", 3) + b"abc\0" + whole[12:])
    found = read_wav(path)
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4]


def test_an_extensible_format_of_plain_samples(tmp_path: Path) -> None:
    guid = struct.pack("<H", 1) + bytes.fromhex("000000001000800000aa00389b71")
    form = struct.pack("<HHIIHHHHI", 0xFFFE, 1, 16_000, 32_000, 2, 16, 22, 16, 4) + guid
    samples = np.array([1, -2], dtype="<i2").tobytes()
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", 4) + samples
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks)
    found = read_wav(path)
    assert found is not None
    assert found.tolist() == [1, -2]
    path.write_bytes(path.read_bytes().replace(guid, b"\3" + guid[1:]))
    with pytest.raises(DataError, match="expected plain samples, format 1, found format 3"):
        read_wav(path)


# Arrays of bytes.


@pytest.mark.parametrize("shape", [(0, 2**32 - 1, 2**32 - 1), (2**32 - 1, 0, 2**32 - 1), (1,) * 9])
def test_an_empty_array_of_a_huge_shape_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape))
    with pytest.raises(DataError, match="a: expected at most"):
        read_idx(path)


def test_a_small_file_that_expands_to_a_large_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 1 << 27), 1))
    with pytest.raises(DataError, match=r"a\.gz: expected at most 67,108,864 bytes, found the shape"):
        read_idx(path)
    path.write_bytes(gzip.compress(idx(np.zeros(4, np.uint8)) + bytes(1 << 20), 1))
    with pytest.raises(DataError, match=r"a\.gz: expected 4 bytes for the shape \(4,\), found more"):
        read_idx(path)


# Pickles.


def shared(levels: int, last: bytes = b".") -> bytes:
    """A list of two times the list of two times the list ..."""
    program = b"\x80\x02]q\x00K\x01a"
    for level in range(1, levels):
        program += b"](h" + bytes([level - 1]) + b"h" + bytes([level - 1]) + b"eq" + bytes([level])
    return program + last


def test_a_list_that_is_in_many_others_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(shared(40))
    found = read_pickle(tmp_path / "a")
    for _ in range(39):
        assert len(found) == 2
        assert found[0] is found[1]
        found = found[0]
    assert found == [1]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"\x80\x02]r\xff\xff\xff\x0f.", None),  # entry 2^28 of the memo
        (b"\x80\x02]q\x00h\x00a.", "something contains itself"),
        (shared(60), "nested more than 50 levels"),
        (b"\x80\x02" + b"(" * 100 + b"K\x01" + b"t" * 100 + b".", "nested more than 50 levels"),
        (b"\x80\x02" + b"]" * 300_100 + b".", "more than 300,000 instructions"),
        (b"\x80\x02}K\x01\x85K\x01s.", "expected keys that are strings or numbers"),
        (b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\x00\x00.", "expected"),  # a bytearray of 2^48 bytes
        (b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".", "a number of 2,039 bits"),
        (b"\x80\x02\x8f.", "refused the instruction EMPTY_SET"),
        (
            b"\x80\x02X\x00\x00\x10\x00" + b"x" * (1 << 20) + b"q\x00X\x06\x00\x00\x00latin1q\x01"
            b"c_codecs\nencode\nq\x02]" + 200 * b"h\x02h\x00h\x01\x86Ra" + b".",
            "it makes more than 134,217,728 bytes",
        ),
    ],
    ids=["memo", "itself", "shared", "nested", "many", "keys", "length", "number", "set", "copies"],
)
def test_short_programs_that_make_large_data_are_refused(program: bytes, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(program)
    if message is None:
        assert read_pickle(tmp_path / "a") == []
    else:
        with pytest.raises(DataError, match=f"a: corrupted or not to be trusted .*{message}"):
            read_pickle(tmp_path / "a")


def test_shapes_of_pickled_arrays_are_bounded(tmp_path: Path) -> None:
    array = pickle.dumps(np.zeros((0, 3), np.uint8), 2).replace(b"K\x00K\x03", b"K\x00J\xff\xff\xff\x7f")
    (tmp_path / "a").write_bytes(array)
    with pytest.raises(DataError, match="expected a shape of at most 8 sizes"):
        read_pickle(tmp_path / "a")


def test_changed_images_are_named(tmp_path: Path) -> None:
    for name in cifar.BATCHES:
        (tmp_path / name).write_bytes(pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [0]}))
    with pytest.warns(UserWarning, match=r"not the published images: data_batch_1, .* test_batch\)"):
        cifar.cifar10(tmp_path)


# Arrays of numbers.


def zipped(path: Path, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in options.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
        "empty": np.zeros((0, 4), np.int64),
        "number": np.array(3.5),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
        found = read_npz(tmp_path / "a.npz")
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


HUGE = npy(np.zeros(1)).replace(b"(1,), }", b"(1099511627776,), }").replace(b"            \n", b"\n")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HUGE, "found the shape|expected"),
        (npy(np.zeros((2, 3)))[:-8], r"expected 48 bytes for the shape \(2, 3\)"),
        (npy(np.array([{}])), "expected numbers, found object"),
        (b"", "EOF"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "Header info length"),
        (b"\x93NUMPY\x03\x00\x00\x00\x00\x00", "expected version 1.0 or 2.0"),
    ],
    ids=["terabytes", "short", "objects", "empty", "nested header", "version"],
)
def test_other_arrays_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.npz", x=data)
    with pytest.raises(DataError, match=rf"a\.npz: damaged .*({message})"):
        read_npz(path)


def test_other_zip_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "a.npz", x=npy(np.zeros(10)))
    whole = path.read_bytes()
    place = whole.rindex(b"PK\x01\x02")
    encrypted = whole[: place + 8] + b"\x01" + whole[place + 9 :]
    unknown = whole[: place + 10] + b"\x63" + whole[place + 11 :]
    for damaged in (b"", b"no zip", whole[:-10], encrypted, unknown, whole[:60] + b"!!" + whole[62:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.npz: damaged"):
            read_npz(path)
    monkeypatch.setattr("seminode_lab.data.arrays.EXPANDED", 100)
    path.write_bytes(whole)
    with pytest.raises(DataError, match="it expands to more than 100 bytes"):
        read_npz(path)


# JSON.


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"a":' * 100_000, "[" * 65 + "]" * 65, '"\\ud800"', "1" * 5000, "\x00", '{"\\udfff": 1}'],
    ids=["empty", "open", "lists", "objects", "levels", "surrogate", "digits", "zero", "key"],
)
def test_other_text_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json: expected JSON, found something else"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(b'"\xff"')
    with pytest.raises(DataError, match=r"a\.json: expected JSON"):
        read_json(tmp_path / "a.json")


def test_pairs_of_surrogates_are_letters() -> None:
    assert parsed(json.dumps({"a": ["\U0001f600", 1.5, None]})) == {"a": ["\U0001f600", 1.5, None]}


# Tensors.


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(6.0).reshape(2, 3).T,
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.zeros(0, 2),
        "d": torch.ones(3, dtype=torch.bfloat16),
        "e": torch.tensor([True, False]),
    }


def test_every_flipped_bit_of_tensors_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, tensors(), {"key": "ü"})
    found = load_tensors(path)
    assert found.proven
    assert found.about == {"key": "ü"}
    for name, x in tensors().items():
        torch.testing.assert_close(found.tensors[name], x, rtol=0, atol=0)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            other = load_tensors(path)
        except DataError:
            pass
        else:  # the entry of the digest itself has another name, or a space is another one
            same = all(torch.equal(other.tensors[name], x) for name, x in tensors().items())
            assert not other.proven or (same and other.about == {"key": "ü"})


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    path, made = tmp_path / "a.safetensors", []

    def make() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"x": torch.arange(1000.0)}

    for _ in range(2):
        cached(path, "key", make)
    assert len(made) == 1
    whole = bytearray(path.read_bytes())
    whole[-10] ^= 4
    path.write_bytes(whole)
    assert torch.equal(cached(path, "key", make)["x"], torch.arange(1000.0))
    assert len(made) == 2


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"x":1}',
        b'{"x":{"dtype":"F32","shape":[0,9223372036854775807,9223372036854775807],"data_offsets":[0,0]}}',
        b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"Q9","shape":[0],"data_offsets":[0,0]}}',
        b'{"x":{"dtype":"F32","shape":"abc","data_offsets":[0,0]}}',
        b'{"x":' * 5000,
    ],
)
def test_other_headers_of_tensors_are_refused(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(DataError, match=r"a\.safetensors: damaged"):
        load_tensors(path)
    path.write_bytes(struct.pack("<Q", 1 << 62) + header)
    with pytest.raises(DataError, match=r"a\.safetensors: damaged .expected a header of at most"):
        load_tensors(path)

"""Downloads and archives: whole or not at all, whatever happens on the way."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer, serving

from seminode_lab.data import DataError, archives
from seminode_lab.data import download as downloading
from seminode_lab.data.archives import SUMS, unpack, wrong_sums
from seminode_lab.data.download import Resource, download
from seminode_lab.data.files import writing

CONTENT = bytes(range(256)) * 400


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(downloading, "PAUSE", 0.0)
    monkeypatch.setattr(downloading, "TIMEOUT", 5.0)
    monkeypatch.setattr(downloading, "CHUNK", 10_000)
    with serving() as found:
        found.files["thing.bin"] = CONTENT
        yield found


def resource(server: FileServer, content: bytes = CONTENT, **changes: Any) -> Resource:
    given = {
        "addresses": (server.address("thing.bin"),),
        "name": "thing.bin",
        "checksum": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "size": len(content),
    }
    return Resource(**{**given, **changes})


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_download_is_there_whole(server: FileServer, tmp_path: Path) -> None:
    path = download(resource(server), tmp_path / "new" / "folder")
    assert path.read_bytes() == CONTENT
    assert files(path.parent) == ["thing.bin"]
    assert server.requests == [None]


def test_what_is_there_is_not_downloaded_again(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "thing.bin").write_bytes(CONTENT)
    download(resource(server), tmp_path)
    assert server.requests == []


def test_what_is_there_and_wrong_is_not_overwritten(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "thing.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"thing\.bin: expected sha256 .*, found .*; it is not overwritten"):
        download(resource(server), tmp_path)
    assert (tmp_path / "thing.bin").read_bytes() == b"mine"


def test_a_download_goes_on_where_it_ended(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "thing.bin.part").write_bytes(CONTENT[:12_345])
    download(resource(server), tmp_path)
    assert server.requests == ["bytes=12345-"]
    assert (tmp_path / "thing.bin").read_bytes() == CONTENT
    assert files(tmp_path) == ["thing.bin"]


def test_a_server_without_ranges_starts_again(server: FileServer, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "thing.bin.part").write_bytes(CONTENT[:12_345])
    download(resource(server), tmp_path)
    assert (tmp_path / "thing.bin").read_bytes() == CONTENT


def test_a_range_that_is_refused_starts_again(server: FileServer, tmp_path: Path) -> None:
    server.limit = 1000
    (tmp_path / "thing.bin.part").write_bytes(b"x" * 12_345)
    download(resource(server), tmp_path)
    assert server.requests == ["bytes=12345-", None]
    assert (tmp_path / "thing.bin").read_bytes() == CONTENT


def test_a_whole_part_needs_no_server(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "thing.bin.part").write_bytes(CONTENT)
    download(resource(server), tmp_path)
    assert server.requests == []
    assert files(tmp_path) == ["thing.bin"]


def test_a_part_that_is_too_long_is_not_used(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "thing.bin.part").write_bytes(CONTENT + b"more")
    download(resource(server), tmp_path)
    assert (tmp_path / "thing.bin").read_bytes() == CONTENT


def test_a_connection_that_breaks_is_taken_up_again(server: FileServer, tmp_path: Path) -> None:
    server.cut = 30_000
    download(resource(server), tmp_path)
    assert server.requests == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]
    assert (tmp_path / "thing.bin").read_bytes() == CONTENT


def test_a_connection_that_always_breaks_leaves_a_part_to_go_on_from(server: FileServer, tmp_path: Path) -> None:
    server.cut = 10_000
    with pytest.raises(
        DataError, match=r"127\.0\.0\.1.*thing\.bin: the connection ended after 50,000 of 102,400 bytes"
    ):
        download(resource(server), tmp_path)
    assert files(tmp_path) == ["thing.bin.part"]
    server.cut = None
    download(resource(server), tmp_path)
    assert server.requests[-1] == "bytes=50000-"
    assert (tmp_path / "thing.bin").read_bytes() == CONTENT


def test_wrong_content_is_removed(server: FileServer, tmp_path: Path) -> None:
    other = CONTENT[::-1]
    with pytest.raises(
        DataError, match=r"the download differs from the published file: expected sha256 \w+, found \w+"
    ):
        download(resource(server, other), tmp_path)
    assert files(tmp_path) == []


def test_a_file_longer_than_published_is_removed(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected 1,000 bytes, found more"):
        download(resource(server, CONTENT[:1000]), tmp_path)
    assert files(tmp_path) == []


def test_without_a_network_the_address_is_named(tmp_path: Path) -> None:
    with serving() as gone:
        address = gone.address("thing.bin")
        there = resource(gone)
    with pytest.raises(DataError, match=rf"could not download thing\.bin: {address}: cannot be reached .* network\?"):
        download(there, tmp_path)
    assert files(tmp_path) == []


def test_a_missing_file_is_looked_for_at_the_next_address(server: FileServer, tmp_path: Path) -> None:
    addresses = (server.address("moved.bin"), server.address("thing.bin"))
    download(resource(server, addresses=addresses), tmp_path)
    assert (tmp_path / "thing.bin").exists()
    with pytest.raises(DataError, match=r"moved\.bin: the server answered 404"):
        download(resource(server, addresses=addresses[:1], name="other.bin"), tmp_path)


def test_two_downloads_of_one_file_do_not_mix(server: FileServer, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / "thing.bin.part.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is downloading it"):
            download(resource(server), tmp_path)


@pytest.mark.parametrize("suffix", [".part", ".part.lock"])
def test_a_link_in_the_place_of_a_download_is_not_followed(suffix: str, server: FileServer, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / f"thing.bin{suffix}").symlink_to(victim)
    with pytest.raises(DataError, match=rf"thing\.bin{suffix}: is a symbolic link, which is not followed; remove it"):
        download(resource(server), folder)
    assert victim.read_text() == "precious"
    assert not (folder / "thing.bin").exists()


def test_a_pipe_in_the_place_of_a_download_is_refused(server: FileServer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "thing.bin.part")
    with pytest.raises(DataError, match=r"thing\.bin\.part"):
        download(resource(server), tmp_path)
    os.unlink(tmp_path / "thing.bin.part")
    os.mkfifo(tmp_path / "thing.bin")
    with pytest.raises(DataError, match=r"thing\.bin: expected a file, found a FIFO"):
        download(resource(server), tmp_path)


def test_a_server_that_sends_drop_by_drop_is_given_up(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pause between two bytes is longer than the limit for a pause, but the whole would take for ever."""
    monkeypatch.setattr(downloading, "TIMEOUT", 0.1)
    monkeypatch.setattr(downloading, "SLOWEST", 1e7)
    server.pause = 0.02
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"slower than 10,000,000 bytes per second; .* are kept"):
        download(resource(server), tmp_path)
    assert time.monotonic() - begin < 10.0
    assert files(tmp_path) == ["thing.bin.part"]


def test_a_server_that_never_ends_its_header_is_given_up(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloading, "ANSWER", 0.3)
    server.header_pause = 0.05
    with pytest.raises(DataError, match=r"thing\.bin: no answer within 0 seconds"):
        download(resource(server), tmp_path)


class Full(io.FileIO):
    """A file on a full disk."""

    def write(self, content: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.open

    def opened(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        return Full(self, mode) if mode in ("ab", "wb", "xb") else original(self, mode, *args, **options)

    by_handle = os.fdopen

    def opened_by_handle(handle: int, mode: str = "r") -> Any:
        return Full(handle, mode) if mode == "wb" else by_handle(handle, mode)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "fdopen", opened_by_handle)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_said(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"thing\.bin\.part: no space left on the disk \(.* free\)"):
        download(resource(server), tmp_path)
    assert not (tmp_path / "thing.bin").exists()


def test_a_disk_that_is_too_small_is_said_before(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(DataError, match=r"no space left on the disk: 102 kB needed, 1 kB free"):
        download(resource(server), tmp_path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("old")

    def interrupted() -> None:
        with writing(path) as scratch:
            scratch.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    with writing(path) as scratch:
        scratch.write_text("new")
    assert path.read_text() == "new"
    assert files(tmp_path) == ["numbers"]


# Archives.


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_an_archive_is_unpacked_with_sums(tmp_path: Path) -> None:
    members = ((entry("./yes", tarfile.DIRTYPE), b""), (entry("./yes/a.wav"), b"a"), (entry("README"), b"b"))
    unpack(archive(tmp_path / "a.tar.gz", *members), tmp_path / "out")
    assert files(tmp_path) == ["a.tar.gz", "out/README", f"out/{SUMS}", "out/yes/a.wav"]
    assert f"{hashlib.sha256(b'a').hexdigest()}  yes/a.wav\n" in (tmp_path / "out" / SUMS).read_text()
    assert wrong_sums(tmp_path / "out") == []
    (tmp_path / "out" / "README").write_text("c")
    (tmp_path / "out" / "yes" / "a.wav").unlink()
    assert wrong_sums(tmp_path / "out") == ["README has changed since it was unpacked", "yes/a.wav is missing"]
    assert wrong_sums(tmp_path) is None


def test_a_folder_of_an_archive_is_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", (entry("inner/x"), b"1"), (entry("other"), b"2"))
    unpack(path, tmp_path / "out", "inner")
    assert files(tmp_path / "out") == [SUMS, "x"]
    assert wrong_sums(tmp_path / "out") == []
    with pytest.raises(DataError, match="expected a folder 'missing' in it, found inner, other"):
        unpack(path, tmp_path / "again", "missing")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "info",
    [
        entry("../evil"),
        entry("inner/../../evil"),
        entry("/evil"),
        entry("..\\evil"),
        entry("C:evil"),
        entry("link", tarfile.SYMTYPE, "/etc/passwd"),
        entry("link", tarfile.LNKTYPE, "good"),
        entry("device", tarfile.CHRTYPE),
        entry("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: info.name.replace("/", "|"),
)
def test_an_archive_that_reaches_out_is_refused(info: tarfile.TarInfo, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    path = archive(folder / "a.tar.gz", (entry("good"), b"good"), (info, b""))
    with pytest.raises(DataError, match=r"a\.tar\.gz: refused"):
        unpack(path, folder / "out")
    assert files(tmp_path) == ["inside/a.tar.gz"]
    assert list(folder.iterdir()) == [path]


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", (entry("x"), b"1"), (entry("x"), b"2"))
    with pytest.raises(DataError, match="File exists"):
        unpack(path, tmp_path / "out")
    assert files(tmp_path) == ["a.tar.gz"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "no archive"])
def test_a_corrupted_archive_leaves_nothing(damage: str, tmp_path: Path) -> None:
    content = bytes(hashlib.shake_256(b"noise").digest(300_000))
    path = archive(tmp_path / "a.tar.gz", (entry("x"), content), (entry("y"), content))
    raw = path.read_bytes()
    spoilt = {"cut": raw[: len(raw) // 2], "flipped": raw[:50_000] + b"spoilt" + raw[50_006:], "no archive": b"none"}
    path.write_bytes(spoilt[damage])
    with pytest.raises(DataError, match=r"a\.tar\.gz: corrupted archive"):
        unpack(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_unpacked_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(DataError, match="exists already and is not overwritten"):
        unpack(archive(tmp_path / "a.tar.gz", (entry("x"), b"1")), tmp_path / "out")
    assert files(tmp_path / "out") == ["mine"]


def test_a_disk_that_fills_while_unpacking_leaves_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = archive(tmp_path / "a.tar.gz", (entry("x"), b"1"))
    request.getfixturevalue("full_disk")
    with pytest.raises(DataError, match="out: no space left on the disk"):
        unpack(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def tar_gz(path: Path, *blocks: bytes) -> Path:
    path.write_bytes(gzip.compress(b"".join(blocks) + bytes(1024)))
    return path


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = entry(name, kind)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_every_form(form: int, tmp_path: Path) -> None:
    name = "folder/" + 40 * "long" + "/ü" if form != tarfile.USTAR_FORMAT else "folder/" + 40 * "l"
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=form) as tar:
        for each, content in ((name, b"1" * 700), ("b", b"")):
            info = entry(each)
            info.size, info.mtime = len(content), 1.5
            tar.addfile(info, io.BytesIO(content))
    unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == b"1" * 700
    assert (tmp_path / "out" / "b").read_bytes() == b""
    assert wrong_sums(tmp_path / "out") == []


BOMB = 4 << 20  # bytes of zeros, which become 4 kB


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((header("a", BOMB), bytes(BOMB)), "it expands to more than 1,000,000 bytes"),
        ((header("a", 1), padded(b"x"), bytes(1024), bytes(BOMB)), "it expands to more than"),
        ((header("a", BOMB, tarfile.XHDTYPE), bytes(BOMB)), "expected at most 65,536 bytes for a name"),
        ((header("a", BOMB, tarfile.GNUTYPE_LONGNAME), bytes(BOMB)), "expected at most 65,536 bytes for a name"),
        ((header("a", 26, tarfile.XHDTYPE), padded(b"26 GNU.sparse.realsize=99\n")), "which is not supported"),
        ((header("a", 4, tarfile.XHDTYPE), padded(b"9999")), "an extended header that cannot be read"),
        ((header("a", 1), padded(b"x"), b"damaged header".ljust(512, b"!"), header("b", 0)), "corrupted archive"),
        ((header("a", 0).replace(b"a\0", b"\xff\0", 1),), "corrupted archive"),
        ((header("x\ny", 0),), "refused: 'x.ny' has characters that cannot be printed"),
        ((header("a", 1000), bytes(10)), "corrupted archive"),
    ],
    ids=["file", "end", "pax", "longname", "sparse", "record", "header", "surrogate", "newline", "short"],
)
def test_an_archive_that_is_more_than_it_seems_is_refused(
    blocks: tuple[bytes, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "EXPANDED", 1_000_000)
    path = tar_gz(tmp_path / "a.tar.gz", *blocks)
    with pytest.raises(DataError, match=rf"a\.tar\.gz: .*{message}"):
        unpack(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]

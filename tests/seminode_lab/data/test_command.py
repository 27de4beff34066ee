"""The command `seminode data`: what it says of each data set, and with which status it ends."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import pytest
from file_server import serving

from seminode import cli
from seminode_lab.data import CATALOGUE, data_dir
from seminode_lab.data.download import Resource
from seminode_lab.data.folders import cache_dir, features_dir


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMINODE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_status_tells_of_every_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "status", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"data in {tmp_path}" in said
    for name in CATALOGUE:
        assert re.search(rf"^{name} +(absent|complete): [\d,]+( of [\d,]+)? \w+", said, re.MULTILINE), name
    assert said.count("origin ") == said.count("licence ") == len(CATALOGUE)
    assert "speech_commands  absent: 0 of 38,546 clips" in said
    assert "fetch    seminode data fetch speech_commands (2.43 GB)" in said
    assert re.search(r"japanese_vowels +complete: 640 series, 315 kB", said)
    assert list(tmp_path.iterdir()) == []


def test_status_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "yes").mkdir()
    assert cli.main(["data", "status", "speech-commands", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "speech_commands  incomplete: 0 of 38,546 clips" in said
    assert "missing: yes 0 of 4,044, no 0 of 3,941" in said
    assert "missing: validation_list.txt, testing_list.txt" in said
    assert "mnist" not in said


def test_check_ends_with_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data-dir", str(tmp_path)]
    assert cli.main(["data", "check", *given]) == 0  # nothing there is wrong
    assert cli.main(["data", "check", "mnist", *given]) == 1  # but this is asked for
    assert cli.main(["data", "check", "japanese_vowels", "digits", *given]) == 0
    capsys.readouterr()
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"spoilt")
    assert cli.main(["data", "check", *given]) == 1
    assert "mnist            broken: 0 of 70,000 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["status", "cifar-10"], "no data set is called 'cifar-10'; expected some of .*; did you mean cifar10?"),
        (["check", "speech_comands", "mnist"], "did you mean speech_commands?"),
        (["fetch", "imagenet"], "no data set is called 'imagenet'; expected some of speech_commands, mnist, cifar10"),
        (["fetch"], r"fetch: expected names of data sets or all; .* speech_commands \(2.43 GB\), mnist"),
        (["status", "--data-dir", __file__], "--data-dir: expected a folder, found the file"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["data", *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert re.search(rf"^seminode data: .*{message.replace('?', '[?]')}|^seminode data: {message}", said.err)


def test_fetch_brings_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        resource = Resource((server.address("gone.gz"),), "gone.gz", "md5:0", 10)
        monkeypatch.setattr(importlib.import_module("seminode_lab.data.mnist"), "RESOURCES", (resource,))
        assert cli.main(["data", "fetch", "mnist", "japanese_vowels", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert re.match(r"seminode data: mnist: could not download gone\.gz: http://127.*the server answered 404", said.err)
    assert "japanese_vowels  complete" in said.out


def test_an_interruption_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CATALOGUE["mnist"], "fetch", interrupted)
    assert cli.main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "seminode data: interrupted; the same fetch resumes the download\n"


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert data_dir() == tmp_path / "cache" / "seminode"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "seminode"
    monkeypatch.setenv("SEMINODE_DATA", "~/there")
    assert data_dir() == Path.home() / "there"
    assert data_dir("here") == Path("here")
    monkeypatch.setenv("SEMINODE_DATA", __file__)
    with pytest.raises(NotADirectoryError, match="SEMINODE_DATA: expected a folder, found the file"):
        data_dir()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "seminode"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache_dir() == tmp_path / "seminode"


def test_features_go_to_the_cache_where_data_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert features_dir(tmp_path / "new") == tmp_path / "new" / "features"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert features_dir(tmp_path / "new") == cache_dir() / "features"

"""`seminode table`, `seminode figure` and `seminode bench`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import lab_runs
import pytest
from lab_runs import write_all
from project import ROOT

from seminode.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("runs"))


def test_one_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "hnn"]) == 0
    said = capsys.readouterr().out
    assert "double pendulum" in said
    assert "Speech Commands" not in said


def test_all_tables_in_markdown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "--format", "markdown"]) == 0
    said = capsys.readouterr().out
    assert "|---" in said or "| ---" in said or "|:--" in said
    assert said.count("Accepted and rejected steps") == 1


def test_one_figure(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["figure", str(folder), "f6", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out.split()
    assert sorted(Path(path).suffix for path in said) == [".png", ".svg"]
    assert all(Path(path).is_file() for path in said)


@pytest.mark.parametrize("command", ["table", "figure"])
def test_unknown_names_and_folders(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(folder), "f99"]) == 2
    assert "NAME: expected one of the" in capsys.readouterr().err
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "expected a folder of run folders" in capsys.readouterr().err
    assert main([command, str(tmp_path)]) == 1
    assert "found none that is complete" in capsys.readouterr().err


def test_benchmarks_are_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench"]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"seminode bench: works only in a clone of the repository, and {str(tmp_path)!r} is none\n"
    assert printed.out == ""


def test_benchmarks_need_the_other_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchode" else name)
    assert main(["bench"]) == 2
    expected = "seminode bench: needs torchode: pip install -c constraints.txt -e '.[bench]'\n"
    assert capsys.readouterr().err == expected


def test_benchmarks_get_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(
        subprocess, "run", lambda command: (called.append(command), subprocess.CompletedProcess(command, 3))[1]
    )
    assert main(["bench", "--quick", "--problems", "small"]) == 3
    assert called[0][1:] == ["-m", "benchmarks", "--quick", "--problems", "small"]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("config.json", '{"settings": []}', "settings"),
        ("config.json", "[" * 100_000, "nested more than 64 levels"),
        ("metrics.json", '{"a": 1}', "expected a list, found a dict; restore it from a copy"),
        ("result.json", "[]", "expected a dict, found a list; delete it, and the run is resumed"),
        ("result.json", "{}", "damaged"),
        ("config.json", None, "data: expected one of pendulum for 'hnn', found 'moon'"),
    ],
    ids=["settings", "nested", "metrics", "result", "empty", "data"],
)
def test_damaged_runs_are_named_and_others_are_not_affected(
    name: str, change: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hnn = next(row for row in lab_runs.rows() if row.experiment == "hnn")
    for seed in (0, 1):
        lab_runs.write(hnn.changed(seed=seed), tmp_path)
    broken = tmp_path / hnn.changed(seed=1).name / name
    if change is None:
        change = broken.read_text().replace('"data": "pendulum"', '"data": "moon"')
    broken.write_text(change)
    assert main(["table", str(tmp_path), "hnn"]) == 0
    said = capsys.readouterr()
    assert said.out
    (line,) = said.err.splitlines()
    assert line.startswith(f"note: left out: {broken.parent}")
    assert reason in line

"""The data of runs, as the report names them."""

from __future__ import annotations

import json
from pathlib import Path

import lab_runs
import pytest

from seminode_lab import sources
from seminode_lab.settings import rows
from seminode_lab.store import StoreError


def test_the_data_of_runs_are_described(tmp_path: Path) -> None:
    digits = rows("quick")[2]
    lab_runs.write(digits, tmp_path / "runs")
    lab_runs.write(digits.changed(data="mnist"), tmp_path / "runs")
    path = sources.measure(tmp_path / "runs", tmp_path / "empty")
    assert json.loads(path.read_text()).keys() == {"digits"}  # MNIST is absent
    (said,) = sources.sentences(tmp_path / "runs")
    assert said.startswith("digits (UCI Machine Learning Repository")
    assert "1,797 images" in said


def test_what_is_described_stays(tmp_path: Path) -> None:
    """The data of a finished run need not be on this machine any more."""
    lab_runs.write(rows("quick")[2], tmp_path)
    about = {"items": 5, "expected": 9, "unit": "clips", "origin": "here", "notes": ["release 1"]}
    (tmp_path / sources.FILE).write_text(json.dumps({"speech_commands": about}))
    sources.measure(tmp_path)
    assert sources.sentences(tmp_path)[1] == "Speech Commands (here): 5 of 9 clips were at hand; release 1."


def test_a_damaged_description_is_named(tmp_path: Path) -> None:
    assert sources.sentences(tmp_path) == []
    (tmp_path / sources.FILE).write_text('{"mnist": 3}')
    with pytest.raises(StoreError, match="delete it"):
        sources.sentences(tmp_path)

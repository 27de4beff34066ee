"""The committed report says what the committed runs say, to the last digit."""

from __future__ import annotations

import shutil
from pathlib import Path

import lab_runs
import pytest
from project import ROOT

from seminode_lab import report, store, tables
from seminode_lab.repeats import noise_of
from seminode_lab.settings import PRESETS, Settings, all_runs
from seminode_lab.store import CHECKPOINT, Finished

RESULTS = ROOT / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/report.md"))


def test_there_are_results() -> None:
    assert [folder.name for folder in FOLDERS] == ["cpu", "libraries"]


def test_rows_of_three_experiments_are_beside_those_of_another_library() -> None:
    runs = store.runs(RESULTS / "libraries", lambda error: pytest.fail(str(error)))
    table = tables.libraries(runs)
    assert len([row for row in table.rows if len(row) == 1]) == 3
    labels = [row[0] for row in table.rows if len(row) > 1]
    assert labels.count("mixed, seminode") == labels.count("mixed, torchdiffeq") == 3


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_report_follows_from_the_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab_runs.draw_coarsely(monkeypatch)
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("report.*", "figures"))
    written = report.write(copy)
    assert written.markdown.read_text() == (folder / "report.md").read_text()
    committed = {path.name for path in (folder / "figures").iterdir()}
    assert {path.name for path in (copy / "figures").iterdir()} == committed


@pytest.mark.parametrize("folder", [RESULTS / "cpu"], ids=lambda folder: folder.name)
def test_all_runs_of_the_preset_are_there_and_complete(folder: Path) -> None:
    """With the settings that the preset has today, and without what only a run that goes on needs."""
    assert folder.name in PRESETS
    for asked in all_runs(folder.name):
        found = Finished.load(folder / asked.name)
        assert Settings.of_json(found.settings) == asked
        assert found.result is not None
        assert not (folder / asked.name / CHECKPOINT).exists()


def test_the_readme_says_the_same() -> None:
    """`seminode table results/cpu savings --format markdown` prints it."""
    text = (ROOT / "README.md").read_text()
    block = text.partition("<!-- lab -->")[2].partition("<!-- /lab -->")[0]
    runs = store.runs(RESULTS / "cpu", lambda error: pytest.fail(str(error)))
    assert block.strip() == tables.savings(runs, noise_of(RESULTS / "cpu")).markdown().strip()

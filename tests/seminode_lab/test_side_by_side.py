"""Every row on one batch, with seminode and with torchdiffeq."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seminode_lab import side_by_side
from seminode_lab.running import run
from seminode_lab.schedule import Schedule
from seminode_lab.settings import rows
from seminode_lab.store import StoreError

pytest.importorskip("torchdiffeq")

MODEL = (("hidden", 4), ("width", 4))
ROW = rows("quick")[0].changed(model=MODEL, batch=4, sizes=(4, 2, 2), schedule=Schedule(epochs=1, lr=1e-2))


def test_both_libraries_do_the_same_work_and_find_the_same_gradient(tmp_path: Path) -> None:
    run(ROW.changed(mode="best"), tmp_path)
    path = side_by_side.measure(ROW, tmp_path)
    written = path.read_bytes()
    found = json.loads(written)
    assert found["weights"]["run"] == ROW.changed(mode="best").name
    passes = {(each["mode"], each["library"]): each for each in found["passes"]}
    assert all(each["reason"] is None and each["seconds"] > 0 for each in passes.values())
    for mode in ("mixed", "seminorm", "per_tensor"):
        ours, theirs = passes[mode, "seminode"], passes[mode, "torchdiffeq"]
        assert abs(ours["loss"] / theirs["loss"] - 1) < 1e-3
        assert 0.0 <= theirs["distance"] < 5e-2
        assert ours["distance"] is None
        assert abs(ours["backward"] - theirs["backward"]) <= 0.3 * theirs["backward"]
    assert ("best", "torchdiffeq") not in passes
    assert side_by_side.measured_rows(tmp_path) == {ROW.row}
    assert "mixed, torchdiffeq" in side_by_side.table(tmp_path).text()
    assert side_by_side.measure(ROW, tmp_path).read_bytes() == written  # not measured again
    path.write_text("{}")
    with pytest.raises(StoreError, match="delete it to have it made again"):
        side_by_side.table(tmp_path)


def test_without_measurements_there_are_no_rows(tmp_path: Path) -> None:
    assert side_by_side.table(tmp_path).rows == ()

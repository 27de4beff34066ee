"""The last step of the published procedure runs past the end, which costs accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seminode_lab import overshoot
from seminode_lab.figures import overshoot as figures
from seminode_lab.overshoot import Ending
from seminode_lab.settings import rows
from seminode_lab.store import StoreError

ROW = next(row for row in rows("quick") if row.experiment == "cnf").changed(
    model=(("hidden", 4), ("scales", 2), ("blocks", 1))
)


def test_steps_past_the_end_are_measured_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overshoot, "TOLERANCES", (1e-4,))
    monkeypatch.setattr(overshoot, "BATCH", 2)
    found = json.loads(overshoot.measure(ROW, tmp_path).read_text())
    for each in (Ending(**each) for each in found["endings"]):
        assert len(each.last_steps) == 2  # one per block
        assert (each.furthest[1] == 0.0) == each.lands
        assert each.furthest[1] <= 0.0
    (picture,) = figures.pictures(tmp_path)
    assert picture.name == "overshoot"
    assert "times as large" in picture.caption
    (tmp_path / overshoot.FILE).write_text("{}")
    with pytest.raises(StoreError, match="damaged"):
        figures.pictures(tmp_path)

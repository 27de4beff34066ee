"""The scale of a flow's loss: what is counted and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from seminode_lab import loss_scale
from seminode_lab.figures import scale
from seminode_lab.settings import rows
from seminode_lab.store import StoreError

ROW = rows("quick")[2].changed(model=(("hidden", 4), ("scales", 1), ("blocks", 1)), batch=4, sizes=(4, 2, 2))


def test_a_large_loss_makes_the_parameters_decide(tmp_path: Path) -> None:
    path = loss_scale.measure(ROW, tmp_path)
    found = json.loads(path.read_text())
    counts = [loss_scale.ScaledLoss(**each) for each in found["counts"]]
    assert [round(each.factor, 1) for each in counts] == [0.1, 1.0, 10.0, 44.4]  # 64 dimensions
    assert [each.mixed for each in counts] == sorted(each.mixed for each in counts)
    assert counts[-1].mixed > counts[0].mixed
    assert all(each.seminorm <= each.mixed for each in counts)
    (picture,) = scale.pictures(tmp_path)
    (axes,) = picture.figure.axes
    assert list(axes.lines[0].get_ydata()) == [each.mixed for each in counts]
    assert f"{counts[-1].saving:.1f} % at 44.4" in picture.caption
    path.write_text("{}")
    with pytest.raises(StoreError, match="delete them"):
        scale.pictures(tmp_path)


def test_without_measurements_there_is_no_figure(tmp_path: Path) -> None:
    assert scale.pictures(tmp_path) == []

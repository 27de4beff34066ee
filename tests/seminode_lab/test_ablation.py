"""The parts of the mode `best`: what is varied, what is counted, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import seminode as sn
from seminode_lab import ablation
from seminode_lab.ablation_table import ablation as table
from seminode_lab.running import run, task_of
from seminode_lab.schedule import Schedule
from seminode_lab.settings import rows
from seminode_lab.store import StoreError
from seminode_lab.weights import trained

ROW = rows("quick")[0].changed(
    model=(("hidden", 4), ("width", 4)), batch=4, sizes=(4, 2, 2), schedule=Schedule(epochs=1, lr=1e-2)
)


def test_each_part_is_added_alone_and_left_out_once() -> None:
    for experiment, names in (
        ("ncde", ["Replay", "Direct", "safety 1.0", "compile"]),
        ("cnf", ["Replay", "Direct", 'norm="auto"', "compile"]),
        ("hnn", ["Replay", "Direct", "compile"]),
    ):
        found = list(ablation.variants(experiment, 64))
        assert [each.name for each in found if each.kind == "alone"] == names
        (together,) = (each for each in found if each.kind == "together")
        best = ablation.solve_options(experiment, "best", batch=64)
        assert repr(together.options) == repr({**together.options, **best, "compile": True})
        assert "norm" not in together.options
        without = [each for each in found if each.kind == "without"]
        assert len(without) == len(names)
        assert all(repr(each.options) != repr(together.options) for each in without)
    alone = {each.name: each.options for each in ablation.variants("cnf", 64) if each.kind in ("start", "alone")}
    assert alone["mixed norm"]["norm"] == "mixed"
    assert "norm" not in alone['norm="auto"']
    assert isinstance(alone["Replay"]["adjoint"], sn.Replay)


def test_costs_are_counted_with_the_weights_of_a_run_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(ROW.changed(mode="best"), tmp_path)
    monkeypatch.setattr(ablation, "REPEATS", 1)
    known = ablation.variants
    names = ("mixed norm", "seminorm", "Replay")
    monkeypatch.setattr(ablation, "variants", lambda *given: (x for x in known(*given) if x.name in names))
    found = json.loads(ablation.measure(ROW, tmp_path).read_text())
    assert found["weights"]["run"] == ROW.changed(mode="best").name
    assert found["weights"]["updates"] == 1
    costs = {each["name"]: each for each in found["costs"]}
    assert all(each["reason"] is None and each["seconds"] for each in costs.values())
    assert costs["mixed norm"]["backward"] >= costs["seminorm"]["backward"] >= costs["Replay"]["backward"] > 0
    text = table(tmp_path).text()
    assert "mixed norm, only with: Replay" in text
    assert "weights after 1 updates" in text
    (tmp_path / "ablation-ncde.json").write_text("{}")
    with pytest.raises(StoreError, match="damaged"):
        table(tmp_path)


def test_without_measurements_the_table_has_no_rows(tmp_path: Path) -> None:
    assert table(tmp_path).rows == ()


def test_weights_are_those_of_the_same_model_only(tmp_path: Path) -> None:
    settings = ROW.changed(mode="seminorm")
    run(settings, tmp_path)
    found = trained(ROW, tmp_path)
    assert found is not None
    assert found.tensors.keys() == task_of(ROW).model.state_dict().keys()
    assert trained(ROW.changed(model=(("hidden", 5), ("width", 4))), tmp_path) is None

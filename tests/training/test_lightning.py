"""The example with the real Lightning, where it is installed."""

from __future__ import annotations

import csv
import runpy
import warnings
from pathlib import Path

import pytest
from project import ROOT

pytest.importorskip("lightning.pytorch")


def test_the_example_learns_and_logs_every_batch(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, on workers, devices and deprecated names of torch
        example = runpy.run_path(str(ROOT / "examples" / "lightning_rings.py"))
        accuracy = example["train"](8, tmp_path)
    assert accuracy > 0.9
    rows = list(csv.DictReader((tmp_path / "costs.csv").read_text().splitlines()))
    assert len(rows) == 80
    assert all(int(row["nfe"]) > 0 and int(row["backward_nfe"]) > 0 and float(row["seconds"]) > 0 for row in rows)
    (metrics,) = tmp_path.rglob("metrics.csv")
    logged = [row["solve/nfe"] for row in csv.DictReader(metrics.read_text().splitlines()) if row.get("solve/nfe")]
    assert [float(value) for value in logged] == [float(row["nfe"]) for row in rows]

"""The knife edge: the published settings are among those measured, and the counts are those of the solver."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from seminode_lab import knife
from seminode_lab.figures import knife as figure
from seminode_lab.knife import Edge
from seminode_lab.store import StoreError, read_json


@pytest.fixture(scope="module")
def small() -> knife.Problem:
    return knife.problem(batch=4, fitted=5)


@pytest.mark.parametrize("norm", knife.NORMS)
def test_a_solve_takes_two_evaluations_and_six_per_step(small: knife.Problem, norm: str) -> None:
    edge = Edge(varied="points", points=3, tolerance=1e-3)
    assert (knife.evaluations(small, edge, norm) - 2 * 2) % 6 == 0


def test_tighter_tolerances_take_more_evaluations(small: knife.Problem) -> None:
    counts = [knife.evaluations(small, Edge(points=2, tolerance=tolerance), "mixed") for tolerance in (1e-2, 1e-6)]
    assert counts[0] < counts[1]


def test_every_setting_changes_one_quantity() -> None:
    base = dataclasses.asdict(Edge())
    found = list(knife.edges())
    for edge in found:
        changed = {name for name, x in dataclasses.asdict(edge).items() if x != base[name]} - {"varied"}
        assert changed <= {edge.varied}
    published = [edge.varied for edge in found if edge == Edge(varied=edge.varied)]
    assert published == ["interval", "tolerance", "scale", "points"]


def test_the_file_and_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: knife.Problem) -> None:
    chosen = [Edge(name) for name in figure.NAMES]
    chosen += [Edge("interval", interval=0.1), Edge("tolerance", tolerance=1e-3), Edge("scale", scale=10.0)]
    chosen.append(Edge("points", points=2))
    monkeypatch.setattr(knife, "edges", lambda: iter(chosen))
    monkeypatch.setattr(knife, "problem", lambda root: small)
    told: list[str] = []
    path = knife.measure(tmp_path, None, told.append)
    knife.measure(tmp_path, None, told.append)
    assert told == ["the knife edge of the pendulum: 8 settings"]
    counts = read_json(path)["counts"]
    assert counts["mixed"][3] == knife.evaluations(small, Edge("points"), "mixed")
    (picture,) = figure.pictures(tmp_path)
    assert f"There a window takes {counts['mixed'][3]} (" in picture.caption
    path.write_text('{"edges": []}')
    with pytest.raises(StoreError, match=r"knife\.json: damaged"):
        figure.pictures(tmp_path)

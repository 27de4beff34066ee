"""Where savings come from: the watched norm changes nothing, and the prediction is right where the answer is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from seminode.models import MatrixField
from seminode_lab import origins
from seminode_lab.figures import origins as figure
from seminode_lab.origins import Case, Longest, Outcome, SegmentWatch, Sizes
from seminode_lab.store import StoreError, read_json


@pytest.fixture(scope="module")
def series() -> origins.sets.SeriesSet:
    found = origins.samples(0)
    rows = torch.arange(4)
    return dataclasses.replace(found, x=found.x[rows], lengths=found.lengths[rows], labels=found.labels[rows])


SMALL = Case(hidden=4, width=4, layers=1, atol=1e-8)


def test_the_watched_norm_takes_the_steps_of_the_mixed_norm(series: origins.sets.SeriesSet) -> None:
    watch = SegmentWatch()
    (own, record), (plain, _) = (origins.solved(SMALL, series, norm) for norm in (watch, "mixed"))
    assert (own.nfe, own.accepted, own.rejected) == (plain.nfe, plain.accepted, plain.rejected)
    steps = watch.of_steps(record.ratios)
    assert len(steps) == own.accepted + own.rejected
    assert sum(size.mixed <= 1.0 for size in steps) == own.accepted
    assert all(size.mixed == max(size.state, size.params) for size in steps)


def test_ratios_that_were_not_computed_are_an_error() -> None:
    watch = SegmentWatch()
    watch.calls = [Sizes(1.0, 1.0, 0.0), Sizes(2.0, 2.0, 0.0)]
    assert watch.of_steps([2.0]) == [Sizes(2.0, 2.0, 0.0)]
    with pytest.raises(ValueError, match="ratios: expected 2 among the calls of the norm, found 1"):
        watch.of_steps([2.0, 3.0])


def test_the_steps_of_a_smooth_problem() -> None:
    """Errors in proportion to h⁵ that allow steps of 1 / n settle at n steps per knot, after some at the start."""
    for n in (2, 4):
        knots = [Longest(1 / n, 0.5)] * 50
        assert origins.steps_predicted(knots, 1 / n, order=5.0) == 50 * n
    assert origins.steps_predicted([Longest(1.0, 0.0)] * 3, first=1e-3) == 3 + 3  # ten times longer each time


def test_an_outcome(series: origins.sets.SeriesSet) -> None:
    found = origins.outcome(SMALL, series)
    assert found.mixed >= found.seminorm > 0
    assert 0.0 <= found.by_params <= 1.0
    assert abs(found.predicted_saving() - found.saving) < 30.0
    assert list(found.predictions) == ["1", "1.5", "2", "3", "5"]


def test_the_cases_that_judge_are_not_those_the_rule_was_chosen_on(series: origins.sets.SeriesSet) -> None:
    rows = [origins.samples(seed).x for seed in (origins.CHOSEN_ON, *origins.HELD_OUT)]
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            assert not (one[:, None] == other[None]).flatten(2).all(2).any()
    chosen = list(origins.cases())
    found = [Outcome(100, 50, {"1": 50}, 1.0)] * len(chosen)
    sizes = {name: len(each) for name, each in origins.groups(chosen, found).items()}
    assert sizes == {"chosen on": 26, "held out": 52, "smooth": 26}
    assert origins.explained(found) is None


def test_smooth_networks_have_no_kinks(monkeypatch: pytest.MonkeyPatch, series: origins.sets.SeriesSet) -> None:
    built: list[MatrixField] = []

    def build(*args: Any, **given: Any) -> MatrixField:
        built.append(MatrixField(*args, **given))
        return built[-1]

    monkeypatch.setattr(origins, "MatrixField", build)
    origins.solved(dataclasses.replace(SMALL, smooth=True), series, "seminorm")
    kinds = {type(part) for part in built[0].modules()}
    assert torch.nn.Softplus in kinds
    assert torch.nn.ReLU not in kinds


def test_one_quantity_is_varied_at_a_time() -> None:
    base = Case().options()
    for case in origins.variations():
        changed = {name for name, x in case.options().items() if x != base[name]}
        allowed = {"the base case": set(), "rtol": {"rtol", "atol"}}.get(case.varied, {case.varied})
        assert changed <= allowed


def test_the_file_and_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, series: origins.sets.SeriesSet
) -> None:
    both = [SMALL, dataclasses.replace(SMALL, varied="atol", atol=1e-3)]
    chosen = [*both, *(dataclasses.replace(case, seed=1) for case in both), dataclasses.replace(SMALL, smooth=True)]
    monkeypatch.setattr(origins, "cases", lambda: iter(chosen))
    monkeypatch.setattr(origins, "samples", lambda seed: series)
    told: list[str] = []
    path = origins.measure(tmp_path, told.append)
    before = path.read_bytes()
    origins.measure(tmp_path, told.append)
    assert path.read_bytes() == before
    assert told == ["where savings come from: 5 cases"]
    found = read_json(path)
    held_out = [Outcome(**row) for row in found["outcomes"][2:4]]
    assert found["explained"]["held out"]["5"] == pytest.approx(origins.explained(held_out, 5.0))
    (picture,) = figure.pictures(tmp_path)
    assert "On the 2 other cases, with other weights and samples, it explains" in picture.caption
    assert "after several others had been tried, on the 2 cases with open markers" in picture.caption
    path.write_text('{"cases": []}')
    with pytest.raises(StoreError, match=r"origins\.json: damaged"):
        figure.pictures(tmp_path)

"""Settings say all that decides a run, survive being written down, and are those of the paper."""

from __future__ import annotations

import json

import pytest

from seminode_lab.settings import Settings, all_runs, rows


def test_the_papers_rows() -> None:
    found = rows("paper")
    assert [row.row for row in found] == [
        "ncde-speech_commands-0.001",
        "ncde-speech_commands-0.0001",
        "ncde-speech_commands-1e-05",
        "cnf-cifar10-64",
        "cnf-mnist-32",
        "cnf-mnist-64",
        "cnf-mnist-128",
        "hnn-pendulum",
    ]
    assert {(row.batch, row.schedule.epochs) for row in found} == {(1024, 200), (256, 100), (256, 50)}
    # Five repeats of two norms, three of the flows, and ours beside them.
    assert len(all_runs("paper")) == 3 * 5 * 3 + 4 * 3 * 3 + 5 * 4


def test_runs_have_names_of_their_own_and_survive_json() -> None:
    found = all_runs("paper")
    assert len({run.name for run in found}) == len(found)
    for run in found:
        assert Settings.of_json(json.loads(json.dumps(run.as_json()))) == run


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="preset: expected one of quick, cpu, long, paper, found 'papr'; did you"):
        rows("papr")
    with pytest.raises(
        ValueError, match="experiment: expected one of ncde, cnf, hnn, found 'cde'; did you mean 'ncde'"
    ):
        rows("paper")[0].changed(experiment="cde")
    with pytest.raises(ValueError, match="mode: expected one of"):
        rows("paper")[0].changed(mode="fast")


def test_runs_of_a_seed_begin_with_the_same_weights_where_a_preset_says_so() -> None:
    found = [run for run in all_runs("cpu") if run.experiment == "ncde" and run.seed == 1]
    assert len(found) == 9
    (first,) = {run.before() for run in found}
    assert first is not None
    assert (first.mode, first.rtol, first.atol, first.seed) == ("best", 1e-3, 1e-6, 1)
    assert first.before() is None
    for run in (*found, first):
        assert Settings.of_json(json.loads(json.dumps(run.as_json()))) == run
    assert all(run.before() is None for run in all_runs("paper"))


def test_a_start_may_have_tolerances_of_its_own() -> None:
    flow = next(row for row in rows("long") if row.row == "cnf-mnist-32")
    first = flow.before()
    assert first is not None
    assert (first.rtol, first.atol, first.mode, first.start) == (1e-3, 1e-3, "best", None)
    assert Settings.of_json(flow.as_json()) == flow
    assert first.sizes is not None
    assert first.schedule.epochs * -(-first.sizes[0] // first.batch) == 9375
    cde = rows("cpu")[2].before()
    assert cde is not None
    assert (cde.rtol, cde.atol) == (1e-3, 1e-6)


def test_additions_do_not_change_the_settings_of_older_runs() -> None:
    """A folder from before an addition to the settings holds the same JSON as one from after it."""
    for row in (*rows("cpu"), *rows("paper")):
        found = row.as_json()
        assert not {"shifts", "library"} & found.keys()
        assert "decay" not in found["schedule"]
        assert "rtol" not in found.get("start", {})

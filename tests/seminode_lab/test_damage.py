"""Damaged run folders: whatever is wrong with a file, the run is named with the file, and no other run is affected."""

from __future__ import annotations

import copy
import json
import random
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lab_runs
import numpy as np
import pytest

from seminode.cli import main
from seminode_lab import report, store, tables
from seminode_lab.measures import gather
from seminode_lab.report.content import content
from seminode_lab.settings import Settings
from seminode_lab.store import Finished, StoreError

JSON = (store.CONFIG, store.METRICS, store.RESULT)
ABSENT = object()
VALUES = (None, float("nan"), -1, float("inf"), 10**400, "x", [], {}, True, ABSENT)
EXPERIMENTS = ("ncde", "cnf", "hnn")


def rows() -> dict[str, Settings]:
    """A run of each experiment, each with all optional settings somewhere."""
    found = {row.experiment: row for row in lab_runs.rows()}
    found["cnf"] = found["cnf"].changed(probe=1e-5, sizes=(640, 96, 192))
    return found


def write(experiment: str, folder: Path, seed: int = 0) -> Path:
    path = lab_runs.write(rows()[experiment].changed(seed=seed), folder)
    if experiment == "cnf":
        metrics = json.loads((path / store.METRICS).read_text())
        for each in metrics:
            each["probe"] = {"iterations": 4 * each["epoch"], "mixed": [90, 80], "seminorm": [70, 60], "best": [50, 40]}
        store.write_json(path / store.METRICS, metrics)
    return path


Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """All places in a JSON value: leaves, and lists and dicts as well."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in parts:
        yield from places(each, (*at, name))


def damaged(value: Any, at: Place, by: Any) -> Any:
    """The JSON value with another one at a place, or without it."""
    if not at:
        return by
    found = copy.deepcopy(value)
    part = found
    for name in at[:-1]:
        part = part[name]
    if by is ABSENT:
        del part[at[-1]]
    else:
        part[at[-1]] = by
    return found


def read(folder: Path) -> None:
    """Make everything of the runs in a folder that a report has, but its pictures."""
    wrong: list[StoreError] = []
    runs = store.runs(folder, wrong.append)
    gathered = gather(runs)
    left_out = {**{str(error): str(error) for error in wrong}, **gathered.left_out}
    assert len(gathered.problems) + len(left_out) == 1
    for why in left_out.values():
        assert any(name in why for name in (*JSON, "not complete", "made with")), why
        assert "\n" not in why
    if gathered.problems:
        tables.all_tables(runs)
        content(gathered, runs, [], "", folder)
        report.in_short(runs, folder)


Case = tuple[str, str, Place, int]


@cache
def whole(experiment: str) -> dict[str, Any]:

    with tempfile.TemporaryDirectory() as folder:
        path = write(experiment, Path(folder))
        return {name: json.loads((path / name).read_text()) for name in JSON}


def cases() -> list[Case]:
    """Experiment, file, place and value of all damages."""
    return [
        (experiment, name, at, i)
        for experiment in EXPERIMENTS
        for name in JSON
        for at in places(whole(experiment)[name])
        for i, by in enumerate(VALUES)
        if at or by is not ABSENT
    ]


def try_all(chosen: list[Case], folder: Path) -> None:
    paths = {experiment: write(experiment, folder / experiment) for experiment in EXPERIMENTS}
    failed: list[str] = []
    for experiment, name, at, i in chosen:
        path, value = paths[experiment] / name, whole(experiment)[name]
        path.write_text(json.dumps(damaged(value, at, VALUES[i])))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about losses that are not finite
                read(folder / experiment)
        except Exception as error:
            failed.append(f"{experiment}: {name} with {VALUES[i]!r:.30} at {at}: {error!r:.200}")
        path.write_text(json.dumps(value))
    assert not failed


def test_every_damage_is_named_or_harmless(tmp_path: Path) -> None:
    """A sample of all damages."""
    try_all(random.Random(7).sample(cases(), 80), tmp_path)


@pytest.mark.slow
def test_all_damages_are_named_or_harmless(tmp_path: Path) -> None:
    try_all(cases(), tmp_path)


def test_undamaged_runs_are_read(tmp_path: Path) -> None:
    for experiment in EXPERIMENTS:
        write(experiment, tmp_path)
    runs = store.runs(tmp_path, lambda error: pytest.fail(str(error)))
    assert not gather(runs).left_out
    assert len(gather(runs).problems) == 3
    for run in runs:
        run.check()


# Files that are no files, links, and arrays.


def two(folder: Path) -> tuple[Path, Path]:
    """Two runs of the pendulum: a healthy one, and one to damage."""
    return write("hnn", folder), write("hnn", folder, seed=1)


def one_is_named(folder: Path, broken: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`seminode table` prints the healthy run, and one line about the other with the file."""
    assert main(["table", str(folder), "hnn"]) == 0
    said = capsys.readouterr()
    assert "double pendulum" in said.out
    (line,) = said.err.splitlines()
    assert line.startswith(f"note: left out: {broken}")
    assert name in line
    assert "expected" in line or "symbolic link" in line


@pytest.mark.parametrize("name", [*JSON, "times-0010.npz", "control.npz"])
@pytest.mark.parametrize("kind", ["dangling", "looping", "folder"])
def test_what_is_no_file_is_named(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, broken = two(tmp_path)
    path = broken / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "looping" else tmp_path / "nowhere")
    one_is_named(tmp_path, broken, name, capsys)


def test_a_run_without_its_settings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, broken = two(tmp_path)
    (broken / store.CONFIG).unlink()
    one_is_named(tmp_path, broken, store.CONFIG, capsys)


def test_a_run_folder_that_is_a_link_to_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("hnn", tmp_path)
    broken = tmp_path / "hnn-pendulum-mixed-1"
    broken.symlink_to(tmp_path / "nowhere")
    one_is_named(tmp_path, broken, store.CONFIG, capsys)


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("control", "ts", np.zeros(3), "expected as many states and torques as times"),
        ("control", "published_states", np.zeros(400), "expected finite numbers in 2 dimensions and 4 columns"),
        ("control", "braked_torques", np.full((400, 2), np.nan), "expected finite numbers in 2 dimensions"),
        ("times-0010", "evaluations", np.zeros((2, 2)), "expected finite numbers in 1 dimension, found the shape"),
        ("times-0010", "rejected", np.array([np.inf]), "expected finite numbers in 1 dimension"),
        ("times-0010", "accepted", np.array([1j]), "found complex128"),
    ],
)
def test_damaged_arrays_are_named(
    name: str, key: str, value: np.ndarray, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, broken = two(tmp_path)
    found = Finished.load(broken).arrays(name)
    np.savez(broken / f"{name}.npz", **{**found, key: value})  # type: ignore[arg-type]
    assert main(["table", str(tmp_path), "hnn"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{broken / name}.npz: " in line
    assert reason in line


@pytest.mark.parametrize("name", [store.RESULT, store.CHECKPOINT, store.METRICS])
def test_a_run_does_not_start_over_where_a_link_leads_nowhere(name: str, tmp_path: Path) -> None:
    path = write("hnn", tmp_path)
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=f"{name}.*(symbolic link|expected)"), store.Run(path, opened(path)) as run:
        {store.RESULT: run.result, store.CHECKPOINT: run.checkpoint, store.METRICS: lambda: run.rewind(0)}[name]()
    assert run.done
    assert (path / name).is_symlink()


def opened(path: Path) -> dict[str, Any]:
    return json.loads((path / store.CONFIG).read_text())


def test_the_report_names_damaged_runs_and_shows_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "draw", lab_runs.draw)
    wanted = {
        1: (store.CONFIG, ("settings", "rtol"), float("nan"), "config.json: settings.rtol: expected a finite number"),
        2: (store.METRICS, (2, "validation", "accuracy"), ABSENT, "metrics.json: [2].validation.accuracy: expected"),
        3: (store.RESULT, ("epochs",), float("nan"), "result.json: epochs: expected a whole number"),
        4: (store.RESULT, ("epochs",), 10**400, "result.json: epochs: expected a whole number"),
    }
    write("ncde", tmp_path)
    for seed, (name, at, by, _) in wanted.items():
        path = write("ncde", tmp_path, seed) / name
        path.write_text(json.dumps(damaged(json.loads(path.read_text()), at, by)))
    damaged_start = write("ncde", tmp_path / "starts") / store.METRICS
    damaged_start.write_text("[]")
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == 5
    for seed, (_, _, _, reason) in wanted.items():
        assert sum(f"mixed-{seed} is left out" in line and reason in line for line in lines) == 1
    assert sum("starts/ncde" in line and "metrics.json" in line for line in lines) == 1
    assert "Speech Commands" in said.out

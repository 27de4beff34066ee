"""Runs from settings: each experiment trains, is written down, and is not made twice."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seminode_lab import running
from seminode_lab.data import Images, ImageSet
from seminode_lab.models import pendulum
from seminode_lab.schedule import Schedule
from seminode_lab.settings import PRESETS, CommonStart, Settings, rows
from seminode_lab.store import CHECKPOINT, METRICS, Checkpoint, Finished
from seminode_lab.task import SPLITS, Outcome

BRIEF = Schedule(epochs=1, lr=1e-3)


def small(experiment: str, **changes: Any) -> Settings:
    given: dict[str, Any] = {"experiment": experiment, "preset": "test", "mode": "seminorm", "rtol": 1e-2, "atol": 1e-2}
    given |= {"batch": 4, "schedule": BRIEF, "sizes": (6, 3, 3)}
    own = {
        "ncde": {"data": "japanese_vowels", "model": (("hidden", 4), ("width", 4))},
        "cnf": {"data": "mnist", "model": (("hidden", 2), ("scales", 2), ("blocks", 1))},
        "hnn": {"data": "pendulum"},
    }
    return Settings(**{**given, **own[experiment], **changes})


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that takes no time."""
    parts = pendulum.split(pendulum.trajectories(trials=8))
    windows = pendulum.Split(*(pendulum.windows(part) for part in parts))
    monkeypatch.setattr(running.sets, "pendulum", lambda root: windows)
    images = ImageSet(torch.randint(256, (8, 1, 4, 4), dtype=torch.uint8), torch.zeros(8, dtype=torch.long))
    monkeypatch.setattr(running.sets, "mnist", lambda root: Images(images, images))


@pytest.mark.usefixtures("sets")
@pytest.mark.parametrize("experiment", ["ncde", "cnf", "hnn"])
def test_every_experiment_runs(tmp_path: Path, experiment: str) -> None:
    settings = small(experiment)
    result = running.run(settings, tmp_path)
    found = Finished.load(tmp_path / settings.name)
    assert found.result == result
    assert Settings.of_json(found.settings) == settings
    assert found.config["circumstances"]["torch"] == torch.__version__
    assert result["train"]["samples"] == 6
    assert result["test"]["samples"] == 3
    assert result["test"]["backward_nfe"] > 0
    assert ("accuracy" in result["test"]) == (experiment == "ncde")


def test_what_direct_keeps_is_not_a_saving(tmp_path: Path) -> None:
    """It evaluates nothing again, and pulls every stage of every step back."""
    settings = small("ncde", mode="best")
    assert settings.batch <= 256  # so it is Direct
    result = running.run(settings, tmp_path)
    for numbers in (result["test"], result["totals"]):
        assert numbers["backward_nfe"] == 6 * numbers["backward_accepted"] > 0


def test_a_complete_run_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = running.run(small("ncde"), tmp_path)
    monkeypatch.setattr(running, "task_of", None)
    assert running.run(small("ncde"), tmp_path) == result


def test_the_seed_decides_the_model() -> None:
    first, again, other = (running.task_of(small("ncde", seed=seed)).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_validation_series_are_not_trained_on() -> None:
    parts = running.series(small("ncde", sizes=None), None)
    assert [len(parts[split]) for split in ("train", "validation", "test")] == [216, 54, 370]
    assert all((parts["validation"].labels == speaker).sum() == 6 for speaker in range(9))


def test_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    series = running.series(small("ncde", sizes=(2, 2, 2)), None)["train"]
    data = {split: replace(series, x=torch.zeros(2, 161, 20), labels=torch.tensor([0, 9])) for split in SPLITS}
    monkeypatch.setattr(running, "series", lambda settings, root: data)
    model = running.task_of(rows("paper")[0]).model
    assert sum(x.numel() for x in model.parameters()) == 88_940


def test_reduced_sets_are_the_same_for_every_seed() -> None:
    first, other = (running.series(small("ncde", seed=seed), None)["train"] for seed in (0, 1))
    assert torch.equal(first.lengths, other.lengths)
    assert len(set(first.labels.tolist())) > 1


def test_unknown_data() -> None:
    with pytest.raises(ValueError, match="data: expected speech_commands or japanese_vowels for 'ncde', found 'mnist'"):
        running.task_of(small("ncde", data="mnist"))
    with pytest.raises(
        ValueError, match="data: expected one of mnist, mnist14, cifar10, digits for 'cnf', found 'faces'"
    ):
        running.task_of(small("cnf", data="faces"))


STARTED = {"start": CommonStart(Schedule(epochs=2, lr=1e-2), sizes=(8, 3, 3)), "schedule": Schedule(epochs=1, lr=0.0)}


def test_runs_begin_where_another_has_come_to(tmp_path: Path) -> None:
    """With a learning rate of zero they end there too, in every mode and at every tolerance; the start is made once."""
    weights = []
    for changes in ({"rtol": 1e-3, "mode": "mixed"}, {"rtol": 1e-4, "mode": "best"}):
        settings = small("ncde", **STARTED, **changes)
        running.run(settings, tmp_path)
        weights.append(Checkpoint.load(tmp_path / settings.name / CHECKPOINT).part("model"))
    (folder,) = (tmp_path / running.STARTS).iterdir()
    start = Checkpoint.load(folder / CHECKPOINT).part("best")
    fresh = running.task_of(small("ncde")).model.state_dict()
    for name, x in start.items():
        assert all(torch.equal(x, found[name]) for found in weights)
    assert not all(torch.equal(fresh[name], x) for name, x in start.items())
    assert Finished.load(folder).result["train"]["samples"] == 8  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.usefixtures("sets")
def test_runs_of_a_flow_begin_with_the_last_weights_of_their_start(tmp_path: Path) -> None:
    """The schedules of flows select no weights, so the "best" ones of a checkpoint are those of the beginning."""
    once = {"selects": False, "optimiser": "Adam"}
    start = CommonStart(Schedule(epochs=1, lr=1e-2, **once), sizes=(6, 3, 3))
    settings = small("cnf", start=start, schedule=Schedule(epochs=1, lr=0.0, **once))
    running.run(settings, tmp_path)
    (folder,) = (tmp_path / running.STARTS).iterdir()
    trained = Checkpoint.load(folder / CHECKPOINT).part("model")
    begun = Checkpoint.load(tmp_path / settings.name / CHECKPOINT).part("model")
    fresh = running.task_of(settings).model.state_dict()
    assert all(torch.equal(x, begun[name]) for name, x in trained.items())
    assert not all(torch.equal(x, fresh[name]) for name, x in trained.items())


def test_a_start_that_is_a_run_of_the_preset_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small("ncde", rtol=1e-3, atol=1e-6, schedule=BRIEF, preset="tiny")
    later = first.changed(rtol=1e-4, atol=1e-7, start=CommonStart(BRIEF, first.sizes))
    monkeypatch.setitem(PRESETS, "tiny", ((first, later), {"ncde": 1}))
    running.run(later.changed(mode="seminorm"), tmp_path)
    assert (tmp_path / first.changed(mode="best").name / CHECKPOINT).exists()
    assert not (tmp_path / running.STARTS).exists()


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_there_again(tmp_path: Path) -> None:
    settings = small("ncde", **STARTED)
    result = running.run(settings, tmp_path)
    folder = tmp_path / settings.name
    for name in (CHECKPOINT, "result.json"):
        (folder / name).unlink()
    assert (folder / METRICS).exists()
    assert running.run(settings, tmp_path)["test"]["loss"] == result["test"]["loss"]


def test_a_complete_run_does_not_need_its_start(tmp_path: Path) -> None:
    settings = small("ncde", **STARTED)
    result = running.run(settings, tmp_path)
    shutil.rmtree(tmp_path / running.STARTS)
    assert running.run(settings, tmp_path) == result
    assert not (tmp_path / running.STARTS).exists()


def test_what_is_compiled_is_made_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pass over a batch of the usual size that leaves no gradients; where nothing is compiled there is none."""
    task = running.task_of(small("ncde"))
    seen = []
    whole = task.outcome

    def outcome(batch: tuple[str, torch.Tensor], record: bool) -> Outcome:
        seen.append(len(batch[1]))
        task.model.options["compile"] = False  # it was asked for: that is enough here
        return whole(batch, record)

    monkeypatch.setattr(task, "outcome", outcome)
    task.prepare()
    assert seen == []
    task.model.options["compile"] = True
    task.prepare()
    assert seen == [4]
    assert all(x.grad is None for x in task.model.parameters())

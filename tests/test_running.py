"""Runs from settings: each experiment trains, is written down, and is not made twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seminode.experiments import running
from seminode.experiments.data import Images, ImageSet
from seminode.experiments.settings import Settings, rows
from seminode.experiments.store import Finished
from seminode.experiments.training import SPLITS, Schedule
from seminode.models import pendulum

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
    with pytest.raises(ValueError, match="data: expected one of mnist, cifar10, digits for 'cnf', found 'faces'"):
        running.task_of(small("cnf", data="faces"))

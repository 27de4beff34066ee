"""The experiments as tasks: batches hold every sample once, losses are what they say, and solves are counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

import seminode as sn
from seminode.models import MultiscaleCNF, NeuralCDE
from seminode_lab.data import SeriesSet, japanese_vowels
from seminode_lab.models import pendulum
from seminode_lab.models.paper import pendulum_symoden
from seminode_lab.task import SPLITS
from seminode_lab.tasks import FlowTask, PendulumTask, SeriesTask


def series_task(**options: Any) -> SeriesTask:
    train, test = japanese_vowels()
    few = {
        split: SeriesSet(part.x[:10], part.lengths[:10], part.labels[:10])
        for split, part in zip(SPLITS, (train, test, test), strict=True)
    }
    model = NeuralCDE(channels=12, hidden=4, outputs=9, path="linear", rtol=1e-2, atol=1e-2, **options)
    return SeriesTask(model, few, batch=4)


def flow_task(**options: Any) -> FlowTask:
    pixels = torch.randint(256, (5, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    model = MultiscaleCNF((1, 4, 4), hidden=4, scales=2, blocks=1, rtol=1e-2, atol=1e-2, **options)
    return FlowTask(model, dict.fromkeys(SPLITS, pixels), batch=3, flips=True)


def pendulum_task(**options: Any) -> PendulumTask:
    parts = pendulum.split(pendulum.trajectories(trials=8))
    windows = {split: pendulum.windows(part)[:6] for split, part in zip(SPLITS, parts, strict=True)}
    return PendulumTask(pendulum_symoden(**options), windows, pendulum.DT, batch=4)


TASKS = {"series": series_task, "flow": flow_task, "pendulum": pendulum_task}


@pytest.mark.parametrize("name", TASKS)
def test_batches_hold_every_sample_once(name: str) -> None:
    task = TASKS[name]()
    for split in SPLITS:
        rows = [rows for _, rows in task.batches(split, shuffle=True)]
        assert sorted(torch.cat(rows).tolist()) == list(range(task.samples(split)))
        assert max(map(len, rows)) == task.batch
    torch.manual_seed(3)
    first = [rows.tolist() for _, rows in task.batches("train", shuffle=True)]
    torch.manual_seed(3)
    assert [rows.tolist() for _, rows in task.batches("train", shuffle=True)] == first


@pytest.mark.parametrize("name", TASKS)
def test_solves_are_counted_and_recorded(name: str) -> None:
    task = TASKS[name](adjoint=sn.Backsolve(norm="mixed", restart="fresh"))
    batch = next(iter(task.batches("train", shuffle=False)))
    outcome = task.outcome(batch, record=True)
    outcome.loss.backward()
    assert math.isfinite(outcome.loss.item())
    assert outcome.samples == task.batch
    assert len(outcome.stats) == len(outcome.records) == (2 if name == "flow" else 1)
    for stats, record in zip(outcome.stats, outcome.records, strict=True):
        assert stats.backward is not None
        assert record.backward is not None
        assert len(record.evaluations) == stats.nfe
        assert len(record.backward.evaluations) == stats.backward.nfe > 0
    assert not task.outcome(batch, record=False).records


def test_right_answers_are_counted() -> None:
    task = series_task()
    split, rows = next(iter(task.batches("train", shuffle=False)))
    data = task.data[split]
    with torch.no_grad():
        logits = task.model(data.x[rows], lengths=data.lengths[rows])
        loss, right = task.loss(split, rows)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, data.labels[rows]))
    assert right == int((logits.argmax(1) == data.labels[rows]).sum())


def test_the_pendulum_is_compared_at_all_times() -> None:
    task = pendulum_task()
    split, rows = next(iter(task.batches("test", shuffle=False)))
    windows = task.data[split][rows]
    with torch.no_grad():
        found = task.model(windows[:, 0], 0.05 * torch.arange(8, dtype=torch.float64))
        loss, _ = task.loss(split, rows)
    assert found.shape == (8, 4, 8)
    torch.testing.assert_close(loss, (found.transpose(0, 1) - windows).square().mean())


class Perfect(torch.nn.Module):
    """Knows the true pendulum: its forces, its actuation and its mass."""

    def __init__(self, damping: float):
        super().__init__()
        self.damping = damping

    def control(self, x: torch.Tensor, damping: float = 1.0) -> torch.Tensor:
        cos, sin, w = x[:2].double(), x[2:4].double(), x[4:6].double()
        s12 = sin[0] * cos[1] + cos[0] * sin[1]
        force = torch.stack((14.7 * sin[0] + 4.9 * s12, 4.9 * s12)) + torch.tensor([-1e-3, 0.0])
        d1, d2 = 3.5 + cos[1], 1.25 + 0.5 * cos[1]
        actuation = torch.stack((torch.tensor([0.0, -1.0]).to(x), torch.stack((torch.ones(()), -d2 / d1)).to(x)))
        return torch.linalg.solve(actuation, (2.0 * force - self.damping * damping * w).to(x))


@pytest.mark.parametrize(("damping", "stands"), [(4.0, True), (0.0, False)])
def test_a_trial_swings_the_pendulum_up(damping: float, stands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    task: Any = pendulum_task()
    monkeypatch.setattr(task, "model", Perfect(damping))
    monkeypatch.setattr(task, "brake", lambda: 1.0)
    trial = task.trial()
    assert trial.name == "control"
    for name in ("published", "braked"):
        assert trial.arrays[f"{name}_states"].shape == (400, 4)
        assert trial.arrays[f"{name}_torques"].shape == (400, 2)
        assert (max(trial.numbers[name]["off"]) < 0.01) == stands
        assert (trial.numbers[name]["settled"] is not None) == stands


def test_torques_that_are_no_numbers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    task: Any = pendulum_task()
    monkeypatch.setattr(task.model, "control", lambda x, damping=1.0: torch.full((2,), math.nan))
    trial = task.trial()
    assert trial.numbers == {"published": None, "braked": None}
    assert trial.arrays == {}


def test_series_are_shifted_in_training_only() -> None:
    """By other numbers in every epoch, which do not depend on the mode, and by no more than the given number."""
    x = torch.arange(12.0).reshape(1, 12, 1).expand(40, 12, 1)
    data = {split: SeriesSet(x, torch.full((40,), 12), torch.zeros(40, dtype=torch.long)) for split in SPLITS}
    task = SeriesTask(NeuralCDE(1, 2, 2), data, batch=40, shifts=2)
    torch.manual_seed(0)
    first, second = (next(iter(task.batches("train", shuffle=False))) for _ in range(2))
    assert set(first[2].tolist()) == {-2, -1, 0, 1, 2}
    assert not torch.equal(first[2], second[2])
    assert len(next(iter(task.batches("test", shuffle=False)))) == 2
    task.model.eval()
    assert len(next(iter(task.batches("train", shuffle=False)))) == 2

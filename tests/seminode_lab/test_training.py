"""The paper's schedule, to the evaluation; and runs that are killed end as if they had not been."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from project import TESTS
from torch import Tensor, nn

import seminode as sn
from seminode_lab.progress import TrainingCallbacks
from seminode_lab.schedule import Schedule
from seminode_lab.store import Checkpoint, Finished, Run, StoreError
from seminode_lab.task import Outcome, Task
from seminode_lab.training import Training, TrainingFailed, drifts, seed_of


class Spiral(Task[nn.Sequential]):
    """A few series to fit, in three batches."""

    accuracy = True

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
        self.data = torch.randn(6, 2)
        self.seen: list[tuple[str, bool]] = []

    def batches(self, split: str, shuffle: bool) -> Iterator[Tensor]:
        self.seen.append((split, self.model.training))
        return iter(self.data[torch.randperm(6)].split(2))

    def outcome(self, batch: Tensor, record: bool) -> Outcome:
        sol = sn.solve(
            lambda t, y: self.model(y), batch, [0.0, 1.0], rtol=1e-3, adjoint=sn.Backsolve(norm="mixed"), record=record
        )
        error = (sol.ys[-1] - torch.tensor([1.0, 0.0])).square().sum(1)
        records = [] if sol.record is None else [sol.record]
        return Outcome(error.mean(), len(batch), [sol.stats], records, right=int((error < 1.0).sum()))


SCHEDULE = Schedule(epochs=5, lr=0.05, every=2)


def config(seed: int = 0) -> dict[str, Any]:
    return {"settings": {"experiment": "spiral", "seed": seed}}


def trained(path: Path, schedule: Schedule = SCHEDULE) -> dict[str, Any]:
    with Run(path, config()) as run:
        training = Training(run, Spiral(), schedule, seed=0)
        training.resume()
        return training.train()


def lasting(tree: Any) -> Any:
    """What does not depend on the machine and its day."""
    if isinstance(tree, dict):
        return {name: lasting(x) for name, x in tree.items() if name not in ("seconds", "peak_memory")}
    return [lasting(x) for x in tree] if isinstance(tree, list) else tree


def numbers(path: Path) -> Any:
    found = Finished.load(path)
    return lasting([list(found.metrics), found.result])


def test_evaluations_are_where_the_paper_has_them(tmp_path: Path) -> None:
    assert [epoch for epoch in range(200) if Schedule(200, 1.0).evaluates(epoch)] == [*range(0, 200, 10), 199]
    assert sum(Schedule(50, 1.0).evaluates(epoch) for epoch in range(50)) == 6
    result = trained(tmp_path / "a")
    found = Finished.load(tmp_path / "a")
    assert [each["epoch"] for each in found.metrics] == [0, 2, 4]
    assert found.result == json.loads(json.dumps(result))
    for each in found.metrics:
        assert each["train"]["samples"] == 6
        assert each["train"]["backward_nfe"] > 0
        assert 0.0 <= each["validation"]["accuracy"] <= 1.0
        times = found.times(each["epoch"])
        assert len(times["evaluations"]) == each["train"]["backward_nfe"]
        assert len(times["accepted"]) == each["train"]["backward_accepted"]
        assert len(times["published_rejected"]) == each["train"]["published_rejected"]
    assert result["test"]["loss"] < found.metrics[0]["train"]["loss"]
    totals = [each["totals"]["backward_nfe"] for each in found.metrics]
    assert totals == sorted(totals)


def test_models_are_looked_at_in_evaluation_mode(tmp_path: Path) -> None:
    with Run(tmp_path / "a", config()) as run:
        task = Spiral()
        Training(run, task, Schedule(epochs=1, lr=0.05), seed=0).train()
    assert task.seen == [("train", True)] + [
        (split, False) for split in ("train", "validation", "train", "validation", "test")
    ]


def test_the_best_weights_are_restored(tmp_path: Path) -> None:
    with Run(tmp_path / "a", config()) as run:
        training = Training(run, Spiral(), Schedule(epochs=4, lr=0.05, every=1), seed=0)
        training.epoch()
        best = training.best
        training.best_loss = 0.0  # from here on nothing is better
        result = training.train()
    assert result["best_epoch"] == 0
    for name, x in training.task.model.state_dict().items():
        assert torch.equal(x, best[name])


def test_the_learning_rate_falls_on_a_plateau_and_training_gives_up(tmp_path: Path) -> None:
    with Run(tmp_path / "a", config()) as run:
        training = Training(run, Spiral(), Schedule(epochs=50, lr=1e-12, every=1, give_up=6), seed=0)
        result = training.train()
    rates = [each["lr"] for each in Finished.load(tmp_path / "a").metrics]
    assert rates[:4] == [1e-12] * 4
    assert rates[4] == pytest.approx(1e-13)
    assert result["epochs"] == 8  # six after the first, and one more


def test_the_learning_rate_warms_up(tmp_path: Path) -> None:
    with Run(tmp_path / "a", config()) as run:
        training = Training(run, Spiral(), Schedule(epochs=2, lr=1.0, warm_up=6, optimiser="Adam"), seed=0)
        training.epoch()
    assert training.optimiser.param_groups[0]["lr"] == pytest.approx(0.5)
    assert isinstance(training.optimiser, torch.optim.Adam)


def test_a_run_that_is_taken_up_again_is_the_same(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    for _ in range(SCHEDULE.epochs):
        with Run(tmp_path / "parts", config()) as run:
            training = Training(run, Spiral(), SCHEDULE, seed=0)
            training.resume()
            training.epoch()
    trained(tmp_path / "parts")
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_a_run_that_is_taken_up_within_an_epoch_is_the_same(tmp_path: Path) -> None:
    """With a task whose batches draw numbers one after the other, and whose model draws some too."""

    class Noisy(Spiral):
        def batches(self, split: str, shuffle: bool) -> Iterator[Tensor]:
            for batch in super().batches(split, shuffle):
                yield batch + 0.1 * torch.rand(1)

        def outcome(self, batch: Tensor, record: bool) -> Outcome:
            return super().outcome(batch + 0.1 * torch.rand(1), record)

    class Killed(Exception):
        pass

    def killed(at: int) -> TrainingCallbacks:
        def kill(epoch: int, batch: int, *_: Any) -> None:
            if batch == at:
                raise Killed

        return TrainingCallbacks(batch=kill)

    schedule = Schedule(epochs=2, lr=0.05, every=1)
    with Run(tmp_path / "whole", config()) as run:
        Training(run, Noisy(), schedule, seed=0).train()
    # The progress is reported before a checkpoint is written, so that the update it reports is lost.
    for at in (0, 1, 2, 1, 2):
        with Run(tmp_path / "parts", config()) as run, contextlib.suppress(Killed):
            training = Training(run, Noisy(), schedule, 0, killed(at), checkpoint_minutes=1e-9)
            training.resume()
            training.train()
    with Run(tmp_path / "parts", config()) as run:
        training = Training(run, Noisy(), schedule, seed=0, checkpoint_minutes=1e-9)
        assert training.resume()
        assert (training.next_epoch, training.next_batch) == (1, 2)
        training.train()
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_a_cosine_falls_to_zero_after_the_warm_up() -> None:
    schedule = Schedule(epochs=10, lr=2.0, warm_up=4, decay="cosine")
    rates = [schedule.rate(i, 104) for i in range(105)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[54] == pytest.approx(1.0)
    assert rates[104] == pytest.approx(0.0, abs=1e-15)
    assert Schedule(10, 2.0, warm_up=4).rate(4, 104) is None
    with pytest.raises(ValueError, match="decay: 'cosine' needs"):
        schedule.rate(4, None)
    with pytest.raises(ValueError, match="decay: expected one of plateau, cosine, found 'linear'"):
        Schedule(10, 2.0, decay="linear")


def test_epochs_have_seeds_of_their_own() -> None:
    seeds = {seed_of(seed, epoch) for seed in range(20) for epoch in range(300)}
    assert len(seeds) == 20 * 300


@pytest.mark.parametrize(
    ("bad", "message"), [("loss", "the loss is nan at epoch 0, batch 0"), ("gradient", "gradient")]
)
def test_divergence_stops_with_a_message(tmp_path: Path, bad: str, message: str) -> None:
    class Bad(Spiral):
        def outcome(self, batch: Tensor, record: bool) -> Outcome:
            w = next(self.model.parameters())
            loss = w.sum() * float("nan") if bad == "loss" else (w * 0).abs().sqrt().sum()
            return Outcome(loss, 2, [])

    with Run(tmp_path / "a", config()) as run, pytest.raises(TrainingFailed, match=message):
        Training(run, Bad(), SCHEDULE, seed=0).train()
    assert not Finished.load(tmp_path / "a").metrics


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    schedule = Schedule(epochs=12, lr=0.05, every=2)
    trained(tmp_path / "whole", schedule)
    code = f"""
        import sys, torch
        sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]
        torch.set_num_threads(1)
        from pathlib import Path
        from test_training import Schedule, trained
        print("on", flush=True)
        trained(Path({str(tmp_path / "killed")!r}), {schedule!r})
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    drawn = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(drawn.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


def test_without_selection_the_last_weights_count_and_training_data_is_not_looked_at(tmp_path: Path) -> None:
    with Run(tmp_path / "a", config()) as run:
        task = Spiral()
        training = Training(run, task, Schedule(epochs=3, lr=0.05, every=1, selects=False), seed=0)
        result = training.train()
    assert [split for split, training in task.seen if not training] == ["validation"] * 4 + ["test"]
    assert "train" not in result
    assert all("train" not in each for each in Finished.load(tmp_path / "a").metrics)
    assert result["epochs"] == 3
    assert result["best_epoch"] == -1
    assert {each["lr"] for each in training.evaluations} == {0.05}


class Contracting(Spiral):
    """Going back along it is unstable."""

    def outcome(self, batch: Tensor, record: bool) -> Outcome:
        sol = sn.solve(
            lambda t, y: -20.0 * y + 0.01 * self.model(y),
            batch,
            [0.0, 2.0],
            adjoint=sn.Backsolve(norm="seminorm", restart="fresh"),
            record=record,
        )
        return Outcome(sol.ys[-1].square().sum(), len(batch), [sol.stats], [] if sol.record is None else [sol.record])


def test_drift_is_counted_and_not_told(tmp_path: Path) -> None:
    with Run(tmp_path / "a", config()) as run:
        result = Training(run, Contracting(), Schedule(epochs=2, lr=1e-3, every=1), seed=0).train()
    assert result["totals"]["drifted"] == 6
    assert result["test"]["drifted"] == 3


def test_other_warnings_are_told() -> None:
    with pytest.warns(UserWarning, match="something else"), drifts():
        warnings.warn("something else", UserWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("model:0.weight", torch.zeros(2, 4), r"model:0.weight: expected float32 \(4, 2\), found float32 \(2, 4\)"),
        ("model:0.bias", torch.zeros(4, dtype=torch.float64), r"model:0.bias: .*found float64"),
        ("best:2.weight", torch.zeros(2, 4, dtype=torch.int64), r"best:2.weight: .*found int64"),
        ("best:2.bias", None, r"best:2.bias: .*found none"),
        ("model:3.bias", torch.zeros(1), r"model:3.bias: expected none"),
        ("optimiser:0:exp_avg", torch.zeros(1), r"optimiser:0:exp_avg: expected float32 \(4, 2\)"),
        ("optimiser:1:step", None, r"optimiser:1:step: .*found none"),
        ("optimiser:1:step", torch.zeros(3), r"optimiser:1:step: expected one number"),
        ("optimiser:x:step", torch.zeros(1), r"optimiser:x:step: expected one of 4 parameters"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path, name: str, wrong: Tensor | None, reason: str) -> None:
    with Run(tmp_path / "a", config()) as run:
        training = Training(run, Spiral(), SCHEDULE, 0)
        training.epoch()
        found = training.checkpoint()
        tensors = {**found.tensors, name: wrong}
        run.save(Checkpoint(found.epoch, {name: x for name, x in tensors.items() if x is not None}, found.rest))
        with pytest.raises(StoreError, match=rf"checkpoint.safetensors: {reason}.*\. Delete it to restart the run"):
            Training(run, Spiral(), SCHEDULE, 0).resume()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterations", -1), ("totals", {"drifted": "x"}), ("best", [1.0]), ("stopped", 0), ("seconds", None),
        ("groups", []), ("groups", [{"lr": 0.1}]), ("groups", [{"lr": float("nan")}]), ("batch", 10**400),
    ],
)  # fmt: skip
def test_a_checkpoint_with_wrong_numbers_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with Run(tmp_path / "a", config()) as run:
        training = Training(run, Spiral(), SCHEDULE, 0)
        training.epoch()
        found = training.checkpoint()
        run.save(Checkpoint(found.epoch, found.tensors, {**found.rest, name: value}))
        with pytest.raises(StoreError, match=rf"checkpoint.safetensors: {name}.*\. Delete it to restart the run"):
            Training(run, Spiral(), SCHEDULE, 0).resume()

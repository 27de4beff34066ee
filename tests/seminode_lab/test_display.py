"""What a run shows: the numbers that it computes, once each, also when it was stopped on the way."""

from __future__ import annotations

import io
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import ONE, TWO, tiny

import seminode as sn
from seminode.solution import BackwardReport
from seminode_lab import running
from seminode_lab.attempts import summary
from seminode_lab.display import LOGS, Lines, Meter, showing, together
from seminode_lab.progress import TrainingCallbacks
from seminode_lab.store import Finished
from seminode_lab.training import Training


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def stats(nfe: int, accepted: int, rejected: int, back: sn.Stats | None = None) -> sn.Stats:
    return sn.Stats(nfe, accepted, rejected, report=BackwardReport(stats=back))


def test_the_meter_averages_the_latest_batches() -> None:
    meter = Meter()
    assert str(meter) == ""
    for _ in range(10):
        meter.batch(100.0, [stats(1, 1, 0)])
    for _ in range(10):
        meter.batch(0.5, [stats(20, 2, 2, stats(30, 3, 1)), stats(10, 4, 0)])
    assert str(meter) == "loss 0.5, NFE 30+30, 25+25 % rejected"


def test_a_terminal_gets_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    settings = tiny(schedule=TWO)
    with showing(tmp_path / settings.name, tensorboard=False) as progress:
        running.run(settings, tmp_path, progress=progress)
    last = screen.getvalue().split("\r")[-1]
    assert settings.name in last
    assert "4/4" in last
    assert re.search(r"loss \d\.\d+, NFE \d+\+\d+, \d+\+\d+ % rejected", last)
    assert "evaluating" in screen.getvalue()


def test_a_log_gets_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tiny(schedule=TWO)
    with showing(tmp_path / settings.name, tensorboard=False) as progress:
        running.run(settings, tmp_path, progress=progress)
    lines = capsys.readouterr().err.splitlines()
    metrics = Finished.load(tmp_path / settings.name).metrics
    assert [line.split(":")[0] for line in lines] == [
        settings.name,
        "epoch 1, evaluated",
        "epoch 1 of 2",
        "epoch 2, evaluated",
        "epoch 2 of 2",
    ]
    assert f"train {metrics[1]['train']['loss']:.4g} (" in lines[3]


def test_long_work_is_reported_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every phase: loading, training and evaluating."""
    settings, task_of, look = tiny(), running.task_of, Training.look

    def slow_task(*given: Any) -> Any:
        time.sleep(0.4)
        return task_of(*given)

    def slow_look(self: Training, split: str, record: bool) -> Any:
        time.sleep(0.4)
        return look(self, split, record)

    monkeypatch.setattr(running, "task_of", slow_task)
    monkeypatch.setattr(Training, "look", slow_look)
    monkeypatch.setattr("seminode_lab.display.Lines", partial(Lines, silence=0.2))
    with showing(tmp_path / settings.name, "lines", tensorboard=False) as progress:
        running.run(settings, tmp_path, progress=progress)
    told = capsys.readouterr().err
    for work in (
        r"loading the data and building the model, \d+ s so far",
        r"epoch 1 of 1, batch 2 of 2: loss \S+, NFE \d+\+\d+, \d+\+\d+ % rejected, \d+ s so far",
        r"evaluating the train set, batch 2, \d+ s so far",
    ):
        assert re.search(work, told), told
    time.sleep(0.4)
    assert capsys.readouterr().err == ""  # nothing comes after the end


def test_where_nothing_is_selected_the_training_set_is_not_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(schedule=replace(ONE, selects=False))
    with showing(tmp_path / settings.name) as progress:
        result = running.run(settings, tmp_path, progress=progress)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("epoch 1, evaluated: validation ") for line in lines)
    assert "    epochs    1\n" in summary(settings, result, tmp_path)


def test_nothing_is_shown_unless_it_is_wanted_and_there_is_something_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny()
    with showing(tmp_path / settings.name, display="nothing", tensorboard=False) as progress:
        running.run(settings, tmp_path, progress=progress)
    assert capsys.readouterr().err == ""
    with showing(tmp_path / settings.name) as progress:  # now it is complete
        running.run(settings, tmp_path, progress=progress)
    assert capsys.readouterr().err == ""
    assert not (tmp_path / settings.name / LOGS).exists()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / LOGS)).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    settings = tiny(schedule=TWO)
    seen: list[tuple[int, Any]] = []
    with showing(tmp_path / settings.name, display="nothing") as progress:
        noted = TrainingCallbacks(batch=lambda epoch, i, loss, stats: seen.append((2 * epoch + i, pytest.approx(loss))))
        running.run(settings, tmp_path, progress=together([progress, noted]))
    found, run = scalars(tmp_path / settings.name), Finished.load(tmp_path / settings.name)
    assert found["loss/batch"] == seen
    assert run.result is not None
    for split in ("train", "validation"):
        for name in ("loss", "accuracy", "forward_nfe", "backward_nfe"):
            expected = [(2 * i + 1, pytest.approx(each[split][name])) for i, each in enumerate(run.metrics)]
            assert found[f"{name}/{split}"] == expected, name
    assert found["accuracy/test"] == [(3, pytest.approx(run.result["test"]["accuracy"]))]
    assert found["lr"] == [(1, pytest.approx(1e-3)), (3, pytest.approx(1e-3))]
    assert [step for step, _ in found["seconds/training"]] == [1, 3]
    assert len(found["backward_nfe/batch"]) == len(found["backward_rejected/batch"]) == 4


def test_a_resumed_run_goes_on_in_the_same_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    settings = tiny(schedule=replace(ONE, epochs=3))

    def made(folder: Path, stop_at: tuple[int, int] | None) -> None:
        def stop(epoch: int, batch: int, *_: Any) -> None:
            if (epoch, batch) == stop_at:
                raise KeyboardInterrupt

        with showing(folder / settings.name, display="nothing") as progress:
            running.run(settings, folder, progress=together([progress, TrainingCallbacks(batch=stop)]))

    made(tmp_path / "whole", None)
    for stop_at in ((0, 1), (2, 0)):  # before there is a checkpoint, and after
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path / "parts", stop_at)
    made(tmp_path / "parts", None)
    whole, parts = scalars(tmp_path / "whole" / settings.name), scalars(tmp_path / "parts" / settings.name)
    lasting = {tag for tag in whole if not tag.startswith("seconds")}
    assert len(lasting) > 10
    assert {tag: parts[tag] for tag in lasting} == {tag: whole[tag] for tag in lasting}


def test_without_tensorboard_there_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    settings = tiny()
    with showing(tmp_path / settings.name, display="nothing") as progress:
        running.run(settings, tmp_path, progress=progress)
    told = capsys.readouterr().err
    assert told.startswith("note: no TensorBoard logs (")
    assert told.count("\n") == 1
    assert not (tmp_path / settings.name / LOGS).exists()


def test_all_hooks_are_called_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    progress = TrainingCallbacks(
        load=lambda description: told.append(f"load {description.partition(':')[0]}"),
        begin=lambda start: told.append(f"begin {start.epoch}/{start.epochs} of {start.batches}, {start.iterations}"),
        batch=lambda epoch, batch, loss, stats: told.append(f"batch {epoch}.{batch}"),
        look=lambda split, batch: told.append(f"look {split}"),
        evaluated=lambda evaluation: told.append(f"evaluated {evaluation['epoch']}"),
        epoch=lambda epoch, lr, seconds: told.append(f"epoch {epoch}"),
        end=lambda result: told.append("end"),
    )
    save = Training.checkpoint
    monkeypatch.setattr(Training, "checkpoint", lambda self: (told.append("saved"), save(self))[1])
    running.run(tiny(), tmp_path, progress=progress)
    looks = ["look train", "look train", "look validation"]
    assert told == [
        f"load {tiny().name}",
        *("begin 0/1 of 2, 0", "batch 0.0", "batch 0.1", *looks, "evaluated 0", "epoch 0", "saved"),
        *(*looks, "look test", "end"),
    ]

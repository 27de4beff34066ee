"""Several processes that train one model: the same numbers as one process, and no process without work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TWO, tiny

from seminode.cli import main
from seminode_lab import running, settings
from seminode_lab.ranks import Ranks
from seminode_lab.settings import Settings, rows
from seminode_lab.store import CHECKPOINT, Checkpoint, Finished, FollowedRun


def test_parts_make_up_the_batch() -> None:
    x = torch.arange(7)
    parts = [Ranks(i, 3).own(x) for i in range(3)]
    assert torch.equal(torch.cat(parts), x)
    assert {len(part) for part in parts} == {2, 3}


def test_a_process_without_samples_is_refused() -> None:
    Ranks(0, 2).check(samples=10, batch=4, split="test")
    with pytest.raises(ValueError, match=r"nproc: expected at most 1, .* smallest batch of test, found 2"):
        Ranks(0, 2).check(samples=9, batch=4, split="test")


@pytest.mark.parametrize("mode", ["mixed", "published"])
def test_norms_of_parameter_gradients_are_refused(mode: str) -> None:
    pendulum, flow = rows("quick")[-1].changed(mode=mode), rows("quick")[2].changed(mode="mixed")
    with pytest.raises(ValueError, match=f"nproc: the norm of the mode '{mode}' reads the gradients of parameters"):
        running.common_steps(pendulum)
    assert running.common_steps(flow) == {}  # every process has its own noise and steps


def test_the_command_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ncde", "--norm", "mixed", "--nproc", "2"]) == 2
    assert "--nproc: the norm of the mode 'mixed'" in capsys.readouterr().err
    assert main(["run", "ncde", "--nproc", "0"]) == 2
    assert "--nproc: expected a whole number of at least 1, found 0" in capsys.readouterr().err


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    with FollowedRun(tmp_path / "a", {"settings": tiny(mode="best").as_json()}) as run:
        run.save(Checkpoint(0, {}, {}))
        run.evaluated([{"epoch": 0}])
        run.keep("times", {})
        run.resumed(0, {})
        run.finish({})
    assert not list(tmp_path.iterdir())


def _weights(out: Path, settings: Settings) -> dict[str, Any]:
    return Checkpoint.load(out / settings.name / CHECKPOINT).part("model")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["seminorm", "best"])
def test_two_processes_train_as_one(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Batches of 4, 4 and 3 with random shifts, over two epochs."""
    row = tiny(schedule=TWO, sizes=(11, 4, 6), mode=mode, shifts=2, rtol=1e-3, atol=1e-6)
    monkeypatch.setitem(settings.PRESETS, "tiny", ((row,), dict.fromkeys(settings.EXPERIMENTS, 1)))
    command = ["run", "ncde", "--preset", "tiny", "--norm", mode, "--nproc", "2", "--threads", "1", "--no-tensorboard"]
    assert main([*command, "--out", str(tmp_path / "two")]) == 0, capfd.readouterr().err
    running.run(row, tmp_path / "one")
    one, two = _weights(tmp_path / "one", row), _weights(tmp_path / "two", row)
    for name, x in one.items():
        # Adam makes updates of 1e-3 of gradients of any size, also of those that are little more than rounding.
        torch.testing.assert_close(two[name], x, rtol=1e-4, atol=1e-4)
    alone, together = (Finished.load(tmp_path / name / row.name) for name in ("one", "two"))
    assert alone.result is not None
    assert together.result is not None
    assert together.result["totals"] == alone.result["totals"]
    assert together.result["test"]["accuracy"] == alone.result["test"]["accuracy"]
    assert together.result["test"]["loss"] == pytest.approx(alone.result["test"]["loss"], rel=1e-4)
    assert together.config["circumstances"]["processes"] == 2

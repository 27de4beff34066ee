"""The race on a GPU: without one it says so; on the CPU the same code gives the same tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import gpu
from benchmarks.contenders import named
from benchmarks.devices import moved, synchroniser
from benchmarks.suite import ENTRIES, numbers, task_of
from benchmarks.torch_runners import TorchRunner


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "accelerator", lambda: None)
    assert gpu.main(["--quick"]) == 2
    assert "neither CUDA nor MPS is available" in capsys.readouterr().out


def test_the_tables_are_those_of_the_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    who = ["seminode: euler", "torchdiffeq: euler"]
    sizes = ["--quick", "--rounds", "2", "--factors", "2", "1"]
    arguments = [*sizes, "--problems", "sampling-euler", "--device", "cpu", "--out", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        everyone = gpu.contenders("sampling-euler")
        patch.setattr(gpu, "contenders", lambda name: [each for each in everyone if each.name in who])
        assert gpu.main(arguments) == 0
    text = capsys.readouterr().out
    assert "tolerance × 2" in text
    assert "torchdiffeq's best" in text
    found = json.loads((tmp_path / "sampling-euler.json").read_text())
    assert found["device"] == "cpu"
    assert [len(each["rounds"]) for row in found["rows"] for each in row["curve"]] == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_task_moves_as_a_whole(name: str) -> None:
    """Nothing of it stays on the CPU: its loss of constant outputs is computed on the other device."""
    task = moved(task_of(name, quick=True), torch.device("meta"))
    devices = []

    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        tensors: list[Tensor] = [y0] if isinstance(y0, Tensor) else list(y0)
        devices.extend(x.device.type for x in (*tensors, *field.parameters(), *field.buffers()))
        constant = [x.expand(len(ts), *x.shape) for x in tensors]
        return constant[0] if isinstance(y0, Tensor) else tuple(constant)

    y0, leaves = task.leaves() if task.differentiate else (task.start(), [])
    value = task.through(y0, solve)
    assert value.device.type == "meta"
    assert {*devices, *(x.device.type for x in (*leaves, *task.data.values()))} == {"meta"}


def test_a_moved_task_has_the_same_gradient() -> None:
    contender = named("cde", "seminode: Direct")
    runners = [
        TorchRunner(numbers("cde", quick=True)[0], contender),
        TorchRunner(moved(numbers("cde", quick=True)[0], torch.device("cpu")), contender),
    ]
    first, second = (runner.run()["loss"] for runner in runners)
    assert first == second
    assert (runners[0].gradient() == runners[1].gradient()).all()


def test_the_device_is_synchronised_before_the_clock_is_read() -> None:
    waits: list[None] = []
    task, _ = numbers("small", quick=True)
    TorchRunner(task, named("small", "seminode: Direct"), lambda: waits.append(None)).run()
    assert len(waits) == 3  # the start, between the passes, the end
    synchroniser(torch.device("cpu"))()


def test_a_contender_that_fails_is_named_with_the_reason() -> None:
    def build() -> object:
        raise ValueError("no such kernel")

    with pytest.raises(gpu.WorkerFailed, match="ValueError: no such kernel"):
        gpu.LocalWorker(build).answer()

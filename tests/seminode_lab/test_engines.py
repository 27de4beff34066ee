"""Workers and their GPUs: each run on cuda gets the one that has the fewest, other runs see what they saw before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny

from seminode_lab import engines
from seminode_lab.engines import Local
from seminode_lab.worker import Order


class Process:
    """A process that ends when it is told to."""

    stdin = None

    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, Process]]:
    found: list[tuple[str | None, Process]] = []

    def launch(order: Order, gpu: str | None = None) -> Any:
        found.append((gpu, Process()))
        return found[-1][1]

    monkeypatch.setattr(engines, "launch", launch)
    return found


def order(device: str) -> Order:
    return Order(tiny(device=device), Path("out"))


def test_runs_are_spread_over_gpus(launched: list[tuple[str | None, Process]]) -> None:
    engine = Local(gpus=["2", "5"])
    for _ in range(3):
        engine.start(order("cuda"))
    assert [gpu for gpu, _ in launched] == ["2", "5", "2"]
    launched[1][1].status = 0
    engine.start(order("cuda"))
    assert launched[-1][0] == "5"  # which is free again


def test_a_device_with_a_number_is_the_users_choice(launched: list[tuple[str | None, Process]]) -> None:
    engine = Local(gpus=["0", "1"])
    for device in ("cpu", "cuda:1"):
        engine.start(order(device))
    assert [gpu for gpu, _ in launched] == [None, None]


def test_without_gpus_nothing_is_hidden(launched: list[tuple[str | None, Process]]) -> None:
    Local(gpus=[]).start(order("cuda"))
    assert launched[0][0] is None


def test_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8f2a,")
    assert engines.visible_gpus() == ["3", "GPU-8f2a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert engines.visible_gpus() == []


def test_a_worker_sees_its_gpu_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PROGRAM", "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])")
    own = Order(tiny(), tmp_path)
    process = engines.launch(own, "7")
    engines.leave(process)
    assert "sees 7" in own.log.read_text()


def test_an_order_survives_its_journey() -> None:
    own = Order(tiny(library="torchdiffeq"), Path("out"), Path("data"), 3, False, 2.5, False)
    assert Order.read(own.written()) == own

"""How many bytes of activations may be kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import seminode as sn
from seminode._stepping import budget
from seminode._stepping.budget import Budget, check_memory, free_memory, storages

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (0, 0),
        (123, 123),
        ("0B", 0),
        ("17b", 17),
        ("2kB", 2000),
        ("512MB", 512 * 10**6),
        ("1.5 GB", 1_500_000_000),
        ("2GiB", 2**31),
        (" .5 KiB ", 512),
        ("1TB", 10**12),
        (None, None),
    ],
)
def test_sizes(memory: Any, size: int | None) -> None:
    assert check_memory(memory) == size


@pytest.mark.parametrize(
    "memory", [-1, "-4GB", "4 potatoes", "", "GB", "4", "1e9B", "4GBs", 4.0, float("inf"), True, [4], "nanGB"]
)
def test_what_is_no_size(memory: Any) -> None:
    with pytest.raises(ValueError, match=r"^memory: expected .* '4GB'.* found ") as refused:
        sn.Direct(memory=memory)
    assert repr(memory) in str(refused.value)


def test_a_limit_is_a_limit() -> None:
    limited = Budget(100, CPU)
    assert limited.fits(100)
    limited.used = 60
    assert limited.fits(40)
    assert not limited.fits(41)


def test_the_default_is_a_part_of_what_is_free_when_it_is_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def free(device: torch.device) -> int:
        asked.append(device)
        return 1000 * budget.SMALL

    monkeypatch.setattr(budget, "free_memory", free)
    default = Budget(None, CPU)
    assert default.fits(budget.SMALL)
    assert not asked
    default.used = budget.SMALL
    assert default.fits(500 * budget.SMALL)
    assert not default.fits(500 * budget.SMALL + 1)
    assert asked == [CPU]


def test_the_default_on_a_full_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_memory", lambda device: 0)
    default = Budget(None, CPU)
    assert default.fits(budget.SMALL)
    assert not default.fits(budget.SMALL + 1)


def test_the_free_memory_is_not_looked_at_for_64_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(budget, "free_memory", lambda device: asked.append(device) or 0)
    assert Budget(None, CPU).fits(64 * 1024 * 1024)
    assert not asked
    assert not Budget(None, CPU).fits(64 * 1024 * 1024 + 1)
    assert asked == [CPU]


def test_the_free_memory_of_this_machine() -> None:
    assert 0 < free_memory(CPU) < 2**50


def test_the_free_memory_of_a_cuda_device_includes_what_torch_holds_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert free_memory(torch.device("cuda")) == 1200


def test_the_free_memory_of_an_mps_device_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    for allocated, free in ((300, 700), (1000, 0), (1200, 0)):
        monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda allocated=allocated: allocated)
        assert free_memory(torch.device("mps")) == free


def test_the_free_memory_of_a_system_without_a_list_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system calls free; or else four gibibytes."""

    def missing(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 300, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert budget._free_on_host() == 300 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert budget._free_on_host() == 4 * 1024**3


def test_the_free_memory_of_the_host_is_in_kibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 9 kB\nMemAvailable:    7 kB\n")
    assert budget._free_on_host() == 7 * 1024


def test_less_than_nothing_is_free_in_no_container(tmp_path: Path) -> None:
    for name, text in {"memory.max": "1000\n", "memory.current": "1200\n", "memory.stat": "anon 5\n"}.items():
        (tmp_path / name).write_text(text)
    assert budget._free_in_container(tmp_path) == 0


@pytest.mark.parametrize(
    ("folder", "names"),
    [(".", ("memory.max", "memory.current")), ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"))],
)
def test_the_limit_of_a_container(tmp_path: Path, folder: str, names: tuple[str, str]) -> None:
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    for name, text in zip((*names, "memory.stat"), ("1000\n", "700\n", "anon 5\ninactive_file 200\n"), strict=True):
        (place / name).write_text(text)
    assert budget._free_in_container(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    if folder == ".":
        assert budget._free_in_container(tmp_path) == 2**62
    assert budget._free_in_container(tmp_path / "missing") == 2**62


def test_each_storage_counts_once() -> None:
    x = torch.zeros(10, dtype=torch.float64)
    assert sum(storages([x, x[:2], x.view(2, 5), torch.zeros(3)]).values()) == 80 + 12

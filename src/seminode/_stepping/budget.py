"""How many bytes of activations a solve may keep: what the user allows, or a part of the memory that is free."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UNITS = {"b": 1} | {
    unit.lower(): base**power
    for power, prefix in enumerate("kMGT", 1)
    for unit, base in ((f"{prefix}B", 1000), (f"{prefix}iB", 1024))
}
#: Without a limit of the user's, so much may be kept before the free memory is looked at, which takes time.
SMALL = 64 * 2**20
#: The part of the free memory that one solve may take.
SHARE = 0.5


def check_memory(memory: Any) -> int | None:
    """A number of bytes, from a whole number or from text such as "512MB" or "2GiB"; `None` stays `None`."""
    if memory is None:
        return None
    size: float | None = None
    if isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    elif isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", memory.lower())
        if found is not None and found[2] in UNITS:
            size = int(float(found[1]) * UNITS[found[2]])
    if size is None or size < 0:
        raise ValueError(
            "memory: expected a whole number of bytes that is not negative, or text such as '4GB', '512MB' or '2GiB', "
            f"found {memory!r}"
        )
    return int(size)


class Budget:
    """Counts the bytes that are kept. One budget serves all stretches of a solve with events.

    Without a limit of the user's, the limit is `SHARE` of the memory that is free when `SMALL` has been used up.
    """

    def __init__(self, limit: int | None, device: torch.device):
        self._limit, self._device = limit, device
        self.used = 0

    def fits(self, size: int) -> bool:
        """Whether so many bytes more may be kept."""
        needed = self.used + size
        if self._limit is None:
            if needed <= SMALL:
                return True
            self._limit = max(SMALL, self.used + int(SHARE * free_memory(self._device)))
        return needed <= self._limit


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the storages behind some tensors, by their addresses: each storage once."""
    held = (x.untyped_storage() for x in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in held}


def free_memory(device: torch.device) -> int:
    """The bytes that can still be allocated on a device, those included that torch holds and does not use."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return min(_free_on_host(), _free_in_container())


def _free_on_host() -> int:
    """The memory that programs can get: on Linux, file caches count as free."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    if found is not None:
        return 1024 * int(found[1])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system says how much is free
        return 2**32


def _free_in_container(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What the limit of a container leaves; file caches count as free."""
    places = (root, "memory.max", "memory.current"), (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, limit, usage in places:
        try:
            allowed, used = ((folder / name).read_text().strip() for name in (limit, usage))
            cached = re.search(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        except OSError:
            continue
        if allowed != "max":
            return max(0, int(allowed) - int(used) + (int(cached[1]) if cached else 0))
    return 2**62

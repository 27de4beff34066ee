"""The memory that a pass needs, as reported by the allocator."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Generator
from typing import Any

import torch

from .._untyped import device_properties


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """The peak of the tensor memory that `run` allocates, in addition to the memory allocated before.

    On a GPU, the caching allocator reports it. On a CPU, it is the running sum of the allocator's events, which the
    profiler of PyTorch records. That is exact for tensors, also in compiled programs, but does not include memory that
    libraries allocate internally. The profiler slows a run down, so a run is either timed or measured here. `None` on
    other devices, or if the profiler is already in use.

    >>> peak_bytes(lambda: torch.ones(1000) + torch.ones(1000), torch.device("cpu"))
    12000
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    profiler: Any = torch.autograd.profiler
    if device.type != "cpu" or getattr(profiler, "_is_profiler_enabled", False):
        return None
    with _quietly(), profiler.profile(profile_memory=True, use_kineto=True) as measured:
        run()
    live = peak = 0
    events = ((e.start_ns(), e.nbytes()) for e in measured.kineto_results.events() if e.name() == "[memory]")
    for _, size in sorted(events):
        live += size
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _quietly() -> Generator[None, None, None]:
    """Suppress the log lines of the profiler, unless a level is set. It reads the level when it first starts."""
    name = "KINETO_LOG_LEVEL"
    chosen = name in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if not chosen:
            os.environ.pop(name, None)


def total_bytes(device: torch.device) -> int | None:
    """The memory of the device."""
    if device.type == "cuda":
        return device_properties(device).total_memory
    if device.type != "cpu":
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not supported on this system
        return None

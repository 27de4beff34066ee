"""How much memory a pass needs, by the allocator's own account."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Peak of the tensor memory that is allocated while `run` is at work, beyond what was there before.

    On a GPU this is what its caching allocator says. On a CPU it is the sum over the allocator's events, which
    PyTorch's profiler lists: exact for tensors, also inside compiled programs, and blind to what libraries allocate for
    themselves. The profiler makes a run slower, so a run is measured or timed, never both. `None` where neither works:
    on other devices, or while somebody else is profiling.

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
def _quietly() -> Iterator[None]:
    """Without lines on stderr for each run, unless a level was chosen: the profiler reads it when it first starts."""
    name = "KINETO_LOG_LEVEL"
    chosen = name in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if not chosen:
            os.environ.pop(name, None)


def total_bytes(device: torch.device) -> int | None:
    """The memory that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        return None

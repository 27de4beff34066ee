"""The shortest time of many calls, of any library."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: Seconds to spend on each minimum, and the calls to make at least and at most.
SPEND, LEAST, MOST = 0.3, 5, 2000


def fastest(run: Callable[[], Any]) -> float:
    """The minimal seconds of many calls, after two that do not count."""
    for _ in range(2):
        run()
    best, begin, calls = float("inf"), time.perf_counter(), 0
    while calls < LEAST or (calls < MOST and time.perf_counter() - begin < SPEND):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        calls += 1
    return best

"""Locks between threads that solve, around what belongs to the whole process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

#: Seconds that a solve waits for its turn where it can do without.
PATIENCE = 5.0


class ProcessLock:
    """A lock that its owner may take again, and that is free in a forked process, whoever held it at the fork."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def turn(self, wait: float = -1.0) -> Iterator[bool]:
        """Wait for it, at most for so many seconds. Yields whether it was had."""
        lock = self._lock
        had = lock.acquire(timeout=wait)
        try:
            yield had
        finally:
            if had:
                lock.release()


_process_state = ProcessLock()
#: The compiler traces one function at a time: whether it does so is a flag of the whole process.
compiler = ProcessLock()


def alone() -> bool:
    """Whether this is the only thread that runs Python."""
    return threading.active_count() == 1


@contextlib.contextmanager
def exclusive(wait: float | None = None) -> Iterator[bool]:
    """Around what uses or changes state of the whole process: generators, filters of warnings.

    Yields whether the solve has its turn. It gets none if the field of another one waits for this one.
    """
    if alone():
        yield True
        return
    with _process_state.turn(PATIENCE if wait is None else wait) as had:
        yield had

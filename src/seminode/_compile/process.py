"""A copy of this process that does some work in parallel and reports how it ended."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import gc
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

#: Seconds after which a copy is ended. One that was made while another thread held a lock may wait for it forever.
LIMIT = 900.0


class Outcome(NamedTuple):
    """How the work ended: a note on what went wrong, if anything did."""

    problem: str | None


class BackgroundProcess:
    """Runs `work` in a copy of this process (`os.fork`), which needs nothing that can be pickled.

    `work` returns what went wrong, or `None`. The copy has no terminal, a lower priority and a process group of its
    own. It ends with this process.
    """

    def __init__(self, work: Callable[[], str | None]):
        self._reader, writer = os.pipe()
        context = contextvars.copy_context()
        with warnings.catch_warnings():
            # From Python 3.12 on: other threads of this process do not exist in the copy, which may wait for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _live(work, context, writer)
        os.close(writer)
        os.set_blocking(self._reader, False)
        self._owner, self._report, self._begun = os.getpid(), b"", time.monotonic()
        self._outcome: Outcome | None = None
        _running.add(self)

    def poll(self) -> Outcome | None:
        """How the work ended, or `None` while it goes on. Does not wait."""
        if self._outcome is None and self._ended():
            self._finish()
        return self._outcome

    def _ended(self) -> bool:
        try:
            while chunk := os.read(self._reader, 65536):
                self._report += chunk
            return True
        except BlockingIOError:
            # Processes that the copy has started may keep the pipe open.
            return self._report.endswith(b"\n") or time.monotonic() - self._begun > LIMIT

    def _finish(self) -> None:
        try:
            self._outcome = Outcome(json.loads(self._report))
        except ValueError:
            late = time.monotonic() - self._begun > LIMIT
            how = f"has not ended within {LIMIT:.0f} seconds" if late else "ended without a result"
            self._outcome = Outcome(f"the process that compiles in the background {how}")
        self.end()

    def end(self) -> None:
        """End the copy and all processes that it has started."""
        if self not in _running:
            return
        _running.discard(self)
        os.close(self._reader)
        if os.getpid() != self._owner:
            return  # of a copy of the process that has started it
        for kill in (os.killpg, os.kill):  # it may not have its group yet
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # other code may have waited for it
            os.waitpid(self.pid, 0)


_running: set[BackgroundProcess] = set()


@atexit.register
def _end_all() -> None:
    for each in list(_running):
        each.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)


def _live(work: Callable[[], str | None], context: contextvars.Context, writer: int) -> NoReturn:
    """The life of the copy."""
    try:
        parent = os.getppid()
        os.setpgid(0, 0)
        os.nice(3)  # with more it would make no progress on a busy machine
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # finalisers of this process are none of the copy's business
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = os.fdopen(nowhere, "w")  # that of a notebook is no file
        # In a new thread: OpenMP's threads do not exist in the copy, and the thread that had them would wait for them.
        thread = threading.Thread(target=context.run, args=(_report, work, writer), daemon=True)
        thread.start()
        while thread.is_alive() and os.getppid() == parent:
            thread.join(0.5)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(1)


def _report(work: Callable[[], str | None], writer: int) -> None:
    try:
        problem: Any = work()
    except BaseException as error:  # whatever it is, it is not raised in the process that waits
        problem = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    os.write(writer, json.dumps(problem).encode() + b"\n")

"""Contenders as processes: started, asked, watched and ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class WorkerFailed(Exception):
    """A contender that cannot, with the reason."""


class Worker:
    """A process that answers each line with one of JSON, within a time and a memory limit; else it is ended.

    Arguments:
        command: what to start; it gets a process group of its own, so that all it starts ends with it.
        log: where its stderr goes; the last line of it is the reason if it dies without a word.
        limit: seconds that an answer may take.
        memory: gigabytes that it may use.
        environment: variables on top of those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        limit: float = 600.0,
        memory: float = 8.0,
        environment: Mapping[str, str] | None = None,
    ):
        self.limit, self.memory, self.log = limit, memory, log
        self.buffer = b""
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail(self.last_words())
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line; a worker that says it failed, dies, takes too long or too much is done with."""
        found = json.loads(self.next_line())
        if "failed" in found:
            self.fail(found["failed"])
        return found

    def next_line(self) -> bytes:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        deadline = time.monotonic() + self.limit
        while b"\n" not in self.buffer:
            if time.monotonic() > deadline:
                self.fail(f"no answer within {self.limit:.0f} s")
            if self.gigabytes() > self.memory:
                self.fail(f"more than {self.memory:g} GB of memory")
            if not select.select([pipe], [], [], 0.5)[0]:
                continue
            piece = os.read(pipe, 65536)
            if not piece:
                self.fail(self.last_words())
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def gigabytes(self) -> float:
        """Resident, where the system tells."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9

    def last_words(self) -> str:
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:300]}" if lines else how

    def fail(self, why: str) -> None:
        self.end()
        raise WorkerFailed(why)

    def end(self) -> None:
        """The whole group, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def worker_command(problem: str, contender: str, data: Path, threads: int, quick: bool) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.worker", "--problem", problem, "--contender", contender]
    return [*command, "--data", str(data), "--threads", str(threads), *(["--quick"] if quick else [])]

"""Worker processes of the race: how to start, query, limit and kill them."""

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
from typing import Any, Protocol


class WorkerFailed(Exception):
    """A worker failed; the message is the reason."""


class Answers(Protocol):
    """What the race talks to, line by line."""

    def ask(self, line: str) -> dict[str, Any]: ...
    def answer(self) -> dict[str, Any]: ...
    def end(self) -> None: ...


class Worker:
    """A process that answers each line with a line of JSON. It is killed if it exceeds a time or a memory limit.

    Arguments:
        command: the command to run, in its own process group, so that its child processes are killed with it.
        log: file for its stderr. If the process exits without an answer, the last line of the file is the reason.
        limit: maximum seconds for an answer.
        memory: maximum resident memory in gigabytes.
        environment: additional environment variables.
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
            self.fail(self.exit_reason())
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer. If the worker fails, exits or exceeds a limit, it is killed and `WorkerFailed` is raised."""
        message = json.loads(self.next_line())
        if "failed" in message:
            self.fail(message["failed"])
        return message

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
                self.fail(self.exit_reason())
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def gigabytes(self) -> float:
        """Resident memory; 0 if the system does not report it."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9

    def exit_reason(self) -> str:
        """Exit code or signal, and the last line of the log."""
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:300]}" if lines else how

    def fail(self, why: str) -> None:
        self.end()
        raise WorkerFailed(why)

    def end(self) -> None:
        """Kill the process group and close the pipes."""
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

"""A copy of the process that works in the background: reports, failures, and that it ends with the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from seminode._compile import process
from seminode._compile.process import BackgroundProcess, Outcome

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs os.fork")


def outcome_of(background: BackgroundProcess, seconds: float = 60.0) -> Outcome:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        outcome = background.poll()
        if outcome is not None:
            return outcome
        time.sleep(0.005)
    raise AssertionError("no outcome")


def fail() -> str | None:
    raise ValueError("first line\nsecond line")


def leave() -> str | None:
    os._exit(3)


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (lambda: None, None),
        (lambda: "a reason — ü", "a reason — ü"),
        (fail, "ValueError: first line"),
        (leave, "the process that compiles in the background ended without a result"),
        (lambda: sys.exit(1), "SystemExit: 1"),
    ],
    ids=["done", "reason", "error", "killed", "exit"],
)
def test_outcomes(work: Callable[[], str | None], problem: str | None) -> None:
    background = BackgroundProcess(work)
    assert outcome_of(background) == Outcome(problem)
    assert background.poll() == Outcome(problem)
    with pytest.raises(ChildProcessError):  # it leaves no zombie
        os.waitpid(background.pid, os.WNOHANG)


def test_polling_does_not_wait() -> None:
    background = BackgroundProcess(lambda: time.sleep(600))
    begin = time.process_time()
    assert [background.poll() for _ in range(100)] == [None] * 100
    assert time.process_time() - begin < 0.5
    background.end()
    with pytest.raises(ProcessLookupError):
        os.kill(background.pid, 0)


def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundProcess(lambda: time.sleep(600))
    monkeypatch.setattr(process, "LIMIT", 0.0)
    assert "has not ended within" in str(outcome_of(background).problem)
    with pytest.raises(ProcessLookupError):
        os.kill(background.pid, 0)


def test_its_output_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        print("noise", flush=True)
        os.write(1, b"noise")
        os.write(2, b"noise")

    assert outcome_of(BackgroundProcess(work)) == Outcome(None)
    assert capfd.readouterr() == ("", "")


def test_another_copy_of_the_process_does_not_take_the_report() -> None:
    """A worker of a data loader, say, that is started in the meantime."""
    background = BackgroundProcess(lambda: time.sleep(0.1))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not process._running else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert outcome_of(background) == Outcome(None)


SCRIPT = """
import os, subprocess, sys, time
from seminode._compile.process import BackgroundProcess

def work():
    child = subprocess.Popen(["sleep", "600"])
    os.write(writer, str(child.pid).encode() + b"\\n")
    child.wait()

reader, writer = os.pipe()
background = BackgroundProcess(work)
print(background.pid, os.read(reader, 100).decode().strip(), flush=True)
{ending}
"""


def gone(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process ends soon, or is a zombie that nobody has waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow  # imports torch again
@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("sys.exit(4)", 4), (f"os.kill(os.getpid(), {int(signal.SIGKILL)})", -9)]
)
def test_it_ends_with_the_process(ending: str, code: int) -> None:
    """At a normal exit, and if the process is killed; with what it has started itself, and without a traceback."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(ending=ending)], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stderr) == (code, "")
    assert all(gone(int(pid)) for pid in ran.stdout.split())

"""A sweep on a real Ray cluster of this machine: workers and the head are killed, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny

from seminode_lab import running
from seminode_lab.schedule import Schedule
from seminode_lab.store import CHECKPOINT, CONFIG

# The warnings are Ray's own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
SETTINGS = tiny(schedule=Schedule(epochs=12, lr=1e-3, every=6))
DRIVER = """
import json, sys
sys.path = json.loads(sys.argv[1])
from pathlib import Path
from seminode_lab.engines import Ray
from seminode_lab.settings import Settings
from seminode_lab.sweeping import SweepRunner
from seminode_lab.worker import Order
order = Order(Settings.of_json(json.loads(sys.argv[2])), Path(sys.argv[3]), None, 1, False)
engine = Ray()
try:
    found = SweepRunner([order], engine, 1).go()
finally:
    engine.close()
print(found, found.failed)
"""


def until(ready: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = ready()
        if found:
            return found
        time.sleep(0.02)
    raise TimeoutError("it does not happen")


class Head:
    """The head of a cluster: a process and those that it starts."""

    def __init__(self, folder: str, port: int = 0) -> None:
        ray = Path(sys.executable).parent / "ray"
        command = [str(ray), "start", "--head", "--block", f"--port={port}", "--num-cpus=2", f"--temp-dir={folder}"]
        command += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
        self.log = Path(folder) / "head.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.address = until(self._address)

    def _address(self) -> str | None:
        if self.process.poll() is not None:
            pytest.fail(f"ray start ended: {self.log.read_text()[-2000:]}")
        match = re.search(r"--address='?([\d.]+:\d+)", self.log.read_text(errors="replace"))
        return match[1] if match else None

    def members(self) -> list[int]:
        """The processes of the head and all that they have started."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                parents[int(path.parent.name)] = int(fields[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def kill(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def heads() -> Iterator[Callable[[], Head]]:
    pytest.importorskip("ray", reason="ray is not installed")
    started: list[Head] = []
    folders: list[str] = []

    def start() -> Head:
        folders.append(tempfile.mkdtemp(prefix="ray"))  # in a short path: sockets have names in it
        started.append(Head(folders[-1]))
        return started[-1]

    yield start
    for head in started:
        head.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(head: Head, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, json.dumps(sys.path), json.dumps(SETTINGS.as_json()), str(out)]
    env = {**os.environ, "RAY_ADDRESS": head.address}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def worker(out: Path) -> int | None:
    """The process that works on the run: the one whose output goes to the log."""
    log = out / "logs" / f"{SETTINGS.name}.log"
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if path.readlink() == log:
                return int(path.parent.parent.name)
    return None


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def begun(out: Path) -> int | None:
    """The worker, once there is a checkpoint to go on from."""
    return worker(out) if (out / SETTINGS.name / CHECKPOINT).exists() else None


def check(out: Path, elsewhere: Path, resumes: int) -> None:
    """The run has the numbers of one that nobody has disturbed, and was resumed, not begun again."""
    expected = running.run(SETTINGS, elsewhere)
    found = json.loads((out / SETTINGS.name / "result.json").read_text())
    for key in ("train", "validation", "test"):
        for name in ("loss", "accuracy", "forward_nfe", "backward_nfe"):
            assert found[key][name] == expected[key][name]
    config = json.loads((out / SETTINGS.name / CONFIG).read_text())
    assert len(config["resumes"]) == resumes
    assert all(0 < each["epoch"] < 12 and each["threads"] == 1 for each in config["resumes"])


@pytest.mark.parametrize("who", ["the run", "the Ray worker"])
def test_a_worker_that_is_killed_is_resumed(who: str, heads: Callable[[], Head], tmp_path: Path) -> None:
    out = tmp_path / "out"
    driver = sweep(heads(), out)
    pid = until(lambda: begun(out))
    os.kill(pid if who == "the run" else parent(pid), signal.SIGKILL)
    said, _ = driver.communicate(timeout=200)
    print(said)
    assert "it is retried" in said
    assert "1 made, 0 complete before, 0 failed" in said
    check(out, tmp_path / "elsewhere", resumes=1)


def test_a_head_that_is_killed_is_replaced(heads: Callable[[], Head], tmp_path: Path) -> None:
    """The sweep ends with its cluster; the same sweep on a new one goes on where it was."""
    out = tmp_path / "out"
    head = heads()
    driver = sweep(head, out)
    until(lambda: begun(out))
    head.kill()
    try:
        said, _ = driver.communicate(timeout=150)
        print(said)
        assert "1 made" not in said
    finally:
        driver.kill()
    until(lambda: worker(out) is None)  # the worker has noticed, too
    assert not (out / SETTINGS.name / "result.json").exists()
    driver = sweep(heads(), out)
    said, _ = driver.communicate(timeout=200)
    print(said)
    assert "1 made, 0 complete before, 0 failed" in said
    check(out, tmp_path / "elsewhere", resumes=1)

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
EPOCHS = 30
SETTINGS = tiny(schedule=Schedule(epochs=EPOCHS, lr=1e-3, every=15))
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
    # Seconds until a driver gives up a cluster that does not answer; a minute by default.
    env = {**os.environ, "RAY_ADDRESS": head.address, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
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


def resumes(out: Path) -> list[dict[str, Any]]:
    """What the run has recorded about each time that it was resumed."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # it is not there yet
        return json.loads((out / SETTINGS.name / CONFIG).read_text())["resumes"]
    return []


def at_work(out: Path, resumed: int) -> int | None:
    """The worker, once the run was resumed so many times and there is a checkpoint to go on from."""
    there = (out / SETTINGS.name / CHECKPOINT).exists() and len(resumes(out)) == resumed
    return worker(out) if there else None


def check(out: Path, elsewhere: Path, resumed: int) -> None:
    """The run has the numbers of one that nobody has disturbed, and was resumed, not begun again."""
    expected = running.run(SETTINGS, elsewhere)
    found = json.loads((out / SETTINGS.name / "result.json").read_text())
    for key in ("train", "validation", "test"):
        for name in ("loss", "accuracy", "forward_nfe", "backward_nfe"):
            assert found[key][name] == expected[key][name]
    assert len(resumes(out)) == resumed
    assert all(0 < each["epoch"] < EPOCHS and each["threads"] == 1 for each in resumes(out))


def test_a_sweep_survives_the_death_of_each_of_its_processes(heads: Callable[[], Head], tmp_path: Path) -> None:
    """The run, the Ray worker that waits for it and the head are killed, one after the other.

    A run that dies is resumed from its checkpoint. The sweep ends with its cluster; the same sweep on a new cluster
    goes on where it was. It is one test since starting a cluster takes longer than all runs.
    """
    out = tmp_path / "out"
    head = heads()
    driver = sweep(head, out)
    try:
        os.kill(until(lambda: at_work(out, resumed=0)), signal.SIGKILL)
        os.kill(parent(until(lambda: at_work(out, resumed=1))), signal.SIGKILL)
        until(lambda: at_work(out, resumed=2))
        head.kill()
        said, _ = driver.communicate(timeout=150)
    finally:
        driver.kill()
    print(said)
    assert "killed by SIGKILL; it is retried" in said
    assert said.count("it is retried") == 2
    assert "1 made" not in said
    until(lambda: worker(out) is None)  # the worker has noticed, too
    assert not (out / SETTINGS.name / "result.json").exists()
    driver = sweep(heads(), out)
    said, _ = driver.communicate(timeout=200)
    print(said)
    assert "1 made, 0 complete before, 0 failed" in said
    check(out, tmp_path / "elsewhere", resumed=3)

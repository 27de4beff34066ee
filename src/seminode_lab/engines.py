"""Engines, which run each run of a sweep in its own process, on this machine or on a Ray cluster."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .attempts import DIED
from .worker import Order

#: Seconds that a process has to exit before it is killed.
GRACE = 5.0
#: The program of a worker. It imports modules from the same places as this process.
PROGRAM = """
import json, sys
sys.path = json.loads(sys.argv[1])
from seminode_lab.worker import main
sys.exit(main())
"""


class RunHandle(ABC):
    """A run that has been started, or that waits for resources."""

    @abstractmethod
    def status(self) -> int | None:
        """The exit status of the process, negative for a signal; `None` while it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the process to exit, without waiting for it."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the process has exited, after `stop`."""


class Engine(ABC):
    """Starts runs."""

    @abstractmethod
    def start(self, order: Order) -> RunHandle: ...

    def close(self) -> None:
        """Release the engine's resources. No run can be started after this."""
        return None


def launch(order: Order, gpu: str | None = None) -> subprocess.Popen[bytes]:
    """Start a worker on this machine, which appends to the log of the run and sees at most one GPU, if one is given.

    The worker has its own session, so that an interrupt from the keyboard reaches only the sweep.
    """
    threads = str(order.threads)
    env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    env |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    order.log.parent.mkdir(parents=True, exist_ok=True)
    with order.log.open("ab") as log:
        log.write(f"--- {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}\n".encode())
        log.flush()
        command = [sys.executable, "-c", PROGRAM, json.dumps(sys.path)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{order.written()}\n".encode())
        process.stdin.flush()  # it stays open: the worker exits when it is closed
    return process


def end(process: subprocess.Popen[bytes], hard: bool = False) -> None:
    """End a process and all processes that it has started."""
    if os.name != "posix":
        process.kill() if hard else process.terminate()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL if hard else signal.SIGTERM)


def leave(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has exited, and kill it if that takes too long."""
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        end(process, hard=True)
        process.wait()
    _hang_up(process)


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


class LocalRun(RunHandle):
    """A process on this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def status(self) -> int | None:
        found = self.process.poll()
        if found is not None:
            _hang_up(self.process)
        return found

    def stop(self) -> None:
        end(self.process)

    def wait(self) -> None:
        leave(self.process)


class Local(Engine):
    """Runs processes on this machine. Each run on `cuda` gets the GPU that has the fewest of them."""

    def __init__(self, gpus: Sequence[str] | None = None) -> None:
        self._gpus = None if gpus is None else list(gpus)
        self._used: list[tuple[str, LocalRun]] = []

    def start(self, order: Order) -> LocalRun:
        gpu = self._free(order)
        run = LocalRun(launch(order, gpu))
        if gpu is not None:
            self._used.append((gpu, run))
        return run

    def _free(self, order: Order) -> str | None:
        if order.settings.device != "cuda":  # a device with a number is the user's choice
            return None
        if self._gpus is None:
            self._gpus = visible_gpus()
        self._used = [(gpu, run) for gpu, run in self._used if run.status() is None]
        loads = Counter(dict.fromkeys(self._gpus, 0))
        loads.update(gpu for gpu, _ in self._used)
        return min(self._gpus, key=loads.__getitem__, default=None)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def _on_a_node(text: str) -> int:
    """The Ray task: runs a worker on its machine. If the task is killed, the worker exits too."""
    process = launch(Order.read(text))
    try:
        return process.wait()
    finally:
        end(process)
        leave(process)


class RayRun(RunHandle):
    """A Ray task."""

    def __init__(self, ray: Any, task: Any) -> None:
        self._ray, self._task = ray, task

    def status(self) -> int | None:
        ready, _ = self._ray.wait([self._task], timeout=0)
        if not ready:
            return None
        try:
            return self._ray.get(self._task)
        except self._ray.exceptions.RayError as error:
            print(f"Ray: {type(error).__name__}", file=sys.stderr)
            return DIED

    def stop(self) -> None:
        self._ray.cancel(self._task, force=True)

    def wait(self) -> None:
        self._ray.wait([self._task], timeout=GRACE)


class Ray(Engine):
    """Runs tasks on a Ray cluster.

    The cluster is the running one, or the one that `RAY_ADDRESS` names; otherwise a new one on this machine. All
    machines need seminode and the output folder under the same path.
    """

    def __init__(self) -> None:
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise ValueError("engine: Ray is not installed: pip install 'seminode[ray]'") from error
        self._ray = ray
        self._own = not ray.is_initialized()
        if self._own:
            ray.init(log_to_driver=False, logging_level="ERROR")

    def start(self, order: Order) -> RayRun:
        gpus = 1 if order.settings.device.startswith("cuda") else 0
        remote = self._ray.remote(num_cpus=order.threads, num_gpus=gpus, max_retries=0)(_on_a_node)
        return RayRun(self._ray, remote.remote(order.written()))

    def close(self) -> None:
        if self._own:
            self._ray.shutdown()


ENGINES: dict[str, type[Engine]] = {"local": Local, "ray": Ray}

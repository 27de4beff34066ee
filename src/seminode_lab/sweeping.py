"""Sweeps: many runs, some in parallel. Complete runs are skipped, others are resumed, and dead ones are retried."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from .attempts import BUSY, DIED, DONE, FAILED, UNUSABLE
from .engines import Engine, RunHandle
from .modes import ALL_MODES
from .peers import LIBRARIES
from .settings import Settings, all_runs
from .store import RESULT, Finished, StoreError, present
from .watching import Sight, SweepDisplay, last_lines
from .worker import Order

#: Seconds between two checks of all processes, and until a run that another process works on is checked again.
PAUSE, AGAIN, AGAIN_AT_MOST = 0.2, 5.0, 60.0


def chosen(
    preset: str,
    experiments: Sequence[str] = (),
    only: Sequence[str] = (),
    seeds: int | None = None,
    library: str | None = None,
) -> list[Settings]:
    """The selected runs of a preset, the longest first: those with the tightest tolerances and with mixed norms.

    `only` has patterns of names. A pattern without wildcards matches any part of a name. `library` replaces seminode,
    with the modes of that library.
    """
    found = all_runs(preset)
    if library is not None:
        found = _with(library, found)
    if seeds is not None:
        if seeds < 1:
            raise ValueError(f"seeds: expected a whole number of at least 1, found {seeds}")
        found = [run.changed(seed=seed) for run in found if run.seed == 0 for seed in range(seeds)]
    if experiments:
        found = [run for run in found if run.experiment in experiments]
        if not found:
            raise ValueError(f"experiment: the preset {preset!r} has no {' or '.join(map(repr, experiments))}")
    if only:
        found = _named(found, only)
    return sorted(found, key=lambda run: (run.rtol, ALL_MODES.index(run.mode)))


def _with(library: str, runs: Iterable[Settings]) -> list[Settings]:
    rows = [run.changed(library=library) for run in runs if run.mode == "mixed"]
    return [run.changed(mode=mode) for run in rows for mode in LIBRARIES[library]]


def _named(runs: Iterable[Settings], patterns: Sequence[str]) -> list[Settings]:
    runs, kept = list(runs), []
    for pattern in patterns:
        wild = pattern if set(pattern) & set("*?[") else f"*{pattern}*"
        fitting = [run for run in runs if fnmatchcase(run.name, wild)]
        if not fitting:
            example = f", such as {runs[0].name!r}" if runs else ""
            raise ValueError(f"only: expected a part of a run's name{example}; nothing matches {pattern!r}")
        kept += fitting
    return list(dict.fromkeys(kept))


@dataclass
class Job:
    """A run of a sweep and its state."""

    order: Order
    tries: int = 0
    not_before: float = 0.0
    pause: float = AGAIN
    since: float = 0.0

    @property
    def name(self) -> str:
        return self.order.settings.name

    def complete(self) -> bool:
        folder = self.order.out / self.name
        if not present(folder / RESULT):
            return False
        try:
            found = Finished.load(folder)
            found.check()
            return found.settings == self.order.settings.as_json()
        except StoreError:
            return False  # the error is reported when the run is made


@dataclass
class Swept:
    """The results of a sweep: the names of the runs."""

    there: list[str] = field(default_factory=list)  # complete before the sweep
    made: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # with the reasons

    def __str__(self) -> str:
        total = len(self.there) + len(self.made) + len(self.failed)
        return f"{total} runs: {len(self.made)} made, {len(self.there)} complete before, {len(self.failed)} failed"


class SweepRunner:
    """Makes the runs of a sweep."""

    def __init__(self, orders: Sequence[Order], engine: Engine, jobs: int, retries: int = 2) -> None:
        if jobs < 1:
            raise ValueError(f"jobs: expected a whole number of at least 1, found {jobs}")
        if retries < 0:
            raise ValueError(f"retries: expected a whole number of at least 0, found {retries}")
        self._engine, self._places, self._retries = engine, jobs, retries
        self._waiting = [Job(order) for order in orders]
        self._running: list[tuple[Job, RunHandle]] = []
        self._display = SweepDisplay(len(orders))
        self.found = Swept()

    def go(self) -> Swept:
        """Make all runs. An interrupt stops the processes; their runs can be resumed."""
        try:
            self._skip()
            while self._waiting or self._running:
                self._start()
                self._look()
                self._show()
                if self._waiting or self._running:
                    time.sleep(PAUSE)
        finally:
            for _, running in self._running:
                running.stop()
            for _, running in self._running:
                running.wait()
            self._display.close()
        return self.found

    def _skip(self) -> None:
        for job in [job for job in self._waiting if job.complete()]:
            self._waiting.remove(job)
            self.found.there.append(job.name)
            self._display.settled()
        if self.found.there:
            self._display.event(f"complete: {len(self.found.there)} runs")

    def _start(self) -> None:
        now = time.monotonic()
        due = [job for job in self._waiting if job.not_before <= now]
        for job in due[: self._places - len(self._running)]:
            self._waiting.remove(job)
            if job.complete():  # another sweep has made it
                self.found.there.append(job.name)
                self._settle(f"complete: {job.name}")
                continue
            job.since = now
            if not job.not_before:
                self._display.event(f"started: {job.name}" + (f", attempt {job.tries + 1}" if job.tries else ""))
            self._running.append((job, self._engine.start(job.order)))

    def _look(self) -> None:
        for job, running in list(self._running):
            status = running.status()
            if status is not None:
                self._running.remove((job, running))
                self._ended(job, status)

    def _ended(self, job: Job, status: int) -> None:
        if status == DONE:
            self.found.made.append(job.name)
            self._settle(f"done: {job.name} in {time.monotonic() - job.since:.0f} s")
        elif status == BUSY:
            if not job.not_before:
                self._display.event(f"waiting: {job.name}, another process works on it")
            job.not_before, job.pause = time.monotonic() + job.pause, min(2 * job.pause, AGAIN_AT_MOST)
            self._waiting.append(job)
        elif status in (FAILED, UNUSABLE):  # it would fail again
            self._failed(job, "".join(last_lines(job.order.log, 1)))
        else:
            job.tries, job.not_before = job.tries + 1, 0.0
            if job.tries > self._retries:
                self._failed(job, f"{_death(status)}, {job.tries} times")
            else:
                self._display.event(f"died: {job.name}, {_death(status)}; it is retried")
                self._waiting.insert(0, job)

    def _failed(self, job: Job, reason: str) -> None:
        self.found.failed[job.name] = reason
        self._settle(f"failed: {job.name}: {reason}")

    def _settle(self, text: str) -> None:
        self._display.event(text)
        self._display.settled()

    def _show(self) -> None:
        now = time.monotonic()
        sights = [Sight(job.name, now - job.since, job.order.log) for job, _ in self._running]
        self._display.tick(sights, len(self._waiting), len(self.found.failed))


def _death(status: int) -> str:
    if status < 0:
        names = {each.value: each.name for each in signal.Signals}
        return f"killed by {names.get(-status, -status)}"
    return "ended by an error" if status == DIED else f"ended with status {status}"


def failures(found: Swept, out: Path, count: int = 5) -> list[str]:
    """Lines about failed runs: the reasons and the ends of their logs."""
    told = []
    for name, reason in found.failed.items():
        log = out / "logs" / f"{name}.log"
        told += [f"{name}: {reason}", *(f"    | {line}" for line in last_lines(log, count)), f"    log: {log}"]
    return told

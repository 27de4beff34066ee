"""Run folders. The folder of a run holds its settings, its measurements and a checkpoint to resume from.

    config.json               settings, seed, versions and commit; the same for every time the run was resumed
    metrics.json              all evaluations so far, in order
    times-0010.npz            the times of function evaluations and steps in the evaluation after epoch 10
    control.npz               pendulum only: the swing-up by the trained model; written before result.json
    checkpoint.safetensors    the state of the run: tensors, and the rest as JSON in the header
    result.json               the final numbers; exists when the run is complete

Every file is written under a temporary name and then moved into place. A reader therefore finds the old file or the new
one, never a part of one, even if the writer is killed. The checkpoint determines how far a run has come: evaluations
that are later than the checkpoint are discarded when the run is resumed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from seminode.errors import warn

from .data.arrays import read_npz
from .data.errors import DataError
from .data.reading import parsed
from .data.tensors import load_tensors, save_tensors
from .forms import LARGEST, Unlike
from .run_files import (
    CHECKPOINT,
    CHECKPOINT_REMEDY,
    CONFIG,
    METRICS,
    REMEDIES,
    REMEDY,
    RESULT,
    StoreError,
    placing,
    present,
    read_json,
    write_json,
)
from .run_forms import check_arrays, check_checkpoint, check_config, check_metrics, check_result

LOCK = "lock"


class Busy(StoreError):
    """Another process works on this run."""


class OldCheckpoint(UserWarning):
    """A checkpoint was written before checkpoints had digests."""


class Taken(StoreError):
    """The folder holds a run that must not be overwritten."""


def times_name(epoch: int) -> str:
    return f"times-{epoch:04d}"


@contextlib.contextmanager
def _formed(path: Path) -> Iterator[None]:
    """Turn what is wrong with the content of a file into an error that names the file."""
    try:
        yield
    except Unlike as error:
        raise StoreError(f"{path}: {error}; {REMEDIES.get(path.name, REMEDY)}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, each with its epoch; none if there is no such file."""
    if not present(path):
        return []
    found = read_json(path, list)
    for i, each in enumerate(found):
        epoch = each.get("epoch") if isinstance(each, dict) else None
        if not isinstance(epoch, int) or isinstance(epoch, bool):
            raise StoreError(f"{path}: [{i}]: expected an evaluation with its epoch; {REMEDIES[METRICS]}")
    return found


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `epoch`, its last complete epoch."""

    epoch: int
    tensors: Mapping[str, Tensor]
    rest: Mapping[str, Any]  # JSON: numbers, strings, lists, dicts

    def save(self, path: Path) -> None:
        about = {"epoch": str(self.epoch), "rest": json.dumps(dict(self.rest))}
        with placing(path) as temporary:
            save_tensors(temporary, self.tensors, about)

    def part(self, kind: str) -> dict[str, Tensor]:
        """The tensors whose names start with `kind:`, under their names without this prefix."""
        return {name.removeprefix(f"{kind}:"): x for name, x in self.tensors.items() if name.startswith(f"{kind}:")}

    def check(self, path: Path) -> None:
        """Check that a run can go on from it.

        Raises:
            StoreError: if a number is missing.
        """
        try:
            check_checkpoint(self.rest)
        except Unlike as error:
            raise StoreError(f"{path}: {error}. {CHECKPOINT_REMEDY}") from None

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a checkpoint. This runs no code from the file: the format holds only numbers and text.

        Checkpoints of version 0.1 have no digest. They are read with a warning.
        """
        try:
            found = load_tensors(path)
            epoch, rest = int(found.about["epoch"]), parsed(found.about["rest"])
            if not -1 <= epoch < LARGEST or not isinstance(rest, dict):
                raise ValueError(f"epoch {epoch} with a {type(rest).__name__}")
        except FileNotFoundError:
            raise StoreError(f"{path}: expected a checkpoint, found none") from None
        except (DataError, OSError, KeyError, ValueError) as error:
            said = str(error).removeprefix(f"{path}: ").removeprefix("damaged ")
            raise StoreError(
                f"{path}: the checkpoint is damaged ({type(error).__name__}: {said}). {CHECKPOINT_REMEDY}"
            ) from error
        if not found.proven:
            warn(f"{path}: an old checkpoint without a digest; changes of its content cannot be noticed", OldCheckpoint)
        return cls(epoch, found.tensors, rest)


class Run:
    """A run folder that is open for writing. It is locked against other processes."""

    def __init__(self, path: Path, config: Mapping[str, Any], wait: bool = False):
        self.path = path
        self.wait = wait  # whether to wait for another process that works on the run
        self.config = json.loads(json.dumps(dict(config)))  # as it will be read from the file
        self._lock: Any = None

    def __enter__(self) -> Run:
        from filelock import FileLock, Timeout

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / LOCK)
            self._lock.acquire(timeout=-1 if self.wait else 0)
        except Timeout:
            raise Busy(f"{self.path}: another process works on this run") from None
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise
        return self

    def _open(self) -> None:
        there = self.path / CONFIG
        if not present(there):
            write_json(there, self.config)
            return
        found = read_json(there)
        asked, kept = self.config["settings"], found.get("settings")
        if not isinstance(kept, dict):
            raise StoreError(f"{there}: settings: expected a dict, found a {type(kept).__name__}; {REMEDIES[CONFIG]}")
        if asked != kept:
            names = sorted(name for name in asked.keys() | kept.keys() if asked.get(name) != kept.get(name))
            raise Taken(f"{self.path}: holds another run: {', '.join(names)} differ. Use another folder.")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def resumed(self, epoch: int, circumstances: Mapping[str, Any]) -> None:
        """Note in the settings that the run goes on from an epoch, and with which versions and threads."""
        found = read_json(self.path / CONFIG)
        earlier = found.get("resumes", [])
        if not isinstance(earlier, list):
            raise StoreError(f"{self.path / CONFIG}: resumes: expected a list; {REMEDIES[CONFIG]}")
        write_json(self.path / CONFIG, {**found, "resumes": [*earlier, {"epoch": epoch, **circumstances}]})

    # The state of the run.

    @property
    def done(self) -> bool:
        return present(self.path / RESULT)

    @property
    def begun(self) -> bool:
        """Whether the run has been started."""
        return any(present(self.path / name) for name in (CHECKPOINT, METRICS))

    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint; `None` if there is none yet."""
        path = self.path / CHECKPOINT
        return Checkpoint.load(path) if present(path) else None

    def save(self, checkpoint: Checkpoint) -> None:
        checkpoint.save(self.path / CHECKPOINT)

    def rewind(self, epoch: int) -> list[dict[str, Any]]:
        """Discard evaluations that are later than an epoch; return the others."""
        path = self.path / METRICS
        if not present(path):
            return []
        kept = [each for each in read_metrics(path) if each["epoch"] <= epoch]
        write_json(path, kept)
        for name in self.path.glob("times-*.npz"):
            digits = name.stem.removeprefix("times-")
            if digits.isdecimal() and int(digits) > epoch:
                name.unlink()
        return kept

    # Results.

    def evaluated(
        self, evaluations: Sequence[Mapping[str, Any]], times: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Write all evaluations so far, and the times of the last one."""
        if times is not None:
            self.keep(times_name(evaluations[-1]["epoch"]), times)
        write_json(self.path / METRICS, list(evaluations))

    def keep(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write named arrays to a file."""
        with placing(self.path / f"{name}.npz") as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def result(self) -> dict[str, Any]:
        return read_json(self.path / RESULT)

    def finish(self, result: Mapping[str, Any]) -> None:
        write_json(self.path / RESULT, dict(result))


class FollowedRun(Run):
    """A run folder as all but the first of several processes see it: they read its checkpoint and write nothing."""

    def __enter__(self) -> FollowedRun:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def resumed(self, epoch: int, circumstances: Mapping[str, Any]) -> None:
        return None

    def save(self, checkpoint: Checkpoint) -> None:
        return None

    def rewind(self, epoch: int) -> list[dict[str, Any]]:
        return []

    def evaluated(
        self, evaluations: Sequence[Mapping[str, Any]], times: Mapping[str, np.ndarray] | None = None
    ) -> None:
        return None

    def keep(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        return None

    def finish(self, result: Mapping[str, Any]) -> None:
        return None


@dataclass(frozen=True)
class Finished:
    """The content of a run folder."""

    path: Path
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any] | None  # `None` if the run is not complete

    @classmethod
    def load(cls, path: Path) -> Finished:
        """Read a run folder of any task. Of the content, only the parts that every run has are checked."""
        metrics, result = path / METRICS, path / RESULT
        config = read_json(path / CONFIG)
        for name in ("settings", "circumstances"):
            if not isinstance(config.get(name, {} if name == "circumstances" else None), dict):
                raise StoreError(f"{path / CONFIG}: {name}: expected a dict; {REMEDIES[CONFIG]}")
        return cls(
            path,
            config,
            read_metrics(metrics),
            read_json(result) if present(result) else None,
        )

    def check(self) -> None:
        """Check that this is a run of the experiments, with everything that tables, figures and reports read.

        Raises:
            StoreError: if something is missing or damaged. It names the file and what is expected.
        """
        with _formed(self.path / CONFIG):
            check_config(self.config)
        experiment = self.settings["experiment"]
        with _formed(self.path / METRICS):
            check_metrics(self.metrics, experiment, complete=self.result is not None)
        if self.result is not None:
            with _formed(self.path / RESULT):
                epochs, trains = self.settings["schedule"]["epochs"], "train" in self.metrics[0]
                check_result(self.result, experiment, epochs, trains)

    def check_arrays(self) -> None:
        """Check the arrays of a run that is otherwise in order.

        Raises:
            StoreError: if a file of arrays is damaged.
        """
        for name in ("control", *(times_name(each["epoch"]) for each in self.metrics)):
            self.arrays(name)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.config["settings"]

    def times(self, epoch: int) -> dict[str, np.ndarray]:
        """The times of the evaluation after an epoch; empty if they were not saved."""
        return self.arrays(times_name(epoch))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Arrays that `Run.keep` has written; empty if there are none."""
        path = self.path / f"{name}.npz"
        if not present(path):
            return {}
        try:
            found = read_npz(path)
        except DataError as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error
        with _formed(path):
            check_arrays(name, found)
        return found


#: Files of which a run folder has at least one.
FILES = (CONFIG, METRICS, RESULT, CHECKPOINT)


def run_folders(folder: Path) -> list[Path]:
    """All run folders in a folder, sorted by name, with those that lack a file and with links that lead nowhere."""
    return [
        path
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if (path.is_symlink() and not path.exists()) or any(present(path / name) for name in FILES)
    ]


def runs(folder: Path, skip: Callable[[StoreError], None]) -> list[Finished]:
    """All runs in a folder, sorted by name. `skip` is called with the error of each run that cannot be read."""
    found = []
    for path in run_folders(folder):
        try:
            run = Finished.load(path)
            run.check_arrays()
            found.append(run)
        except StoreError as error:
            skip(error)
    return found


def undamaged(folder: Path, skip: Callable[[StoreError], None] = lambda _: None) -> list[Finished]:
    """The runs of the experiments in a folder, complete or not, that have all that tables, figures and reports read."""
    found = []
    for run in runs(folder, skip):
        try:
            run.check()
            found.append(run)
        except StoreError as error:
            skip(error)
    return found

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

from .data import reading
from .data.arrays import read_npz
from .data.errors import DataError
from .data.files import writing
from .data.reading import parsed
from .data.tensors import load_tensors, save_tensors

CONFIG, METRICS, RESULT, CHECKPOINT, LOCK = (
    "config.json",
    "metrics.json",
    "result.json",
    "checkpoint.safetensors",
    "lock",
)


class StoreError(Exception):
    """A run folder cannot be read, written or locked."""


class Busy(StoreError):
    """Another process works on this run."""


class OldCheckpoint(UserWarning):
    """A checkpoint was written before checkpoints had digests."""


class Taken(StoreError):
    """The folder holds a run that must not be overwritten."""


def times_name(epoch: int) -> str:
    return f"times-{epoch:04d}"


@contextlib.contextmanager
def placing(path: Path) -> Iterator[Path]:
    """A temporary file, which is moved to `path` on success and removed on failure."""
    try:
        with writing(path) as temporary:
            yield temporary
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror or error}; the old file is kept") from error


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, allow_nan=True) + "\n"
    with placing(path) as temporary:
        temporary.write_text(text)


#: What to do about a damaged file.
REMEDIES = {
    CONFIG: "restore it from a copy, or delete the run's folder to make the run again",
    METRICS: "restore it from a copy, or delete the run's folder to make the run again",
    RESULT: "delete it, and the run is resumed from its checkpoint",
}


def read_json(path: Path, kind: type = dict) -> Any:
    remedy = REMEDIES.get(path.name, "delete it to have it made again")
    try:
        found = reading.read_json(path)
    except FileNotFoundError:
        raise StoreError(f"{path}: expected a file, found none") from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DataError as error:
        raise StoreError(f"{error}; {remedy}") from error
    if not isinstance(found, kind):
        raise StoreError(f"{path}: expected a {kind.__name__}, found a {type(found).__name__}; {remedy}")
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

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a checkpoint. This runs no code from the file: the format holds only numbers and text.

        Checkpoints of version 0.1 have no digest. They are read with a warning.
        """
        try:
            found = load_tensors(path)
            epoch, rest = int(found.about["epoch"]), parsed(found.about["rest"])
            if epoch < -1 or not isinstance(rest, dict):
                raise ValueError(f"epoch {epoch} with a {type(rest).__name__}")
        except FileNotFoundError:
            raise StoreError(f"{path}: expected a checkpoint, found none") from None
        except (DataError, OSError, KeyError, ValueError) as error:
            said = str(error).removeprefix(f"{path}: ").removeprefix("damaged ")
            raise StoreError(
                f"{path}: the checkpoint is damaged ({type(error).__name__}: {said}). Delete it to restart the run."
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
        if not there.exists():
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
        return (self.path / RESULT).exists()

    @property
    def begun(self) -> bool:
        """Whether the run has been started."""
        return any((self.path / name).exists() for name in (CHECKPOINT, METRICS))

    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint; `None` if there is none yet."""
        path = self.path / CHECKPOINT
        return Checkpoint.load(path) if path.exists() else None

    def save(self, checkpoint: Checkpoint) -> None:
        checkpoint.save(self.path / CHECKPOINT)

    def rewind(self, epoch: int) -> list[dict[str, Any]]:
        """Discard evaluations that are later than an epoch; return the others."""
        path = self.path / METRICS
        if not path.exists():
            return []
        kept = [each for each in read_json(path, list) if each["epoch"] <= epoch]
        write_json(path, kept)
        for name in self.path.glob("times-*.npz"):
            if int(name.stem.split("-")[1]) > epoch:
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
        metrics, result = path / METRICS, path / RESULT
        config = read_json(path / CONFIG)
        if not isinstance(config.get("settings"), dict):
            raise StoreError(f"{path / CONFIG}: settings: expected a dict; {REMEDIES[CONFIG]}")
        return cls(
            path,
            config,
            read_json(metrics, list) if metrics.exists() else [],
            read_json(result) if result.exists() else None,
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.config["settings"]

    def times(self, epoch: int) -> dict[str, np.ndarray]:
        """The times of the evaluation after an epoch; empty if they were not saved."""
        return self.arrays(times_name(epoch))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Arrays that `Run.keep` has written; empty if there are none."""
        path = self.path / f"{name}.npz"
        if not path.exists():
            return {}
        try:
            return read_npz(path)
        except DataError as error:
            raise StoreError(str(error)) from error
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror or error}") from error


def runs(folder: Path, skip: Callable[[StoreError], None]) -> list[Finished]:
    """All runs in a folder, sorted by name. `skip` is called with the error of each run that cannot be read."""
    found = []
    for config in sorted(folder.glob(f"*/{CONFIG}")):
        try:
            found.append(Finished.load(config.parent))
        except StoreError as error:
            skip(error)
    return found

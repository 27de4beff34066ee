"""The files of a run folder and of measurements: their names, reading and writing them, and what errors say."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .data import reading
from .data.errors import DataError
from .data.files import writing

CONFIG, METRICS, RESULT, CHECKPOINT = "config.json", "metrics.json", "result.json", "checkpoint.safetensors"


class StoreError(Exception):
    """A run folder cannot be read, written or locked."""


def present(path: Path) -> bool:
    """Whether there is anything with this name. A link that leads nowhere is not nothing: reading it says so."""
    return os.path.lexists(path)


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

#: And about any other.
CHECKPOINT_REMEDY = "Delete it to restart the run."
REMEDY = "delete it to have it made again"


def read_json(path: Path, kind: type = dict) -> Any:
    remedy = REMEDIES.get(path.name, REMEDY)
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

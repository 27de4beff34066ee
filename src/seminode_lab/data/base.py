"""What every data set can tell about itself."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from seminode.errors import warn

from .errors import DataError, IncompleteDataWarning, MissingData
from .folders import data_dir

State = Literal["complete", "incomplete", "absent", "broken"]


@dataclass(frozen=True)
class DataStatus:
    """What there is of a data set.

    Attributes:
        state: `broken` is what is there but is not what it should be.
        place: the folder or file.
        items: how many there are, of how many.
        size: bytes on disk.
        notes: what is missing or wrong, or else worth knowing; a sentence each.
        origin: where it is from, if not from the data set's usual origin.
    """

    state: State
    place: Path | None = None
    items: int = 0
    expected: int = 0
    size: int = 0
    notes: tuple[str, ...] = ()
    origin: str | None = None

    def noting(self, *notes: str, state: State | None = None) -> DataStatus:
        return replace(self, notes=(*self.notes, *notes), state=state or self.state)


class DataSet(abc.ABC):
    """A data set by name. A new one gives:

    1. `name`, `title`, `unit` (what its items are), `origin` and `licence`;
    2. `download_size`: the bytes that a fetch brings, 0 if it brings none;
    3. `status(root)`: what there is, from a look at names and sizes;
    4. `check(root)`: the same, from reading everything;
    5. `fetch(root, progress)`: bring it to `root`, if it is not there.
    """

    name: str
    title: str
    unit: str
    origin: str
    licence: str
    download_size: int = 0

    @abc.abstractmethod
    def status(self, root: Path) -> DataStatus: ...

    @abc.abstractmethod
    def check(self, root: Path, progress: bool = True) -> DataStatus: ...

    @abc.abstractmethod
    def fetch(self, root: Path, progress: bool = True) -> None: ...


def found_in(root: Path, places: Sequence[str], marks: Sequence[str]) -> Path | None:
    """The first of the places below `root` that holds one of the files or folders in `marks`."""
    folders = (root / place for place in places)
    return next((folder for folder in folders if any((folder / mark).exists() for mark in marks)), None)


def located(name: str, root: str | os.PathLike[str] | None, places: Sequence[str], marks: Sequence[str]) -> Path:
    """The same, or an error that says where it was looked for and what to do."""
    folder = data_dir(root)
    found = found_in(folder, places, marks)
    if found is None:
        raise MissingData(
            f"{name}: expected {marks[0]!r} in one of {', '.join(map(repr, places))} below {str(folder)!r}, found "
            f"none; name the folder with root or SEMINODE_DATA, or run: seminode data fetch {name}"
        )
    return found


def warn_incomplete(name: str, place: Path, found: str) -> None:
    warn(f"{name}: {str(place)!r} is incomplete: {found}. Results are of what is there", IncompleteDataWarning)


def count_text(found: int, expected: int) -> str:
    """
    >>> count_text(3, 12), count_text(1234, 1234)
    ('3 of 12', '1,234')
    """
    return f"{found:,}" if found == expected else f"{found:,} of {expected:,}"


def broken(error: DataError, status: DataStatus) -> DataStatus:
    """The same data set, after something in it could not be read."""
    return status.noting(str(error), state="broken")

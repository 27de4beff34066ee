"""The interface of data sets."""

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
    """The state of a data set on disk.

    Attributes:
        state: `broken` if there are files with wrong content.
        place: the folder or file.
        items, expected: the number of items that were found, and that of the complete data set.
        size: bytes on disk.
        notes: what is missing, wrong or otherwise worth knowing, in one sentence each.
        origin: the origin, if it differs from that of the data set.
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
    """A data set. A subclass provides:

    1. `name`, `title`, `unit` (what its items are), `origin` and `licence`;
    2. `download_size`: the number of bytes to download, 0 if there is no download;
    3. `status(root)`: the state, from file names and sizes;
    4. `check(root, progress)`: the state, after reading all files;
    5. `fetch(root, progress)`: download or simulate it into `root` if it is absent.
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
    """The first of the folders `places` below `root` that contains one of the files or folders `marks`."""
    folders = (root / place for place in places)
    return next((folder for folder in folders if any((folder / mark).exists() for mark in marks)), None)


def located(name: str, root: str | os.PathLike[str] | None, places: Sequence[str], marks: Sequence[str]) -> Path:
    """The same, or an error with the places that were searched and how to get the data."""
    folder = data_dir(root)
    found = found_in(folder, places, marks)
    if found is None:
        raise MissingData(
            f"{name}: expected {marks[0]!r} in one of {', '.join(map(repr, places))} below {str(folder)!r}, found "
            f"none; give the folder with root or SEMINODE_DATA, or run: seminode data fetch {name}"
        )
    return found


def warn_incomplete(name: str, place: Path, found: str) -> None:
    warn(f"{name}: {str(place)!r} is incomplete: {found}. Results use only the existing part", IncompleteDataWarning)


def count_text(found: int, expected: int) -> str:
    """A count, with the expected one if they differ.

    >>> count_text(3, 12), count_text(1234, 1234)
    ('3 of 12', '1,234')
    """
    return f"{found:,}" if found == expected else f"{found:,} of {expected:,}"


def broken(error: DataError, status: DataStatus) -> DataStatus:
    """The status of a data set after an error was found in it."""
    return status.noting(str(error), state="broken")

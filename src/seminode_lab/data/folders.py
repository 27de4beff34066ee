"""The folder with data, which the user chooses, or one in the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "SEMINODE_DATA"
FEATURES = "features"  # the folder of features that are computed from data


def cache_dir() -> Path:
    """The cache folder of the user, according to the platform's conventions."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The XDG specification says that relative paths are ignored.
        given = Path(os.environ.get("XDG_CACHE_HOME") or "")
        base = given if given.is_absolute() else Path.home() / ".cache"
    return base / "seminode"


def data_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """The given folder, or that of the environment variable `SEMINODE_DATA`, or the user's cache.

    The folder may not exist.

    Arguments:
        given: the folder, if the user has chosen one.

    >>> data_dir("some/where").as_posix()
    'some/where'
    """
    name = "data_dir" if given is not None else VARIABLE
    folder = Path(given if given is not None else os.environ.get(VARIABLE) or cache_dir()).expanduser()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{name}: expected a folder, found the file {str(folder)!r}")
    return folder


def features_dir(root: Path) -> Path:
    """The folder for features of the data in `root`: below `root` if that is writable, else in the user's cache."""
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return (root if os.access(existing, os.W_OK) else cache_dir()) / FEATURES

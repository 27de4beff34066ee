"""Where data lie: a folder that the user names, or one in the cache of the user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "SEMINODE_DATA"
FEATURES = "features"  # what is computed from data, in a folder beside them


def cache_dir() -> Path:
    """The folder for caches of this user, as the platform has it."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The XDG specification has relative paths ignored.
        given = Path(os.environ.get("XDG_CACHE_HOME") or "")
        base = given if given.is_absolute() else Path.home() / ".cache"
    return base / "seminode"


def data_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, or that of the environment variable `SEMINODE_DATA`, or the cache of the user.

    It need not exist.

    >>> data_dir("some/where").as_posix()
    'some/where'
    """
    name = "data_dir" if given is not None else VARIABLE
    folder = Path(given if given is not None else os.environ.get(VARIABLE) or cache_dir()).expanduser()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{name}: expected a folder, found the file {str(folder)!r}")
    return folder


def features_dir(root: Path) -> Path:
    """Where to keep what is computed from data in `root`: there, or in the user's cache where it is not writable."""
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    return (root if os.access(existing, os.W_OK) else cache_dir()) / FEATURES

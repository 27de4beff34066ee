"""A cache on disk for tensors that are slow to compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from seminode.errors import warn

from .errors import CacheWarning, DataError
from .files import writing
from .tensors import load_tensors, save_tensors


def cached(path: Path, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in `path` if they were saved with the same key; otherwise those of `make`, which are then saved.

    A file that is damaged, or that has no digest to tell, is made again.
    """
    found = _load(path, key)
    if found is not None:
        return found
    tensors = {name: tensor.contiguous() for name, tensor in make().items()}
    try:
        with writing(path) as scratch:
            save_tensors(scratch, tensors, {"key": key})
    except OSError as error:
        warn(f"{path}: could not be saved and will be computed again the next time ({error})", CacheWarning)
    return tensors


def _load(path: Path, key: str) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    try:
        found = load_tensors(path)
    except (OSError, DataError):
        return None
    return found.tensors if found.proven and found.about.get("key") == key else None

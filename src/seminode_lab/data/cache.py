"""A cache on disk for tensors that are slow to compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from seminode.errors import warn

from .errors import CacheWarning
from .files import writing


def cached(path: Path, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in `path` if they were saved with the same key; otherwise those of `make`, which are then saved.

    The file is a safetensors file. It contains only numbers and no code.
    """
    found = _load(path, key)
    if found is not None:
        return found
    tensors = {name: tensor.contiguous() for name, tensor in make().items()}
    try:
        with writing(path) as scratch:
            _safetensors().torch.save_file(tensors, scratch, metadata={"key": key})
    except (OSError, _safetensors().SafetensorError) as error:
        warn(f"{path}: could not be saved and will be computed again the next time ({error})", CacheWarning)
    return tensors


def _load(path: Path, key: str) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    try:
        with _safetensors().safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") != key:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a dict
    except (OSError, _safetensors().SafetensorError):
        return None  # it is computed again


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("the cache of features needs safetensors: pip install 'seminode[lab]'") from error
    return safetensors

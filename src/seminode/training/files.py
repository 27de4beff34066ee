"""Trained models in safetensors files: numbers and text only, so that reading a file runs no code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from .._field.checks import described

#: The entries of the file's header with the class of the model, and with the user's metadata as JSON; safetensors adds
#: entries of its own for tensors that share memory.
KIND, TEXT = "seminode.model", "seminode.metadata"


def save_model(model: nn.Module, path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
    """Save the parameters and buffers of a model. Options of `solve` and the architecture are not saved.

    The file is written under another name first, so that an interrupted write leaves the old file as it was. Needs
    safetensors: `pip install seminode[training]`.

    Arguments:
        model: any module.
        path: of the file.
        metadata: further text for the header, by name.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from seminode.models import ConcatMLP, NeuralODE
        >>> from seminode.training import load_model, save_model
        >>> model, other = (NeuralODE(ConcatMLP(2, (8,))) for _ in range(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(model, Path(folder) / "model.safetensors", {"epoch": "3"})
        ...     load_model(other, Path(folder) / "model.safetensors")
        {'epoch': '3'}
        >>> x = torch.randn(4, 2)
        >>> torch.equal(model(x), other(x))
        True
    """
    library = _safetensors()
    _check_module(model)
    text = dict(metadata or {})
    for name, value in text.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"metadata: expected names that are text, found {described(name)}")
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"metadata[{name!r}]: expected text, found {described(value)}")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"model: expected a state dict of tensors only, found {described(value)} as {name!r}")
    place = Path(path)
    if not place.parent.is_dir():
        raise FileNotFoundError(f"path: expected a file in an existing folder, found no folder {place.parent}")
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        library.save_model(model, str(part), metadata={KIND: type(model).__name__, TEXT: json.dumps(text)})
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> dict[str, str]:
    """Load parameters and buffers into a model of the same architecture, and return the metadata of the file.

    Arguments:
        model: built as the one that was saved; its class and the shapes of its tensors are checked.
        path: a file of `save_model`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from seminode.models import ConcatMLP, NeuralODE
        >>> from seminode.training import load_model, save_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(NeuralODE(ConcatMLP(2, (8,))), Path(folder) / "model.safetensors")
        ...     try:
        ...         load_model(NeuralODE(ConcatMLP(2, (16,))), Path(folder) / "model.safetensors")
        ...     except ValueError as error:
        ...         print(str(error).splitlines()[0])
        model: expected the architecture that ...model.safetensors holds: ...
    """
    library = _safetensors()
    _check_module(model)
    place = Path(path)
    with _open(place) as file:
        header: dict[str, str] = dict(file.metadata() or {})
    kind = header.get(KIND)
    if kind is None:
        raise ValueError(f"path: expected a file of save_model, found {place} without an entry {KIND!r}")
    if kind != type(model).__name__:
        raise ValueError(f"model: expected a {kind}, which {place} holds, found a {type(model).__name__}")
    metadata = _metadata(header.get(TEXT, "{}"), place)
    try:
        library.load_model(model, str(place), strict=True)
    except RuntimeError as error:
        raise ValueError(f"model: expected the architecture that {place} holds: {error}") from error
    return metadata


def _metadata(text: str, place: Path) -> dict[str, str]:
    try:
        metadata = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"path: expected metadata as JSON, found {place}, which is damaged: {error}") from error
    if not isinstance(metadata, dict):
        raise ValueError(f"path: expected metadata as a JSON object, found {described(metadata)} in {place}")
    return cast("dict[str, str]", metadata)


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, found {described(model)}")


def _open(place: Path) -> Any:
    import safetensors

    if not place.is_file():
        raise FileNotFoundError(f"path: expected a file of save_model, found no file {place}")
    try:
        return safetensors.safe_open(str(place), framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"path: expected a safetensors file, found {place}, which is damaged: {error}") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("files of models need safetensors: pip install 'seminode[training]'") from error
    return safetensors.torch

"""Puts the drop-ins in the place of the libraries that they replace."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import ModuleType

#: The libraries that may be replaced.
LIBRARIES = ("torchdiffeq", "torchcde")


def available() -> tuple[str, ...]:
    """The libraries for which there is a drop-in."""
    return tuple(name for name in LIBRARIES if importlib.util.find_spec(f"{__package__}.{name}") is not None)


@contextmanager
def installed(*libraries: str) -> Generator[None, None, None]:
    """A context in which importing these libraries gives their drop-ins; by default all of them.

    Modules that were imported before keep what they have.

    >>> with installed("torchdiffeq"):
    ...     import torchdiffeq
    >>> torchdiffeq.__name__
    'seminode.compat.torchdiffeq'
    """
    names = libraries or available()
    unknown = [name for name in names if name not in available()]
    if unknown:
        raise ValueError(f"libraries: expected some of {', '.join(available())}, found {unknown[0]!r}")
    before = {key: module for key, module in sys.modules.items() if key.split(".")[0] in names}
    for key in before:
        del sys.modules[key]
    try:
        for name in names:
            sys.modules.update(_modules(name))
        yield
    finally:
        for key in [key for key in sys.modules if key.split(".")[0] in names]:
            del sys.modules[key]
        sys.modules.update(before)


def _modules(name: str) -> dict[str, ModuleType]:
    """A drop-in and its modules, by the names that they replace."""
    package = importlib.import_module(f"{__package__}.{name}")
    found = {name: package}
    for each in _submodules(package):
        found[each.removeprefix(f"{__package__}.")] = importlib.import_module(each)
    return found


def _submodules(package: ModuleType) -> Iterator[str]:
    for info in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
        yield info.name

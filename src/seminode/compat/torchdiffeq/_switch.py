"""A switch that gives existing code other gradients, or compiled steps, without editing it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from ...adjoints import BY_NAME, Adjoint, AdjointName

#: The environment variable: `adjoint=replay,compile=1`, say.
VARIABLE = "SEMINODE_TORCHDIFFEQ"


@dataclass(frozen=True)
class Settings:
    """How solves are differentiated, and whether their steps are compiled.

    Attributes:
        adjoint: `None` differentiates as torchdiffeq does.
        compile: whether steps are compiled.
    """

    adjoint: Adjoint | None = None
    compile: bool = False


class Previous:
    """Puts the settings back that were in force before `use`, at the end of a `with` block."""

    def __init__(self, settings: Settings):
        self._settings = settings

    def __enter__(self) -> Settings:
        return current()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _current
        _current = self._settings


_UNCHANGED: Any = object()


def use(*, adjoint: Adjoint | AdjointName | None = _UNCHANGED, compile: bool = _UNCHANGED) -> Previous:
    """Change how all following solves are differentiated and run.

    Used as a statement, the change lasts; as `with use(...):`, until the end of the block.

    Arguments:
        adjoint: an adjoint of seminode or its name, for `odeint` and `odeint_adjoint`; `None` differentiates as
            torchdiffeq does.
        compile: whether to compile steps.

    >>> with use(adjoint="replay"):
    ...     current()
    Settings(adjoint=Replay(every=1), compile=False)
    >>> current()
    Settings(adjoint=None, compile=False)
    """
    global _current
    before = current()
    changed = before
    if adjoint is not _UNCHANGED:
        changed = replace(changed, adjoint=_adjoint(adjoint))
    if compile is not _UNCHANGED:
        if not isinstance(compile, bool):
            raise TypeError(f"compile: expected True or False, found {compile!r}")
        changed = replace(changed, compile=compile)
    _current = changed
    return Previous(before)


def current() -> Settings:
    """The settings in force: those of the last `use`, or of the environment variable."""
    global _current
    if _current is None:
        _current = from_environment(os.environ)
    return _current


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings in the environment variable, such as `adjoint=replay,compile=1`."""
    settings = Settings()
    for item in filter(None, map(str.strip, environment.get(VARIABLE, "").split(","))):
        name, _, value = item.partition("=")
        if name == "adjoint":
            settings = replace(settings, adjoint=_adjoint(None if value in ("", "none") else value))
        elif name == "compile" and value in ("0", "1"):
            settings = replace(settings, compile=value == "1")
        else:
            raise ValueError(f"{VARIABLE}: expected adjoint=NAME and compile=0 or 1, found {item!r}")
    return settings


def _adjoint(adjoint: Any) -> Adjoint | None:
    if adjoint is None or isinstance(adjoint, Adjoint):
        return adjoint
    if not isinstance(adjoint, str) or adjoint not in BY_NAME:
        raise ValueError(f"adjoint: expected None, one of {', '.join(BY_NAME)}, or an object, found {adjoint!r}")
    return BY_NAME[adjoint]()


_current: Settings | None = None

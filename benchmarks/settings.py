"""What a contender of the race is: a library with one of its settings, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Contender:
    """A library with a solver and an adjoint; the runner of the library interprets `options`."""

    library: str
    setting: str
    options: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False

    @property
    def name(self) -> str:
        return f"{self.library}: {self.setting}"


def step_size(options: Mapping[str, Any], factor: float) -> float:
    """The fixed step of a setting, 1/n, so that the error of a method of its order changes by about the factor."""
    return 1.0 / max(1, round(factor ** (-1.0 / options["order"]) / options["fixed"]))


def both(settings: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Contender]:
    """Settings of seminode, eager and compiled."""
    eager = [Contender("seminode", name, options) for name, options in settings]
    return eager + [
        Contender("seminode", f"{name}, compiled", {**options, "compile": True}, compiled=True)
        for name, options in settings
    ]

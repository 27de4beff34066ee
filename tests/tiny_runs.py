"""Runs of a second, and a preset of them: for tests of what makes runs."""

from __future__ import annotations

from typing import Any

import pytest

from seminode_lab import settings
from seminode_lab.schedule import Schedule
from seminode_lab.settings import Settings

ONE = Schedule(epochs=1, lr=1e-3, every=1)
TWO = Schedule(epochs=2, lr=1e-3, every=1)


def tiny(**changes: Any) -> Settings:
    """A neural CDE on a few of the shipped series."""
    model = (("hidden", 4), ("width", 4))
    given: dict[str, Any] = {"experiment": "ncde", "preset": "tiny", "data": "japanese_vowels", "mode": "mixed"}
    given |= {"rtol": 1e-2, "atol": 1e-2, "batch": 4, "schedule": ONE, "sizes": (6, 3, 3), "model": model}
    return Settings(**{**given, **changes})


def install(monkeypatch: pytest.MonkeyPatch, *rows: Settings) -> None:
    """The preset `tiny`, of these rows or of two."""
    rows = rows or (tiny(), tiny(rtol=1e-3))
    monkeypatch.setitem(settings.PRESETS, "tiny", (rows, dict.fromkeys(settings.EXPERIMENTS, 1)))

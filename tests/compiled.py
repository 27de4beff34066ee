"""A stand-in for Inductor, which takes seconds for every program: graphs run as they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import pytest

from seminode._compile import batch_axis, front_end, inductor


def run_graph(module: Any, examples: list[Any]) -> Callable[[list[Any]], Any]:
    """What `inductor.back_end` does, without compiling."""
    return lambda inputs: list(module(*inputs))


def replace_back_end(monkeypatch: pytest.MonkeyPatch, back_end: Callable[..., Any] = run_graph) -> None:
    """Compile with another back end, and forget all programs compiled so far."""
    monkeypatch.setattr(inductor, "back_end", back_end)
    forget_programs(monkeypatch)


def forget_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "_front_ends", OrderedDict())
    monkeypatch.setattr(front_end, "_wide_front_ends", OrderedDict())
    monkeypatch.setattr(batch_axis, "_remembered", OrderedDict())
    monkeypatch.setattr(front_end, "_known", WeakValueDictionary())

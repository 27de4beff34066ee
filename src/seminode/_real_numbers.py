"""Checks of numbers that a user passes to a controller: each says which argument, what was found, what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, cast

from torch import Tensor

from ._untyped import numbers


def real_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, found {type(value).__name__}")
    return float(value)


def check_finite(thing: object, *names: str) -> None:
    """Check attributes of an object."""
    for name in names:
        value = getattr(thing, name)
        if not math.isfinite(real_number(name, value)):
            raise ValueError(f"{name}: expected a finite number, found {value}")


def check_positive(thing: object, *names: str) -> None:
    """Check attributes of an object."""
    for name in names:
        value = real_number(name, getattr(thing, name))
        if not value > 0.0:
            raise ValueError(f"{name}: expected a positive number, found {value}")


def positive_steps(name: str, values: Sequence[float]) -> tuple[float, ...]:
    steps = list(_sequence(name, values))
    for i, dt in enumerate(steps):
        if not real_number(f"{name}[{i}]", dt) > 0.0:
            raise ValueError(f"{name}[{i}]: expected a positive step, found {dt}")
    return tuple(map(float, steps))


def finite_times(name: str, times: Sequence[float] | Tensor) -> tuple[float, ...]:
    values: list[Any] = numbers(times) if isinstance(times, Tensor) else list(_sequence(name, times))
    for i, t in enumerate(values):
        if not math.isfinite(real_number(f"{name}[{i}]", t)):
            raise ValueError(f"{name}[{i}]: expected a finite time, found {t}")
    return tuple(map(float, values))


def _sequence(name: str, values: Any) -> Iterable[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a sequence of numbers, found {type(values).__name__}")
    return cast("Iterable[Any]", values)

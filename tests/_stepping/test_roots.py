"""Changes of sign between samples, and zeros to float precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from seminode._stepping.roots import Bracket, first_bracket, root

XS = (0.0, 0.25, 0.5, 0.75, 1.0)


def brackets(function: Callable[[float], float], direction: int = 0) -> Bracket | None:
    return first_bracket(XS, [function(x) for x in XS], direction, function)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - 0.3,
        lambda x: math.cos(7.0 * x),
        lambda x: x**9 - 1e-3,
        lambda x: math.exp(30.0 * (x - 0.9)) - 1.0,
        lambda x: math.atan(1e4 * (x - 0.123)),
        lambda x: (x - 0.7) ** 3,
    ],
)
def test_roots_are_found_to_float_precision(function: Callable[[float], float]) -> None:
    count = 0

    def counted(x: float) -> float:
        nonlocal count
        count += 1
        return function(x)

    bracket = brackets(function)
    assert bracket is not None
    x = root(counted, bracket)
    below, above = function(x - 4.0 * math.ulp(x)), function(x + 4.0 * math.ulp(x))
    assert function(x) == 0.0 or below * above <= 0.0
    assert count <= 60


def test_a_root_at_an_end_is_that_end() -> None:
    assert root(lambda x: x, Bracket(0.0, 1.0, 0.0, 1.0)) == 0.0
    assert root(lambda x: x - 1.0, Bracket(0.0, 1.0, -1.0, 0.0)) == 1.0


def test_direction_selects_crossings() -> None:
    up_then_down = lambda x: math.sin(2.0 * math.pi * x) - 0.5
    up, down = brackets(up_then_down, 1), brackets(up_then_down, -1)
    assert up is not None
    assert (up.a, up.b) == (0.0, 0.25)
    assert down is not None
    assert (down.a, down.b) == (0.25, 0.5)
    assert brackets(lambda x: x - 0.3, -1) is None
    assert brackets(lambda x: x + 1.0) is None


def test_a_zero_ends_a_crossing_and_begins_none() -> None:
    touch = brackets(lambda x: x - 0.5)
    assert touch is not None
    assert (touch.b, touch.fb) == (0.5, 0.0)
    assert brackets(lambda x: x) is None
    assert first_bracket((0.0, 0.5, 1.0), (0.0, -1.0, 1.0), 0, lambda x: x) is not None


def test_two_crossings_between_samples_show_as_an_extremum() -> None:
    dip = brackets(lambda x: (x - 0.4) ** 2 - 1e-4)
    assert dip is not None
    assert 0.25 <= dip.a < dip.b == pytest.approx(0.4)
    assert brackets(lambda x: (x - 0.4) ** 2 + 1e-4) is None
    hill = brackets(lambda x: 1e-4 - (x - 0.1) ** 2, 1)
    assert hill is not None
    assert hill.b == pytest.approx(0.1)

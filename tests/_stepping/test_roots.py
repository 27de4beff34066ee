"""Changes of sign between samples, and zeros to float precision."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from seminode._stepping.roots import Bracket, first_bracket, parabola, root, vertex

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


@pytest.mark.parametrize("place", [0.1, 0.4, 0.6, 0.9])
def test_an_extremum_across_zero_is_found_between_any_two_samples(place: float) -> None:
    found = brackets(lambda x: (x - place) ** 2 - 1e-4)
    assert found is not None
    assert found.b == pytest.approx(place)


@pytest.mark.parametrize("values", [(-1.0, 3.0), (-3.0, 1.0), (2.0, -1.0), (1.0, -2.0)])
def test_between_neighbouring_floats_the_root_is_where_the_function_is_smaller(values: tuple[float, float]) -> None:
    ends = 0.5, math.nextafter(0.5, 1.0)
    found = root(lambda x: values[ends.index(x)], Bracket(*ends, *values))
    assert found == ends[0 if abs(values[0]) < abs(values[1]) else 1]


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (lambda x: x - 0.3, 2),
        (lambda x: math.cos(7.0 * x), 7),
        (lambda x: x**9 - 1e-3, 9),
        (lambda x: math.exp(30.0 * (x - 0.9)) - 1.0, 9),
        (lambda x: math.atan(1e4 * (x - 0.123)), 16),
        (lambda x: (x - 0.7) ** 3, 50),
    ],
)
def test_interpolation_finds_roots_in_few_evaluations(function: Callable[[float], float], most: int) -> None:
    """Bisection alone takes about fifty; it is left for multiple roots. The same mirrored, and turned upside down."""
    mirrored: list[Callable[[float], float]] = [
        function,
        lambda x: -function(x),
        lambda x: function(1.0 - x),
        lambda x: 1e-3 * function(x),
    ]
    for each in mirrored:
        bracket, count = brackets(each), 0
        assert bracket is not None

        def counted(x: float, each: Callable[[float], float] = each) -> float:
            nonlocal count
            count += 1
            return each(x)

        root(counted, bracket)
        assert count <= most + 4


@pytest.mark.parametrize("bend", [2.0, -0.5, 1e3])
@pytest.mark.parametrize("xs", [(0.0, 0.25, 0.5), (-1.0, 0.5, 0.75), (3.0, 3.5, 5.0)])
def test_the_parabola_through_three_samples(xs: tuple[float, float, float], bend: float) -> None:
    """Of c + bend·(x − p)², whose second divided difference is the bend and whose vertex is (p, c)."""
    place, height = 0.6, -7.0
    values = [height + bend * (x - place) ** 2 for x in xs]
    slope, found = parabola(xs, values)
    assert slope == pytest.approx((values[1] - values[0]) / (xs[1] - xs[0]))
    assert found == pytest.approx(bend)
    assert vertex(xs, values[0], slope, found) == (pytest.approx(place), pytest.approx(height))


def test_a_function_that_never_settles_is_given_up() -> None:
    """Values that do not get smaller on either side: the search ends where they are smallest so far."""
    count = 0

    def jumping(x: float) -> float:
        nonlocal count
        count += 1
        return math.copysign(1.0 + x, x - 1e-300)

    found = root(jumping, Bracket(0.0, 1.0, -1.0, 2.0))
    assert count <= 100
    assert 0.0 <= found < 1e-12


def test_samples_that_touch_zero_hide_no_extremum() -> None:
    """Only where three samples have one sign is the function sampled at the vertex, and only inside of them."""
    asked: list[float] = []

    def function(x: float) -> float:
        asked.append(x)
        return 1.0

    for values in ((1.0, 0.1, 0.0), (0.0, 0.1, 1.0), (1.0, 0.0, 1.0), (1.0, -1.0, 1.0)):
        first_bracket((0.0, 0.5, 1.0), values, 7, function)
    assert not asked
    first_bracket((0.0, 0.5, 1.0), (4.0, 1.0, 0.5), 0, function)  # the vertex, 0.9, is not much lower than the last one
    assert not asked
    for outside in (-0.2, 1.2):  # close to zero, but not between the samples
        first_bracket((0.0, 0.5, 1.0), [(x - outside) ** 2 + 1e-3 for x in (0.0, 0.5, 1.0)], 0, function)
    assert not asked
    first_bracket((0.0, 0.5, 1.0), (4.0, 0.5, 0.6), 0, function)  # a vertex close to zero, at 0.73
    assert asked == [pytest.approx(0.7361111)]
    first_bracket((0.0, 0.5, 1.0), (-4.0, -0.5, -0.6), 0, function)
    assert asked[1:] == [pytest.approx(0.7361111)]
    first_bracket((0.0, 0.5, 1.0), (-4.0, -5.0, -4.9), 0, function)  # away from zero
    assert len(asked) == 2

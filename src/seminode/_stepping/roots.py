"""Zeros of a function of one variable: where one changes its sign between samples, and where exactly it is zero.

The searches are generators: they yield a place and are sent the value there. One function can thus be evaluated for
many searches at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

R = TypeVar("R")
Search = Generator[float, float, R]


class Bracket(NamedTuple):
    """Two places between which a function changes its sign, and its values there."""

    a: float
    b: float
    fa: float
    fb: float


def sign(x: float) -> int:
    return (x > 0.0) - (x < 0.0)


def first_bracket(
    xs: Sequence[float], values: Sequence[float], direction: int, function: Callable[[float], float]
) -> Bracket | None:
    """The first change of sign in the given direction; a value of zero ends one, and does not begin another.

    Two changes of sign between neighbouring samples cancel. They show as an extremum close to zero: where the parabola
    through three samples has its vertex near or across zero, the function is sampled there as well.
    """
    return _run(search_bracket(xs, values, direction), function)


def search_bracket(xs: Sequence[float], values: Sequence[float], direction: int) -> Search[Bracket | None]:
    """`first_bracket` as a generator."""
    xs, values = yield from _with_extrema(xs, values)
    before = 0
    for i, value in enumerate(values):
        now = sign(value)
        crosses = before * now < 0 or (before != 0 and now == 0)
        if crosses and direction in (0, -before):
            return Bracket(xs[i - 1], xs[i], values[i - 1], value)
        before = now
    return None


def _with_extrema(xs: Sequence[float], values: Sequence[float]) -> Search[tuple[list[float], list[float]]]:
    found = list(zip(xs, values, strict=True))
    for i in range(len(xs) - 2):
        (x0, v0), (x1, v1), (x2, v2) = zip(xs[i : i + 3], values[i : i + 3], strict=True)
        if not sign(v0) == sign(v1) == sign(v2) != 0:
            continue
        slope, bend = parabola((x0, x1, x2), (v0, v1, v2))
        if bend * v1 <= 0.0:  # the vertex is away from zero
            continue
        x, value = vertex((x0, x1), v0, slope, bend)
        if x0 < x < x2 and x not in (x0, x1, x2) and value * sign(v1) < 0.25 * min(abs(v0), abs(v1), abs(v2)):
            found.append((x, (yield x)))
    found.sort()
    return [x for x, _ in found], [v for _, v in found]


def parabola(xs: Sequence[float], values: Sequence[Any]) -> tuple[Any, Any]:
    """The slope over the first two and the second difference of three samples, which are numbers or tensors."""
    (x0, x1, x2), (v0, v1, v2) = xs, values
    slope = (v1 - v0) / (x1 - x0)
    return slope, ((v2 - v1) / (x2 - x1) - slope) / (x2 - x0)


def vertex(xs: Sequence[float], value: Any, slope: Any, bend: Any) -> tuple[Any, Any]:
    """The place and the value of the extremum of such a parabola, which has `value` at the first sample."""
    x0, x1 = xs[:2]
    x = 0.5 * (x0 + x1) - 0.5 * slope / bend
    return x, value + (x - x0) * (slope + bend * (x - x1))


def root(function: Callable[[float], float], bracket: Bracket) -> float:
    """A zero between the ends of a bracket, to float precision.

    Chandrupatla's method (*Advances in Engineering Software* 28, 1997): inverse quadratic interpolation where the last
    three values promise that it converges, bisection elsewhere.
    """
    return _run(search_root(bracket), function)


def search_root(bracket: Bracket) -> Search[float]:
    """`root` as a generator."""
    a, b, fa, fb = bracket
    if fa == 0.0 or fb == 0.0:
        return a if fa == 0.0 else b
    a, b, fa, fb = b, a, fb, fa
    c, fc = a, fa
    t, best = 0.5, a
    for _ in range(100):
        x = a + t * (b - a)
        fx = yield x
        if sign(fx) == sign(fa):
            c, fc, a, fa = a, fa, x, fx
        else:
            c, fc, b, fb, a, fa = b, fb, a, fa, x, fx
        best, value = (a, fa) if abs(fa) < abs(fb) else (b, fb)
        least = 2.0 * math.ulp(best) / abs(b - a) if b != a else 1.0
        if value == 0.0 or least > 0.5:
            return best
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        t = 0.5
        if phi**2 < xi and (1.0 - phi) ** 2 < 1.0 - xi:
            t = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        t = min(max(t, least), 1.0 - least)
    return best


def _run(search: Search[R], function: Callable[[float], float]) -> R:
    return run_together({0: search}, lambda places: {0: function(places[0])})[0]


def run_together(
    searches: Mapping[int, Search[R]], function: Callable[[Mapping[int, float]], Mapping[int, float]]
) -> dict[int, R]:
    """The results of several searches, which wait for each other: the function is evaluated for all of them at once."""
    results: dict[int, R] = {}
    waiting, values = dict(searches), dict[int, float | None].fromkeys(searches)
    while waiting:
        places: dict[int, float] = {}
        for key, search in list(waiting.items()):
            try:
                places[key] = search.send(values[key])  # type: ignore[arg-type]
            except StopIteration as end:
                results[key] = end.value
                del waiting[key]
        values = dict(function(places)) if waiting else {}
    return results

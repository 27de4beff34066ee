"""Order conditions and other identities that the coefficients of a tableau must fulfil."""

from collections.abc import Iterator, Sequence
from math import fsum

_TOLERANCE = 1e-12
#: An identity, the value found and the one due.
Condition = tuple[str, float, float]


def require(name: str, identity: str, found: float, expected: float) -> None:
    """Refuse a tableau that violates an identity by more than rounding."""
    if not abs(found - expected) <= _TOLERANCE:  # `not <=`, so that NaN fails
        raise ValueError(f"tableau {name!r} violates {identity}: {found} instead of {float(expected)}")


def order_conditions(
    a: Sequence[Sequence[float]], b: Sequence[float], c: Sequence[float], order: int
) -> Iterator[Condition]:
    """The conditions up to order three that a Runge–Kutta method has to fulfil."""
    for i, (node, row) in enumerate(zip(c, a, strict=True)):
        yield f"c[{i}] = sum_j a[{i}][j]", node, fsum(row)
    yield "sum b = 1", fsum(b), 1
    if order >= 2:
        yield "sum b c = 1/2", dot(b, c), 1 / 2
    if order >= 3:
        yield "sum b c^2 = 1/3", dot(b, [x * x for x in c]), 1 / 3
        yield "sum b a c = 1/6", dot(b, [dot(row, c) for row in a]), 1 / 6


def dot(x: Sequence[float], y: Sequence[float]) -> float:
    return fsum(p * q for p, q in zip(x, y, strict=False))  # rows of `a` are shorter than c

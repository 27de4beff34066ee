"""The polynomials of one step, as rows of coefficients: made from the weights of a method, or corrected to fit them."""

from collections.abc import Sequence
from math import fsum

Matrix = Sequence[Sequence[float]]


def slope_at_end(row: Sequence[float]) -> float:
    return fsum(m * coefficient for m, coefficient in enumerate(row, start=1))


def cubic_hermite(b: Sequence[float]) -> Matrix:
    """The cubic through y0 and y1 with slopes f0 and f1, where y1 = y0 + dt sum_i b_i k_i and f1 is the end slope.

    p(x) = y0 + (3x^2 - 2x^3) (y1 - y0) + dt (x - 2x^2 + x^3) f0 + dt (x^3 - x^2) f1
    """
    rows = [[0.0, 3 * weight, -2 * weight] for weight in b]
    rows[0] = [1.0, rows[0][1] - 2, rows[0][2] + 1]
    return [*rows, [0.0, -1.0, 1.0]]


def quartic_through_midpoint(b: Sequence[float], mid: Sequence[float]) -> Matrix:
    """The quartic through y0, y_mid and y1 with slopes f0 and f1; y_mid = y0 + dt sum_i mid_i k_i + dt mid_end f1.

    p(x) = y0 + x dt f0 + x^2 [dt (f1 - 4 f0) - 11 y0 - 5 y1 + 16 y_mid]
         + x^3 [dt (5 f0 - 3 f1) + 18 y0 + 14 y1 - 32 y_mid] + x^4 [2 dt (f1 - f0) - 8 (y1 + y0) + 16 y_mid]
    """
    pairs = zip((*b, 0.0), mid, strict=True)
    rows = [[0.0, 16 * m - 5 * w, 14 * w - 32 * m, 16 * m - 8 * w] for w, m in pairs]
    for row, slope in ((rows[0], (1, -4, 5, -2)), (rows[-1], (0, 1, -3, 2))):
        row[:] = (x + y for x, y in zip(row, slope, strict=True))
    return rows


def product(scale: float, *factors: Sequence[float]) -> list[float]:
    """Coefficients of x, x^2, ... in scale * x * product of the factors, which start with their constant term."""
    result = [scale]
    for factor in factors:
        terms = [0.0] * (len(result) + len(factor) - 1)
        for i, x in enumerate(result):
            for j, y in enumerate(factor):
                terms[i + j] += x * y
        result = terms
    return result


def pinned_at_end(interpolant: Matrix, b: Sequence[float]) -> Matrix:
    """Make b_i(1) and b_i'(1) exact if the published digits are not: change the two highest powers.

    The changes are differences of weights that fulfil the order conditions up to rounding, so the order stays the same.
    """
    rows = [list(row) for row in interpolant]
    for i, (row, weight) in enumerate(zip(rows, (*b, 0.0), strict=True)):
        d = len(row)
        value = weight - fsum(row)
        slope = (i == len(b)) - slope_at_end(row)
        row[d - 2] += d * value - slope
        row[d - 1] += slope - (d - 1) * value
    return rows

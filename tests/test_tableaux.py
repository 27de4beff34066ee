"""Tableaux against the order conditions, other people's coefficients and planted mistakes."""

from __future__ import annotations

import importlib
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from order_conditions import defect, density, rooted_trees, slope_matrix, slope_weights, vertices
from scipy.integrate import RK23, RK45

from seminode import tableaux
from seminode._polynomials import cubic_hermite, quartic_through_midpoint
from seminode.tableaux import (
    ADAPTIVE_HEUN,
    BOSH3,
    DOPRI5,
    DOPRI8,
    EULER,
    FEHLBERG2,
    HEUN,
    MIDPOINT,
    RALSTON,
    RK4,
    TSIT5,
    Tableau,
)

ALL = (
    EULER,
    MIDPOINT,
    HEUN,
    RALSTON,
    RK4,
    BOSH3,
    ADAPTIVE_HEUN,
    FEHLBERG2,
    DOPRI5,
    TSIT5,
    DOPRI8,
)
PAIRS = tuple(tableau for tableau in ALL if tableau.e is not None)

EXACT = 2e-13  # what rounding may leave of an order condition
VIOLATED = 1e-6  # below the smallest real violation, 4e-6 (dopri8's interpolant)

every_tableau = pytest.mark.parametrize("tableau", ALL, ids=lambda tableau: tableau.name)
every_pair = pytest.mark.parametrize("tableau", PAIRS, ids=lambda tableau: tableau.name)


def weights_at(tableau: Tableau, x: float) -> np.ndarray:
    """b_i(x) for all s + 1 slopes."""
    return np.array(tableau.interpolant) @ x ** np.arange(1, tableau.degree + 1)


# Trees


def test_numbers_of_rooted_trees() -> None:
    # Hairer, Norsett, Wanner, table II.2.1
    assert [len(rooted_trees(n)) for n in range(1, 10)] == [1, 1, 2, 4, 9, 20, 48, 115, 286]


def test_densities_of_the_trees_of_order_four() -> None:
    assert sorted(density(tree) for tree in rooted_trees(4)) == [4, 8, 12, 24]
    assert all(vertices(tree) == 4 for tree in rooted_trees(4))


def test_slope_weights_of_a_tall_and_a_bushy_tree() -> None:
    a = slope_matrix(RK4)
    c = a.sum(1)
    np.testing.assert_allclose(slope_weights(((), (), ()), a), c**3)
    np.testing.assert_allclose(slope_weights((((),),), a), a @ c)


# Orders


@every_tableau
def test_weights_have_the_stated_order_and_no_more(tableau: Tableau) -> None:
    weights = (*tableau.b, 0.0)
    assert max(defect(tableau, weights, p) for p in range(1, tableau.order + 1)) < EXACT
    assert defect(tableau, weights, tableau.order + 1) > VIOLATED


@every_pair
def test_embedded_weights_have_the_stated_order_and_no_more(tableau: Tableau) -> None:
    assert tableau.e is not None
    assert tableau.embedded_order is not None
    weights = np.array((*tableau.b, 0.0)) - np.array(tableau.e)
    assert max(defect(tableau, weights, p) for p in range(1, tableau.embedded_order + 1)) < EXACT
    assert defect(tableau, weights, tableau.embedded_order + 1) > VIOLATED


@every_tableau
def test_interpolant_has_the_stated_order_and_no_more(tableau: Tableau) -> None:
    q = tableau.interpolant_order
    for x in (0.0, 0.1, 0.3, 0.5, 0.77, 0.95, 1.0):
        weights = weights_at(tableau, x)
        assert max(defect(tableau, weights, p, x) for p in range(1, q + 1)) < EXACT, x
    for x in (0.3, 0.6):
        assert defect(tableau, weights_at(tableau, x), q + 1, x) > VIOLATED, x


@every_tableau
def test_interpolant_converges_at_its_order(tableau: Tableau) -> None:
    # u' = u v, v' = -u^2 is solved by (1 / cosh t, -tanh t).
    def solution(t: float) -> np.ndarray:
        return np.array([1 / math.cosh(t), -math.tanh(t)])

    def field(y: np.ndarray) -> np.ndarray:
        return np.array([y[0] * y[1], -(y[0] ** 2)])

    def local_error(dt: float, x: float = 0.4, t0: float = 0.3) -> float:
        slopes: list[np.ndarray] = []
        for row in (*tableau.a, tableau.b):
            increments = [weight * k for weight, k in zip(row, slopes, strict=True)]
            slopes.append(field(solution(t0) + dt * sum(increments, np.zeros(2))))
        y = solution(t0) + dt * weights_at(tableau, x) @ np.array(slopes)
        return float(np.linalg.norm(y - solution(t0 + x * dt)))

    dt = 0.2 if tableau.order > 5 else 0.05  # far above rounding
    measured = math.log2(local_error(dt) / local_error(dt / 2))
    assert measured == pytest.approx(tableau.interpolant_order + 1, abs=0.3)


def test_dopri8_slopes_allow_no_interpolant_of_order_six() -> None:
    def contradiction(order: int) -> float:
        """Distance of the order conditions from the nearest solvable ones, power of x by power of x."""
        trees = [tree for p in range(1, order + 1) for tree in rooted_trees(p)]
        phi = np.array([slope_weights(tree, slope_matrix(DOPRI8)) for tree in trees])
        rhs = np.array([[(vertices(tree) == m) / density(tree) for m in range(1, 9)] for tree in trees])
        solution = np.linalg.lstsq(phi, rhs, rcond=1e-12)[0]
        return float(abs(phi @ solution - rhs).max())

    assert contradiction(5) < 1e-12
    assert contradiction(6) > 1e-3


# The error estimate of fehlberg2


def linear_step(tableau: Tableau, z: float) -> tuple[float, float]:
    """(y1, error estimate) of one step of y' = l y from y0 = 1, with z = l dt."""
    slopes: list[float] = []
    for row in (*tableau.a, tableau.b):
        slopes.append(z * (1 + sum(weight * k for weight, k in zip(row, slopes, strict=True))))
    y1 = 1 + sum(weight * k for weight, k in zip(tableau.b, slopes, strict=False))
    return y1, sum(weight * k for weight, k in zip(tableau.e or (), slopes, strict=True))


@pytest.mark.parametrize(
    ("tableau", "leading", "ratio"),
    [(FEHLBERG2, 1 / 512, 512 * (1 / 6 - 255 / 2**18)), (ADAPTIVE_HEUN, 1 / 2, 2 / 6)],
    ids=["fehlberg2", "adaptive_heun"],
)
def test_local_error_over_estimate(tableau: Tableau, leading: float, ratio: float) -> None:
    """estimate = leading dt^2 y'' + ..., local error = ratio |l| dt times the estimate: 84.8 |l| dt for fehlberg2."""
    a, c = slope_matrix(tableau), np.array((*tableau.c, 1.0))
    assert abs(np.array(tableau.e) @ c) == pytest.approx(leading, rel=1e-14)
    assert (1 / 6 - np.array((*tableau.b, 0.0)) @ a @ c) / leading == pytest.approx(ratio, rel=1e-12)
    for z in (-1e-2, -1e-3):
        y1, estimate = linear_step(tableau, z)
        assert abs((math.exp(z) - y1) / estimate) == pytest.approx(ratio * abs(z), rel=0.02)
    y1, estimate = linear_step(tableau, -0.2)  # the step that rtol = 1e-4 allows fehlberg2
    underestimated = abs(math.exp(-0.2) - y1) > 10 * abs(estimate)
    assert underestimated == (tableau is FEHLBERG2)


# Derived quantities and the published form


def test_first_same_as_last_is_found() -> None:
    assert {tableau.name for tableau in ALL if tableau.fsal} == {"bosh3", "dopri5", "tsit5"}


@every_tableau
def test_counts(tableau: Tableau) -> None:
    stages = {
        "euler": 1,
        "midpoint": 2,
        "heun": 2,
        "ralston": 2,
        "rk4": 4,
        "bosh3": 3,
        "adaptive_heun": 2,
        "fehlberg2": 3,
        "dopri5": 6,
        "tsit5": 6,
        "dopri8": 13,
    }
    assert tableau.stages == len(tableau.b) == stages[tableau.name]
    assert tableau.degree == len(tableau.interpolant[0])
    assert getattr(tableaux, tableau.name.upper()) is tableau


def test_error_order_is_the_exponent_of_step_control() -> None:
    assert {tableau.name: tableau.error_order for tableau in PAIRS} == {
        "bosh3": 3,
        "adaptive_heun": 2,
        "fehlberg2": 2,
        "dopri5": 5,
        "tsit5": 5,
        "dopri8": 8,
    }
    assert RK4.error_order == 5


def test_only_euler_interpolates_without_the_end_slope() -> None:
    assert [tableau.name for tableau in ALL if not tableau.interpolant_reads_end] == ["euler"]


@every_tableau
def test_coefficients_are_floats_and_a_tableau_is_a_value(tableau: Tableau) -> None:
    numbers = (*tableau.b, *tableau.c, *(tableau.e or ()), *sum(tableau.a + tableau.interpolant, ()))
    assert all(type(number) is float for number in numbers)
    assert pickle.loads(pickle.dumps(tableau)) == tableau
    assert hash(replace(tableau)) == hash(tableau)
    with pytest.raises(AttributeError):
        tableau.order = 7  # type: ignore[misc]


def test_published_and_reduced_form_agree() -> None:
    published = Tableau.classical(
        "bosh3",
        3,
        (*BOSH3.c, 1),
        (*BOSH3.a, BOSH3.b),
        (*BOSH3.b, 0),
        b_hat=(7 / 24, 1 / 4, 1 / 3, 1 / 8),
        embedded_order=2,
        interpolant=cubic_hermite(BOSH3.b),
        interpolant_order=3,
    )
    assert published == BOSH3
    assert BOSH3.e == (2 / 9 - 7 / 24, 1 / 3 - 1 / 4, 4 / 9 - 1 / 3, -1 / 8)


def test_published_form_is_checked() -> None:
    with pytest.raises(ValueError, match=r"'odd'.*b_hat has 1 weights, b has 2"):
        Tableau.classical("odd", 2, HEUN.c, HEUN.a, HEUN.b, b_hat=(1.0,), embedded_order=1)
    with pytest.raises(ValueError, match=r"'odd'.*needs its interpolant_order"):
        Tableau.classical("odd", 2, HEUN.c, HEUN.a, HEUN.b, interpolant=HEUN.interpolant)


# Dense output


def test_dopri5_interpolant_is_the_quartic_through_the_midpoint() -> None:
    rng = np.random.default_rng(0)
    k = rng.normal(size=(7, 5))
    y0, dt = rng.normal(size=5), 0.37
    f0, f1 = k[0], k[-1]
    mid = 0.5 * np.array(
        [
            6025192743 / 30085553152,
            0,
            51252292925 / 65400821598,
            -2691868925 / 45128329728,
            187940372067 / 1594534317056,
            -1776094331 / 19743644256,
            11237099 / 235043384,
        ]
    )
    y1 = y0 + dt * np.array(DOPRI5.b) @ k[:-1]
    y_mid = y0 + dt * mid @ k
    for x in np.linspace(0, 1, 11):
        expected = (
            y0
            + x * dt * f0
            + x**2 * (dt * (f1 - 4 * f0) - 11 * y0 - 5 * y1 + 16 * y_mid)
            + x**3 * (dt * (5 * f0 - 3 * f1) + 18 * y0 + 14 * y1 - 32 * y_mid)
            + x**4 * (2 * dt * (f1 - f0) - 8 * (y1 + y0) + 16 * y_mid)
        )
        np.testing.assert_allclose(y0 + dt * weights_at(DOPRI5, x) @ k, expected, rtol=0, atol=1e-13)


def test_quartic_takes_its_midpoint_value() -> None:
    mid = (0.1, 0.2, 0.3)
    rows = np.array(quartic_through_midpoint((0.4, 0.6), mid))
    np.testing.assert_allclose(rows @ 0.5 ** np.arange(1, 5), mid, atol=1e-15)


@every_tableau
def test_interpolant_ends_on_y1_with_the_end_slope(tableau: Tableau) -> None:
    np.testing.assert_allclose(weights_at(tableau, 1.0), (*tableau.b, 0.0), rtol=0, atol=1e-13)
    if tableau.interpolant_reads_end:
        slope = np.array(tableau.interpolant) @ np.arange(1, tableau.degree + 1)
        np.testing.assert_allclose(slope, [0] * tableau.stages + [1], rtol=0, atol=2e-13)


def test_pinning_moves_dopri8_within_its_published_digits() -> None:
    published, pinned = np.array(tableaux._DOPRI8_INTERPOLANT), np.array(DOPRI8.interpolant)
    assert 0 < abs(pinned - published).max() < 5e-11


# Self-checks


def shifted(values: tuple[float, ...] | None, *shifts: tuple[int, float]) -> tuple[float, ...]:
    """Values with small mistakes: (index, how many times 1e-9)."""
    changed = list(values or ())
    for i, by in shifts:
        changed[i] += 1e-9 * by
    return tuple(changed)


def shifted_rows(rows: tuple[tuple[float, ...], ...], *shifts: tuple[int, int, float]) -> tuple[tuple[float, ...], ...]:
    """The same for a matrix: (row, column, how many times 1e-9)."""
    return tuple(shifted(row, *((j, by) for r, j, by in shifts if r == i)) for i, row in enumerate(rows))


MISTAKES: dict[str, Callable[[], Tableau]] = {
    "c[3] = sum_j a[3][j]": lambda: replace(DOPRI5, c=shifted(DOPRI5.c, (3, 1))),
    "c[0] = sum_j a[0][j]": lambda: replace(DOPRI5, c=shifted(DOPRI5.c, (0, 1))),
    "c[9] = sum_j a[9][j]": lambda: replace(DOPRI8, a=shifted_rows(DOPRI8.a, (9, 6, 1))),
    "sum b = 1": lambda: replace(TSIT5, b=shifted(TSIT5.b, (2, 1))),
    "sum b c = 1/2": lambda: replace(HEUN, b=shifted(HEUN.b, (0, 1), (1, -1))),
    "sum b c^2 = 1/3": lambda: replace(BOSH3, b=shifted(BOSH3.b, (0, 1), (1, -3), (2, 2))),
    "sum b a c = 1/6": lambda: replace(RK4, a=shifted_rows(RK4.a, (3, 0, 1), (3, 2, -1))),
    "sum e = 0": lambda: replace(BOSH3, e=shifted(BOSH3.e, (3, 1))),
    "sum e c = 0": lambda: replace(BOSH3, e=shifted(BOSH3.e, (0, 1), (3, -1))),
    "sum_i b_i(x) = x (power 4)": lambda: replace(DOPRI5, interpolant=shifted_rows(DOPRI5.interpolant, (2, 3, 1))),
    "b_2(1) = b[2]": lambda: replace(DOPRI5, interpolant=shifted_rows(DOPRI5.interpolant, (2, 1, 1), (3, 1, -1))),
    "b_2'(0) =": lambda: replace(
        DOPRI5, interpolant=shifted_rows(DOPRI5.interpolant, (2, 0, 1), (2, 1, -1), (3, 0, -1), (3, 1, 1))
    ),
    "b_2'(1) =": lambda: replace(
        DOPRI5, interpolant=shifted_rows(DOPRI5.interpolant, (2, 1, 1), (2, 2, -1), (3, 1, -1), (3, 2, 1))
    ),
}


@pytest.mark.parametrize("identity", MISTAKES)
def test_planted_mistake_is_found(identity: str) -> None:
    with pytest.raises(ValueError, match=rf"^tableau '\w+' violates {re.escape(identity)}"):
        MISTAKES[identity]()


def test_nan_is_no_coefficient() -> None:
    with pytest.raises(ValueError, match="sum e = 0"):
        replace(BOSH3, e=(math.nan,) * 4)


MISSHAPEN: dict[str, Callable[[], Tableau]] = {
    "at least one stage": lambda: replace(EULER, b=()),
    "len(c) = s": lambda: replace(RK4, c=RK4.c[1:]),
    "row i of a has i entries": lambda: replace(RK4, a=(*RK4.a[:3], (0.0, 1.0))),
    "len(e) = s + 1": lambda: replace(BOSH3, e=(0.0,) * 3),
    "embedded_order goes with e": lambda: replace(RK4, embedded_order=3),
    "len(interpolant) = s + 1": lambda: replace(RK4, interpolant=RK4.interpolant[1:]),
    "rows of the interpolant have the same length": lambda: replace(
        RK4, interpolant=(*RK4.interpolant[:4], (0.0, 0.0))
    ),
    "order >= 1": lambda: replace(RK4, order=0),
    "1 <= interpolant_order <= order": lambda: replace(HEUN, interpolant_order=3),
}


@pytest.mark.parametrize("expected", MISSHAPEN)
def test_wrong_shape_is_found(expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^tableau '\w+' has a wrong shape, expected: {re.escape(expected)}"):
        MISSHAPEN[expected]()


# Other people's coefficients


@pytest.mark.parametrize(("tableau", "peer"), [(DOPRI5, RK45), (BOSH3, RK23)], ids=["dopri5", "bosh3"])
def test_agrees_with_scipy(tableau: Tableau, peer: type[RK45] | type[RK23]) -> None:
    rows, columns = peer.A.shape
    np.testing.assert_allclose(slope_matrix(tableau)[:rows, :columns], peer.A, rtol=1e-15)
    assert rows == tableau.stages
    np.testing.assert_allclose(tableau.b, peer.B, rtol=1e-15)
    np.testing.assert_allclose(tableau.c, peer.C, rtol=1e-15)
    np.testing.assert_allclose(tableau.interpolant, peer.P, rtol=0, atol=1e-13)


def test_bosh3_error_agrees_with_scipy() -> None:
    assert BOSH3.e is not None
    np.testing.assert_allclose(np.negative(BOSH3.e), RK23.E, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize(
    ("tableau", "where", "sign"),
    [
        (BOSH3, "bosh3._BOGACKI_SHAMPINE_TABLEAU", 1),
        (ADAPTIVE_HEUN, "adaptive_heun._ADAPTIVE_HEUN_TABLEAU", -1),
        (FEHLBERG2, "fehlberg2._FEHLBERG2_TABLEAU", 1),
        (DOPRI5, "dopri5._DORMAND_PRINCE_SHAMPINE_TABLEAU", 1),
        (DOPRI8, "dopri8._DOPRI8_TABLEAU", 1),
    ],
    ids=["bosh3", "adaptive_heun", "fehlberg2", "dopri5", "dopri8"],
)
def test_agrees_with_torchdiffeq(tableau: Tableau, where: str, sign: int) -> None:
    module, name = where.split(".")
    peer = getattr(importlib.import_module(f"torchdiffeq._impl.{module}"), name)
    n = len(peer.c_sol)  # s, or s + 1 where the end slope is a stage
    a = np.zeros((n, n))
    for i, row in enumerate(peer.beta, start=1):
        a[i, :i] = row
    np.testing.assert_array_equal(slope_matrix(tableau)[:n, :n], a)
    np.testing.assert_array_equal((*tableau.c, 1.0)[:n], (0.0, *peer.alpha))
    np.testing.assert_array_equal((*tableau.b, 0.0)[:n], peer.c_sol)
    assert tableau.e is not None
    np.testing.assert_array_equal(tableau.e[:n], sign * peer.c_error)
    assert not any(tableau.e[n:])


def test_dopri5_midpoint_agrees_with_torchdiffeq() -> None:
    peer = importlib.import_module("torchdiffeq._impl.dopri5")
    np.testing.assert_allclose(weights_at(DOPRI5, 0.5), peer.DPS_C_MID, rtol=0, atol=1e-15)


def test_dopri8_midpoint_agrees_with_torchdiffeq() -> None:
    peer = importlib.import_module("torchdiffeq._impl.dopri8")
    np.testing.assert_allclose(weights_at(DOPRI8, 0.5), peer._C_mid, rtol=0, atol=1e-11)

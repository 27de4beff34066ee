"""Implicit tableaux: order conditions, dense output, stability, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from seminode import tableaux_implicit as tableaux
from seminode.solvers.implicit import IMPLICIT
from seminode.tableaux_implicit import ImplicitTableau

TABLEAUX = [kind.tableau for kind in IMPLICIT.values()]
L_STABLE = {"implicit_euler", "sdirk2", "trbdf2", "kvaerno3", "kvaerno5", "radauIIA3", "radauIIA5"}


def tensors(tableau: ImplicitTableau) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, c = (torch.tensor(x, dtype=torch.float64) for x in (tableau.a, tableau.b, tableau.c))
    return a, b, c


def conditions(a: torch.Tensor, c: torch.Tensor) -> list[tuple[int, torch.Tensor, float]]:
    """Order, elementary weight of every stage, and 1/density, of all rooted trees with up to five nodes."""
    one = torch.ones_like(c)
    trees: list[tuple[int, torch.Tensor, float]] = [(1, one, 1.0)]
    trees += [(2, c, 1 / 2), (3, c**2, 1 / 3), (3, a @ c, 1 / 6)]
    trees += [(4, c**3, 1 / 4), (4, c * (a @ c), 1 / 8), (4, a @ c**2, 1 / 12), (4, a @ a @ c, 1 / 24)]
    trees += [(5, c**4, 1 / 5), (5, c**2 * (a @ c), 1 / 10), (5, c * (a @ c**2), 1 / 15), (5, c * (a @ a @ c), 1 / 30)]
    trees += [(5, (a @ c) ** 2, 1 / 20), (5, a @ c**3, 1 / 20), (5, a @ (c * (a @ c)), 1 / 40)]
    trees += [(5, a @ a @ c**2, 1 / 60), (5, a @ a @ a @ c, 1 / 120)]
    return trees


@pytest.mark.parametrize("tableau", TABLEAUX, ids=lambda t: t.name)
def test_order_conditions(tableau: ImplicitTableau) -> None:
    a, b, c = tensors(tableau)
    for order, weights, value in conditions(a, c):
        if order <= tableau.order:
            assert float(b @ weights) == pytest.approx(value, abs=1e-14)
    if tableau.order < 5:
        missed = [abs(float(b @ w) - v) for order, w, v in conditions(a, c) if order == tableau.order + 1]
        assert max(missed) > 1e-4


@pytest.mark.parametrize("tableau", [t for t in TABLEAUX if t.e is not None], ids=lambda t: t.name)
def test_embedded_order(tableau: ImplicitTableau) -> None:
    a, _, c = tensors(tableau)
    e = torch.tensor(tableau.e, dtype=torch.float64)
    a = torch.cat([torch.zeros(1, len(c), dtype=torch.float64), a])
    a = torch.cat([torch.zeros(len(a), 1, dtype=torch.float64), a], 1)  # f(t0, y0) is a stage of its own
    e, c = torch.cat([e.new_tensor([tableau.e_start]), e]), torch.cat([c.new_zeros(1), c])
    assert tableau.embedded_order is not None
    for order, weights, _ in conditions(a, c):
        if order <= min(tableau.embedded_order, tableau.order):
            assert float(e @ weights) == pytest.approx(0.0, abs=1e-14)
    lowest = min(tableau.embedded_order, tableau.order) + 1
    assert max(abs(float(e @ w)) for order, w, _ in conditions(a, c) if order == lowest) > 1e-4


@pytest.mark.parametrize("tableau", TABLEAUX, ids=lambda t: t.name)
@pytest.mark.parametrize("x", [0.3, 0.8])
def test_order_of_the_dense_output(tableau: ImplicitTableau, x: float) -> None:
    a, _, c = tensors(tableau)
    powers = torch.tensor([x**m for m in range(1, len(tableau.interpolant[0]) + 1)], dtype=torch.float64)
    b = torch.tensor(tableau.interpolant, dtype=torch.float64) @ powers
    for order, weights, value in conditions(a, c):
        if order <= tableau.interpolant_order:
            assert float(b @ weights) == pytest.approx(value * x**order, abs=1e-12)


def stability(tableau: ImplicitTableau, z: complex) -> complex:
    """R(z) = 1 + z bᵀ(I − zA)⁻¹1."""
    a, b, c = (x.to(torch.complex128) for x in tensors(tableau))
    stages = torch.linalg.solve(torch.eye(len(c), dtype=a.dtype) - z * a, torch.ones_like(c))
    return complex(1.0 + z * (b @ stages))


@pytest.mark.parametrize("tableau", TABLEAUX, ids=lambda t: t.name)
def test_a_and_l_stability(tableau: ImplicitTableau) -> None:
    imaginary = [1j * y for y in (0.01, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1e4)]
    assert max(abs(stability(tableau, z)) for z in imaginary) <= 1.0 + 1e-12
    for radius in (0.1, 1.0, 10.0, 1e3):  # no pole in the left half-plane
        assert all(abs(stability(tableau, radius * complex(math.cos(w), math.sin(w)))) <= 1.0 for w in (1.6, 2.2, 3.1))
    at_infinity = abs(stability(tableau, -1e9))
    assert at_infinity < 1e-7 if tableau.name in L_STABLE else at_infinity > 0.99


@pytest.mark.parametrize(
    "tableau", [t for t in TABLEAUX if t.explicit_start and t.name in L_STABLE], ids=lambda t: t.name
)
def test_dense_output_does_not_read_a_stiff_first_slope(tableau: ImplicitTableau) -> None:
    """A change of k₁ that all stages damp is damped between them too: b(x) is in the row space of the other stages."""
    a, _, _ = tensors(tableau)
    response = torch.cat([torch.ones(1, dtype=torch.float64), -torch.linalg.solve(a[1:, 1:], a[1:, 0])])
    rows = torch.tensor(tableau.interpolant, dtype=torch.float64)
    assert float((response @ rows).abs().max()) < 1e-11


@pytest.mark.parametrize("tableau", TABLEAUX, ids=lambda t: t.name)
def test_spectrum_gives_the_matrix_back(tableau: ImplicitTableau) -> None:
    if tableau.diagonal:
        return
    total = torch.zeros(tableau.stages, tableau.stages, dtype=torch.complex128)
    for value, left, right in tableau.spectrum:
        term = value * torch.outer(*(torch.tensor(x, dtype=torch.complex128) for x in (right, left)))
        total += term if value.imag == 0.0 else term + term.conj()
    torch.testing.assert_close(total.real, torch.tensor(tableau.a, dtype=torch.float64), rtol=0.0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": (0.5, 0.6)}, "sum b = 1"),
        ({"c": (0.0, 0.9)}, "c\\[1\\]"),
        ({"c": (0.0,)}, "wrong shape"),
        ({"order": 3}, "sum b c\\^2"),
        ({"a": ((0.0, 0.0), (0.6, 0.5))}, "violates"),
        ({"interpolant": ((1.0, -0.4), (0.0, 0.5))}, "sum_i b_i"),
        ({"embedded_order": 1}, "go together"),
    ],
)
def test_wrong_coefficients_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tableaux.TRAPEZOID, **change)  # type: ignore[arg-type]

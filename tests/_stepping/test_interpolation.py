"""The polynomial of a step, computed in two ways; z of many of them at several times."""

import math

import pytest
import torch

from seminode._field.checks import check_solver
from seminode._stepping.interpolation import coefficients, coefficients_by_product
from seminode._stepping.schedule import Plan
from seminode.adjoints._continuous.dense_state import DenseState


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("solver", ["dopri5", "tsit5", "bosh3", "euler"])
def test_coefficients_by_a_product_are_the_same(solver: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = check_solver(solver).interpolant
    y0, slopes = torch.randn(5, 3, dtype=dtype), [torch.randn(5, 3, dtype=dtype) for _ in matrix]
    expected, found = (each(matrix, y0, 0.3, slopes) for each in (coefficients, coefficients_by_product))
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=20 * eps, atol=20 * eps)
    assert torch.equal(found[0], y0)


def test_slopes_that_a_polynomial_does_not_read_may_be_infinite() -> None:
    matrix = ((1.0, -0.5), (0.0, 0.0), (0.0, 0.5))
    slopes = [torch.ones(2), torch.full((2,), math.inf), torch.ones(2)]
    assert coefficients_by_product(matrix, torch.ones(2), 0.5, slopes).tolist() == [[1.0, 1.0], [0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_polynomials_at_several_times_are_z_at_each_of_them(dtype: torch.dtype, sign: float) -> None:
    torch.manual_seed(0)
    plans = [Plan(sign * t, sign * (t + 1.0), sign, 1.0) for t in (0.0, 1.0, 2.0)]
    z = DenseState(plans, [torch.randn(4, 5, 2, dtype=dtype) for _ in plans])
    for times in ([0.5], [2.7, 2.2, 2.0], [2.5, 1.5, 1.0, 0.2], [0.5, 2.5, 0.5], [3.1, -0.1]):
        times = [sign * t for t in times]
        polynomials, places = z.polynomials(times)
        for t, polynomial, x in zip(times, polynomials, places, strict=True):
            powers = torch.tensor([x**m for m in range(4)], dtype=dtype)
            torch.testing.assert_close(torch.tensordot(powers, polynomial, 1), z(t))

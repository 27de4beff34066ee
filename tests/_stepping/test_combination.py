"""Linear combinations of slopes, against sums by hand, for every kind of step size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seminode._stepping.combination import MovingStep, combine, length, scaled_sum, sparse, weighted_sum

F64 = torch.float64
WEIGHTS = (0.5, 0.0, -0.25, 3.0)
SIZES: dict[str, Callable[[], Any]] = {
    "number": lambda: 0.4,
    "tensor": lambda: torch.tensor(0.4, dtype=F64),
    "one for each sample": lambda: torch.tensor([[0.4], [-0.7], [2.0]], dtype=F64),
    "differentiated": lambda: MovingStep(0.4, torch.zeros((), dtype=F64, requires_grad=True)),
}


def slopes(dtype: torch.dtype = F64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, dtype=dtype, generator=generator) for _ in WEIGHTS]


def by_hand(ks: list[Tensor]) -> Tensor:
    return 0.5 * ks[0] - 0.25 * ks[2] + 3.0 * ks[3]


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_by_hand(size: str, dtype: torch.dtype) -> None:
    dt, ks, y = SIZES[size](), slopes(dtype), torch.full((3, 2), 7.0, dtype=dtype)
    before = [k.clone() for k in ks]
    torch.testing.assert_close(combine(y, dt, sparse(WEIGHTS), ks), y + length(dt) * by_hand(ks))
    torch.testing.assert_close(scaled_sum(dt, sparse(WEIGHTS), ks), length(dt) * by_hand(ks))
    torch.testing.assert_close(weighted_sum(sparse(WEIGHTS), ks, -1.5), -1.5 * by_hand(ks))
    assert all(map(torch.equal, ks, before))  # only sums are reused
    assert y.eq(7.0).all()


@pytest.mark.parametrize("size", SIZES)
def test_sums_without_terms(size: str) -> None:
    dt, ks, y = SIZES[size](), slopes(), torch.ones(3, 2, dtype=F64)
    assert torch.equal(combine(y, dt, (), ks), y)
    assert torch.equal(scaled_sum(dt, (), ks), torch.zeros_like(y))


@pytest.mark.parametrize("size", ["number", "tensor"])
def test_sums_under_a_transform_of_torch(size: str) -> None:
    """Of some slopes that are mapped over and others that are not, in any order."""
    dt, ks = SIZES[size](), slopes()

    def combined(*k: Any) -> Tensor:
        return combine(k[0], dt, sparse(WEIGHTS), k)

    def scaled(*k: Any) -> Tensor:
        return scaled_sum(dt, sparse(WEIGHTS), k)

    for mapped in ((0,), (2,), (3,), (0, 3)):
        axes = tuple(0 if i in mapped else None for i in range(len(ks)))
        many = [torch.stack([k, 2.0 * k]) if i in mapped else k for i, k in enumerate(ks)]
        each = [[(2.0 if i in mapped and row else 1.0) * k for i, k in enumerate(ks)] for row in range(2)]
        found = torch.func.vmap(combined, axes)(*many)
        expected = torch.stack([k[0] + 0.4 * by_hand(k) for k in each])
        torch.testing.assert_close(found, expected)
        found = torch.func.vmap(scaled, axes)(*many)
        torch.testing.assert_close(found, expected - torch.stack([k[0] for k in each]))


@pytest.mark.parametrize(
    "summed",
    [lambda dt, ks: combine(ks[0], dt, sparse(WEIGHTS), ks), lambda dt, ks: scaled_sum(dt, sparse(WEIGHTS), ks)],
)
def test_the_derivative_by_a_step_size_is_the_sum(summed: Callable[..., Tensor]) -> None:
    ks, shift = slopes(), torch.zeros((), dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(summed(MovingStep(0.4, shift), ks).sum(), shift)
    torch.testing.assert_close(grad, by_hand(ks).sum())

"""Tridiagonal systems, against dense ones."""

from __future__ import annotations

import pytest
import torch

from seminode.paths.tridiagonal import tridiagonal_solution


@pytest.mark.parametrize("n", [1, 2, 7])
def test_solves_the_dense_system(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    upper, lower = (torch.randn(n - 1, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    diagonal = 4.0 + torch.rand(n, 3, generator=generator, dtype=torch.float64)
    right = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    solution = tridiagonal_solution(right, upper, diagonal, lower)
    for j in range(3):
        matrix = diagonal[:, j].diag() + upper[:, j].diag(1) + lower[:, j].diag(-1)
        torch.testing.assert_close(matrix @ solution[:, j], right[:, j])

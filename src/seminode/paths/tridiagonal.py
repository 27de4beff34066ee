"""Tridiagonal linear systems, along the first axis of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def tridiagonal_solution(right: Tensor, upper: Tensor, diagonal: Tensor, lower: Tensor) -> Tensor:
    """Solve lowerᵢ₋₁·xᵢ₋₁ + diagonalᵢ·xᵢ + upperᵢ·xᵢ₊₁ = rightᵢ for x, by Gaussian elimination without pivoting.

    The Thomas algorithm is stable for matrices that are diagonally dominant or symmetric and positive definite.

    Arguments:
        right: (n, ...), the right-hand sides.
        upper, lower: (n − 1, ...), the entries above and below the diagonal.
        diagonal: (n, ...).

    Example:
        >>> import torch
        >>> two, one = torch.full((3,), 2.0), torch.ones(2)
        >>> tridiagonal_solution(torch.tensor([4.0, 8.0, 8.0]), one, two, one).round(decimals=3)
        tensor([1., 2., 3.])
    """
    pivots, sums = [diagonal[0]], [right[0]]
    rows = zip(diagonal[1:].unbind(), upper.unbind(), lower.unbind(), right[1:].unbind(), strict=True)
    for d, above, below, r in rows:
        factor = below / pivots[-1]
        pivots.append(d - factor * above)
        sums.append(r - factor * sums[-1])
    solution = [sums[-1] / pivots[-1]]
    for above, pivot, total in zip(reversed(upper.unbind()), reversed(pivots[:-1]), reversed(sums[:-1]), strict=True):
        solution.append((total - above * solution[-1]) / pivot)
    return torch.stack(solution[::-1])

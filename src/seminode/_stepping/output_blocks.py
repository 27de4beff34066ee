"""Outputs inside of steps, for several steps together.

Where states are small, calling an operation takes longer than its arithmetic. So the polynomials of several steps are
evaluated at once, and so are their VJPs: p(x) = y0 + Σ wᵢ(x)·kᵢ with wᵢ(x) = dt·bᵢ(x), for all steps and outputs of a
block. What a block keeps alive is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .interpolation import Matrix, read_by

#: The most entries of a state for which steps share operations.
SMALL = 1024
#: The most outputs in a block, counting the gaps that steps with fewer outputs than others leave.
MANY = 256
#: The most steps in a block, whose slopes are kept until it is complete.
STEPS = 32


def shares(y: Tensor) -> bool:
    """Whether steps of such a state share operations."""
    return y.numel() <= SMALL


class Block:
    """Positions of outputs in several steps: their step sizes, and where in each step, from 0 to 1, the outputs are."""

    def __init__(self) -> None:
        self._dts: list[float] = []
        self.xs: list[list[float]] = []
        self._widest = 0  # the most outputs in one step

    def has_room(self, count: int) -> bool:
        """Whether a step with so many outputs fits in."""
        steps = len(self.xs) + 1
        return steps == 1 or (steps <= STEPS and steps * max(count, self._widest) <= MANY)

    def add(self, dt: float, xs: list[float]) -> None:
        self._dts.append(dt)
        self.xs.append(xs)
        self._widest = max(self._widest, len(xs))

    def padded(self, rows: Sequence[Sequence[float]], filling: float) -> list[list[float]]:
        """The numbers of every step, followed by as many fillings as it has gaps."""
        return [[*row, *[filling] * (self._widest - len(row))] for row in rows]

    def weights(self, matrix: Matrix, like: Tensor) -> Tensor:
        """dt·bᵢ(x), by step, output and slope. They are zero in gaps, since bᵢ(0) = 0."""
        powers, coefficients = torch.arange(1, len(matrix[0]) + 1), torch.tensor(matrix, dtype=torch.float64).T
        xs = torch.tensor(self.padded(self.xs, 0.0), dtype=torch.float64).unsqueeze(-1)
        lengths = torch.tensor(self._dts, dtype=torch.float64).reshape(-1, 1, 1)
        return (lengths * xs**powers @ coefficients).to(device=like.device, dtype=like.dtype)


class WaitingOutputs:
    """Outputs inside of steps, and where they belong, until there are enough of them to be computed together."""

    def __init__(self, matrix: Matrix):
        self._matrix = matrix
        self._read = read_by(matrix)
        self._block = Block()
        self._places: list[int] = []
        self._states: list[Tensor] = []
        self._slopes: list[Tensor] = []

    def has_room(self, matrix: Matrix, count: int) -> bool:
        """Whether a step with so many outputs fits in, whose polynomial has these weights."""
        return matrix is self._matrix and self._block.has_room(count)

    def add(self, place: int, y0: Tensor, dt: float, slopes: Sequence[Tensor], xs: list[float]) -> None:
        self._block.add(dt, xs)
        self._places.append(place)
        self._states.append(y0)
        # A copy: a field may write into what it returned some steps ago.
        self._slopes.append(torch.stack([slopes[i] for i in self._read]))

    def compute(self) -> list[tuple[int, Tensor]]:
        """The outputs of every step, stacked, with the place of each."""
        if not self._places:
            return []
        y0 = torch.stack(self._states)
        slopes = torch.stack(self._slopes)
        slopes = slopes.reshape(*slopes.shape[:2], -1)
        weights = self._block.weights([self._matrix[i] for i in self._read], y0)
        values = torch.baddbmm(y0.reshape(len(y0), 1, -1), weights, slopes)
        counts = list(map(len, self._block.xs))
        if min(counts) < max(counts):  # leave out the gaps
            widest = values.shape[1]
            rows = [step * widest + i for step, count in enumerate(counts) for i in range(count)]
            values = values.flatten(0, 1)[torch.tensor(rows, device=values.device)]
        pieces = values.reshape(-1, *y0.shape[1:]).split(counts)
        return list(zip(self._places, pieces, strict=True))

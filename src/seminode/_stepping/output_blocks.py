"""Outputs inside of steps, for several steps together.

Where states are small, calling an operation takes longer than its arithmetic. So the polynomials of several steps are
evaluated at once, and so are their VJPs: p(x) = y0 + Σ wᵢ(x)·kᵢ with wᵢ(x) = dt·bᵢ(x), for all steps and outputs of a
block. What a block keeps alive is bounded.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from .._host_numbers import as_tensor
from .interpolation import Matrix, read_by

#: The most entries of a state for which steps share operations.
SMALL = 1024
#: The most outputs in a block, counting the gaps that steps with fewer outputs than others leave.
MANY = 256
#: The most steps in a block, whose slopes are kept until it is complete.
STEPS = 64


def shares(y: Tensor) -> bool:
    """Whether steps of such a state share operations."""
    return y.numel() <= SMALL


def _doubles(values: Sequence[float]) -> Tensor:
    return as_tensor(values, torch.float64, torch.device("cpu"))


def integers(values: Sequence[int]) -> Tensor:
    """On the host; `torch.tensor` takes three times as long."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


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

    @property
    def positions(self) -> list[float]:
        """Those of every step one after the other; zeros in gaps."""
        return [x for xs in self.xs for x in (*xs, *[0.0] * (self._widest - len(xs)))]

    def rows(self, firsts: Sequence[int], gap: int) -> Tensor:
        """Which rows of a tensor belong to the outputs, if those of each step follow a first one, by step and output.

        That in gaps is `gap`.
        """
        found: list[int] = []
        for first, xs in zip(firsts, self.xs, strict=True):
            count = len(xs)
            found += range(first, first + count)
            found += [gap] * (self._widest - count)
        return integers(found).view(len(firsts), -1)

    def weights(self, matrix: Matrix, like: Tensor) -> Tensor:
        """dt·bᵢ(x), by step, output and slope. They are zero in gaps, since bᵢ(0) = 0."""
        powers = torch.arange(1, len(matrix[0]) + 1)
        coefficients, xs, lengths = map(_doubles, ([x for row in matrix for x in row], self.positions, self._dts))
        scaled = lengths.view(-1, 1, 1) * xs.view(len(lengths), -1, 1) ** powers
        return (scaled @ coefficients.view(len(matrix), -1).T).to(device=like.device, dtype=like.dtype)


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

    def add(
        self, place: int, y0: Tensor, dt: float, slopes: Sequence[Tensor], xs: list[float], copied: bool = True
    ) -> None:
        """Outputs at xs inside of a step. The slopes are copied where others may write into them: a field into what it
        returned some steps ago."""
        self._block.add(dt, xs)
        self._places.append(place)
        self._states.append(y0)
        read = [slopes[i] for i in self._read]
        self._slopes += torch.stack(read).unbind() if copied else read

    def compute(self) -> list[tuple[slice, Tensor]]:
        """The outputs, stacked, for steps whose places follow each other, with these places."""
        if not self._places:
            return []
        y0 = torch.stack(self._states)
        matrix = [self._matrix[i] for i in self._read]
        slopes = torch.stack(self._slopes).reshape(len(y0), len(matrix), -1)
        values = torch.baddbmm(y0.reshape(len(y0), 1, -1), self._block.weights(matrix, y0), slopes)
        counts = list(map(len, self._block.xs))
        if min(counts) < max(counts):  # leave out the gaps
            widest = values.shape[1]
            rows = [step * widest + i for step, count in enumerate(counts) for i in range(count)]
            values = values.flatten(0, 1).index_select(0, integers(rows).to(values.device))
        places, sizes = [slice(place, place + 1) for place in self._places[:1]], counts[:1]
        for place, count in zip(self._places[1:], counts[1:], strict=True):
            if place == places[-1].stop:
                places[-1], sizes[-1] = slice(places[-1].start, place + 1), sizes[-1] + count
            else:
                places.append(slice(place, place + 1))
                sizes.append(count)
        return list(zip(places, values.reshape(-1, *y0.shape[1:]).split(sizes), strict=True))

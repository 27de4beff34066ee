"""The polynomial of one step, and the whole solution as a function of time.

The continuous extension of a Runge–Kutta method is p(x) = y0 + dt·Σ bᵢ(x)·kᵢ with x = (t − t0)/dt and polynomial
weights bᵢ(x) = Σₘ Bᵢₘ xᵐ. The matrix B (one row a slope, one column a power) belongs to the tableau.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._field.pytree import Layout, real_dtype
from .._host_numbers import TYPE_CODES, as_tensor
from .combination import StepSize, combine, length, scaled_sum, sparse

Matrix = Sequence[Sequence[float]]


def weights_at(matrix: Matrix, x: float) -> list[float]:
    """The weights bᵢ(x), by Horner's rule."""
    weights = []
    for row in matrix:
        total = 0.0
        for coefficient in reversed(row):
            total = (total + coefficient) * x
        weights.append(total)
    return weights


def read_by(matrix: Matrix) -> list[int]:
    """Which slopes the polynomial reads. Another one need not be finite, and zero times infinity is NaN."""
    return [i for i, row in enumerate(matrix) if any(row)]


def evaluate(
    matrix: Matrix, y0: Tensor, dt: StepSize, slopes: Sequence[Tensor], xs: Sequence[float] | Tensor
) -> Tensor:
    """p(x) for several x at once, stacked in front; a tensor of x is differentiated."""
    if isinstance(xs, Tensor) or len(xs) > 1:
        read = read_by(matrix)
        matrix, slopes = [matrix[i] for i in read], [slopes[i] for i in read]
    if isinstance(xs, Tensor):
        powers = torch.stack([xs**m for m in range(1, len(matrix[0]) + 1)], -1)
        weights = powers @ torch.tensor(matrix, dtype=xs.dtype, device=xs.device).T
    elif len(xs) == 1:
        return combine(y0, dt, sparse(weights_at(matrix, xs[0])), slopes).unsqueeze(0)
    else:
        rows = [weights_at(matrix, x) for x in xs]
        weights = torch.tensor(rows, dtype=real_dtype(y0), device=y0.device)
    stacked = torch.stack(list(slopes))
    return y0 + length(dt) * torch.tensordot(weights.to(stacked.dtype), stacked, 1)


def coefficients(matrix: Matrix, y0: Tensor, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
    """The coefficients of p as a polynomial in x, constant first, stacked in front."""
    columns = zip(*matrix, strict=True)
    return torch.stack([y0, *(scaled_sum(dt, sparse(column), slopes) for column in columns)])


def coefficients_by_product(matrix: Matrix, y0: Tensor, dt: StepSize, slopes: Sequence[Tensor]) -> Tensor:
    """The same to rounding, without a graph: one product of matrices takes a third of the time of a sum for each power.

    On accelerators products may be less precise than sums.
    """
    if not isinstance(dt, float) or y0.device.type != "cpu" or y0.dtype not in TYPE_CODES:
        return coefficients(matrix, y0, dt, slopes)
    read = read_by(matrix)
    powers = len(matrix[0])
    weights = as_tensor([dt * x for i in read for x in matrix[i]], y0.dtype, y0.device).view(len(read), powers)
    found = y0.new_empty((1 + powers, *y0.shape))
    found[0] = y0
    stacked = torch.stack([slopes[i] for i in read]).reshape(len(read), -1)
    torch.mm(weights.T, stacked, out=found[1:].view(powers, -1))
    return found


class DenseSolution:
    """The solution as a function of time, one polynomial per step; differentiable, also with respect to the time.

    Call it with a number or a tensor of times of any shape: each leaf of the result has the shape of the times
    followed by its own. Times outside of the interval that was solved raise an error.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = torch.ones(2, dtype=torch.float64)
        >>> dense = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], dense=True).dense
        >>> dense
        DenseSolution([0, 1], 5 steps)
        >>> dense(torch.linspace(0.0, 1.0, 6).reshape(2, 3)).shape
        torch.Size([2, 3, 2])
    """

    def __init__(self, knots: Tensor, coefficients: Tensor, layout: Layout, dtype: torch.dtype):
        self._knots = knots  # the ends of the steps, in the direction of the solve
        self._coefficients = coefficients  # (steps, degree + 1, *state)
        self._layout = layout
        self._dtype = dtype
        self._sign = -1.0 if float(knots[-1].detach()) < float(knots[0].detach()) else 1.0

    @property
    def t0(self) -> float:
        """Start of the interval."""
        return float(self._knots[0].detach())

    @property
    def t1(self) -> float:
        """End of the interval."""
        return float(self._knots[-1].detach())

    def __call__(self, t: float | Tensor) -> Any:
        times = torch.as_tensor(t, device=self._knots.device)
        if times.is_complex() or times.dtype == torch.bool:
            raise TypeError(f"t: expected real times, found dtype {times.dtype}")
        given = times.dtype
        times = times.to(self._knots.dtype)
        flat = times.reshape(-1)
        index = self._steps_of(flat.detach(), given)
        start, end = self._knots[index], self._knots[index + 1]
        x = ((flat - start) / (end - start)).to(real_dtype(self._coefficients))
        state = self._coefficients.shape[2:]
        x = x.reshape(-1, *(1 for _ in state))
        degree = self._coefficients.shape[1] - 1
        y = self._coefficients[index, degree]
        for m in range(degree - 1, -1, -1):
            y = self._coefficients[index, m] + x * y
        y = y.reshape(times.shape + state).to(self._dtype)
        return self._layout.unpack(y, lead=times.ndim)

    def _steps_of(self, times: Tensor, given: torch.dtype) -> Tensor:
        low, high = sorted((self.t0, self.t1))
        # The ends themselves, as far as the caller's dtype can name them.
        eps = torch.finfo(given if given.is_floating_point else times.dtype).eps
        slack = eps * max(abs(low), abs(high))
        inside = (times >= low - slack) & (times <= high + slack)
        if not bool(inside.all()):
            found = float(times[~inside][0])
            raise ValueError(f"t: the solution is known on [{low:g}, {high:g}], found {found:g}")
        knots = self._sign * self._knots.detach()
        index = torch.searchsorted(knots, self._sign * times) - 1
        return index.clamp(0, len(self._coefficients) - 1)

    def __repr__(self) -> str:
        return f"DenseSolution([{self.t0:g}, {self.t1:g}], {len(self._coefficients)} steps)"

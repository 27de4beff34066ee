"""Outputs of batched solves: which samples pass which output times in which step, and their values there.

An output is a row: the state of one sample at one of its times. Rows are collected in the order in which the steps pass
them. `arranged` puts them into their places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..solvers.base import Solver
from .lanes import LanePlan, column


class Rows(NamedTuple):
    """Outputs in one step: the lane and the number of the output time, both on the host. Those inside come first."""

    lanes: Tensor
    index: Tensor
    x: Tensor  # where in the step, from 0 to 1
    inside: int  # how many are not at the end of the step


class LaneOutputs:
    """The solution at given times, one row of `times` per lane; with `last`, at the last of them only."""

    def __init__(self, times: Tensor, last: bool = False):
        self._lanes, count = times.shape
        self._times = times[:, -1:] if last else times
        self._first = torch.zeros(self._lanes, dtype=torch.int64)
        sign = -1.0 if bool((times[:, -1] < times[:, 0]).any()) else 1.0
        self._sign = sign
        self._sorted = (sign * self._times).contiguous()
        self._shared = self._sorted[0].contiguous() if times.stride(0) == 0 else None
        trivial = times[:, 0] == times[:, -1]
        begun = trivial if last else torch.ones_like(trivial)
        self._cursor = torch.where(trivial, self._times.shape[1], begun.to(torch.int64))
        self._claims: dict[int, Rows] = {}
        self._begun = self._rows(self._first, self._cursor)
        self._order = [self._begun]
        self._matrix: tuple[Any, Tensor] | None = None

    @property
    def begun(self) -> int:
        """How many rows are y0 itself."""
        return len(self._begun[0])

    def start(self, y0: Tensor) -> list[Tensor]:
        """Those rows."""
        return [y0[self._begun[0].to(y0.device)]]

    def start_vjp(self, cotangents: Tensor, y0: Tensor) -> Tensor:
        return added_to(y0, self._begun[0], cotangents)

    def _rows(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The lane and the index of all outputs low … high − 1 of each lane."""
        counts = high - low
        lanes = torch.repeat_interleave(counts)
        offsets = counts.cumsum(0) - counts - low
        return lanes, torch.arange(len(lanes)) - offsets[lanes]

    def claim(self, plan: LanePlan, cursor: int) -> int:
        """How many rows there are after this step, if `cursor` were there before it."""
        s1 = plan.t1 if self._sign > 0 else -plan.t1
        if self._shared is not None:
            high = torch.searchsorted(self._shared, s1, right=True)
        else:
            high = torch.searchsorted(self._sorted, s1.unsqueeze(1), right=True).squeeze(1)
        high = torch.where(plan.moved, high, self._cursor)
        lanes, index = self._rows(self._cursor, high)
        if not len(lanes):
            return cursor
        self._cursor = high
        times, ends = self._times[lanes, index], plan.t1[lanes]
        at_end = times == ends
        inside = len(lanes)
        if bool(at_end.any()):
            order = torch.argsort(at_end.to(torch.int8), stable=True)
            lanes, index, times = lanes[order], index[order], times[order]
            inside -= int(at_end.sum())
        x = (times - plan.t0[lanes]) / plan.dt[lanes]
        self._claims[cursor] = Rows(lanes, index, x, inside)
        self._order.append((lanes, index))
        return cursor + len(lanes)

    def rows(self, low: int) -> Rows | None:
        """The rows from number `low` on that one step has passed, if it has passed any."""
        return self._claims.get(low)

    def of(self, step: Any, low: int, high: int, shifts: Any) -> Tensor:
        """Rows low … high − 1, which lie in this step."""
        rows = self._claims[low]
        if shifts is not None:
            return self._moving(step, rows, shifts)
        lanes = rows.lanes.to(step.y0.device)
        if not rows.inside:
            return step.y1[lanes]
        n = rows.inside
        weights = self.weights(step.solver, rows.x[:n]) * step.plan.dt[rows.lanes[:n], None]
        inner = step.y0[lanes[:n]] + _weighted(weights.to(step.y0), step.interpolated(), lanes[:n])
        return inner if n == len(lanes) else torch.cat([inner, step.y1[lanes[n:]]])

    def _moving(self, step: Any, rows: Rows, shifts: Any) -> Tensor:
        """With the derivative with respect to times. Only the last time is at the end of a step for good."""
        plan, device = step.plan, step.y0.device
        start, end = shifts.of(plan)
        lanes = rows.lanes.to(device)
        ahead = (self._times[rows.lanes, rows.index] - plan.t0[rows.lanes]).to(start)
        length = plan.dt.to(start) + (end - start)
        x = (ahead - start[lanes] + shifts.rows(rows)) / length[lanes]
        weights = self.weights(step.solver, x) * length[lanes, None]
        values = step.y0[lanes] + _weighted(weights.to(step.y0.dtype), step.interpolated(), lanes)
        final = plan.final[rows.lanes] & (rows.index == self._times.shape[1] - 1)
        if not bool(final.any()):
            return values
        return torch.where(column(final, values).bool(), step.y1[lanes], values)

    def weights(self, solver: Solver, x: Tensor) -> Tensor:
        """The weights bᵢ(x) of the interpolant, one row for each x."""
        if self._matrix is None or self._matrix[0] is not solver.interpolant:
            matrix = torch.tensor(solver.interpolant, dtype=torch.float64).T.contiguous()
            self._matrix = solver.interpolant, matrix
        matrix = self._matrix[1].to(x)
        powers = [x]
        for _ in range(len(matrix) - 1):
            powers.append(powers[-1] * x)
        return torch.stack(powers, -1) @ matrix

    def vjp(
        self, cotangents: Tensor, plan: LanePlan, bounds: tuple[int, int], solver: Solver, y: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Cotangents of the end of a step, of its start and of its slopes, from those of the rows in it."""
        rows = self._claims[bounds[0]]
        n = rows.inside
        end = added_to(y, rows.lanes[n:], cotangents[n:]) if n < len(rows.lanes) else None
        if not n:
            return end, None, None
        lanes, inner = rows.lanes[:n], cotangents[:n]
        weights = (self.weights(solver, rows.x[:n]) * plan.dt[lanes, None]).to(inner)
        shaped = weights.T.reshape(*weights.T.shape, *(1,) * (inner.ndim - 1))
        slopes = y.new_zeros((len(shaped), *y.shape)).index_add_(1, lanes.to(y.device), shaped * inner)
        return end, added_to(y, lanes, inner), slopes

    def arranged(self, rows: Tensor) -> Tensor:
        """All outputs, (T, B, ...), from their rows; NaN where there is none, since the sample has failed."""
        count = self._times.shape[1]
        lanes, index = (torch.cat(parts) for parts in zip(*self._order, strict=True))
        places = (index * self._lanes + lanes).to(rows.device)
        shape = (count * self._lanes, *rows.shape[1:])
        if len(places) == shape[0]:
            whole = rows[torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=rows.device))]
        else:
            whole = rows.new_full(shape, torch.nan).index_copy(0, places, rows)
        return whole.reshape(count, self._lanes, *rows.shape[1:])

    def row_times(self) -> list[float]:
        lanes, index = (torch.cat(parts) for parts in zip(*self._order, strict=True))
        return self._times[lanes, index].tolist()

    def named(self, row: int) -> str:
        """What to call a row in a message."""
        lanes, index = (torch.cat(parts) for parts in zip(*self._order, strict=True))
        return f"output {int(index[row])} of sample {int(lanes[row])}"


def _weighted(weights: Tensor, slopes: list[Tensor], lanes: Tensor) -> Tensor:
    """Σ wᵢkᵢ of the given lanes, for one row of weights each."""
    stacked = torch.stack(slopes)[:, lanes]
    shaped = weights.T.reshape(*weights.T.shape, *(1,) * (stacked.ndim - 2))
    return (shaped * stacked).sum(0)


def added_to(y: Tensor, lanes: Tensor, rows: Tensor) -> Tensor:
    """A tensor like y with the rows added at their lanes."""
    return torch.zeros_like(y).index_add_(0, lanes.to(y.device), rows)

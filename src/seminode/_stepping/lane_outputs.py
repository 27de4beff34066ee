"""Outputs of batched solves: which samples pass which output times in which step, and their values there.

An output is a row: the state of one sample at one of its times. Rows are collected in the order in which the steps pass
them; `arranged` puts them into their places. The rows of several steps are computed together, since it is the number of
operations that takes time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._field.pytree import real_dtype
from ..solvers.base import Solver
from .lane_plan import SMALL, LanePlan, mask
from .observers import Observer

#: How many steps wait for their outputs at most, and how many bytes they may hold meanwhile.
STEPS, BYTES = 32, 1 << 22


class Rows(NamedTuple):
    """Outputs in one step or in several: where they are, all on the host."""

    cells: Tensor  # number of the step times the number of lanes, plus the lane
    lanes: Tensor
    number: Tensor  # of the output time
    x: Tensor  # where in the step, from 0 to 1
    at_end: Tensor | None  # which are the end of a step, if any is


class LaneOutputs:
    """The solution at given times, one row of `times` per lane; with `last`, at the last of them only.

    With `ends`, the states after the last step are outputs, too: one more row for each lane, after all others.
    """

    def __init__(self, times: Tensor, last: bool = False, ends: bool = False):
        self.ends = ends
        self._closed = -1  # the first row of the last step
        self._lanes = len(times)
        trivial = times[:, 0] == times[:, -1]
        self._sign = -1.0 if bool((times[:, -1] < times[:, 0]).any()) else 1.0
        shared = times.stride(0) == 0
        self._times = times[:, -1:] if last else times
        #: Whether outputs may lie inside of steps.
        self.inside = self._times.shape[1] > 2
        never = torch.full((self._lanes, 1), torch.inf, dtype=times.dtype)
        self._sorted = torch.cat([self._sign * self._times, never], 1)  # times in the solve's own direction
        self._shared = self._sorted[0].contiguous() if shared else None
        begun = trivial if last else torch.ones_like(trivial)
        self._first = torch.zeros(self._lanes, dtype=torch.int64)
        self._cursor = torch.where(trivial, self._times.shape[1], begun.to(torch.int64))
        self._next = self._following(self._cursor)
        #: Whether a lane that does not move may seem to pass an output.
        self._repeated = self.inside and bool((self._times[:, 0] == self._times[:, 1]).any())
        self._begun = self._places(self._first, self._cursor)
        self._order = [(self._begun[1], self._begun[2])]
        self._rows: dict[int, tuple[Rows, slice]] = {}  # of each step that passes any, by its first row
        self._matrix: tuple[Any, Tensor] | None = None

    @property
    def begun(self) -> int:
        """How many rows are y0 itself."""
        return len(self._begun[1])

    def start(self, y0: Tensor) -> Tensor:
        """Those rows."""
        return y0[self._begun[1].to(y0.device)]

    def start_vjp(self, cotangents: Tensor, y0: Tensor) -> Tensor:
        return added_to(y0, self._begun[1], cotangents)

    def go_on(self, t: Tensor) -> None:
        """Leave out all outputs up to the times of the lanes."""
        self._cursor = self._searched((self._sign * t).unsqueeze(0))[0]

    def passed(self) -> tuple[Tensor, Tensor]:
        """The lane and the number of every row, those of the ends left out."""
        lanes, number = self._all()
        count = len(lanes) - (self._lanes if self._closed >= 0 else 0)
        return lanes[:count], number[:count]

    def close(self, low: int) -> int:
        """Add the rows of the ends to those of the last step, which begin with number `low`. How many there are."""
        lanes, yes = torch.arange(self._lanes), torch.ones(self._lanes, dtype=torch.bool)
        ends = Rows(lanes, lanes, torch.full_like(lanes, self._times.shape[1] - 1), yes.to(self._times.dtype), yes)
        rows = self.rows(low)
        if rows is not None:
            at_end = torch.zeros_like(rows.lanes, dtype=torch.bool) if rows.at_end is None else rows.at_end
            pairs = zip(rows._replace(at_end=at_end), ends, strict=True)
            ends = Rows(*(torch.cat([a, b]) for a, b in pairs if a is not None and b is not None))
        self._rows[low] = ends, slice(0, len(ends.lanes))
        self._order.append((lanes, torch.full_like(lanes, self._times.shape[1] - 1)))
        self._closed = low
        return self._lanes

    def _following(self, cursor: Tensor) -> Tensor:
        """The time of the next output of each lane."""
        if self._shared is not None:
            return self._shared[cursor]
        return self._sorted.gather(1, cursor.unsqueeze(1)).squeeze(1)

    def _places(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cell, lane and index of all outputs low … high − 1 of each lane; of several steps, one after the other."""
        counts = (high - low).flatten()
        cells = torch.repeat_interleave(counts)
        offsets = counts.cumsum(0) - counts - low.flatten()
        return cells, cells % self._lanes, torch.arange(len(cells)) - offsets[cells]

    def passes(self, plan: LanePlan) -> bool:
        """Whether a step passes an output of any lane."""
        s1 = plan.t1 if self._sign > 0 else -plan.t1
        return bool(((s1 >= self._next) & plan.moved).any())

    def claim(self, plans: list[LanePlan], first: int) -> tuple[Rows, list[int]]:
        """The rows of several steps, from number `first` on, and how many there are in each step."""
        t0, t1, dt = (torch.stack([getattr(plan, name) for plan in plans]) for name in ("t0", "t1", "dt"))
        high = self._searched(t1 if self._sign > 0 else -t1)
        if self._repeated:
            moved = torch.stack([plan.moved for plan in plans])
            high = torch.where(moved, high, self._first)
        high = torch.cummax(torch.cat([self._cursor.unsqueeze(0), high]), 0).values
        self._cursor = high[-1]
        self._next = self._following(self._cursor)
        cells, lanes, index = self._places(high[:-1], high[1:])
        times = self._times[0][index] if self._shared is not None else self._times[lanes, index]
        at_end = times == t1.flatten()[cells]
        ends = at_end if bool(at_end.any()) else None
        rows = Rows(cells, lanes, index, (times - t0.flatten()[cells]) / dt.flatten()[cells], ends)
        counts = (high[1:] - high[:-1]).sum(1).tolist()
        self._order.append((lanes, index))
        begin = 0
        for count in counts:
            end = begin + count
            if count:
                self._rows[first + begin] = rows, slice(begin, end)
            begin = end
        return rows, counts

    def _searched(self, s: Tensor) -> Tensor:
        """How many outputs of each lane are at most at these times, of shape (steps, B)."""
        if self._shared is not None:
            return torch.searchsorted(self._shared, s, right=True)
        return torch.searchsorted(self._sorted, s.T.contiguous(), right=True).T

    def rows(self, low: int) -> Rows | None:
        """The rows from number `low` on that one step has passed, if it has passed any."""
        if low not in self._rows:
            return None
        rows, part = self._rows[low]
        lanes = rows.lanes[part]
        ends = None if rows.at_end is None else rows.at_end[part]
        return Rows(lanes, lanes, rows.number[part], rows.x[part], ends)

    def of(self, step: Any, low: int, high: int, shifts: Any) -> Tensor:
        """Rows low … high − 1, which lie in this step."""
        rows = self.rows(low)
        assert rows is not None
        if low != self._closed:
            return self._inside(step, rows, shifts)
        inner = slice(len(rows.lanes) - self._lanes)
        ends = None if rows.at_end is None else rows.at_end[inner]
        rows = Rows(rows.cells[inner], rows.lanes[inner], rows.number[inner], rows.x[inner], ends)
        return torch.cat([self._inside(step, rows, shifts), step.y1]) if len(rows.lanes) else step.y1

    def _inside(self, step: Any, rows: Rows, shifts: Any) -> Tensor:
        plan, y0 = step.plan, step.y0
        length, x, at_end = plan.dt, rows.x, rows.at_end
        if shifts is not None:
            start, end = shifts.of(plan)
            lanes = rows.lanes.to(start.device)
            ahead = (self._times[rows.lanes, rows.number] - plan.t0[rows.lanes]).to(start)
            length = plan.dt.to(start) + (end - start)
            x = (ahead - start[lanes] + shifts.rows(rows)) / length[lanes]
            # A time that is differentiated may be at the end by chance only, unless it is the last one.
            at_end = plan.final[rows.lanes] & (rows.number == self._times.shape[1] - 1)
        polynomial = self.polynomial(step.solver, [step.interpolated()]) if self.inside else None
        return values(y0, step.y1, length, polynomial, rows._replace(x=x, at_end=at_end))

    def polynomial(self, solver: Solver, steps: list[list[Tensor]]) -> Tensor:
        """(p(x) − y0)/dt by its powers of x, the first one first, from the slopes of several steps."""
        slopes = torch.stack([k for step in zip(*steps, strict=True) for k in step])
        slopes = slopes.reshape(len(steps[0]), -1, *slopes.shape[2:])  # an axis of slopes, then one of cells
        matrix = self._weights(solver, slopes)
        return (matrix @ slopes.reshape(len(slopes), -1)).reshape(-1, *slopes.shape[1:])

    def _weights(self, solver: Solver, like: Tensor) -> Tensor:
        if self._matrix is None or self._matrix[0] is not solver.interpolant:
            self._matrix = solver.interpolant, torch.tensor(solver.interpolant, dtype=torch.float64).T.contiguous()
        return self._matrix[1].to(like)

    def vjp(
        self, cotangents: Tensor, plan: LanePlan, low: int, solver: Solver, y: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Cotangents of the end of a step, of its start and of its slopes, from those of the rows in it."""
        rows = self.rows(low)
        assert rows is not None
        lanes, x, end = rows.lanes, rows.x, None
        if rows.at_end is not None and bool(rows.at_end.any()):
            ends, inner = rows.at_end.to(y.device), ~rows.at_end
            end = added_to(y, lanes[rows.at_end], cotangents[ends])
            lanes, x, cotangents = lanes[inner], x[inner], cotangents[~ends]
        if not len(lanes):
            return end, None, None
        powers = [x]
        for _ in range(len(solver.interpolant[0]) - 1):
            powers.append(powers[-1] * x)
        weights = torch.stack(powers, -1) @ self._weights(solver, x)
        weights = (weights * plan.dt[lanes].unsqueeze(1)).to(cotangents)
        shaped = weights.T.reshape(*weights.T.shape, *(1,) * (cotangents.ndim - 1))
        slopes = y.new_zeros((len(shaped), *y.shape)).index_add_(1, lanes.to(y.device), shaped * cotangents)
        return end, added_to(y, lanes, cotangents), slopes

    def _all(self) -> tuple[Tensor, Tensor]:
        lanes, index = zip(*self._order, strict=True)
        return torch.cat(lanes), torch.cat(index)

    def arranged(self, rows: Tensor) -> Tensor:
        """All outputs, (T, B, ...), from their rows; NaN where there is none, since the sample has failed."""
        count = self._times.shape[1]
        lanes, index = self._all()
        places = (index * self._lanes + lanes).to(rows.device)
        shape = (count * self._lanes, *rows.shape[1:])
        if len(places) == shape[0]:
            whole = rows[torch.empty_like(places).scatter_(0, places, torch.arange(len(places), device=rows.device))]
        else:
            whole = rows.new_full(shape, torch.nan).index_copy(0, places, rows)
        return whole.reshape(count, self._lanes, *rows.shape[1:])

    def row_times(self) -> list[float]:
        lanes, index = self._all()
        return self._times[lanes, index].tolist()

    def named(self, row: int) -> str:
        """What to call a row in a message."""
        lanes, index = self._all()
        return f"output {int(index[row])} of sample {int(lanes[row])}"


def values(y0: Tensor, y1: Tensor, dt: Tensor, polynomial: Tensor | None, rows: Rows) -> Tensor:
    """The solution in the cells of the rows. Tensors have an axis of cells, and the polynomial one of powers before it.

    Without a polynomial, all rows are at the ends of steps.
    """
    device, dtype = y0.device, real_dtype(y0)
    cells = rows.cells.to(device)
    if polynomial is None:
        return y1.index_select(0, cells)

    powers = polynomial.index_select(1, cells)

    def column(x: Tensor) -> Tensor:
        x = x.to(device, dtype).reshape(-1, *(1,) * (y0.ndim - 1))
        return x.expand(powers.shape[1:]).contiguous() if small else x

    small = y0.numel() <= SMALL * len(y0)  # then kernels that need not broadcast are faster
    x = column(rows.x)
    total = powers[-1]
    for power in powers[:-1].flip(0):
        total = power + x * total if y0.is_complex() else torch.addcmul(power, x, total)
    lengths = dt[cells if dt.device == device else rows.cells]
    inside = y0.index_select(0, cells) + column(lengths) * (x * total)
    if rows.at_end is None:
        return inside
    return torch.where(mask(rows.at_end, inside), y1.index_select(0, cells), inside)


def added_to(y: Tensor, lanes: Tensor, rows: Tensor) -> Tensor:
    """A tensor like y with the rows added at their lanes."""
    return torch.zeros_like(y).index_add_(0, lanes.to(y.device), rows)


class LaneSampler(Observer):
    """Collects the rows, and which of them lie in which step; as [`Sampler`][seminode._stepping.outputs.Sampler]."""

    def __init__(self, outputs: LaneOutputs, y0: Tensor, solver: Solver, shifts: Any = None):
        self._outputs, self._solver, self._shifts = outputs, solver, shifts
        self._pieces = [outputs.start(y0)]
        self.count = outputs.begun
        # Where the slope at the end of a step is known in any case, it costs nothing to keep the step.
        self._known = solver.error_needs_end_slope or len(solver.interpolant) <= solver.stages or not outputs.inside
        size = y0.numel() * y0.element_size() * (len(solver.interpolant) + 2)
        self._patience = max(1, min(STEPS, BYTES // max(size, 1)))
        self._waiting: list[tuple[LanePlan, Tensor, Tensor, list[Tensor]]] = []
        self._numbers: list[int] = []  # of those steps
        self._end: Tensor | None = None
        self.ranges: list[tuple[int, int]] = []

    def accepted(self, step: Any, ratio: Any) -> None:
        outputs, plan = self._outputs, step.plan
        self.ranges.append((self.count, self.count))
        if outputs.ends:
            self._end = step.y1
        if not (self._known and self._patience > 1 and self._shifts is None) and not outputs.passes(plan):
            return
        if self._shifts is not None:
            _, (count,) = outputs.claim([plan], self.count)
            self._pieces.append(outputs.of(step, self.count, self.count + count, self._shifts))
            self._close(len(self.ranges) - 1, count)
            return
        self._waiting.append((plan, step.y0, step.y1, step.interpolated() if outputs.inside else []))
        self._numbers.append(len(self.ranges) - 1)
        # A step that may evaluate its end slope must know whether it passes an output, and so must the one before it.
        if len(self._waiting) >= self._patience or not self._known:
            self._flush()

    def _close(self, step: int, count: int) -> None:
        self.ranges[step] = self.count, self.count + count
        self.count += count

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows, counts = self._outputs.claim([plan for plan, *_ in self._waiting], self.count)
        passing = [waiting for waiting, count in zip(self._waiting, counts, strict=True) if count]
        if passing:
            plans, starts, ends, slopes = zip(*passing, strict=True)
            polynomial = self._outputs.polynomial(self._solver, list(slopes)) if self._outputs.inside else None
            dt = _joined([plan.dt for plan in plans])
            rows = _renumbered(rows, counts, len(starts[0]))
            self._pieces.append(values(_joined(starts), _joined(ends), dt, polynomial, rows))
        for step, count in zip(self._numbers, counts, strict=True):
            self._close(step, count)
        self._waiting, self._numbers = [], []

    def stacked(self, like: Tensor) -> Tensor:
        self._flush()
        if self._end is not None:
            low, high = self.ranges[-1]
            self.ranges[-1] = low, high + self._outputs.close(low)
            self._pieces.append(self._end)
            self.count += len(self._end)
        return torch.cat(self._pieces)


def _renumbered(rows: Rows, counts: list[int], lanes: int) -> Rows:
    """The rows with cells of those steps only that have any."""
    if all(counts):
        return rows
    step = torch.repeat_interleave(torch.tensor([count for count in counts if count]))
    return rows._replace(cells=step * lanes + rows.lanes)


def _joined(tensors: Any) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

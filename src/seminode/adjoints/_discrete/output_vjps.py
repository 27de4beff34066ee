"""The VJPs of outputs: from their cotangents to those of the steps in which they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._stepping.interpolation import weights_at
from ..._stepping.lane_outputs import LaneOutputs
from ..._stepping.output_blocks import Block, shares
from ..._stepping.outputs import Outputs
from ...solvers.base import Solver


class StepEndings(NamedTuple):
    """Cotangents of the parts of a step; `None` where no output depends on them."""

    #: That of the end of the step, where all outputs in it are there.
    end: Tensor | None = None
    #: Where outputs lie inside: those of the end, the start and the slopes, stacked, since programs take one tensor.
    parts: Tensor | None = None
    #: The last of them, if it is that of the slope at the end.
    end_slope: Tensor | None = None


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two cotangents, either of which may be missing."""
    return b if a is None else a if b is None else a + b


class OutputVJPs:
    """Cotangents of the parts of every step, from those of the outputs in it. Ask for the last step first.

    An output inside a step is y0 + dt·Σ bᵢ(x)·kᵢ, so that its VJP is a combination too. Where states are small, those
    of several steps are computed together. `sizes` are the largest magnitudes of the cotangents; zeros are left out.
    """

    def __init__(
        self,
        outputs: Outputs | LaneOutputs,
        ranges: Sequence[tuple[int, int]],
        plans: Sequence[Any],
        solver: Solver,
        like: Tensor,
        cotangents: Tensor | None,
        sizes: Sequence[float],
    ):
        self._outputs, self._ranges, self._plans = outputs, ranges, plans
        self._solver, self._like = solver, like
        self._cotangents, self._sizes = cotangents, sizes
        self._shares = shares(like)
        self._reads_end = len(solver.interpolant) > solver.stages
        self._known: dict[int, StepEndings] = {}

    def rows(self, j: int) -> Tensor | None:
        """The cotangents of the outputs in step j, stacked; `None` if all of them are zero."""
        low, high = self._ranges[j]
        return self._cotangents[low:high] if self._cotangents is not None and any(self._sizes[low:high]) else None

    def of(self, j: int) -> StepEndings:
        """Those of step j."""
        known = self._known.get(j)
        if known is None:
            self._known = self._before(j)
            known = self._known[j]
        return known

    def _before(self, j: int) -> dict[int, StepEndings]:
        """Those of step j, and maybe of steps before it."""
        rows, plan, bounds = self.rows(j), self._plans[j], self._ranges[j]
        if rows is None:
            return {j: StepEndings()}
        if isinstance(self._outputs, LaneOutputs):
            end, start, slopes = self._outputs.vjp(rows, plan, bounds[0], self._solver, self._like)
            return {j: self._stacked(end, start, slopes)}
        xs = self._outputs.inside(plan, *bounds)
        if xs and self._shares:
            return self._block_before(j)
        end = rows[len(xs) :].sum(0) if len(xs) < len(rows) else None
        if not xs:
            return {j: StepEndings(end)}
        weights = torch.tensor([weights_at(self._solver.interpolant, x) for x in xs], dtype=torch.float64)
        inner = rows[: len(xs)]
        slopes = torch.tensordot((plan.dt * weights).to(inner).T, inner, 1)
        return {j: self._stacked(end, inner.sum(0), slopes)}

    def _stacked(self, end: Tensor | None, start: Tensor | None, slopes: Tensor | None) -> StepEndings:
        if start is None or slopes is None:
            return StepEndings(end)
        end = torch.zeros_like(start) if end is None else end
        parts = torch.cat([end.unsqueeze(0), start.unsqueeze(0), slopes])
        return StepEndings(None, parts, parts[-1] if self._reads_end else None)

    def _block_before(self, j: int) -> dict[int, StepEndings]:
        """Those of step j and of some steps before it with outputs inside."""
        assert not isinstance(self._outputs, LaneOutputs)
        assert self._cotangents is not None
        block, steps, ends = Block(), [], {}
        for i in range(j, -1, -1):
            low, high = self._ranges[i]
            xs = self._outputs.inside(self._plans[i], low, high) if any(self._sizes[low:high]) else []
            if not xs:
                continue
            if not block.has_room(len(xs)):
                break
            if len(xs) < high - low:
                ends[len(steps)] = self._cotangents[low + len(xs) : high].sum(0).reshape(-1)
            block.add(self._plans[i].dt, xs)
            steps.append(i)
        # In the gaps the weights are zero, but the start has none: a row of zeros fills them.
        zeros, first = self._cotangents.new_zeros(1, *self._like.shape), self._ranges[steps[-1]][0]
        rows = torch.cat([self._cotangents[first : self._ranges[j][1]], zeros])
        index = block.rows([self._ranges[i][0] - first for i in steps], len(rows) - 1)
        padded = rows.reshape(len(rows), -1).index_select(0, index.view(-1).to(rows.device))
        padded = padded.view(*index.shape, -1)
        slopes = block.weights(self._solver.interpolant, rows).transpose(1, 2) @ padded
        starts = padded.sum(1, keepdim=True)
        found = torch.cat([torch.zeros_like(starts), starts, slopes], 1)
        for place, end in ends.items():
            found[place, 0] = end
        found = found.reshape(*found.shape[:2], *self._like.shape)
        end_slopes = found[:, -1].unbind() if self._reads_end else [None] * len(steps)
        return dict(zip(steps, map(StepEndings, [None] * len(steps), found.unbind(), end_slopes), strict=True))

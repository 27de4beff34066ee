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
    """Cotangents of a step's end, its start and its slopes; `None` where no output depends on them."""

    end: Tensor | None
    start: Tensor | None
    slopes: Tensor | None


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
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def rows(self, j: int) -> Tensor | None:
        """The cotangents of the outputs in step j, stacked; `None` if all of them are zero."""
        low, high = self._ranges[j]
        return self._cotangents[low:high] if self._cotangents is not None and any(self._sizes[low:high]) else None

    def of(self, j: int) -> StepEndings:
        """Those of step j."""
        rows, plan, bounds = self.rows(j), self._plans[j], self._ranges[j]
        if rows is None:
            return StepEndings(None, None, None)
        if isinstance(self._outputs, LaneOutputs):
            return StepEndings(*self._outputs.vjp(rows, plan, bounds[0], self._solver, self._like))
        xs = self._outputs.inside(plan, *bounds)
        end = rows[len(xs) :].sum(0) if len(xs) < len(rows) else None
        if not xs:
            return StepEndings(end, None, None)
        if not self._shares:
            weights = torch.tensor([weights_at(self._solver.interpolant, x) for x in xs], dtype=torch.float64)
            inner = rows[: len(xs)]
            return StepEndings(end, inner.sum(0), torch.tensordot((plan.dt * weights).to(inner).T, inner, 1))
        if j not in self._known:
            self._known = self._block_before(j)
        return StepEndings(end, *self._known[j])

    def _block_before(self, j: int) -> dict[int, tuple[Tensor, Tensor]]:
        """The cotangents of starts and slopes, of step j and of some steps before it."""
        assert not isinstance(self._outputs, LaneOutputs)
        assert self._cotangents is not None
        block, steps = Block(), []
        for i in range(j, -1, -1):
            xs = [] if self.rows(i) is None else self._outputs.inside(self._plans[i], *self._ranges[i])
            if not xs:
                continue
            if not block.has_room(len(xs)):
                break
            block.add(self._plans[i].dt, xs)
            steps.append(i)
        # In the gaps the weights are zero, but the start has none: a row of zeros fills them.
        zeros, first = self._cotangents.new_zeros(1, *self._like.shape), self._ranges[steps[-1]][0]
        rows = torch.cat([self._cotangents[first : self._ranges[j][1]], zeros])
        places = [
            [self._ranges[i][0] - first + n for n in range(len(xs))] for i, xs in zip(steps, block.xs, strict=True)
        ]
        index = torch.tensor(block.padded(places, len(rows) - 1), device=rows.device)
        padded = rows.reshape(len(rows), -1)[index]
        slopes = block.weights(self._solver.interpolant, rows).transpose(1, 2) @ padded
        starts = padded.sum(1).reshape(len(steps), *self._like.shape)
        slopes = slopes.reshape(*slopes.shape[:2], *self._like.shape)
        return dict(zip(steps, zip(starts.unbind(), slopes.unbind(), strict=True), strict=True))

"""Gradients with respect to the times of batched solves."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._field.pytree import real_dtype
from ..._stepping.lane_outputs import Rows
from ..._stepping.lane_plan import LanePlan


class LaneStepShifts:
    """Leaves for the times of one step of all lanes, to differentiate with respect to them."""

    def __init__(self, like: Tensor, count: int):
        dtype = real_dtype(like)
        self.start = like.new_zeros(len(like), dtype=dtype).requires_grad_()
        self.end = like.new_zeros(len(like), dtype=dtype).requires_grad_()
        self.out = like.new_zeros(count, dtype=dtype).requires_grad_()

    def of(self, plan: LanePlan) -> tuple[Tensor, Tensor]:
        return self.start, self.end

    def rows(self, rows: Rows) -> Tensor:
        return self.out[: len(rows.lanes)]  # ends of steps have no time of their own


class LaneTimeGradient:
    """The gradient with respect to `ts`, of shape (T,) or (B, T), by what the times of each lane move with."""

    def __init__(self, ts: Tensor, like: Tensor):
        self._shared = ts.ndim == 1
        self._total = like.new_zeros((len(like), ts.shape[-1]), dtype=real_dtype(like))

    def add(
        self, plan: LanePlan, rows: Rows | None, start: Tensor | None, end: Tensor | None, out: Tensor | None
    ) -> None:
        zero, device = self._total.new_zeros(()), self._total.device
        start, end = zero if start is None else start, zero if end is None else end
        floating = torch.ones_like(plan.final) if plan.floating is None else plan.floating
        # The step of a lane that does not move has length 0 whatever its times are.
        end_floats = plan.moved & floating & ~plan.lands
        start_floats = plan.moved & floating
        first = torch.where(start_floats.to(device), start, zero) + torch.where(end_floats.to(device), end, zero)
        self._total[:, 0] += first
        self._total[:, -1] += torch.where(plan.final.to(device), end, zero)
        if out is not None and rows is not None:
            self._total.index_put_((rows.lanes.to(device), rows.number.to(device)), out, accumulate=True)

    @property
    def total(self) -> Tensor:
        return self._total.sum(0) if self._shared else self._total

"""One step of all lanes of a batched solve before it is taken: as `Plan`, with tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .lane_control import Proposed

#: Up to how many entries a sample is small.
SMALL = 32


class Rest(NamedTuple):
    """Where failed lanes are left: states and times at which the field is known to be finite."""

    y: Tensor
    times: Tensor


class LanePlan:
    """One step of all lanes before it is taken; as [`Plan`][seminode._stepping.schedule.Plan], with tensors.

    When it has been judged, `settle` removes the lanes that do not move: rejected ones get a step of length 0. A plan
    that is taken again on a backward pass thus needs no mask.
    """

    __slots__ = (
        "bounds",
        "crosses_jump",
        "dt",
        "failing",
        "final",
        "floating",
        "lands",
        "moved",
        "proposal",
        "proposed",
        "rest",
        "t0",
        "t1",
        "unanimous",
    )

    def __init__(self, t0: Tensor, t1: Tensor, dt: Tensor, proposal: Tensor, proposed: Proposed, running: Tensor):
        self.t0, self.t1, self.dt = t0, t1, dt
        self.proposal, self.proposed = proposal, proposed
        self.lands, self.final = proposed.lands, proposed.final
        self.floating: Tensor | None = None  # all of them
        self.bounds: tuple[Tensor, Tensor] | None = None  # of the times handed to the field
        self.crosses_jump = False  # any of them
        #: Which lanes take their step, and whether those are all that are running: until it is judged, all of them.
        self.moved = running
        self.unanimous = True
        #: Which lanes fail here, if any does. They go on, at rest, from `rest`.
        self.failing: Tensor | None = None
        self.rest: Rest | None = None

    @property
    def landing(self) -> bool:
        """The schedule of the lanes checks the lengths of their steps itself."""
        return True

    @property
    def time(self) -> float:
        """A time for messages: that of the first lane that moves."""
        moving = self.t0[self.moved]
        return float(moving[0] if len(moving) else self.t0[0])

    def stage_time(self, c: float) -> Tensor:
        """The times of a stage at node c."""
        t = self.t1 if c == 1.0 else self.t0 if c == 0.0 else torch.add(self.t0, self.dt, alpha=c)
        return t if self.bounds is None else torch.minimum(torch.maximum(t, self.bounds[0]), self.bounds[1])

    def clock(self) -> Tensor:
        """Step sizes, both ends and the bounds of times, for a compiled program."""
        bounds = _unbounded(len(self.dt)) if self.bounds is None else self.bounds
        return torch.stack([self.dt, self.t0, self.t1, *bounds])

    def length(self, like: Tensor) -> Tensor:
        """The step sizes as a tensor that broadcasts against the state."""
        dt = column(self.dt, like)
        # Small ones in full: kernels that need not broadcast are faster.
        return dt.expand(like.shape).contiguous() if like.numel() <= SMALL * len(like) else dt

    def enter(self, y: Tensor) -> Tensor:
        """The states from which the step starts: failing lanes go to rest."""
        if self.failing is None or self.rest is None:
            return y
        return torch.where(mask(self.failing, y), self.rest.y, y)

    def settle(self, accept: Tensor, unanimous: bool) -> None:
        """Only lanes in `accept` take the step."""
        self.moved, self.unanimous = accept, unanimous
        if unanimous:
            return
        self.t1 = torch.where(accept, self.t1, self.t0)
        self.dt = self.t1 - self.t0
        self.final = self.final & accept

    def fail(self, failing: Tensor, rest: Rest) -> None:
        """Put lanes to rest, at which the field is finite: they keep the shape of the batch, and nothing else."""
        self.failing = failing if self.failing is None else self.failing | failing
        self.rest = rest
        self.t0 = torch.where(failing, rest.times, self.t0)
        self.t1 = torch.where(failing, rest.times, self.t1)
        self.dt = torch.where(failing, 0.0, self.dt)
        self.final = self.final & ~failing


@lru_cache(maxsize=4)
def _unbounded(lanes: int) -> tuple[Tensor, Tensor]:
    highest = torch.full((lanes,), torch.inf, dtype=torch.float64)
    return -highest, highest


def column(x: Tensor, like: Tensor) -> Tensor:
    """One number per lane as a tensor that broadcasts against the state, in its real dtype and on its device."""
    dtype = like.dtype.to_real() if like.is_complex() else like.dtype
    return x.to(device=like.device, dtype=dtype).reshape(-1, *(1,) * (like.ndim - 1))


def mask(x: Tensor, like: Tensor) -> Tensor:
    """The same for a condition."""
    return x.to(like.device).reshape(-1, *(1,) * (like.ndim - 1))

"""The ends of the steps of a solve, as the user gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._field.pytree import wide_dtype
from .._stepping.problem import Problem
from .._stepping.schedule import Plan


def knots_of(problem: Problem, plans: Sequence[Plan]) -> Tensor:
    """The ends of the steps as a tensor that moves with ts[0] and ts[-1] as the steps do."""
    ts, y0 = problem.ts, problem.y0
    wide = wide_dtype(ts)
    if not plans:
        return torch.tensor([problem.times[0]] * 2, dtype=wide, device=y0.device)
    knots = torch.tensor([plans[0].t0, *(plan.t1 for plan in plans)], dtype=wide, device=y0.device)
    with_start = [True, *(plan.end_floats for plan in plans)]
    with_end = [False, *(plan.final for plan in plans)]
    shift = (ts - ts.detach()).to(knots)
    moves = torch.tensor([with_start, with_end], dtype=wide, device=knots.device)
    return knots + moves[0] * shift[0] + moves[1] * shift[-1]

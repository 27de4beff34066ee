"""Steps on a grid of times that the user gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ._untyped import numbers
from .controllers import Controller, History, Verdict


@dataclass(frozen=True)
class Grid(Controller):
    """Steps from each time of a grid to the next, in any solver.

    >>> Grid().landings([0.0, 1.0, 3.0])
    (0.0, 1.0, 3.0)

    Arguments:
        construct: a function from the tensor of output times to a tensor of the times at which steps end, from the
            first to the last output time; by default one step leads from each output time to the next. On the backward
            pass of a continuous adjoint it is called for each interval between outputs. If the gradient with respect
            to `ts` is needed, the grid moves with them as `construct` says; with `Direct` only.
        dtype: precision in which the grid and the times inside of its steps are computed.
        perturb: whether the field may jump at the times of the grid. It is then evaluated on the inner side of each end
            of a step.
        sums_ends: whether the last stage of a step is evaluated at t0 + dt, which may differ from t1 by rounding.
    """

    adaptive: ClassVar[bool] = False
    check: ClassVar[bool] = False

    construct: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype = torch.float64
    perturb: bool = False
    sums_ends: bool = False

    def __post_init__(self) -> None:
        if self.construct is not None and not callable(self.construct):
            raise TypeError(f"construct: expected a function of the output times, found {self.construct!r}")

    def landings(self, times: Sequence[float]) -> tuple[float, ...]:
        if self.construct is None:
            return tuple(times)
        grid = self.construct(torch.tensor(times, dtype=self.dtype))
        found = tuple(numbers(grid))
        if not found or found[0] != times[0] or found[-1] != times[-1]:
            ends = f"{found[0]:g} and {found[-1]:g}" if found else "an empty grid"
            raise ValueError(f"construct: expected a grid from {times[0]:g} to {times[-1]:g}, found {ends}")
        return found

    def moving(self, ts: Tensor) -> Tensor:
        """The grid as a function of the output times `ts`."""
        return ts if self.construct is None else self.construct(ts)

    def first(self) -> tuple[float, History]:
        return math.inf, ()

    def judge(self, dt: float, proposal: float, ratio: float, order: int, history: History) -> Verdict:
        return Verdict(True, math.inf, history)

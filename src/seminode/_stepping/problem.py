"""Plain data: the problem that goes into a solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from .._error_norm import ErrorNorm
from .._ranks import ALONE, Alone

if TYPE_CHECKING:
    from .._field.event_function import EventFunction
    from .._field.field import Field
    from ..controllers import Controller
    from ..solvers.base import Solver
    from .observers import Observer

#: Where outputs are saved.
Save = Literal["ts", "last", "steps"]


@dataclass(frozen=True)
class Problem:
    """A checked, flattened initial value problem; adjoints and the loop need nothing else."""

    field: Field
    y0: Tensor  # flat
    ts: Tensor
    times: tuple[float, ...]  # ts on the host
    solver: Solver
    controller: Controller
    error: ErrorNorm | None  # None: no error control
    jumps: tuple[float, ...] = ()
    events: tuple[EventFunction, ...] = ()
    params: tuple[Tensor, ...] | None = None  # None: to be detected
    integrals: tuple[bool, ...] = ()  # which leaves are only integrals, where that was detected or declared
    reader: Any = None  # checks again whether they still are, where it was detected
    save: Save = "ts"
    dense: bool = False
    record: bool = False
    progress: bool = False
    throw: bool = True
    max_steps: int = 100_000
    compile: bool | Literal["background"] = False
    observers: tuple[Observer, ...] = ()
    ranks: Alone = ALONE  # the processes that take the same steps
    #: With `batched=True`, the output times of every sample, (B, T), on the host; `times` are then the two ends of an
    #: interval that holds them all.
    lanes: Tensor | None = None

    @property
    def outputs_inside(self) -> bool:
        """Whether outputs may lie inside of steps: the last one too, if the last step need not end there."""
        return self.save == "ts" and (len(self.times) > 2 or bool(self.events) or not self.controller.land)

    @property
    def trivial(self) -> bool:
        """Whether there is nothing to solve: the interval is a single time."""
        return self.times[0] == self.times[-1]

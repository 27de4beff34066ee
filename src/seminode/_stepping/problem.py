"""Plain frozen data: the Problem that goes into a solve, the Solution that comes out, and what was counted."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..errors import SolveError
from ..norms import ErrorNorm
from .interpolation import DenseSolution

if TYPE_CHECKING:
    from .._field.field import Field


class Plan(NamedTuple):
    """One step before it is taken. Times are host floats in the user's own direction of time.

    A step that lands on a fixed place (a jump, a step-to time, the end) ends exactly there. What moves with what
    decides the gradient with respect to times: `floating` means that t0 is ts[0] plus a constant; a step that does
    not land has a constant dt, so that t1 moves with t0; a `final` one ends on ts[-1].
    """

    t0: float
    t1: float
    dt: float
    proposal: float
    floating: bool = True
    landing: bool = False
    final: bool = False
    crosses_jump: bool = False
    #: Times handed to the field are kept inside [lowest, highest]: the correct side of a jump at either end.
    lowest: float = float("-inf")
    highest: float = float("inf")

    @property
    def end_floats(self) -> bool:
        """Whether t1, like t0, is ts[0] plus a constant."""
        return self.floating and not self.landing

    @property
    def breaks(self) -> bool:
        """Whether the slope at its end is not the first one of a next step."""
        return self.final or self.crosses_jump

    def stage_time(self, c: float) -> float:
        """The time of a stage at node c, exactly t1 for c = 1 and never across a jump."""
        t = self.t1 if c == 1.0 else self.t0 + c * self.dt
        if t < self.lowest:
            return self.lowest
        return t if t <= self.highest else self.highest


class Status(enum.Enum):
    """How a solve ended."""

    SUCCESS = "success"
    STEP_SIZE_UNDERFLOW = "step size underflow"
    MAX_STEPS_REACHED = "max steps reached"
    NON_FINITE_STATE = "non-finite state"

    @classmethod
    def of(cls, error: SolveError | None) -> Status:
        return cls.SUCCESS if error is None else cls(error.status)


@dataclass(frozen=True)
class Stats:
    """What a solve cost, counted where it happened.

    `nfe` counts evaluations of the field (an evaluation together with its VJP is one), `accepted` and `rejected`
    steps, `jumps` the jump times crossed. On the backward pass `vjp_y` and `vjp_params` count the evaluations that
    were pulled back to the state and to the parameters. `params_error` is set where the gradient for parameters is an
    integral of its own (`Backsolve`, `Interpolating`, `Quadrature`): an estimate of the error of that integral,
    relative to it in the Euclidean norm. `checks` counts evaluations that `norm="auto"` made to look at the field; they
    are not in `nfe`.
    """

    nfe: int = 0
    accepted: int = 0
    rejected: int = 0
    jumps: int = 0
    vjp_y: int = 0
    vjp_params: int = 0
    params_error: float | None = None
    checks: int = 0
    _backward: list[Stats] = field(default_factory=list, repr=False, compare=False)

    @property
    def backward(self) -> Stats | None:
        """The same for the latest backward pass; `None` before there was one."""
        return self._backward[-1] if self._backward else None

    def __str__(self) -> str:
        text = f"nfe={self.nfe}, accepted={self.accepted}, rejected={self.rejected}"
        if self.jumps:
            text += f", jumps={self.jumps}"
        if self.vjp_y or self.vjp_params:
            text += f", vjp_y={self.vjp_y}, vjp_params={self.vjp_params}"
        if self.checks:
            text += f", checks={self.checks}"
        if self.params_error is not None:
            text += f", params_error={self.params_error:.1e}"
        return text + (f"; backward: {self.backward}" if self.backward else "")


@dataclass(frozen=True)
class Record:
    """Everything that happened, in order, with `record=True`. Times are host floats."""

    evaluations: tuple[float, ...]
    accepted: tuple[Plan, ...]
    rejected: tuple[Plan, ...]
    ratios: tuple[float, ...]  #: error ratio of every attempted step; empty for fixed steps
    _backward: list[Record] = field(default_factory=list, repr=False, compare=False)

    @property
    def backward(self) -> Record | None:
        """The same for the latest backward pass; `None` before there was one."""
        return self._backward[-1] if self._backward else None

    @property
    def ts(self) -> tuple[float, ...]:
        """Where the accepted steps begin and end."""
        return (self.accepted[0].t0, *(plan.t1 for plan in self.accepted)) if self.accepted else ()


@dataclass(frozen=True)
class Problem:
    """A checked, flattened initial value problem; adjoints and the loop need nothing else."""

    field: Field
    y0: Tensor  # flat
    ts: Tensor
    times: tuple[float, ...]  # ts on the host
    solver: Any
    controller: Any
    error: ErrorNorm | None  # None: no error control
    jumps: tuple[float, ...] = ()
    params: tuple[Tensor, ...] | None = None  # None: to be found
    integrals: tuple[bool, ...] = ()  # which leaves are only integrals, where that was asked for or said
    reader: Any = None  # looks again whether they still are, where it was found
    save: str = "ts"
    dense: bool = False
    record: bool = False
    progress: bool = False
    throw: bool = True
    max_steps: int = 100_000
    compile: bool = False


@dataclass(frozen=True)
class Solution:
    """What [`solve`][seminode.solve] returns.

    Attributes:
        ts: the times of the outputs.
        ys: the solution there, in the structure of `y0`, the time axis first.
        stats: what it cost; `stats.backward` is filled when a gradient is taken.
        status: how it ended; anything but success only with `throw=False`.
        error: the error that would have been raised, with `throw=False`.
        dense: with `dense=True` the solution as a function of time.
        record: with `record=True` the times of all evaluations and steps.
    """

    ts: Tensor
    ys: Any
    stats: Stats
    status: Status = Status.SUCCESS
    error: SolveError | None = None
    dense: DenseSolution | None = None
    record: Record | None = None

    def __repr__(self) -> str:
        return f"Solution({len(self.ts)} outputs, {self.status.value}, {self.stats})"


class Forward(NamedTuple):
    """A finished forward pass over flat tensors: what an adjoint hands back to `solve`."""

    ts: Tensor
    ys: Tensor
    stats: Stats
    error: SolveError | None
    record: Record | None
    plans: Sequence[Plan]
    coefficients: Tensor | None

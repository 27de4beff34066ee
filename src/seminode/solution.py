"""What `solve` returns: the solution, what it cost, and a record of its steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from ._stepping.interpolation import DenseSolution
from ._untyped import integers
from .errors import SolveError

if TYPE_CHECKING:
    from ._stepping.schedule import Plan

Y = TypeVar("Y")


class Status(enum.Enum):
    """How a solve ended."""

    SUCCESS = "success"
    STEP_SIZE_UNDERFLOW = "step size underflow"
    MAX_STEPS_REACHED = "max steps reached"
    NON_FINITE_STATE = "non-finite state"
    STEP_FAILURE = "step failure"

    @classmethod
    def of(cls, error: SolveError | None) -> Status:
        return cls.SUCCESS if error is None else cls(error.status)


@dataclass
class BackwardReport:
    """What the latest backward pass of a solve cost; both are `None` before there was one.

    The statistics and the record of a solve are made when it ends, a backward pass comes later and fills this in.
    """

    stats: Stats | None = None
    record: Record | None = None


@dataclass(frozen=True)
class PerSample:
    """What each sample of a batched solve did; tensors of shape (B,) on the host.

    Attributes:
        accepted, rejected: steps of the sample.
        status: how it ended, as its number in `list(Status)`: 0 is success.
    """

    accepted: Tensor
    rejected: Tensor
    status: Tensor

    @property
    def failed(self) -> list[int]:
        """The samples that did not reach the end of their intervals."""
        return integers(self.status.nonzero().flatten())

    @property
    def statuses(self) -> list[Status]:
        """How each sample ended."""
        kinds = list(Status)
        return [kinds[code] for code in integers(self.status)]


@dataclass(frozen=True)
class Stats:
    """What a solve cost, counted where it happened.

    In a batched solve an evaluation is one of the whole batch. A step counts as accepted if any sample has taken it,
    and as rejected if none has; `per_sample` has the steps of each sample.

    Attributes:
        nfe: evaluations of the field; an evaluation together with its VJP counts once.
        accepted, rejected: steps.
        jumps: jump times crossed.
        vjp_y, vjp_params: on a backward pass, VJPs of evaluations with respect to the state and to the parameters.
        params_error: where the gradient for parameters is an integral of its own (`Backsolve`, `Interpolating`,
            `Quadrature`), an estimate of the error of that integral, relative to it in the Euclidean norm.
        checks: evaluations that only look at the field, for `norm="auto"` and to make sure on a backward pass that the
            field has not changed since the solve; they are not in `nfe`.
        per_sample: with `batched=True`, accepted and rejected steps and the status of every sample.
    """

    nfe: int = 0
    accepted: int = 0
    rejected: int = 0
    jumps: int = 0
    vjp_y: int = 0
    vjp_params: int = 0
    params_error: float | None = None
    checks: int = 0
    report: BackwardReport = field(default_factory=BackwardReport, repr=False, compare=False)
    per_sample: PerSample | None = field(default=None, repr=False, compare=False)

    @property
    def backward(self) -> Stats | None:
        """The same for the latest backward pass; `None` before there was one."""
        return self.report.stats

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
    """Everything that happened, in order, with `record=True`. Times are host floats.

    Attributes:
        evaluations: the time of every evaluation of the field.
        accepted, rejected: the steps, each with `t0`, `t1` and `dt`.
        ratios: the error ratio of every attempted step; empty for fixed steps.
    """

    evaluations: tuple[float, ...]
    accepted: tuple[Plan, ...]
    rejected: tuple[Plan, ...]
    ratios: tuple[float, ...]
    report: BackwardReport = field(default_factory=BackwardReport, repr=False, compare=False)

    @property
    def backward(self) -> Record | None:
        """The same for the latest backward pass; `None` before there was one."""
        return self.report.record

    @property
    def ts(self) -> tuple[float, ...]:
        """Where the accepted steps begin and end."""
        return (self.accepted[0].t0, *(plan.t1 for plan in self.accepted)) if self.accepted else ()


@dataclass(frozen=True)
class Solution(Generic[Y]):
    """What [`solve`][seminode.solve] returns.

    Attributes:
        ts: the times of the outputs.
        ys: the solution there, in the structure of `y0`, the time axis first.
        stats: what it cost; `stats.backward` is filled in when a gradient is taken.
        status: how it ended; anything but success only with `throw=False`.
        error: the error that would have been raised, with `throw=False`.
        dense: with `dense=True` the solution as a function of time.
        record: with `record=True` the times of all evaluations and steps.
    """

    ts: Tensor
    ys: Y
    stats: Stats
    status: Status = Status.SUCCESS
    error: SolveError | None = None
    dense: DenseSolution | None = None
    record: Record | None = None

    def __repr__(self) -> str:
        return f"Solution({len(self.ts)} outputs, {self.status.value}, {self.stats})"

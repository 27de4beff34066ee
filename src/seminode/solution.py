"""What `solve` returns: the solution, what it cost, and a record of its steps."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from ._stepping.interpolation import DenseSolution
from ._untyped import integers
from ._verification import Rerun, Verification, verification
from .errors import SolveError
from .events import Occurrences

if TYPE_CHECKING:
    from ._stepping.schedule import Plan

Y = TypeVar("Y")


class Status(enum.Enum):
    """How a solve ended.

    Example:
        >>> import torch, seminode as sn
        >>> sol = sn.solve(lambda t, y: y**2, torch.ones(1), [0.0, 2.0], throw=False)  # infinite at t = 1
        >>> sol.status is sn.Status.SUCCESS, sol.status.value
        (False, 'step size underflow')
    """

    SUCCESS = "success"
    STEP_SIZE_UNDERFLOW = "step size underflow"
    MAX_STEPS_REACHED = "max steps reached"
    NON_FINITE_STATE = "non-finite state"
    STEP_FAILURE = "step failure"
    ZENO_BEHAVIOUR = "Zeno behaviour"
    EVENT = "ended by an event"
    NEWTON_DIVERGENCE = "newton divergence"

    @classmethod
    def of(cls, error: SolveError | None, ended: bool = False) -> Status:
        """The status of a solve that ended with this error, or without one.

        Arguments:
            error: the error that ended the solve, if one did.
            ended: whether an event ended it.
        """
        return cls(error.status) if error is not None else cls.EVENT if ended else cls.SUCCESS


@dataclass
class BackwardReport:
    """What the latest backward pass of a solve cost; both are `None` before there was one.

    The statistics and the record of a solve are made when it ends, a backward pass comes later and fills this in. A
    solve that went on after events has a report for each of its stretches in `parts`; `of_events` counts the VJPs of
    evaluations in the steps that land on events.
    """

    stats: Stats | None = None
    record: Record | None = None
    parts: Sequence[BackwardReport] = ()
    of_events: int = 0

    def total(self) -> Stats | None:
        """The statistics, summed over all stretches that a backward pass has reached."""
        if not self.parts:
            return self.stats
        found = [part.stats for part in self.parts if part.stats is not None]
        if not found:
            return self.stats
        total = Stats.total(found)
        return replace(total, vjp_y=total.vjp_y + self.of_events, vjp_params=total.vjp_params + self.of_events)

    def total_record(self) -> Record | None:
        """The records of all stretches, in the order of the backward pass."""
        if not self.parts:
            return self.record
        found = [part.record for part in reversed(self.parts) if part.record is not None]
        if not found:
            return None
        chained = itertools.chain.from_iterable
        return Record(
            tuple(chained(x.evaluations for x in found)),
            tuple(chained(x.accepted for x in found)),
            tuple(chained(x.rejected for x in found)),
            tuple(chained(x.ratios for x in found)),
        )


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
        """The samples that reached neither the end of their intervals nor an event that ended them."""
        ended = list(Status).index(Status.EVENT)
        return integers(((self.status != 0) & (self.status != ended)).nonzero().flatten())

    @property
    def statuses(self) -> list[Status]:
        """How each sample ended."""
        kinds = list(Status)
        return [kinds[code] for code in integers(self.status)]


@dataclass(frozen=True)
class Stats:
    """The cost of a solve.

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
        events: occurrences of events. Steps that were discarded in order to land on them are among the rejected ones.
        jacobians, factorisations, newton_iterations: of implicit solvers. A Jacobian costs one evaluation, which is in
            `nfe`, and VJPs; an iteration evaluates the stages that it solves for.
        kept: on a backward pass of `Direct`, how many of the accepted steps were differentiated with activations that
            the forward pass has kept. The others were taken again.
        products: products of a vector with a Jacobian, with `linear_solver="gmres"`.
        per_sample: with `batched=True`, accepted and rejected steps and the status of every sample.
        report: where the backward pass leaves its statistics; read them from `backward`.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0])
        >>> sol.stats.nfe, sol.stats.accepted, sol.stats.backward
        (32, 5, None)
        >>> sol.ys[-1].sum().backward()
        >>> print(sol.stats.backward)
        nfe=30, accepted=5, rejected=0, vjp_y=30, vjp_params=0
    """

    nfe: int = 0
    accepted: int = 0
    rejected: int = 0
    jumps: int = 0
    vjp_y: int = 0
    vjp_params: int = 0
    params_error: float | None = None
    checks: int = 0
    events: int = 0
    jacobians: int = 0
    factorisations: int = 0
    newton_iterations: int = 0
    products: int = 0
    kept: int = 0
    report: BackwardReport = field(default_factory=BackwardReport, repr=False, compare=False)
    per_sample: PerSample | None = field(default=None, repr=False, compare=False)

    @classmethod
    def total(cls, several: Sequence[Stats]) -> Stats:
        """The sum of all counts, and the largest estimate of an error."""
        errors = [each.params_error for each in several if each.params_error is not None]
        counts = [each.name for each in fields(cls) if isinstance(each.default, int)]
        sums: dict[str, Any] = {name: sum(getattr(each, name) for each in several) for name in counts}
        return cls(**sums, params_error=max(errors) if errors else None)

    @property
    def backward(self) -> Stats | None:
        """The same for the latest backward pass; `None` before there was one."""
        return self.report.total()

    def __str__(self) -> str:
        text = f"nfe={self.nfe}, accepted={self.accepted}, rejected={self.rejected}"
        if self.jumps:
            text += f", jumps={self.jumps}"
        if self.events:
            text += f", events={self.events}"
        if self.jacobians:
            text += f", jacobians={self.jacobians}, factorisations={self.factorisations}"
            text += f", newton_iterations={self.newton_iterations}"
        if self.products:
            text += f", products={self.products}"
        if self.vjp_y or self.vjp_params:
            text += f", vjp_y={self.vjp_y}, vjp_params={self.vjp_params}"
        if self.kept:
            text += f", kept={self.kept}"
        if self.checks:
            text += f", checks={self.checks}"
        if self.params_error is not None:
            text += f", params_error={self.params_error:.1e}"
        return text + (f"; backward: {self.backward}" if self.backward else "")


def work_of(stats: Stats) -> dict[str, int]:
    """What ranks that take the same steps must have in common."""
    return {"evaluations": stats.nfe, "accepted steps": stats.accepted, "rejected steps": stats.rejected}


@dataclass(frozen=True)
class Record:
    """Everything that happened, in order, with `record=True`. Times are host floats.

    Attributes:
        evaluations: the time of every evaluation of the field.
        accepted, rejected: the steps, each with `t0`, `t1` and `dt`.
        ratios: the error ratio of every attempted step; empty for fixed steps.
        report: where the backward pass leaves its record; read it from `backward`.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = torch.ones(1, dtype=torch.float64)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], record=True)
        >>> [round(t, 2) for t in sol.record.ts]
        [0.0, 0.03, 0.28, 0.53, 0.78, 1.0]
        >>> max(sol.record.ratios) <= 1.0, len(sol.record.rejected)
        (True, 0)
    """

    evaluations: tuple[float, ...]
    accepted: tuple[Plan, ...]
    rejected: tuple[Plan, ...]
    ratios: tuple[float, ...]
    report: BackwardReport = field(default_factory=BackwardReport, repr=False, compare=False)

    @property
    def backward(self) -> Record | None:
        """The same for the latest backward pass; `None` before there was one."""
        return self.report.total_record()

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
        status: how it ended: `SUCCESS`, `EVENT` if an event ended it, anything else only with `throw=False`.
        error: the error that would have been raised, with `throw=False`.
        dense: with `dense=True` the solution as a function of time.
        record: with `record=True` the times of all evaluations and steps.
        events: for each event that was passed, when it occurred and in which states.
        rerun: how `verify` solves the problem again.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = {"x": torch.tensor([1.0]), "v": torch.tensor([0.0])}
        >>> sol = sn.solve(lambda t, y: {"x": y["v"], "v": -y["x"]}, y0, [0.0, 1.0, 2.0], rtol=1e-6, dense=True)
        >>> sol.status.value, sol.ys["x"].squeeze(-1)
        ('success', tensor([ 1.0000,  0.5403, -0.4161]))
        >>> sol.dense(0.5)["x"]  # cos ½
        tensor([0.8776])
    """

    ts: Tensor
    ys: Y
    stats: Stats
    status: Status = Status.SUCCESS
    error: SolveError | None = None
    dense: DenseSolution | None = None
    record: Record | None = None
    events: tuple[Occurrences[Any], ...] = ()
    rerun: Callable[[], Rerun | None] | None = field(default=None, repr=False, compare=False)

    def verify(self, loss: Callable[[Y], Tensor] | None = None) -> Verification:
        """Solve again at a tenth of the tolerances, and report the error relative to the tolerances.

        The problem is solved twice more: as before, to make sure that it is still the same, and more finely. With fixed
        steps the finer ones are half as long. With `save="steps"` only the last state is compared. The report is an
        estimate: see [Verifying a solution](errors.md#verifying-a-solution) for what it cannot see.

        Arguments:
            loss: a function of `ys`; if given, its gradients by y0, args and parameters are compared too.

        Example:
            >>> import torch, seminode as sn
            >>> y0 = torch.ones(1, dtype=torch.float64)
            >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], rtol=1e-6, atol=1e-6)
            >>> report = sol.verify(loss=lambda ys: ys[-1].sum())
            >>> true = abs(float(sol.ys[-1]) - 0.36787944117144233)
            >>> 0.5 < report.error / true < 2.0
            True
        """
        if self.status not in (Status.SUCCESS, Status.EVENT):
            raise RuntimeError(f"verify: expected a solve that has succeeded, found status {self.status.value!r}")
        rerun = None if self.rerun is None else self.rerun()
        if rerun is None:
            raise RuntimeError(
                "verify: this solution does not know its problem: it was copied or loaded, or solved inside a "
                "torch.func transform, on steps that cannot be made finer, or with computed tensors in params="
            )
        return verification(self.ys, rerun, loss)

    def __getstate__(self) -> dict[str, Any]:
        # A field may not be picklable, and is not worth copying.
        return {**self.__dict__, "rerun": None}

    def __repr__(self) -> str:
        return f"Solution({len(self.ts)} outputs, {self.status.value}, {self.stats})"

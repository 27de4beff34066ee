"""The results of a profile: frozen data that can be printed, written as JSON and plotted."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..solution import Stats
from .contenders import Contender
from .cost import backward_cost, cost


@dataclass(frozen=True)
class Row:
    """The measurements of one contender, or the reason why there are none.

    Attributes:
        contender: adjoint, solver, whether it is compiled, tolerances.
        forward, backward: the counters of each pass.
        forward_seconds, backward_seconds: the time of each pass in each repeat. The loss is part of the forward pass.
        first_seconds: the time of both passes in the first run, including compilation.
        memory: the peak memory of both passes in bytes, in addition to the memory allocated before; `None` if it cannot
            be measured.
        error: the relative error of the gradient, over all gradients together.
        notes: warnings of the first run.
        reason: why there are no measurements, or `None`.
        params_error: the same as `error`, for the gradients of the parameters only.

    Example:
        `profile` makes rows. Here is one of two repeats by hand, to show what its numbers are:

        >>> import seminode as sn
        >>> contender = Contender(sn.Replay(), sn.Dopri5())
        >>> row = Row(contender, sn.Stats(nfe=32), sn.Stats(nfe=30, vjp_y=30), (0.2, 0.1), (0.3, 0.4))
        >>> row.contender.label, row.cost  # 32 + 30 evaluations and 30 VJPs
        ('Replay, dopri5, eager', 92)
        >>> row.seconds, row.median_seconds  # 0.1 + 0.3, and the median of 0.5 and 0.5
        (0.4, 0.5)
    """

    contender: Contender
    forward: Stats = field(default_factory=Stats)
    backward: Stats = field(default_factory=Stats)
    forward_seconds: tuple[float, ...] = ()
    backward_seconds: tuple[float, ...] = ()
    first_seconds: float = math.nan
    memory: int | None = None
    error: float = math.nan
    notes: tuple[str, ...] = ()
    reason: str | None = None
    params_error: float = math.nan

    @property
    def measured(self) -> bool:
        return self.reason is None and bool(self.forward_seconds)

    @property
    def seconds(self) -> float:
        """The time of both passes, each at its fastest, because noise only makes a run slower."""
        return min(self.forward_seconds, default=math.nan) + min(self.backward_seconds, default=math.nan)

    @property
    def median_seconds(self) -> float:
        """The median time of both passes together."""
        both = [a + b for a, b in zip(self.forward_seconds, self.backward_seconds, strict=True)]
        return statistics.median(both) if both else math.nan

    @property
    def compile_seconds(self) -> float:
        """The additional time of the first run. Compiled programs are shared, so the first contender compiles them."""
        return max(0.0, self.first_seconds - self.seconds)

    @property
    def cost(self) -> int:
        """The cost of both passes in F, the cost of one evaluation of the field."""
        return cost(self.forward, self.backward)

    @property
    def drifted(self) -> bool:
        return any(note.startswith("DriftWarning") for note in self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        contender = self.contender
        counted = ("nfe", "accepted", "rejected", "vjp_y", "vjp_params")
        shown: dict[str, Any] = {
            "adjoint": contender.adjoint_name,
            "solver": contender.solver.name,
            "compile": contender.compile,
            "rtol": _plain(contender.rtol),
            "atol": _plain(contender.atol),
            "call": contender.call,
            "reason": self.reason,
            "notes": list(self.notes),
        }
        if not self.measured:
            return shown
        return shown | {
            "forward": {name: getattr(self.forward, name) for name in counted[:3]},
            "backward": {name: getattr(self.backward, name) for name in counted},
            "backward_cost": backward_cost(self.backward),
            "cost": self.cost,
            "error": _plain(self.error),
            "params_error": _plain(self.params_error),
            "forward_seconds": list(self.forward_seconds),
            "backward_seconds": list(self.backward_seconds),
            "seconds": self.seconds,
            "median_seconds": self.median_seconds,
            "first_seconds": self.first_seconds,
            "memory": self.memory,
        }


@dataclass(frozen=True)
class Reference:
    """The gradient that errors are relative to: `dopri8` and `Replay` with a tight tolerance.

    Attributes:
        dtype: the dtype in which it was computed; `"none"` if there is no reference.
        rtol: its tolerance.
        good_to: its relative difference from a gradient whose rtol is a hundred times larger, and at least its rtol.
            Smaller errors are not resolved.
        note: why it was relaxed, kept in the dtype of the problem, or left out, if so.

    Example:
        >>> reference = Reference("float64", rtol=1e-10, good_to=3e-9)
        >>> print(reference)
        dopri8 and Replay, rtol 1e-10, float64, good to 3e-09
    """

    dtype: str
    rtol: float
    good_to: float | None
    note: str = ""

    def __str__(self) -> str:
        if self.dtype == "none":
            return f"no reference: {self.note}"
        good = "" if self.good_to is None else f", good to {self.good_to:.0e}"
        return f"dopri8 and Replay, rtol {self.rtol:.0e}, {self.dtype}{good}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class Recommendation:
    """The recommended row, with the reason.

    Attributes:
        row: the fastest row whose gradient is good enough and whose memory is available.
        reason: one or two sentences.
        call: the call of `solve`.
        limit: the largest error of a gradient that is good enough.
        lean: a row that needs much less memory, if there is one.

    Example:
        What `profile(...).recommendation` may be, and how to use it:

        >>> import torch, seminode as sn
        >>> row = Row(Contender(sn.Direct(), sn.Dopri5()), memory=24_000, error=2e-5)
        >>> chosen = Recommendation(row, reason="the fastest", call=row.contender.call, limit=1e-3)
        >>> print(chosen.call)
        sn.solve(..., solver='dopri5', adjoint=sn.Direct())
        >>> best = chosen.row.contender
        >>> sol = sn.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0], solver=best.solver, adjoint=best.adjoint)
    """

    row: Row
    reason: str
    call: str
    limit: float
    lean: Row | None = None


@dataclass(frozen=True)
class Profile:
    """The result of [`profile`][seminode.profile]. `print` shows it as a table.

    Attributes:
        rows: a [`Row`][seminode.diagnostics.Row] for each contender, the fastest first, those not measured last.
        reference: the gradient that all gradients are compared with.
        recommendation: one row, with the reason; `None` if no gradient could be measured and trusted.
        problem: a description of the problem.
        machine: the machine and the versions.

    Example:
        >>> import torch, seminode as sn
        >>> problem = (lambda t, y: -y, torch.ones(2, requires_grad=True), [0.0, 1.0], lambda ys: ys[-1].sum())
        >>> options = {"adjoints": "Replay", "solvers": "dopri5", "compile": False, "repeats": 1, "verbose": False}
        >>> found = sn.profile(*problem, **options)
        >>> [(row.contender.label, row.error < 1e-3) for row in found.rows]
        [('Replay, dopri5, eager', True)]
        >>> found.reference.dtype, sorted(found.as_dict())
        ('float64', ['machine', 'problem', 'recommendation', 'reference', 'rows'])
    """

    rows: tuple[Row, ...]
    reference: Reference
    recommendation: Recommendation | None
    problem: Mapping[str, Any] = field(default_factory=dict[str, Any])
    machine: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        from .table import text

        return text(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        chosen = self.recommendation
        recommended = None
        if chosen is not None:
            lean = None if chosen.lean is None else chosen.lean.contender.call
            recommended = {"reason": chosen.reason, "call": chosen.call, "limit": chosen.limit, "lean": lean}
        reference = self.reference
        return {
            "problem": {name: _plain(value) for name, value in self.problem.items()},
            "machine": dict(self.machine),
            "reference": {
                "dtype": reference.dtype,
                "rtol": _plain(reference.rtol),
                "good_to": _plain(reference.good_to),
                "note": reference.note,
            },
            "recommendation": recommended,
            "rows": [row.as_dict() for row in self.rows],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `as_dict()` to the file `path`."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Plot errors against seconds and against F. The suffix of the path selects the format. Needs matplotlib."""
        from .plots import draw

        draw(self, path)


def _plain(value: Any) -> Any:
    """A value that JSON can represent."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    return str(value)

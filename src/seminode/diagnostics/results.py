"""What a profile is made of: plain frozen data, as text, as JSON and as a picture."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..solution import Stats
from .contenders import Contender
from .cost import backward_cost, cost


@dataclass(frozen=True)
class Row:
    """One contender: what was counted, timed and compared, or the reason why not.

    Attributes:
        contender: adjoint, solver, whether it is compiled, tolerances.
        forward, backward: what was counted.
        forward_seconds, backward_seconds: of each repeat; the loss belongs to the forward pass.
        first_seconds: of the first run, both passes, with whatever was compiled in it.
        memory: peak of both passes in bytes, beyond what was there before; `None` where it cannot be measured.
        error: of the gradient, relative to the reference, over all gradients together.
        notes: warnings on the way.
        reason: why there is nothing to show, if so.
        params_error: as `error`, over the gradients of parameters alone.
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
        """Of both passes, each at its quickest: the noise of a clock is only ever added."""
        return min(self.forward_seconds, default=math.nan) + min(self.backward_seconds, default=math.nan)

    @property
    def median_seconds(self) -> float:
        """Of both passes together."""
        both = [a + b for a, b in zip(self.forward_seconds, self.backward_seconds, strict=True)]
        return statistics.median(both) if both else math.nan

    @property
    def compile_seconds(self) -> float:
        """What the first run took longer than the later ones. Programs are shared: who comes first pays for them."""
        return max(0.0, self.first_seconds - self.seconds)

    @property
    def cost(self) -> int:
        """Of both passes, in F: the price of an evaluation."""
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
    """The gradient that errors are relative to: `dopri8` and `Replay`, to a tight tolerance.

    Attributes:
        dtype: in which it was computed; `"none"` if it could not be.
        rtol: to which tolerance.
        good_to: how far, relatively, one is from it that is a hundred times looser, and not less than its rtol. Errors
            below that are not resolved.
        note: what had to be given up, if anything.
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
    """One row, and why.

    Attributes:
        row: the fastest of those whose gradient is good enough and whose memory is there.
        reason: in a sentence or two.
        call: what to write.
        limit: the largest error of a gradient that is good enough.
        lean: a row that needs much less memory, if there is one.
    """

    row: Row
    reason: str
    call: str
    limit: float
    lean: Row | None = None


@dataclass(frozen=True)
class Profile:
    """What [`profile`][seminode.profile] returns; printed, it is a table.

    Attributes:
        rows: a [`Row`][seminode.diagnostics.Row] for each contender, the fastest first, then those with a reason.
        reference: what the gradients are compared with.
        recommendation: one row, with the reason; `None` if no gradient is good enough.
        problem: what was measured.
        machine: where, and with which versions.
    """

    rows: tuple[Row, ...]
    reference: Reference
    recommendation: Recommendation | None
    problem: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

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
        """Write `as_dict()` to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw errors against seconds and against F; the suffix of the path decides on the format. Needs matplotlib."""
        from .plots import draw

        draw(self, path)


def _plain(value: Any) -> Any:
    """A value that JSON knows."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)

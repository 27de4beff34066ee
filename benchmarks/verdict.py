"""The speed-up of seminode over other libraries at equal gradient error, and whether it meets the target.

Both libraries are represented by the lower envelopes of their work–precision curves. The speed-up is read off at the
error that the peer's fastest setting has at the nominal tolerance; its range over all errors that both curves reach and
its spread over the rounds are given beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .bars import BACKSOLVE, LIMIT, LIMITS, bars_of
from .curves import Envelope, Reading, Row, ratios, spread_at
from .detest import table

#: Of results without curves: seminode's error may be this much larger, for rounding.
SLACK = 1.05
#: Ten times the rounding error of float32. Smaller errors are luck, and count as equal.
FLOOR = 1.2e-6

Fits = Callable[[Row], bool]


@dataclass(frozen=True)
class Verdict:
    """The times of a peer and of seminode at one error.

    Attributes:
        against: who is compared with.
        peer, ours: the readings off the two curves; ours is `None` if no setting is as accurate.
        bar: the target.
        spread: the speed-up with the quartiles of the rounds, unfavourable and favourable.
        span: the smallest and the largest speed-up over all errors that both curves reach.
    """

    against: str
    peer: Reading | None
    ours: Reading | None
    bar: float | None
    spread: tuple[float, float] | None = None
    span: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None or self.ours is None else self.peer.seconds / self.ours.seconds

    def times(self, scale: float = 1.0) -> tuple[str, str]:
        """The peer's time and ours, with at least three digits and as many as give the ratio to two decimals."""
        digits = 3
        shown = self._rounded(scale, digits)
        while self.ratio is not None and f"{float(shown[0]) / float(shown[1]):.2f}" != f"{self.ratio:.2f}":
            digits += 1
            shown = self._rounded(scale, digits)
        return shown

    def _rounded(self, scale: float, digits: int) -> tuple[str, str]:
        show = lambda at: "–" if at is None else f"{scale * at.seconds:#.{digits}g}".rstrip(".")
        return show(self.peer), show(self.ours)

    @property
    def says(self) -> str:
        if self.peer is None:
            return "no such peer ran"
        if self.ours is None:
            return "no setting as accurate" if self.bar is None else "missed: no setting as accurate"
        if self.bar is None or self.ratio is None:
            return ""
        return "met" if self.ratio >= self.bar else "missed"


def judged(rows: Sequence[Row], against: str, theirs: Fits, mine: Fits, bar: float | None) -> Verdict:
    """Compare all settings of a peer that `theirs` selects with those of seminode that `mine` selects."""
    curves = any("curve" in row for row in rows)
    slack, floor = (1.0, FLOOR) if curves else (SLACK, 0.0)
    peer = Envelope([row for row in rows if row["library"] != "seminode" and theirs(row)], floor=floor)
    ours = Envelope([row for row in rows if row["library"] == "seminode" and mine(row)], slack, floor)
    at = peer.nominal
    if at is None:
        return Verdict(against, None, None, bar)
    span = ratios(peer, ours) if curves else None
    return Verdict(against, peer.at(at.error), ours.at(at.error), bar, spread_at(peer, ours, at.error), span)


def named(name: str) -> Fits:
    return lambda row: row["name"] == name


def of_library(library: str) -> Fits:
    return lambda row: row["library"] == library


def of_adjoint(row: Row) -> bool:
    """`odeint_adjoint` of torchdiffeq, with its own norm or a seminorm."""
    return row["library"] == "torchdiffeq" and row["setting"].startswith("adjoint")


PEERS: dict[str, tuple[str, Fits]] = {
    "adjoint": ("torchdiffeq's adjoint", of_adjoint),
    "direct": ("torchdiffeq's odeint", named("torchdiffeq: direct")),
    "best": ("torchdiffeq's best", of_library("torchdiffeq")),
    "torchode": ("torchode's best", of_library("torchode")),
    "torchcde": ("torchcde's best", of_library("torchcde")),
    "diffrax": ("diffrax's best", of_library("diffrax")),
}


def backsolve(library: str, solver: str | None = None) -> Fits:
    """Settings that solve the adjoint equation backwards with a seminorm, with one solver."""
    adjoint = "Backsolve" if library == "seminode" else "BacksolveAdjoint"

    def fits(row: Row) -> bool:
        options = row.get("options", {})
        used = options.get("solver") or options.get("solve", {}).get("solver", "dopri5")
        return row["library"] == library and options.get("adjoint") == adjoint and used.lower() == solver

    return fits


def checkpointed(library: str, count: int) -> Fits:
    """Settings that keep so many states."""
    return lambda row: row["library"] == library and row.get("options", {}).get("checkpoints") == count


def reversible(row: Row) -> bool:
    return row.get("options", {}).get("adjoint") == "Reversible"


def like_for_like(result: Mapping[str, Any]) -> list[Verdict]:
    """Comparisons of the same method: `Backsolve` with each solver, and each number of checkpoints."""
    rows: Sequence[Row] = result["rows"]
    used = [row.get("options", {}) for row in rows if row["library"] == "diffrax"]
    found = []
    for solver in sorted({each["solver"] for each in used if each.get("adjoint") == "BacksolveAdjoint"}):
        pair = backsolve("diffrax", solver.lower()), backsolve("seminode", solver.lower())
        found.append(judged(rows, f"diffrax's BacksolveAdjoint with {solver}, Backsolve", *pair, BACKSOLVE))
    for count in sorted({each["checkpoints"] for each in used if "checkpoints" in each}):
        theirs, bar = checkpointed("diffrax", count), bars_of(result["problem"]).get("diffrax")
        label = f"diffrax with {count} checkpoints"
        found.append(judged(rows, f"{label}, Checkpointed", theirs, checkpointed("seminode", count), bar))
        found.append(judged(rows, f"{label}, Reversible", theirs, reversible, None))
    return found


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """All comparisons of one problem; those without a target have no bar."""
    rows: Sequence[Row] = result["rows"]
    bars = bars_of(result["problem"])
    found = []
    for eager in (False, True):
        for key, (against, theirs) in PEERS.items():
            bar = bars.get(f"eager {key}" if eager else key)
            mine: Fits = (lambda row: not row["compiled"]) if eager else (lambda row: True)
            each = judged(rows, f"{against}, seminode eager" if eager else against, theirs, mine, bar)
            if each.peer is not None or bar is not None:
                found.append(each)
    return found + like_for_like(result)


def verdict_row(verdict: Verdict) -> list[str]:
    cells = [verdict.against]
    for reading, time in zip((verdict.peer, verdict.ours), verdict.times(), strict=True):
        cells += 3 * ["–"] if reading is None else [reading.setting, f"{reading.error:.1e}", time]
    ratio = "–" if verdict.ratio is None else f"{verdict.ratio:.2f}"
    ranges = ["–" if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}" for pair in (verdict.spread, verdict.span)]
    return [*cells, ratio, *ranges, "" if verdict.bar is None else f"{verdict.bar:g}", verdict.says]


HEADER = (
    "compared with",
    "its setting",
    "error",
    "seconds",
    "seminode's setting",
    "error",
    "seconds",
    "speed-up",
    "spread over rounds",
    "range over errors",
    "target",
    "",
)


def verdict_table(result: Mapping[str, Any]) -> str:
    return table(HEADER, [verdict_row(verdict) for verdict in verdicts(result)])


@dataclass(frozen=True)
class LimitVerdict:
    """The time of seminode's fastest compiled setting, divided by that of its evaluations and VJPs alone."""

    setting: str
    times: float
    bar: float

    @property
    def says(self) -> str:
        return "met" if self.times <= self.bar else "missed"


def limit_verdict(result: Mapping[str, Any]) -> LimitVerdict | None:
    """`None` if no compiled setting of seminode was compared with its limit."""
    rows = [row for row in result["rows"] if row["library"] == "seminode" and row["compiled"] and "limit" in row]
    if not rows:
        return None
    fastest = min(rows, key=lambda row: row["minimum"])
    bar = LIMITS.get(result["problem"], LIMIT)
    return LimitVerdict(fastest["setting"], fastest["minimum"] / fastest["limit"], bar)

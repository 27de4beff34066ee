"""The speed-up of seminode over other libraries, and whether it meets the target.

A peer's setting is compared with the fastest setting of seminode whose gradient is at least as accurate: its error is
at most 1.05 times the peer's, where the 5 % allow for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .detest import table

SLACK = 1.05

Row = Mapping[str, Any]
#: Targets for each kind of problem, against torchdiffeq's adjoint, its fastest mode and diffrax's fastest; then for
#: seminode without compilation.
BARS: dict[str, dict[str, float]] = {
    "small": {"adjoint": 10.0, "best": 4.0, "diffrax": 1.0, "eager adjoint": 3.0, "eager direct": 1.3},
    "cde": {"adjoint": 5.0, "best": 1.5, "diffrax": 1.2, "eager best": 1.0},
    "pendulum": {"adjoint": 5.0, "best": 1.5, "diffrax": 1.2, "eager best": 1.0},
    "flow": {"adjoint": 2.5, "best": 1.3, "diffrax": 1.2, "eager best": 1.0},
}


@dataclass(frozen=True)
class Verdict:
    """A peer's setting and the fastest setting of ours that is at least as accurate; `bar` is the target."""

    against: str
    peer: Row | None
    ours: Row | None
    bar: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None or self.ours is None else self.peer["minimum"] / self.ours["minimum"]

    def times(self, scale: float = 1.0) -> tuple[str, str]:
        """The peer's time and ours, with at least three digits and as many as give the ratio to two decimals."""
        digits = 3
        shown = self._rounded(scale, digits)
        while self.ratio is not None and f"{float(shown[0]) / float(shown[1]):.2f}" != f"{self.ratio:.2f}":
            digits += 1
            shown = self._rounded(scale, digits)
        return shown

    def _rounded(self, scale: float, digits: int) -> tuple[str, str]:
        show = lambda row: "–" if row is None else f"{scale * row['minimum']:#.{digits}g}".rstrip(".")
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


def fastest(rows: Sequence[Row], fits: Callable[[Row], bool] = lambda row: True) -> Row | None:
    ran = [row for row in rows if "minimum" in row and "error" in row and fits(row)]
    return min(ran, key=lambda row: row["minimum"], default=None)


def as_accurate(peer: Row) -> Callable[[Row], bool]:
    return lambda row: row["error"] <= SLACK * peer["error"]


def judged(rows: Sequence[Row], against: str, peer: Row | None, eager: bool, bar: float | None) -> Verdict:
    if peer is None:
        return Verdict(against, None, None, bar)
    admissible = as_accurate(peer)
    ours = fastest(
        rows,
        lambda row: row["library"] == "seminode" and admissible(row) and not (eager and row["compiled"]),
    )
    return Verdict(against, peer, ours, bar)


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """All comparisons of one problem; those without a target have no bar."""
    rows: Sequence[Row] = result["rows"]
    bars = BARS.get(result["problem"].split("-")[0], {})
    of = lambda name: fastest(rows, lambda row: row["name"] == name)
    best = lambda library: fastest(rows, lambda row: row["library"] == library)
    peers = {
        "adjoint": ("torchdiffeq's adjoint", of("torchdiffeq: adjoint")),
        "direct": ("torchdiffeq's odeint", of("torchdiffeq: direct")),
        "best": ("torchdiffeq's best", best("torchdiffeq")),
        "torchode": ("torchode's best", best("torchode")),
        "torchcde": ("torchcde's best", best("torchcde")),
        "diffrax": ("diffrax's best", best("diffrax")),
    }
    found = []
    for eager in (False, True):
        for key, (against, peer) in peers.items():
            if peer is None and key in ("torchode", "torchcde"):
                continue
            bar = bars.get(f"eager {key}" if eager else key)
            found.append(judged(rows, f"{against}, seminode eager" if eager else against, peer, eager, bar))
    return found


def verdict_row(verdict: Verdict) -> list[str]:
    cells = [verdict.against]
    for row, time in zip((verdict.peer, verdict.ours), verdict.times(), strict=True):
        cells += 3 * ["–"] if row is None else [row["setting"], f"{row['error']:.1e}", time]
    ratio = "–" if verdict.ratio is None else f"{verdict.ratio:.2f}"
    return [*cells, ratio, "" if verdict.bar is None else f"{verdict.bar:g}", verdict.says]


HEADER = (
    "compared with",
    "its setting",
    "error",
    "seconds",
    "seminode's setting",
    "error",
    "seconds",
    "speed-up",
    "target",
    "",
)


def verdict_table(result: Mapping[str, Any]) -> str:
    return table(HEADER, [verdict_row(verdict) for verdict in verdicts(result)])

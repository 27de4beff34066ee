"""Work–precision curves: the time that a library needs for a given error, from settings run at several tolerances.

Between two tolerances of one setting, time is interpolated linearly in log error and log time. A library takes the
fastest of its settings at every error. A setting that is more accurate than asked for counts with its own time; beyond
the largest and the smallest error that were measured, nothing is extrapolated.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Row = Mapping[str, Any]
#: Which time of a point: the minimum of its rounds, or a quartile of them.
Which = Literal["minimum", "low", "high"]
#: Errors per curve at which the ratio of two curves is looked at, beside those that were measured.
SAMPLES = 64
#: The relative error of a gradient of zeros. A setting that is no better says nothing, however fast it is.
USELESS = 1.0


@dataclass(frozen=True)
class Point:
    """One setting at one tolerance: its gradient error, and the minimum and the quartiles of its times."""

    factor: float
    error: float
    minimum: float
    low: float
    high: float

    def seconds(self, which: Which = "minimum") -> float:
        return getattr(self, which)


@dataclass(frozen=True)
class Reading:
    """The time of a setting at an error. `error` is its own where it is more accurate than asked for."""

    row: Row
    error: float
    seconds: float

    @property
    def name(self) -> str:
        return self.row["name"]

    @property
    def setting(self) -> str:
        return self.row["setting"]


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile; of one round, its time twice."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, high


def point(entry: Mapping[str, Any], factor: float) -> Point:
    rounds = [each["seconds"] for each in entry.get("rounds", ())] or [entry["minimum"]]
    return Point(factor, entry["error"], entry["minimum"], *quartiles(rounds))


def points(row: Row) -> list[Point]:
    """The curve of a row, from the loosest tolerance to the tightest; older results have only the nominal one."""
    if "curve" in row:
        entries = [each for each in row["curve"] if "minimum" in each and "error" in each]
        found = [point(each, each["factor"]) for each in entries]
    else:
        found = [point(row, 1.0)] if "minimum" in row and "error" in row else []
    usable = [each for each in found if 0.0 < each.error < math.inf]
    return sorted(usable, key=lambda each: -each.factor)


def between(a: Point, b: Point, error: float, which: Which) -> float | None:
    """Log-log interpolation; `None` if the error lies outside."""
    low, high = sorted((a.error, b.error))
    if not low < error < high:
        return None
    x = math.log(error / a.error) / math.log(b.error / a.error)
    return math.exp((1.0 - x) * math.log(a.seconds(which)) + x * math.log(b.seconds(which)))


class Envelope:
    """The lower envelope of the curves of several settings.

    Arguments:
        rows: the settings.
        slack: by how much the error of a measured point may exceed the one asked for. Results of one tolerance need
            some, for rounding; curves do not.
        floor: smaller errors count as this one.
    """

    def __init__(self, rows: Sequence[Row], slack: float = 1.0, floor: float = 0.0):
        measured = [(row, [each for each in points(row) if each.error < USELESS]) for row in rows]
        self.curves = [
            (row, [replace(each, error=max(each.error, floor)) for each in found]) for row, found in measured if found
        ]
        self.slack = slack

    @property
    def errors(self) -> list[float]:
        return sorted(each.error for _, found in self.curves for each in found)

    @property
    def nominal(self) -> Point | None:
        """The fastest setting at the tolerance of the problem."""
        timed = [each for _, found in self.curves for each in found if each.factor == 1.0]
        return min(timed, key=lambda each: each.minimum, default=None)

    def at(self, error: float, which: Which = "minimum") -> Reading | None:
        """The fastest setting at this error or a smaller one; `None` if no setting is as accurate."""
        readings: list[Reading] = []
        for row, found in self.curves:
            accurate = [each for each in found if each.error <= self.slack * error]
            readings += [Reading(row, each.error, each.seconds(which)) for each in accurate]
            for a, b in itertools.pairwise(found):
                seconds = between(a, b, error, which)
                if seconds is not None:
                    readings.append(Reading(row, error, seconds))
        return min(readings, key=lambda each: each.seconds, default=None)


def ratio_at(peer: Envelope, ours: Envelope, error: float) -> float | None:
    theirs, mine = peer.at(error), ours.at(error)
    return None if theirs is None or mine is None else theirs.seconds / mine.seconds


def spread_at(peer: Envelope, ours: Envelope, error: float) -> tuple[float, float] | None:
    """The ratio of the fast quartile of the peer to our slow one, and the other way round."""
    slow, fast = ours.at(error, "high"), ours.at(error, "low")
    low, high = peer.at(error, "low"), peer.at(error, "high")
    if slow is None or fast is None or low is None or high is None:
        return None
    return low.seconds / slow.seconds, high.seconds / fast.seconds


def overlap(peer: Envelope, ours: Envelope) -> tuple[float, float] | None:
    """The errors that both curves reach."""
    theirs, mine = peer.errors, ours.errors
    if not theirs or not mine:
        return None
    low, high = max(theirs[0], mine[0]), min(theirs[-1], mine[-1])
    return (low, high) if low <= high else None


def ratios(peer: Envelope, ours: Envelope) -> tuple[float, float] | None:
    """The smallest and the largest ratio over the errors that both curves reach."""
    ends = overlap(peer, ours)
    if ends is None:
        return None
    low, high = ends
    grid = [low * (high / low) ** (i / SAMPLES) for i in range(SAMPLES + 1)]
    errors = {*grid, *(x for x in (*peer.errors, *ours.errors) if low <= x <= high)}
    found = [ratio for error in errors if low <= error <= high and (ratio := ratio_at(peer, ours, error)) is not None]
    return (min(found), max(found)) if found else None

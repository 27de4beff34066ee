"""A contender in the race: its process, and the rounds that it has run at each tolerance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .limits import f_unit, limit
from .processes import Answers, WorkerFailed
from .settings import Contender

#: The minimum number of rounds by the seconds of one pass: (seconds at least, rounds).
SLOW = ((20.0, 1), (5.0, 2), (0.0, 3))
#: If a pass takes at least this many seconds, the warm-up pass after the first one counts as a round.
LONG = 1.0

Start = Callable[[Contender, Path], Answers]
Say = Callable[[str], None]


@dataclass
class Series:
    """The rounds of a contender at one factor on the tolerances: planned and finished ones, and other results."""

    factor: float
    planned: int = 0
    rounds: list[dict[str, float]] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)

    def plan(self, ready: dict[str, Any], most: int, budget: float) -> None:
        self.planned = planned_rounds(ready["warm"], most, budget)
        if ready["warm"] >= LONG:
            self.rounds.append(ready["round"])
            self.planned -= 1

    def refuse(self, reason: str) -> None:
        self.planned = 0
        self.known["failed"] = reason

    def result(self) -> dict[str, Any]:
        found = dict(self.known)
        if self.rounds:
            seconds = [each["seconds"] for each in self.rounds]
            found |= {"minimum": min(seconds), "median": statistics.median(seconds), "rounds": self.rounds}
        return found


class Lane:
    """A contender in a race, at all factors. The row of its results has those of factor 1 and the whole curve."""

    def __init__(self, contender: Contender, factors: Sequence[float] = (1.0,)):
        self.contender = contender
        self.worker: Answers | None = None
        self.nominal = Series(1.0)
        # From the loosest to the tightest, which may need more memory than there is.
        others = [Series(factor) for factor in factors if factor != 1.0]
        self.series = sorted([self.nominal, *others], key=lambda each: -each.factor)
        self.known: dict[str, Any] = {}

    def ask(self, line: str) -> dict[str, Any] | None:
        """The answer, or `None` if the contender fails or has failed."""
        if self.worker is None:
            return None
        try:
            return self.worker.ask(line)
        except WorkerFailed as failure:
            self.fail(failure)
            return None

    def fail(self, failure: WorkerFailed) -> None:
        self.known["failed"] = str(failure)
        self.worker = None

    def ask_at(self, series: Series, command: str, argument: str = "") -> dict[str, Any] | None:
        """As `ask`, at one factor. If the contender refuses, only this factor has failed."""
        if "failed" in series.known:
            return None
        answer = self.ask(f"{command} {series.factor!r}{argument}")
        if answer is not None and "refused" in answer:
            series.refuse(answer["refused"])
            return None
        return answer

    def row(self) -> dict[str, Any]:
        contender = self.contender
        row: dict[str, Any] = {"name": contender.name, "library": contender.library, "setting": contender.setting}
        row |= {"compiled": contender.compiled, "options": dict(contender.options), **self.known}
        row |= self.nominal.result()
        curve = [{"factor": each.factor, **each.result()} for each in self.series]
        costs = self.known.get("costs", [])
        for entry in (row, *curve):
            if costs and "minimum" in entry:
                entry["f_units"] = entry["minimum"] / f_unit(costs)
                bound = limit(costs, entry.get("needed", []))
                if bound:
                    entry["limit"] = bound
        return {**row, "curve": curve}


def planned_rounds(seconds: float, most: int, budget: float) -> int:
    """As many rounds as fit in the budget, at most `most`, and at least the number in `SLOW`."""
    least = next(rounds for slow, rounds in SLOW if seconds >= slow)
    return min(most, max(least, int(budget / max(seconds, 1e-9))))


def takes_part(round_: int, planned: int, rounds: int) -> bool:
    """Whether a contender runs in this round: its rounds are spread evenly, so that other load affects all alike."""
    return (round_ + 1) * planned // rounds > round_ * planned // rounds


def warm_up(lanes: Sequence[Lane], start: Start, data: Path, most: int, budget: float, say: Say) -> None:
    """Start and warm up the contenders one by one, so that none compiles while another is timed."""
    for lane in lanes:
        try:
            lane.worker = start(lane.contender, data)
            ready = lane.worker.answer()
        except WorkerFailed as failure:
            lane.fail(failure)
            say(f"{lane.contender.name}: {failure}")
            continue
        lane.nominal.plan(ready, most, budget)
        lane.known |= {"first": ready["first"]}
        say(f"{lane.contender.name}: first {ready['first']:.2f} s, then {ready['warm']:.4f} s")
        warm_up_others(lane, start, data, most, budget, say)


def warm_up_others(lane: Lane, start: Start, data: Path, most: int, budget: float, say: Say) -> None:
    """Warm up the other tolerances. If the process ends at one, it is started again without that and tighter ones."""
    for i, series in enumerate(lane.series):
        if series is lane.nominal:
            continue
        ready = lane.ask_at(series, "warm")
        if ready is not None:
            series.plan(ready, most, budget)
        elif lane.worker is None:
            reason = lane.known.pop("failed")
            for tighter in lane.series[i:]:
                if tighter is not lane.nominal:
                    tighter.refuse(reason)
            say(f"{lane.contender.name}, tolerances times {series.factor:g}: {reason}")
            restart(lane, start, data)
            return


def restart(lane: Lane, start: Start, data: Path) -> None:
    try:
        lane.worker = start(lane.contender, data)
        lane.worker.answer()
    except WorkerFailed as failure:
        lane.fail(failure)


def heats(lanes: Sequence[Lane], together: int) -> list[list[Lane]]:
    """Groups of at most `together` contenders, which all keep their memory; each library is spread over the groups."""
    count = -(-len(lanes) // together)
    return [list(lanes[i::count]) for i in range(count)]


def run_rounds(lanes: Sequence[Lane]) -> None:
    rounds = max((each.planned for lane in lanes if lane.worker for each in lane.series), default=0)
    for round_ in range(rounds):
        for lane in lanes:
            for series in lane.series:
                if takes_part(round_, series.planned, rounds):
                    timing = lane.ask_at(series, "go")
                    if timing is not None:
                        series.rounds.append(timing)


def finish(lanes: Sequence[Lane], data: Path, error: Callable[[np.ndarray], float]) -> None:
    for i, lane in enumerate(lanes):
        for j, series in enumerate(lane.series):
            answer = lane.ask_at(series, "gradient", f" {data / f'{i}-{j}.npy'}")
            if answer is not None:
                series.known |= {"error": error(np.load(answer["saved"])), "counts": answer["counts"]}
                series.known |= {"needed": answer["needed"]}
                lane.known |= {name: answer[name] for name in ("versions", "peak_mb")}
        costs = lane.ask("field")
        if costs is not None and "costs" in costs:
            lane.known |= {"costs": costs["costs"]}
        lane.ask("stop")
        if lane.worker is not None:
            lane.worker.end()

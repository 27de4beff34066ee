"""What is found about something that the paper says, in words made of the runs' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .. import measures
from ..measures import ProblemRuns
from ..spread import saving

#: Between a number and its sign, which stay together.
SPACE = "\N{NO-BREAK SPACE}"
#: Differences in per cent of evaluations: below the first there is no saving; up to the second, two savings are alike.
NOTHING, ALIKE = 5.0, 15.0


class Conclusion(Enum):
    """With the mark and the words for a reader."""

    HOLDS = ("✓", "reproduces")
    PARTLY = ("≈", "reproduces in part")
    FAILS = ("✗", "does not reproduce")
    CONFIRMED = ("✓", "confirmed by these runs")
    PRINTED = ("✓", "confirmed by the printed numbers")
    MEASURED = ("→", "its effect measured by these runs")
    REFUTED = ("✗", "not seen in these runs")
    UNTESTED = ("–", "not tested by these runs")

    @property
    def mark(self) -> str:
        return self.value[0]

    @property
    def words(self) -> str:
        return self.value[1]

    @property
    def kind(self) -> str:
        """For the eye: good, fair, bad or none."""
        kinds = {"≈": "fair", "→": "fair", "✗": "bad", "–": "none"}
        return kinds.get(self.mark, "good")


@dataclass(frozen=True)
class Finding:
    """Attributes:
    name: for links to it.
    said: what the paper says, or what its code does.
    found: what the runs say to that; where it ends in a colon, the items follow.
    """

    name: str
    title: str
    said: str
    found: str
    conclusion: Conclusion
    items: tuple[str, ...] = ()


def untested(name: str, title: str, said: str, why: str = "") -> Finding:
    return Finding(name, title, said, why, Conclusion.UNTESTED)


def percent(value: float | None, digits: int = 1) -> str:
    r"""
    >>> percent(-0.01), percent(None)
    ('0.0\xa0%', 'unknown')
    """
    return "unknown" if value is None else f"{round(value, digits) + 0.0:.{digits}f}{SPACE}%"


def listed(parts: Sequence[str]) -> str:
    """
    >>> listed(["one", "two", "three"])
    'one, two and three'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def correct_saving(problem: ProblemRuns, mode: str = "seminorm") -> float | None:
    """Of backward evaluations in training, against the mixed norm, in per cent."""
    return saving(problem.spread(mode, measures.true_nfe), problem.spread("mixed", measures.true_nfe))


def compatible_saving(problem: ProblemRuns) -> float | None:
    """The same by the paper's count and code."""
    counted = measures.published_nfe
    return saving(problem.spread(problem.compatible, counted), problem.spread("mixed", counted))

"""Findings: statements about the paper with the evidence from runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .. import measures
from ..measures import ProblemRuns
from ..spread import saving

#: Keeps a number and its unit on one line.
SPACE = "\N{NO-BREAK SPACE}"
#: In per cent of evaluations: a saving below NOTHING counts as none, and two savings that differ by at most ALIKE count
#: as equal.
NOTHING, ALIKE = 5.0, 15.0


class Conclusion(Enum):
    """The conclusion of a finding, with its mark and its words on the page."""

    HOLDS = ("✓", "reproduces")
    PARTLY = ("≈", "reproduces in part")
    FAILS = ("✗", "does not reproduce")
    CONFIRMED = ("✓", "confirmed by these runs")
    PRINTED = ("✓", "confirmed by the printed numbers")
    MEASURED = ("→", "effect measured by these runs")
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
        """The style on the page: good, fair, bad or none."""
        kinds = {"≈": "fair", "→": "fair", "✗": "bad", "–": "none"}
        return kinds.get(self.mark, "good")


@dataclass(frozen=True)
class Finding:
    """A statement about the paper and the evidence from runs.

    Attributes:
        name: an identifier, for links.
        said: what the paper says, or what its code does.
        found: the evidence; if it ends in a colon, the items follow.
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
    r"""A number with a per cent sign.

    >>> percent(-0.01), percent(None)
    ('0.0\xa0%', 'unknown')
    """
    return "unknown" if value is None else f"{round(value, digits) + 0.0:.{digits}f}{SPACE}%"


def listed(parts: Sequence[str]) -> str:
    """An enumeration in words.

    >>> listed(["one", "two", "three"])
    'one, two and three'
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def correct_saving(problem: ProblemRuns, mode: str = "seminorm") -> float | None:
    """The saving of backward evaluations in training compared with the mixed norm, in per cent."""
    return saving(problem.spread(mode, measures.true_nfe), problem.spread("mixed", measures.true_nfe))


def compatible_saving(problem: ProblemRuns) -> float | None:
    """The same saving with the code and the counter of the paper."""
    counted = measures.published_nfe
    return saving(problem.spread(problem.compatible, counted), problem.spread("mixed", counted))

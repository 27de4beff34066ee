"""Findings: statements about the paper with the evidence from runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .. import measures
from ..intervals import Interval, paired_saving
from ..loss_scale import ScaledLoss, measured
from ..measures import ProblemRuns
from ..regime import in_regime
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
    UNDECIDED = ("?", "not decided by these runs")
    REGIME = ("…", "regime not reached")
    UNTESTED = ("–", "not tested by these runs")
    ANSWERED = ("✓", "answered")
    ANSWERED_PARTLY = ("≈", "answered in part")
    OPEN = ("…", "open")

    @property
    def mark(self) -> str:
        return self.value[0]

    @property
    def words(self) -> str:
        return self.value[1]

    @property
    def kind(self) -> str:
        """The style on the page: good, fair, bad or none."""
        kinds = {"≈": "fair", "→": "fair", "✗": "bad", "–": "none", "?": "none", "…": "none"}
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
    figure: str = ""  # the name of the figure that shows it


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


# Verdicts.


def saving_interval(problem: ProblemRuns, mode: str = "seminorm") -> Interval | None:
    """The saving of backward evaluations in training compared with the mixed norm, paired by seed."""
    return paired_saving(problem, mode, "mixed", measures.true_nfe)


def scaled_saving(problem: ProblemRuns, folder: Path | None) -> ScaledLoss | None:
    """What one batch shows with the loss multiplied so that the seminorm saves most; `None` if not measured."""
    found = None if folder is None else measured(folder, problem.settings)
    return None if found is None else max(found[1], key=lambda each: each.saving, default=None)


def verdict(problem: ProblemRuns, own: Interval, theirs: Interval, folder: Path | None = None) -> Conclusion:
    """Whether a saving reproduces the published one.

    A saving is there if its interval is above zero; without an interval, if it is at least `NOTHING`. It reproduces if
    it is there and its interval reaches that of the paper; without an interval, if it is at most `ALIKE` points below.
    A missing saving does not count against the paper if the same weights show one with another scale of the loss, which
    the paper does not name. `folder` may have a measurement of that.
    """
    there = own.low > 0.0 if own.known else own.mean >= NOTHING
    reaches = own.high >= theirs.low if own.known else own.mean >= theirs.mean - ALIKE
    if there:
        return Conclusion.HOLDS if reaches else Conclusion.PARTLY
    if not in_regime(problem):
        return Conclusion.REGIME
    other = scaled_saving(problem, folder)
    depends = other is not None and other.saving >= NOTHING
    return Conclusion.UNDECIDED if depends or (own.known and own.high >= theirs.low) else Conclusion.FAILS

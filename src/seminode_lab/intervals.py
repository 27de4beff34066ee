"""Confidence intervals of savings and differences, over runs that are paired by their seed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .measures import ProblemRuns, Quantity
from .published import Norm, PublishedRow
from .spread import Spread

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """The mean of `n` values, and the interval of Student's t that contains the true one with probability `LEVEL`.

    A single value has no interval.
    """

    mean: float
    half: float | None = None  # half the width
    n: int = 1

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval | None:
        """The interval of some values; `None` if there are none.

        >>> found = Interval.of([1.0, 2.0, 3.0])
        >>> round(found.low, 3), round(found.high, 3)
        (-0.484, 4.484)
        """
        spread = Spread.of(values)
        if spread is None:
            return None
        if spread.sd is None:
            return cls(spread.mean)
        return cls(spread.mean, quantile(spread.n - 1) * spread.sd / math.sqrt(spread.n), spread.n)

    @property
    def known(self) -> bool:
        return self.half is not None

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)

    def text(self, digits: int, unit: str = "") -> str:
        """The mean, with its interval if it has one.

        >>> Interval(48.5, 3.2, 5).text(1, " %"), Interval(0.0).text(1, " %")
        ('48.5 % (45.3 to 51.7, 5 seeds)', '0.0 % (one seed)')
        """
        told = f"{round(self.mean, digits) + 0.0:,.{digits}f}{unit}"
        if self.half is None:
            return f"{told} (one seed)"
        ends = " to ".join(f"{round(end, digits) + 0.0:,.{digits}f}" for end in (self.low, self.high))
        return f"{told} ({ends}, {self.n} seeds)"


def quantile(degrees: float) -> float:
    """The factor of the standard error in an interval.

    >>> round(quantile(4), 3)
    2.776
    """
    from scipy.stats import t

    return float(t.ppf(0.5 + LEVEL / 2, degrees))


def pairs(problem: ProblemRuns, first: str, second: str, quantity: Quantity) -> list[tuple[float, float]]:
    """A quantity in two modes, for every seed that has runs of both."""
    by_seed = [{run.settings["seed"]: quantity(run) for run in problem.modes.get(mode, ())} for mode in (first, second)]
    found = [(by_seed[0][seed], by_seed[1].get(seed)) for seed in by_seed[0]]
    return [(a, b) for a, b in found if a is not None and b is not None]


def paired_saving(problem: ProblemRuns, less: str, more: str, quantity: Quantity) -> Interval | None:
    """How much lower a quantity is in the mode `less` than in the mode `more`, in per cent of `more`."""
    return Interval.of(100.0 * (1.0 - a / b) for a, b in pairs(problem, less, more, quantity) if b)


def paired_ratio(problem: ProblemRuns, more: str, less: str, quantity: Quantity) -> Interval | None:
    """A quantity in the mode `more`, divided by that in the mode `less`."""
    return Interval.of(a / b for a, b in pairs(problem, more, less, quantity) if b)


def paired_difference(problem: ProblemRuns, first: str, second: str, quantity: Quantity) -> Interval | None:
    """A quantity in the first mode, minus that in the second."""
    return Interval.of(a - b for a, b in pairs(problem, first, second, quantity))


def published_saving(row: PublishedRow) -> Interval:
    """The saving of a printed row, with an interval from the printed deviations.

    The paper's runs are not paired. The relative errors of both means are added as those of a quotient.
    """
    less, more = row.seminorm.nfe, row.mixed.nfe
    errors = [((spread.sd or 0.0) / spread.mean) ** 2 / spread.n for spread in (less, more)]
    total = sum(errors)
    if total == 0.0:
        return Interval(row.saving)
    degrees = total**2 / sum(x**2 / (spread.n - 1) for x, spread in zip(errors, (less, more), strict=True))
    return Interval(row.saving, quantile(degrees) * 100.0 * (less.mean / more.mean) * math.sqrt(total), less.n)


def chance_of_difference(first: Norm, second: Norm) -> float:
    """The probability that the qualities of two printed norms differ as much by chance (Welch's test).

    >>> from .published import ROWS
    >>> round(chance_of_difference(ROWS[-1].mixed, ROWS[-1].seminorm), 2)
    0.15
    """
    from scipy.stats import ttest_ind_from_stats

    a, b = first.quality, second.quality
    found = ttest_ind_from_stats(a.mean, a.sd or 0.0, a.n, b.mean, b.sd or 0.0, b.n, equal_var=False)
    return float(found.pvalue)

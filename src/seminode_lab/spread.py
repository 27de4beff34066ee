"""The mean and standard deviation of repeated measurements, and how to print them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

#: Units of counts: the least count that is printed in the unit, the unit, its letter, and decimals.
UNITS = ((1e9, 1e9, " G", 2), (1e6, 1e6, " M", 2), (1e4, 1e3, " k", 2))


@dataclass(frozen=True)
class Spread:
    """The mean and sample standard deviation of `n` values. The deviation of a single value is `None`."""

    mean: float
    sd: float | None = None
    n: int = 1

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The mean and deviation of some values; `None` if there are none.

        >>> Spread.of([1.0, 2.0, 3.0])
        Spread(mean=2.0, sd=1.0, n=3)
        >>> Spread.of([]) is None
        True
        """
        found = np.asarray(list(values), dtype=np.float64)
        if not len(found):
            return None
        return cls(float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else None, len(found))

    def text(self, digits: int, scale: float = 1.0, unit: str = "") -> str:
        """Mean ± deviation, multiplied by `scale`.

        >>> Spread(0.925, 0.005, 5).text(1, scale=100)
        '92.5 ± 0.5'
        """
        sd = "" if self.sd is None else f" ± {self.sd * scale:,.{digits}f}"
        return f"{self.mean * scale:,.{digits}f}{sd}{unit}"

    def count(self) -> str:
        """As a count, with k for thousands (from 10,000), M for millions and G for billions.

        >>> Spread(14.36e6, 1.09e6).count(), Spread(28860.0).count(), Spread(9870.0).count(), Spread(98.25).count()
        ('14.36 ± 1.09 M', '28.86 k', '9,870', '98.2')
        """
        for least, scale, unit, digits in UNITS:
            if abs(self.mean) >= least:
                return self.text(digits, 1 / scale, unit)
        whole = self.mean == round(self.mean) or abs(self.mean) >= 1000
        return self.text(0 if whole else 1)


def saving(less: Spread | None, more: Spread | None) -> float | None:
    """How much lower the mean of `less` is than that of `more`, in per cent of `more`.

    >>> round(saving(Spread(8.67), Spread(14.36)), 1)
    39.6
    """
    return None if less is None or more is None or more.mean == 0 else 100 * (1 - less.mean / more.mean)


def ratio(more: Spread | None, less: Spread | None) -> float | None:
    """The mean of `more` divided by that of `less`."""
    return None if less is None or more is None or less.mean == 0 else more.mean / less.mean


def counted(number: int, thing: str) -> str:
    """A number with a noun.

    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"

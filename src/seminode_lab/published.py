"""The numbers of the paper's tables, row by row, as they are printed there.

Kidger, Chen and Lyons: "Hey, that's not an ODE": Faster ODE Adjoints via Seminorms (ICML 2021). Rows are named as
`Settings.row` names those of the preset `paper`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .settings import Settings
from .spread import Spread, saving

#: "Median improvement" in backward evaluations, and the largest one, as the abstract gives them; in per cent.
CLAIMED_MEDIAN, CLAIMED_LARGEST = 40.0, 62.0


@dataclass(frozen=True)
class Norm:
    """The numbers of one norm in a row.

    Attributes:
        quality: test accuracy in per cent, test bits/dim, or test mean squared error in 10⁻⁴.
        nfe: backward evaluations throughout training, as counted by the paper.
        rejected, accepted: backward steps in one pass over the test set, as counted by the paper.
        proportion: rejected steps among all steps, in per cent, as printed.
    """

    quality: Spread
    nfe: Spread
    rejected: Spread
    accepted: Spread
    proportion: float


@dataclass(frozen=True)
class PublishedRow:
    """A row, with its numbers from all tables.

    Attributes:
        params: parameters of the whole model.
        updates: the number of batches that the count of evaluations represents. For the neural CDE and the pendulum,
            every tenth epoch and the last one are counted ten times, so that 200 epochs become 210 and 50 become 60.
    """

    name: str
    title: str
    experiment: str
    params: int
    updates: int
    mixed: Norm
    seminorm: Norm

    @property
    def saving(self) -> float:
        """Backward evaluations that the seminorm saves, in per cent."""
        return saving(self.seminorm.nfe, self.mixed.nfe) or 0.0


def _row(
    name: str, title: str, params: int, updates: int, scale: float, mixed: Sequence[float], seminorm: Sequence[float]
) -> PublishedRow:
    """A row from numbers in the order of `Norm`, each with its deviation.

    Evaluations are in units of `scale`, steps in thousands.
    """
    experiment = name.split("-")[0]
    repeats = 3 if experiment == "cnf" else 5

    def norm(x: Sequence[float]) -> Norm:
        scales = (1.0, scale, 1e3, 1e3)
        spreads = (Spread(x[2 * i] * by, x[2 * i + 1] * by, repeats) for i, by in enumerate(scales))
        return Norm(*spreads, proportion=x[8])

    return PublishedRow(name, title, experiment, params, updates, norm(mixed), norm(seminorm))


ROWS: tuple[PublishedRow, ...] = (
    # quality, backward evaluations, rejected and accepted steps, each with its deviation; proportion
    _row(
        "ncde-speech_commands-0.001", "Neural CDE, rtol 1e-3, atol 1e-6", 88_940, 24 * 210, 1e6,
        (92.6, 0.4, 14.36, 1.09, 0.13, 0.02, 3.45, 0.26, 3.63),
        (92.5, 0.5, 8.67, 1.60, 0.15, 0.02, 1.92, 0.18, 7.25),
    ),
    _row(
        "ncde-speech_commands-0.0001", "Neural CDE, rtol 1e-4, atol 1e-7", 88_940, 24 * 210, 1e6,
        (92.8, 0.4, 30.67, 2.48, 1.01, 0.18, 8.38, 0.86, 10.76),
        (92.5, 0.5, 12.75, 2.00, 0.17, 0.05, 3.25, 0.43, 4.97),
    ),
    _row(
        "ncde-speech_commands-1e-05", "Neural CDE, rtol 1e-5, atol 1e-8", 88_940, 24 * 210, 1e6,
        (92.4, 0.7, 77.95, 4.47, 10.91, 1.03, 28.86, 2.15, 27.43),
        (92.9, 0.4, 29.39, 0.80, 1.16, 0.13, 8.61, 0.45, 11.87),
    ),
    _row(
        "cnf-cifar10-64", "CIFAR-10, 64 channels", 1_200_600, 195 * 100, 1e6,
        (3.3492, 0.0059, 41.65, 1.97, 11.04, 0.29, 23.50, 1.19, 31.96),
        (3.3428, 0.0121, 38.93, 1.32, 9.30, 1.92, 22.82, 1.34, 28.95),
    ),
    _row(
        "cnf-mnist-32", "MNIST, 32 channels", 281_928, 234 * 100, 1e6,
        (0.9968, 0.0020, 41.50, 2.35, 5.54, 0.99, 20.91, 0.90, 20.95),
        (0.9942, 0.0013, 37.03, 0.96, 4.51, 1.01, 19.93, 0.42, 18.45),
    ),
    _row(
        "cnf-mnist-64", "MNIST, 64 channels", 1_005_384, 234 * 100, 1e6,
        (0.9623, 0.0020, 44.24, 1.78, 7.79, 0.81, 22.95, 1.02, 38.53),
        (0.9603, 0.0021, 37.85, 0.94, 4.29, 0.69, 19.73, 0.99, 17.86),
    ),
    _row(
        "cnf-mnist-128", "MNIST, 128 channels", 3_779_400, 234 * 100, 1e6,
        (0.9439, 0.0030, 48.60, 2.30, 8.88, 0.21, 26.54, 0.91, 25.07),
        (0.9466, 0.0048, 41.84, 1.92, 7.40, 1.17, 25.01, 1.17, 22.83),
    ),
    _row(
        "hnn-pendulum", "Double pendulum", 509_108, 79 * 60, 1e4,
        (1.247, 0.520, 46.45, 0.01, 0.11, 0.00, 0.18, 0.00, 37.93),
        (2.995, 2.190, 26.55, 0.01, 0.00, 0.00, 0.16, 0.00, 0.00),
    ),
)  # fmt: skip


def median_saving(without: str | None = None) -> float:
    """The median saving of the printed rows, or of all but one, in per cent.

    >>> round(median_saving(), 1), {round(median_saving(row.name), 1) for row in ROWS if row.experiment == "cnf"}
    (27.0, {39.6})
    """
    return median(row.saving for row in ROWS if row.name != without)


def beside(settings: Settings) -> PublishedRow | None:
    """The published row that a run is compared with, if there is one.

    That is the row of the same name. If a reduced run has none, it is the row of the same tolerances (`"ncde"`), or of
    the same data and the nearest number of channels (`"cnf"`; MNIST for other images).

    Example:
        >>> from seminode_lab import settings
        >>> [beside(row).name for row in settings.rows("quick")][-2:]
        ['cnf-mnist-32', 'hnn-pendulum']
    """
    found = [row for row in ROWS if row.experiment == settings.experiment]
    exact = [row for row in found if row.name == settings.row]
    if exact or settings.experiment == "hnn":
        return (exact or found)[0]
    if settings.experiment == "ncde":
        return next((row for row in found if math.isclose(float(row.name.split("-", 2)[2]), settings.rtol)), None)
    same = [row for row in found if row.name.split("-")[1] == settings.data]
    same = same or [row for row in found if row.name.split("-")[1] == "mnist"]
    hidden = dict(settings.model).get("hidden", 64)
    return min(same, key=lambda row: abs(math.log(int(row.name.split("-")[2]) / hidden)))

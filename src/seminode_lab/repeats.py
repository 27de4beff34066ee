"""Identical runs, repeated: how much their seconds differ, so that a speed ratio can be told from noise.

`seminode sweep --repeat N` makes every run N times, round by round. Only a summary of these runs is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import measures
from .grid import Column, Table
from .settings import EXPERIMENTS, Settings
from .spread import Spread, counted
from .store import Finished, StoreError, read_json, undamaged, write_json

#: The summary, and the folder with one folder of run folders for each round.
FILE, ROUNDS = "repeats.json", "repeats"
NOTE = (
    "Every run was made several times, each time from the start and in a process of its own, one round of all runs "
    "after the other. Seconds are those of training, as in the other tables. A speed-up that is smaller than the "
    "largest difference of its experiment is shown as ≈ 1."
)


@dataclass(frozen=True)
class Repeated:
    """The seconds and the backward evaluations of identical runs."""

    settings: Settings
    seconds: tuple[float, ...]
    evaluations: tuple[int, ...]

    @property
    def difference(self) -> float:
        """By how much the slowest run takes longer than the fastest, relative to that."""
        return max(self.seconds) / min(self.seconds) - 1.0


@dataclass(frozen=True)
class Noise:
    """The largest relative difference between the seconds of identical runs, by experiment."""

    largest: Mapping[str, float] = field(default_factory=dict)

    def of(self, experiment: str) -> float | None:
        """The noise of an experiment; `None` if it was not measured."""
        return self.largest.get(experiment)

    def hides(self, experiment: str, ratio: float) -> bool:
        """Whether a ratio of seconds may be noise.

        >>> noise = Noise({"hnn": 0.13})
        >>> noise.hides("hnn", 1.1), noise.hides("hnn", 0.8), noise.hides("cnf", 1.01)
        (True, False, False)
        """
        noise = self.of(experiment)
        return noise is not None and 1.0 / (1.0 + noise) <= ratio <= 1.0 + noise

    def told(self, experiment: str, ratio: float) -> str:
        """A ratio for a table.

        >>> Noise({"hnn": 0.13}).told("hnn", 1.1), Noise().told("hnn", 1.1)
        ('≈ 1', '1.10')
        """
        return "≈ 1" if self.hides(experiment, ratio) else f"{ratio:.2f}"


def collect(out: Path) -> Path:
    """Write `out/repeats.json` from the complete runs in the rounds."""
    found: dict[str, list[Finished]] = {}
    for place in sorted((out / ROUNDS).iterdir()):
        for run in undamaged(place) if place.is_dir() else ():
            if run.result is not None:
                found.setdefault(run.path.name, []).append(run)
    rows = [_row(name, runs) for name, runs in sorted(found.items()) if len(runs) > 1]
    write_json(out / FILE, {"runs": rows})
    return out / FILE


def _row(name: str, runs: list[Finished]) -> dict[str, Any]:
    settings = runs[0].settings
    if any(run.settings != settings for run in runs):
        raise StoreError(f"{runs[0].path.parent.parent}: the runs {name} have different settings; delete this folder")
    return {
        "name": name,
        "settings": settings,
        "circumstances": runs[0].config.get("circumstances", {}),
        "seconds": [measures.seconds(run) for run in runs],
        "evaluations": [measures.true_nfe(run) for run in runs],
    }


def repeated(folder: Path) -> list[Repeated]:
    """The repeated runs of a folder, in the order of the experiments; none if there is no summary."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        rows = read_json(path)["runs"]
        found = [
            Repeated(
                Settings.of_json(row["settings"]),
                tuple(float(x) for x in row["seconds"]),
                tuple(int(x) for x in row["evaluations"]),
            )
            for row in rows
        ]
        if any(len(each.seconds) < 2 or min(each.seconds) <= 0.0 for each in found):
            raise ValueError("expected at least two positive numbers of seconds for every run")
    except (KeyError, TypeError, ValueError) as error:
        remedy = "delete it, and make it again with `seminode sweep --repeat`"
        raise StoreError(f"{path}: damaged ({type(error).__name__}: {error}); {remedy}") from error
    return sorted(found, key=lambda each: (EXPERIMENTS.index(each.settings.experiment), each.settings.name))


def noise_of(folder: Path) -> Noise:
    """The noise that was measured in a folder."""
    largest: dict[str, float] = {}
    for each in repeated(folder):
        name = each.settings.experiment
        largest[name] = max(largest.get(name, 0.0), each.difference)
    return Noise(largest)


def table(folder: Path) -> Table:
    """The table of all repeated runs; without rows if there are none."""
    rows = []
    for each in repeated(folder):
        seconds = Spread.of(each.seconds)
        counts = sorted(set(each.evaluations))
        alike = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        text = "" if seconds is None else seconds.text(2 if seconds.mean < 100 else 0)
        rows.append(
            (each.settings.name, counted(len(each.seconds), "run"), alike, text, f"{100 * each.difference:.1f}")
        )
    names = ("", "repeats", "backward NFE", "seconds in training", "largest difference (%)")
    columns = tuple(Column(name, minor=name in ("repeats", "backward NFE")) for name in names)
    return Table("repeats", "Identical runs, repeated", columns, tuple(rows), (NOTE,) if rows else ())

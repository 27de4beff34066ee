"""Quantities of complete runs, grouped by the rows of the paper's tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import published
from .counting import accumulated
from .settings import EXPERIMENTS, Settings
from .spread import Spread
from .store import Finished, StoreError

Quantity = Callable[[Finished], float | None]


class Quality(NamedTuple):
    """The measure of quality of an experiment: its name, its key in the result, the paper's unit and decimals."""

    name: str
    key: str
    scale: float
    digits: int
    higher: bool = False  # whether more is better

    def __call__(self, run: Finished) -> float:
        return self.scale * result(run)["test"][self.key]


#: The names of data sets and experiments in tables.
DATA = {
    "speech_commands": "Speech Commands",
    "japanese_vowels": "Japanese Vowels",
    "mnist": "MNIST",
    "mnist14": "MNIST at 14×14",
    "cifar10": "CIFAR-10",
    "pendulum": "double pendulum",
}
KINDS = {"ncde": "Neural CDE", "cnf": "Flow", "hnn": "Symplectic ODE-Net"}
#: The gains of the controllers that swing up the pendulum.
GAINS = {"published": "the published gains", "braked": "damping proportional to the learned mass"}
QUALITIES = {
    "ncde": Quality("test accuracy (%)", "accuracy", 100.0, 1, higher=True),
    "cnf": Quality("test bits/dim", "loss", 1.0, 4),
    "hnn": Quality("test error (10⁻⁴)", "loss", 1e4, 3),
}


def result(run: Finished) -> Mapping[str, Any]:
    if run.result is None:
        raise ValueError(f"run: expected a complete one, found {run.path.name}, which is not")
    return run.result


# Quantities of a run.


#: The number of training images. A run that selects no weights makes no evaluation pass over them and does not save it.
IMAGES = {"mnist": 60_000, "mnist14": 60_000, "cifar10": 50_000, "digits": 1437}


def samples(run: Finished, split: str = "train") -> int:
    found = result(run).get(split)
    if found is None and split == "train":
        sizes = run.settings["sizes"]
        return IMAGES[run.settings["data"]] if sizes is None else sizes[0]
    return result(run)[split]["samples"]


def batches(run: Finished, split: str = "train") -> int:
    return math.ceil(samples(run, split) / run.settings["batch"])


def updates(run: Finished) -> int:
    return result(run)["epochs"] * batches(run)


def true_nfe(run: Finished) -> float:
    """Backward evaluations of all training steps."""
    return result(run)["totals"]["backward_nfe"]


def forward_nfe(run: Finished) -> float:
    return result(run)["totals"]["forward_nfe"]


def extrapolated(run: Finished) -> bool:
    """Whether the paper's count is extrapolated from passes over the training set. Flows make no such passes."""
    return "train" in run.metrics[0]


def published_nfe(run: Finished) -> float:
    """Backward evaluations as the paper counts them, with the schedule of the run."""
    if not extrapolated(run):
        return true_nfe(run)
    passes = [evaluation["train"]["backward_nfe"] for evaluation in run.metrics]
    return accumulated(passes, run.settings["schedule"]["every"])


def published_epochs(run: Finished) -> int:
    """The number of epochs that the paper's count represents."""
    return run.settings["schedule"]["every"] * len(run.metrics) if extrapolated(run) else result(run)["epochs"]


def true_per_batch(run: Finished) -> float:
    return true_nfe(run) / updates(run)


def published_per_batch(run: Finished) -> float:
    return published_nfe(run) / (published_epochs(run) * batches(run))


def seconds(run: Finished) -> float:
    """Seconds of training: processor time if it was on a CPU, so that other processes have no influence."""
    found = result(run)["seconds"]
    return found["training_processor"] if run.settings["device"] == "cpu" else found["training"]


def core_hours(run: Finished) -> float:
    """All work of a run in hours of a core: preparation, training and evaluation.

    Training is measured in processor time, the rest in elapsed time of all threads.
    """
    found = result(run)["seconds"]
    threads = run.config.get("circumstances", {}).get("threads", 1)
    rest = sum(found.get(name, 0.0) for name in ("preparation", "evaluation"))
    return (found["training_processor"] + threads * rest) / 3600.0


def drifted(run: Finished) -> float | None:
    """The number of backward solves in training that drifted; `None` if it was not counted."""
    return result(run)["totals"].get("drifted")


def best_epoch(run: Finished) -> float:
    return result(run)["best_epoch"]


def validation_loss(run: Finished) -> float:
    """The lowest validation loss of all evaluations."""
    return min(evaluation["validation"]["loss"] for evaluation in run.metrics)


def memory(run: Finished) -> float | None:
    """Peak memory of the process in bytes; `None` if the system does not report it."""
    return result(run)["peak_memory"]


def tested(name: str) -> Quantity:
    """A number from the last pass over the test set."""
    return lambda run: result(run)["test"][name]


STEPS = ("backward_accepted", "backward_rejected", "published_accepted", "published_rejected")
#: Quantities that every usable run has.
NUMBERS = (
    *(true_nfe, forward_nfe, published_nfe, true_per_batch, published_per_batch, seconds),
    *(best_epoch, validation_loss),
    *(tested(name) for name in ("backward_nfe", *STEPS)),
)


@dataclass(frozen=True)
class ProblemRuns:
    """All complete runs of a row of the tables, by mode and sorted by seed."""

    settings: Settings
    modes: Mapping[str, Sequence[Finished]]

    @property
    def experiment(self) -> str:
        return self.settings.experiment

    @property
    def row(self) -> str:
        return self.settings.row

    @property
    def title(self) -> str:
        """The name of the row within its experiment."""
        own = self.settings
        data = DATA.get(own.data, own.data)
        if own.experiment == "ncde":
            return f"{data}, rtol {own.rtol:g}, atol {own.atol:g}"
        hidden = dict(own.model).get("hidden")
        return f"{data}, {hidden} channels" if own.experiment == "cnf" and hidden else data

    @property
    def full_title(self) -> str:
        """The name of the row with that of the experiment."""
        return f"{KINDS[self.experiment]}: {self.title}"

    @property
    def published(self) -> published.PublishedRow | None:
        return published.beside(self.settings)

    @property
    def quality(self) -> Quality:
        return QUALITIES[self.experiment]

    @property
    def compatible(self) -> str:
        """The mode that corresponds to the paper's code for the seminorm."""
        return "published" if self.experiment == "hnn" else "seminorm"

    @property
    def runs(self) -> Iterator[Finished]:
        return (run for runs in self.modes.values() for run in runs)

    def spread(self, mode: str, quantity: Quantity) -> Spread | None:
        """Mean and deviation of a quantity over the seeds of a mode; `None` if there are no values."""
        values = (quantity(run) for run in self.modes.get(mode, ()))
        return Spread.of(value for value in values if value is not None)

    @property
    def differences(self) -> list[str]:
        """Settings, other than mode and seed, in which the runs differ although they should not."""
        alike = ("mode", "seed", "device", "compile", "preset")
        found = [{**run.settings} for run in self.runs]
        return sorted(
            name for name in found[0] if name not in alike and any(x.get(name) != found[0][name] for x in found)
        )


@dataclass(frozen=True)
class Gathered:
    """All rows with complete runs, in the paper's order, and the reasons why other runs are left out."""

    problems: Sequence[ProblemRuns]
    left_out: Mapping[str, str] = field(default_factory=dict)
    peers: Sequence[ProblemRuns] = ()  # the same rows, made with other libraries

    def of(self, experiment: str) -> list[ProblemRuns]:
        return [problem for problem in self.problems if problem.experiment == experiment]


def damaged(error: StoreError) -> str:
    """Why a run is left out whose files cannot be read: the name of the file and what is wrong with it."""
    path, _, why = str(error).partition(": ")
    return f"damaged ({Path(path).name}: {why})"


def gather(runs: Sequence[Finished]) -> Gathered:
    """Group runs by row, mode and seed. Incomplete and damaged runs are left out."""
    found: dict[tuple[str, str | None], dict[str, list[Finished]]] = {}
    own: dict[tuple[str, str | None], Settings] = {}
    left_out: dict[str, str] = {}
    for run in runs:
        why = _fault(run)
        if why is not None:
            left_out[run.path.name] = why
            continue
        settings = Settings.of_json(run.settings)
        key = (settings.row, settings.library)
        own.setdefault(key, settings)
        found.setdefault(key, {}).setdefault(settings.mode, []).append(run)
    problems = [
        ProblemRuns(own[key], {mode: _by_seed(each) for mode, each in modes.items()}) for key, modes in found.items()
    ]
    problems = sorted(problems, key=_place)
    ours = [problem for problem in problems if problem.settings.library is None]
    return Gathered(ours, left_out, [problem for problem in problems if problem.settings.library is not None])


def _by_seed(runs: Sequence[Finished]) -> tuple[Finished, ...]:
    return tuple(sorted(runs, key=lambda run: run.settings["seed"]))


def _place(problem: ProblemRuns) -> tuple[int, int, str]:
    row = problem.published
    rank = len(published.ROWS) if row is None else published.ROWS.index(row)
    return EXPERIMENTS.index(problem.experiment), rank, problem.row


def _fault(run: Finished) -> str | None:
    """Why a run cannot be used; `None` if it can."""
    if run.result is None:
        return "not complete"
    try:
        run.check()
        settings = Settings.of_json(run.settings)
        other = run.settings.get("adjoint")
        if other is not None:
            return f"made with {other} instead of the adjoint of its mode"
        for quantity in (*NUMBERS, QUALITIES[settings.experiment], memory):
            found = quantity(run)
            if not isinstance(found, int | float) and quantity is not memory:
                return f"damaged: expected numbers, found {found!r}"
    except StoreError as error:
        return damaged(error)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        return f"damaged ({type(error).__name__}: {error})"
    return None

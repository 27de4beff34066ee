"""Differences between runs and those of the paper, such as less data or fewer epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import settings as presets
from .measures import ProblemRuns, gather
from .settings import EXPERIMENTS, PRESETS, Settings
from .store import Finished

NAMES = {"ncde": "neural CDE", "cnf": "flows", "hnn": "pendulum"}
SCHEDULE = {
    "epochs": "epochs",
    "lr": "learning rate",
    "every": "epochs between evaluations",
    "warm_up": "warm-up steps",
    "weight_decay": "weight decay",
    "optimiser": "optimiser",
    "decay": "decay of the learning rate",
}


def reductions(runs: Sequence[Finished], experiment: str | None = None) -> list[str]:
    """One sentence per experiment that differs from the published one, and one per experiment that was not run."""
    gathered = gather(runs)
    found = []
    for name in EXPERIMENTS if experiment is None else (experiment,):
        problems = gathered.of(name)
        said = list(dict.fromkeys(change for problem in problems for change in changes(problem)))
        if said:
            found.append(f"Differs from the published {NAMES[name]}: {'; '.join(said)}.")
        missing = _missing(name, problems)
        if problems and missing:
            found.append(f"Rows of the paper that were not run: {', '.join(missing)}.")
        if experiment is None and not problems:
            found.append(f"Not run: {NAMES[name]}.")
    return found


def _missing(experiment: str, problems: Sequence[ProblemRuns]) -> list[str]:
    there = {problem.published.name for problem in problems if problem.published}
    return [row.row for row in presets.rows("paper") if row.experiment == experiment and row.row not in there]


def reduced(problem: ProblemRuns) -> bool:
    """Whether a row differs from the published one in more than the number of seeds."""
    paper = _paper(problem)
    return paper is None or any(_different(problem.settings, paper))


def _paper(problem: ProblemRuns) -> Settings | None:
    """The settings of the paper for a row; `None` if the paper has no such row."""
    row = problem.published
    return next((each for each in presets.rows("paper") if row is not None and each.row == row.name), None)


def changes(problem: ProblemRuns) -> Iterator[str]:
    """The differences between a row and that of the paper."""
    paper = _paper(problem)
    if paper is None:
        yield f"{problem.title} has no counterpart in the paper"
        return
    own = problem.settings
    yield from _different(own, paper)
    seeds, asked = max(map(len, problem.modes.values())), PRESETS["paper"][1][own.experiment]
    if seeds != asked:
        yield f"{seeds} seed{'s' * (seeds > 1)} instead of {asked}"


def _different(own: Settings, paper: Settings) -> Iterator[str]:
    """The differences in all settings but the seed."""
    if own.data != paper.data:
        yield f"data {own.data} instead of {paper.data}"
    if own.sizes is not None:
        yield f"{' / '.join(f'{n:,}' for n in own.sizes)} samples for training / validation / test instead of all"
    mine, theirs = dict(own.model), dict(paper.model)
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield f"{name} {mine.get(name, 'as published')} instead of {theirs.get(name, 'the published value')}"
    if own.batch != paper.batch:
        yield f"batches of {own.batch:,} instead of {paper.batch:,}"
    for name, word in SCHEDULE.items():
        a, b = getattr(own.schedule, name), getattr(paper.schedule, name)
        if a != b:
            yield f"{word} {a} instead of {b}"
    for name in ("rtol", "atol"):
        if getattr(own, name) != getattr(paper, name):
            yield f"{name} {getattr(own, name):g} instead of {getattr(paper, name):g}"
    if own.shifts:
        yield f"training series shifted at random by up to {own.shifts} samples"
    if own.fitted:
        yield f"{own.fitted:,} iterations of regression on true accelerations before training through the solver"
    if own.start is not None:
        epochs, samples = own.start.schedule.epochs, own.start.sizes
        of = "" if samples is None else f" of {samples[0]:,} samples"
        yield (
            "all modes and tolerances of a seed start from the same weights, trained for "
            f"{epochs} epochs{of} in best mode"
        )

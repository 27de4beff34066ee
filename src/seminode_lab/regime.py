"""Whether the solves of a row are as hard as those of the paper. If they are not, little can be saved."""

from __future__ import annotations

from typing import NamedTuple

from . import measures
from .measures import ProblemRuns

#: A row is in the regime of the paper if the mixed norm takes at least this share of its evaluations per solve.
REGIME = 2 / 3


class PerSolve(NamedTuple):
    """Backward evaluations per solve and batch with the mixed norm."""

    own: float
    published: float

    def words(self) -> str:
        return f"{self.own:.0f} backward evaluations per solve instead of {self.published:.0f}"


def evaluations_per_solve(problem: ProblemRuns) -> PerSolve | None:
    """The evaluations of these runs and of the paper; `None` if one of them is not known."""
    row, own = problem.published, problem.spread("mixed", measures.true_per_batch)
    if row is None or own is None:
        return None
    published_solves, solves = (12, _blocks(problem)) if problem.experiment == "cnf" else (1, 1)
    return PerSolve(own.mean / solves, row.mixed.nfe.mean / row.updates / published_solves)


def _blocks(problem: ProblemRuns) -> int:
    given = dict(problem.settings.model)
    return given.get("scales", 3) * given.get("blocks", 4)


def in_regime(problem: ProblemRuns) -> bool:
    """Whether the solves of a row are as hard as those of the paper, as far as it is known."""
    found = evaluations_per_solve(problem)
    return found is None or found.own >= REGIME * found.published

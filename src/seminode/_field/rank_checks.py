"""Checks of solves whose steps several processes take together."""

from __future__ import annotations

from typing import Any, NoReturn

from .. import norms
from .._ranks import ALONE, Alone, Ranks
from ..solvers import Solver


def check_ranks(norm: Any, solver: Solver) -> Alone:
    """The processes that take the same steps: those of a distributed norm."""
    if not isinstance(norm, norms.Distributed):
        return ALONE
    if solver.implicit:
        refuse_implicit_ranks(solver)
    return Ranks(norm.group)


def refuse_implicit_ranks(solver: Solver) -> NoReturn:
    raise ValueError(
        f"norm: distributed() does not work with the implicit solver {solver.name!r}, whose linear solves and Newton "
        "iterations belong to one rank; pass an explicit one such as 'dopri5', or leave the norm out: it is needed "
        "only where the field communicates"
    )

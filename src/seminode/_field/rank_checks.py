"""Checks of solves whose steps several processes take together."""

from __future__ import annotations

import re
import textwrap
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

from .. import norms
from .._ranks import ALONE, Alone, Ranks
from ..solvers import Solver

if TYPE_CHECKING:
    from .._stepping.problem import Problem


def check_ranks(norm: Any, solver: Solver) -> Alone:
    """The processes that take the same steps: those of a distributed norm."""
    if not isinstance(norm, norms.Distributed):
        return ALONE
    if solver.implicit:
        refuse_implicit_ranks(solver)
    return Ranks(norm.group)


def check_same_problem(problem: Problem, adjoint: Any, norm: Any) -> None:
    """Refuse a solve whose arguments differ between ranks: reductions would be paired wrongly, or not at all.

    Tolerances may differ, since an entry of the state may have its own, and so may the numbers of samples.
    """
    if not isinstance(problem.ranks, Ranks):
        return
    # Of what steps and reductions depend on. How much memory there is for activations, ranks find out together.
    traits: dict[str, Any] = {
        "y0": (problem.y0.dtype, len(problem.field.layout.names)),
        "ts": problem.times,
        "solver": problem.solver,
        "controller": problem.controller,
        "adjoint": adjoint if getattr(adjoint, "memory", None) is None else type(adjoint).__name__,
        "norm": norm,
        "jumps": problem.jumps,
        "event": [(x.event.direction, x.event.terminal, x.event.max_count) for x in problem.events],
        "save": problem.save,
        "dense": problem.dense,
        "throw": problem.throw,
        "max_steps": problem.max_steps,
    }
    texts = {name: re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)) for name, value in traits.items()}
    digests = [float(zlib.crc32(text.encode())) for text in texts.values()]
    largest = problem.ranks.largest([*digests, *(-x for x in digests)])
    high, low = largest[: len(digests)], largest[len(digests) :]
    different = [name for name, a, b in zip(traits, high, low, strict=True) if a != -b]
    if different:
        found = "; ".join(f"{name} = {textwrap.shorten(texts[name], 100)}" for name in different)
        raise ValueError(
            f"norm: with distributed() all ranks must make the same solve, found different ones: on this rank {found}"
        )


def refuse_implicit_ranks(solver: Solver) -> NoReturn:
    raise ValueError(
        f"norm: distributed() does not work with the implicit solver {solver.name!r}, whose linear solves and Newton "
        "iterations belong to one rank; pass an explicit one such as 'dopri5', or leave the norm out: it is needed "
        "only where the field communicates"
    )

"""norm="auto": only leaves that are an ODE control the step size; plain integrals along the solution do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._compile.torch_private import transforms_active
from .._error_norm import ErrorNorm
from .._field.pytree import real_dtype
from .._field.reach import reachable
from .._stepping.observers import Observer
from .._stepping.problem import Problem
from ..norms import Without, over_ranks
from .detect import Reader, looked_at

if TYPE_CHECKING:
    from .._stepping.step import Step
    from ..adjoints.base import ForwardResult

Mask = tuple[bool, ...]

#: Earlier results by field, and by the structure and shapes of its state. Every solve checks them again.
_KNOWN: WeakKeyDictionary[Any, dict[Any, Mask]] = WeakKeyDictionary()


class LeafRead(Exception):
    """The field reads a leaf that was taken for an integral."""

    def __init__(self, mask: Mask):
        super().__init__()
        self.mask = mask


class Recheck(Observer):
    """Checks again after one, two, four, eight, … accepted steps: a field may begin to read a leaf at any time."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._count = 0

    def accepted(self, step: Step, ratio: float) -> None:
        self._count += 1
        if self._count & (self._count - 1) == 0 or step.plan.final:
            look_again(self._problem, step.plan.t1, step.y1)


def look_again(problem: Problem, t: float, y: Tensor) -> None:
    """Raise `LeafRead` if the field reads one of the integrals at this time and state."""
    layout, reader, mask = problem.field.layout, problem.reader, problem.integrals
    time = torch.tensor(t, dtype=real_dtype(y), device=y.device)
    state = layout.unpack(y.detach().to(problem.field.dtype))
    with torch.no_grad():
        if not reader.still_unread(time, state, mask):
            found = tuple(reader.unread(time, state, mask))
            # If all of them together are read, but none of them alone, none counts as an integral.
            raise LeafRead(found if found != mask else (False,) * len(mask))


def ignoring_integrals(problem: Problem, run: Callable[[Problem], ForwardResult]) -> ForwardResult:
    """Run a problem with an error norm that leaves out integrals; if one of them is read after all, start again."""
    if transforms_active():
        raise ValueError("norm: 'auto' reads values of the field, which torch.func does not allow")
    assert problem.error is not None
    field, error = problem.field, problem.error
    agreed = problem.ranks.every if problem.ranks.several else bool
    reader = Reader(lambda t, y: field.run(t, y, *field.args), field.layout, reachable(field.reach), agreed)
    mask = _known(problem)
    places: Sequence[float] = ()
    if mask is None:
        mask, places = _first_look(problem, reader), looked_at(problem.times)
    while True:
        steered = replace(problem, integrals=mask, reader=reader)
        if any(mask):
            norm = over_ranks(Without(mask), problem.ranks)
            steered = replace(steered, error=ErrorNorm(field.layout, norm, error.rtol, error.atol, problem.y0))
        try:
            for t in places if any(mask) else ():
                look_again(steered, t, problem.y0)
            result = run(steered)
        except LeafRead as read:
            mask = read.mask
            _remember(problem, mask)
            continue
        return result._replace(stats=replace(result.stats, checks=reader.evaluations))


def _known(problem: Problem) -> Mask | None:
    """What is known from earlier solves, on all ranks."""
    field, mask = problem.field, None
    with contextlib.suppress(TypeError):  # what cannot be referred to weakly is not remembered
        mask = _KNOWN.get(field.func, {}).get((field.layout, field.dtype))
    everywhere, *flags = problem.ranks.all(mask is not None, *(mask or (False,) * len(field.layout.names)))
    return tuple(flags) if everywhere else None


def _first_look(problem: Problem, reader: Reader) -> Mask:
    field, y0 = problem.field, problem.y0
    time = torch.tensor(problem.times[0], dtype=real_dtype(y0), device=y0.device)
    with torch.no_grad():
        mask = tuple(reader.unread(time, field.layout.unpack(y0.detach().to(field.dtype))))
    mask = mask if not all(mask) else (False,) * len(mask)  # something must steer
    _remember(problem, mask)
    return mask


def _remember(problem: Problem, mask: Mask) -> None:
    with contextlib.suppress(TypeError):
        _KNOWN.setdefault(problem.field.func, {})[problem.field.layout, problem.field.dtype] = mask

"""Whether a field is separable, as symplectic methods need it: q′ does not depend on q, nor p′ on p.

One half of the state gets other values: NaNs, random ones, the negative, zeros. Its own slope must stay the same to the
last bit. A field that raises an error at such values tells nothing; at least one of them must be accepted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._compile.torch_private import transforms_active
from .._field.pytree import real_dtype
from .._field.reach import reachable
from .._stepping.problem import Problem
from ..solvers.symplectic import Symplectic
from .detect import OTHERS, Reader, not_a_number

if TYPE_CHECKING:
    from ..adjoints.base import ForwardResult

#: Fields that were found to be separable, with the structures of their states.
_KNOWN: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def separable(problem: Problem, solver: Symplectic, run: Callable[[Problem], ForwardResult]) -> ForwardResult:
    """Run a problem with a symplectic solver, after a check that it is one for it."""
    refuse_state(problem, solver)
    if solver.separable or problem.trivial or _is_known(problem, solver):
        return run(problem)
    if transforms_active():
        raise ValueError(
            f"solver: {solver.name!r} reads values of the field to check whether it is separable, which torch.func "
            f"does not allow; if it is, pass solver=sn.{type(solver).__name__}(separable=True)"
        )
    checks = refuse_inseparable(problem, solver)
    result = run(problem)
    return result._replace(stats=replace(result.stats, checks=result.stats.checks + checks))


def refuse_state(problem: Problem, solver: Symplectic) -> None:
    """Refuse a state that has no two halves (q, p), and jumps where the field would be evaluated beyond them."""
    layout, y0 = problem.field.layout, problem.y0
    if not layout.single:
        sizes = [shape.numel() for shape in layout.shapes]
        if len(sizes) != 2 or sizes[0] != sizes[1]:
            raise ValueError(
                f"y0: solver {solver.name!r} expects two leaves (q, p) of equal size, found {len(sizes)} with "
                f"{', '.join(map(str, sizes))} elements"
            )
        if solver.dim != -1:
            raise ValueError(f"dim: describes a state that is one tensor, found {solver.dim} with two leaves (q, p)")
    elif not -y0.ndim <= solver.dim < y0.ndim or y0.shape[solver.dim] % 2:
        raise ValueError(
            f"y0: solver {solver.name!r} expects q and p as the halves of dimension {solver.dim}, found shape "
            f"{tuple(y0.shape)}; pass a tuple (q, p), or sn.{type(solver).__name__}(dim=...)"
        )
    if problem.jumps and solver.reaches_outside:
        raise ValueError(
            f"jumps: solver {solver.name!r} evaluates the field at times outside of a step, which may lie beyond a "
            "jump; pass solver='leapfrog'"
        )


def refuse_inseparable(problem: Problem, solver: Symplectic) -> int:
    """Refuse a field whose q′ depends on q or whose p′ depends on p; the number of evaluations that it took."""
    field, y0 = problem.field, problem.y0.detach()
    reader = Reader(lambda t, y: field.run(t, y, *field.args), field.layout, reachable(field.reach))
    time = torch.tensor(problem.times[0], dtype=real_dtype(y0), device=y0.device)

    def slopes(y: Tensor) -> tuple[Tensor, Tensor]:
        return solver.halves(reader.answer(time, field.layout.unpack(y.to(field.dtype))).reshape(y.shape))

    halves, true = solver.halves(y0), slopes(y0)
    for i, name in enumerate("qp"):
        accepted = 0
        for value in (not_a_number, *OTHERS[:3]):
            changed = [value(half) if j == i else half for j, half in enumerate(halves)]
            try:
                found = slopes(torch.cat(changed, solver.dim))[i]
            except Exception:  # whatever the field makes of a value that it did not expect
                continue
            accepted += 1
            if not torch.equal(found.contiguous().view(torch.uint8), true[i].contiguous().view(torch.uint8)):
                _refuse(solver, f"{name}′ depends on {name}")
        if not accepted:
            _refuse(solver, f"the field raises an error at every other value of {name}")
    _remember(problem, solver)
    return reader.evaluations


def _refuse(solver: Symplectic, reason: str) -> None:
    raise ValueError(
        f"solver: {solver.name!r} needs a separable Hamiltonian system, q′ = v(t, p) and p′ = F(t, q), but {reason}. "
        "Pass solver='implicit_midpoint', which is symplectic for all Hamiltonian systems, or check the order of q and "
        f"p and the dimension that holds them; if the field is separable, pass "
        f"sn.{type(solver).__name__}(separable=True)"
    )


def _key(problem: Problem, solver: Symplectic) -> Any:
    return problem.field.layout, problem.field.dtype, solver.dim


def _is_known(problem: Problem, solver: Symplectic) -> bool:
    with contextlib.suppress(TypeError):  # what cannot be referred to weakly is not remembered
        return _key(problem, solver) in _KNOWN.get(problem.field.func, ())
    return False


def _remember(problem: Problem, solver: Symplectic) -> None:
    with contextlib.suppress(TypeError):
        _KNOWN.setdefault(problem.field.func, set()).add(_key(problem, solver))

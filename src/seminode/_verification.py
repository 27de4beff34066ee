"""An accuracy certificate: the difference between a solution and one at a tenth of its tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._field.pytree import leaves_of
from ._untyped import vector_norm

#: How much finer the solve is that a solution is compared with.
FINER = 0.1
#: A repeated solve may differ from the first one by this part of the tolerance: devices add up in any order.
REPEATED = 0.01


@dataclass(frozen=True)
class Verification:
    """What [`Solution.verify`][seminode.Solution.verify] reports.

    All errors are differences from a solve at a tenth of the tolerances (or with half the steps, if they are fixed).
    Where errors are proportional to tolerances, that is nine tenths of the true error or more.

    Attributes:
        rtol, atol: the tolerances that were asked for; the smallest, if they differ between entries. `None` for fixed
            steps.
        error: the largest absolute error of any entry of the outputs.
        relative_error: the largest error of any leaf at any output, relative to the leaf, in the Euclidean norm.
        tolerances: the largest error of any output in the norm of the solve, in tolerances: at 1 the global error is
            as large as the error that a single step may have. `None` for fixed steps and with `save=` a function.
        gradient_error: of the gradient of the loss, relative to it, in the Euclidean norm over y0, args and parameters;
            `None` if it was not asked for.
        nfe, reference_nfe: evaluations of the solve and of the finer one.
    """

    rtol: float | None
    atol: float | None
    error: float
    relative_error: float
    tolerances: float | None
    gradient_error: float | None
    nfe: int
    reference_nfe: int

    def __str__(self) -> str:
        asked = "fixed steps" if self.rtol is None else f"rtol={self.rtol:.1e}, atol={self.atol:.1e}"
        text = f"asked: {asked}; observed global error: {self.error:.1e} absolute, {self.relative_error:.1e} relative"
        if self.tolerances is not None:
            text += f", {self.tolerances:.2g} tolerances"
        if self.gradient_error is not None:
            text += f"; gradient: {self.gradient_error:.1e} relative"
        return f"{text}; nfe={self.nfe}, of the reference {self.reference_nfe}"


class Repeated(NamedTuple):
    """A repeated solve."""

    ys: Any
    nfe: int
    states: Tensor  # the outputs, flat
    inputs: Sequence[Tensor]  # what a gradient may be asked for


class Rerun(NamedTuple):
    """How a solve can be repeated, `solve(finer, grad)`, and its tolerances."""

    solve: Callable[[bool, bool], Repeated]
    rtol: float | Tensor | None  # tensors are not read before they are needed: the host would wait for the device
    atol: float | Tensor | None
    #: The size of a difference of states, in tolerances.
    size: Callable[[Tensor, Tensor], float] | None
    last: bool  # whether only the last output is compared


def verification(ys: Any, rerun: Rerun, loss: Callable[[Any], Tensor] | None) -> Verification:
    """Compare outputs with those of a finer solve; refuse if the solve cannot be repeated."""
    again, finer = (rerun.solve(each, loss is not None) for each in (False, True))
    rtol, atol = _smallest(rerun.rtol), _smallest(rerun.atol)
    before = [leaf[-1:] if rerun.last else leaf for leaf in _leaves(ys)]
    _check_repeated(before, _leaves(again.ys), rtol, atol)
    pairs = list(zip(_leaves(again.ys), _leaves(finer.ys), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        raise RuntimeError(
            "verify: the finer solve has a different number of outputs, since an event ends it before or after one of "
            "them; ask for outputs that are not close to the event"
        )
    rows = [(x, y) for a, b in pairs for x, y in zip(a, b, strict=True) if x.numel()]
    relative = [(float(vector_norm(x - y)), float(vector_norm(y))) for x, y in rows]
    tolerances = None
    if rerun.size is not None:
        tolerances = max(rerun.size(x - y, y) for x, y in zip(again.states, finer.states, strict=True))
    return Verification(
        rtol,
        atol,
        max((float((x - y).abs().max()) for x, y in rows), default=0.0),
        max((d / size if size else 0.0 if d == 0.0 else float("inf") for d, size in relative), default=0.0),
        tolerances,
        None if loss is None else _gradient_error(again, finer, loss),
        again.nfe,
        finer.nfe,
    )


def _leaves(ys: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in leaves_of(ys)]


def _smallest(tolerance: float | Tensor | None) -> float | None:
    return float(tolerance.min()) if isinstance(tolerance, Tensor) else tolerance


def _check_repeated(ys: Sequence[Tensor], again: Sequence[Tensor], rtol: float | None, atol: float | None) -> None:
    rtol, atol = (1e-8, 1e-8) if rtol is None or atol is None else (rtol, atol)
    for before, now in zip(ys, again, strict=True):
        largest = float(before.abs().max()) if before.numel() else 0.0
        allowed = REPEATED * (atol + rtol * largest) + 16.0 * torch.finfo(before.dtype).eps * largest
        if before.shape != now.shape or not bool(((before - now).abs() <= allowed).all()):
            raise RuntimeError(
                "verify: the repeated solve has a different result, so there is nothing to compare with: parameters, "
                "y0 or something else that the field reads has changed since, or the field draws random numbers. Call "
                "verify() before the optimiser's step, and for a random field with the generator in the same state"
            )


def _gradient_error(again: Repeated, finer: Repeated, loss: Callable[[Any], Tensor]) -> float:
    found, wanted = _gradients(again, loss), _gradients(finer, loss)
    size = sum(float(vector_norm(x)) ** 2 for x in wanted)
    difference = sum(float(vector_norm(x - y)) ** 2 for x, y in zip(found, wanted, strict=True))
    return (difference / size) ** 0.5 if size else 0.0 if difference == 0.0 else float("inf")


def _gradients(solved: Repeated, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        value: Any = loss(solved.ys)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError(f"loss: expected a function of ys that returns one number, found {value!r}")
    if not value.requires_grad:
        raise ValueError("loss: expected a function of ys that can be differentiated, found a constant one")
    grads = torch.autograd.grad(value, list(solved.inputs), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(solved.inputs, grads, strict=True)]

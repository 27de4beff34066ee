"""The gradient that all others are compared with: tight, in float64 if the problem goes there, and its own error."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._field.capture import Substitution, uncompiled
from .._field.pytree import HALF, mapped
from ..adjoints import Replay
from ..controllers import Integral
from ..errors import SolveError
from ..solvers import Dopri8
from .contenders import Contender
from .results import Reference
from .subject import Look, Subject, flat_gradient, relative_error

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
#: By how much a reference that cannot be had is relaxed, and the one it is compared with is looser.
RELAXED = 100.0
LOOSEST = 1e-4

Widened = Callable[[Subject, Look], Subject]


class Unsuitable(Exception):
    """Why a problem could not be taken to float64 in some way."""


@dataclass(frozen=True)
class Means:
    """With which a reference is computed."""

    ratio: float  # of atol to rtol
    max_steps: int
    restore: Callable[[], None]  # of all that is the user's: every gradient is taken from the same state

    def gradient(self, subject: Subject, rtol: float, wide: bool) -> Sequence[Tensor | None]:
        """By dopri8, whose steps end on all outputs since its polynomial is of lower order, and Replay."""
        self.restore()
        contender = Contender(Replay(), Dopri8(), rtol=rtol, atol=self.ratio * rtol)
        subject = replace(subject, controller=Integral(step_to=subject.ts.tolist()[1:-1]), norm=None)
        with warnings.catch_warnings(), default_double() if wide else contextlib.nullcontext():
            warnings.simplefilter("ignore")
            value = subject.loss(subject.solve(contender, self.max_steps).ys)
            grads = torch.autograd.grad(value, subject.targets, allow_unused=True)
        if not all(g is None or bool(torch.isfinite(g).all()) for g in grads):
            raise Unsuitable("the gradient of the loss is not finite")
        return grads


def reference_gradient(subject: Subject, look: Look, rtol: float, means: Means) -> tuple[Reference, Tensor | None]:
    """A gradient to a tight tolerance, in float64; where that fails, to a looser one or in the problem's own dtype.

    How good it is is seen from one that is a hundred times looser.
    """
    notes: list[str] = []
    for widened in _ways(subject, look, notes):
        try:
            return _tightest(widened(subject, look), subject, rtol, means, notes)
        except SolveError as error:  # which another dtype would not help
            notes.append(_first_sentence(error))
            break
        except Exception as error:
            notes.append(f"{_DESCRIBED[widened]}: {_first_sentence(error)}")
    return Reference("none", float("nan"), None, "; ".join(notes)), None


def _ways(subject: Subject, look: Look, notes: list[str]) -> list[Widened]:
    """How the problem might be solved, the best way first."""
    if subject.leaf.dtype not in WIDER:
        return [_as_it_is]
    if look.random:
        notes.append("random numbers are drawn, and others would be drawn in float64")
        return [_as_it_is]
    copied = [_copied] if isinstance(subject.field, nn.Module) else []
    return [_substituted, *copied, _as_it_is]


def _as_it_is(subject: Subject, look: Look) -> Subject:
    return subject


def _substituted(subject: Subject, look: Look) -> Subject:
    """In float64, by handing the field and the loss other tensors wherever they use one of their own."""
    others = {id(x): _wide(x) for x in look.used if x.dtype in WIDER}
    return replace(
        subject,
        field=_given(subject.field, others),
        loss=_given(subject.loss, others),
        y0=mapped(subject.y0, _wide),
        ts=_wide(subject.ts),
        args=mapped(subject.args, _wide),
        found=tuple(others.get(id(x), x) for x in subject.found),
        params=None if subject.params is None else tuple(others.get(id(x), x) for x in subject.params),
    )


def _copied(subject: Subject, look: Look) -> Subject:
    """In float64, by a copy of a field that is a module."""
    memo: dict[int, Any] = {}
    assert isinstance(subject.field, nn.Module)
    field = copy.deepcopy(subject.field, memo).double()
    missing = [x for x in subject.found if id(x) not in memo]
    if missing:
        raise Unsuitable(f"{len(missing)} of the tensors that get gradients are not the module's own")
    others = {id(x): memo.get(id(x), _wide(x)) for x in look.used if x.dtype in WIDER}
    found = tuple(memo[id(x)] for x in subject.found)
    wide = _substituted(subject, look)
    params = None if subject.params is None else tuple(memo[id(x)] for x in subject.params)
    return replace(wide, field=field, loss=_given(subject.loss, others), found=found, params=params)


_DESCRIBED: dict[Widened, str] = {
    _as_it_is: "in the dtype of the problem",
    _substituted: "not in float64",
    _copied: "not with a copy in float64",
}


def _wide(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.dtype not in WIDER:
        return x
    return x.detach().to(WIDER[x.dtype]).requires_grad_(x.requires_grad)


def _given(function: Callable[..., Any], others: dict[int, Tensor]) -> Callable[..., Any]:
    def substituted(*args: Any) -> Any:
        with uncompiled(), Substitution(others):
            return function(*args)

    return substituted


def _tightest(subject: Subject, own: Subject, rtol: float, means: Means, notes: list[str]) -> tuple[Reference, Tensor]:
    """The tightest that can be had, and how far one that is looser is from it."""
    dtype, wide = subject.leaf.dtype, subject is not own
    eps = torch.finfo(torch.float32 if dtype in HALF else dtype).eps
    rtol = max(rtol, 8 * eps)
    while True:
        try:
            grads = means.gradient(subject, rtol, wide)
            break
        except SolveError as error:
            if rtol * RELAXED > LOOSEST:
                raise
            notes.append(f"rtol {rtol:.0e}: {_first_sentence(error)}")
            rtol *= RELAXED
    if wide:
        _check_complete(grads, own, max(rtol, LOOSEST), means)
    gradient = flat_gradient(grads, subject.targets)
    good_to = None
    with contextlib.suppress(SolveError):
        looser = flat_gradient(means.gradient(subject, RELAXED * rtol, wide), subject.targets)
        # Where outputs lie close together both take the same steps, and their difference says nothing.
        good_to = max(rtol, relative_error(looser, gradient))
    return Reference(str(dtype).removeprefix("torch."), rtol, good_to, "; ".join(notes)), gradient


@contextlib.contextmanager
def default_double() -> Iterator[None]:
    """Tensors that a field makes for itself are float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_complete(grads: Sequence[Tensor | None], own: Subject, rtol: float, means: Means) -> None:
    """A gradient that the problem has as it is must not be missing in float64: a substitute was not used then."""
    try:
        expected = means.gradient(own, rtol, wide=False)
    except SolveError:
        return
    lost = sum(g is None and e is not None and bool(e.any()) for g, e in zip(grads, expected, strict=True))
    if lost:
        raise Unsuitable(f"{lost} of {len(grads)} gradients are missing")


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0][:200]

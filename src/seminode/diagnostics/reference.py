"""The reference gradient: to a tight tolerance, in float64 if possible, with an estimate of its own error."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._compile.stance import uncompiled
from .._field.capture import Substitution
from .._field.pytree import HALF, mapped
from .._untyped import numbers
from ..adjoints import Replay
from ..controllers import Integral
from ..errors import SolveError
from ..solvers import Dopri8
from .contenders import Contender
from .progress import progress_bar
from .results import Reference
from .subject import Look, Subject, flat_gradient, relative_error

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
#: The factor on rtol after a failure, and of the looser solve that the reference is compared with.
RELAXED = 100.0
LOOSEST = 1e-4
MAX_STEPS = 50_000

Widened = Callable[[Subject, Look], Subject]


class Unsuitable(Exception):
    """The problem cannot be solved in float64 in some way."""


class OutOfTime(Exception):
    """The time limit was reached."""


class Means:
    """How reference gradients are computed.

    Arguments:
        ratio: of atol to rtol.
        restore: puts everything that belongs to the user back, so that all gradients start from the same state.
        time_limit: seconds for all reference gradients together, from now on. It is checked at every evaluation of the
            field.
        progress: whether to show a bar on a terminal.
    """

    def __init__(self, ratio: float, restore: Callable[[], None], time_limit: float, progress: bool = False):
        self.ratio, self.restore, self.time_limit, self.progress = ratio, restore, time_limit, progress
        self.deadline = perf_counter() + time_limit

    def gradient(self, subject: Subject, rtol: float, wide: bool, share: float = 1.0) -> Sequence[Tensor | None]:
        """Use dopri8 and Replay. Steps end on all outputs, because the interpolant of dopri8 has a lower order.

        Arguments:
            share: the part of the remaining time after which `OutOfTime` is raised.
        """
        self.restore()
        contender = Contender(Replay(), Dopri8(), rtol=rtol, atol=self.ratio * rtol)
        now = perf_counter()
        deadline = now + share * (self.deadline - now)
        form = "{desc}: {n_fmt} evaluations [{elapsed}, time limit " + f"{self.time_limit:g} s]"
        with (
            progress_bar(self.progress, f"reference, rtol {rtol:.0e}", bar_format=form) as bar,
            warnings.catch_warnings(),
            default_double() if wide else contextlib.nullcontext(),
        ):
            warnings.simplefilter("ignore")
            field, controller = _timed(subject.field, deadline, bar), Integral(step_to=numbers(subject.ts)[1:-1])
            subject = replace(subject, field=field, controller=controller, norm=None)
            value = subject.loss(subject.solve(contender, MAX_STEPS).ys)
            found = torch.autograd.grad(value, subject.targets, allow_unused=True)
            grads = cast("tuple[Tensor | None, ...]", found)
        if not all(g is None or bool(torch.isfinite(g).all()) for g in grads):
            raise Unsuitable("the gradient of the loss is not finite")
        return grads


def _timed(field: Callable[..., Any], deadline: float, bar: Any) -> Callable[..., Any]:
    """The field with a progress bar for its evaluations. After the deadline it raises `OutOfTime`."""
    shown = weakref.ref(bar)  # a weak reference, because a solve searches everything that a field holds for parameters

    def timed(*args: Any) -> Any:
        if perf_counter() > deadline:
            raise OutOfTime
        bar = shown()
        if bar is not None:
            bar.update()
        return field(*args)

    return timed


def reference_gradient(subject: Subject, look: Look, rtol: float, means: Means) -> tuple[Reference, Tensor | None]:
    """A gradient to a tight tolerance in float64. If that fails, rtol is relaxed, or the problem keeps its own dtype.

    Its error is estimated by comparison with a gradient whose rtol is a hundred times larger. If the time limit is
    reached, there is no reference, and its note says so.
    """
    notes: list[str] = []
    for widened in _ways(subject, look, notes):
        try:
            return _tightest(widened(subject, look), subject, rtol, means, notes)
        except SolveError as error:  # another dtype would not help
            notes.append(_first_sentence(error))
            break
        except OutOfTime:
            looser = f", or a looser tolerance such as reference={rtol * RELAXED**2:.0e}" if rtol < LOOSEST else ""
            notes.append(f"not finished within time_limit={means.time_limit:g} s; pass a larger time_limit{looser}")
            break
        except Exception as error:
            notes.append(f"{_DESCRIBED[widened]}: {_first_sentence(error)}")
    return Reference("none", float("nan"), None, "; ".join(notes)), None


def _ways(subject: Subject, look: Look, notes: list[str]) -> list[Widened]:
    """The ways to solve the problem, the best one first."""
    if subject.leaf.dtype not in WIDER:
        return [_as_it_is]
    if look.random:
        notes.append("random numbers are drawn, which would differ in float64")
        return [_as_it_is]
    copied = [_copied] if isinstance(subject.field, nn.Module) else []
    return [_substituted, *copied, _as_it_is]


def _as_it_is(subject: Subject, look: Look) -> Subject:
    return subject


def _substituted(subject: Subject, look: Look) -> Subject:
    """In float64: float64 tensors replace all tensors that the field and the loss use."""
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
    """In float64: with a copy of the field, which is a module."""
    memo: dict[int, Any] = {}
    assert isinstance(subject.field, nn.Module)
    field = copy.deepcopy(subject.field, memo).double()
    missing = [x for x in subject.found if id(x) not in memo]
    if missing:
        raise Unsuitable(f"{len(missing)} of the tensors that get gradients do not belong to the module")
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
    """The gradient to the tightest tolerance that works, and the estimate of its error."""
    dtype, wide = subject.leaf.dtype, subject is not own
    eps = torch.finfo(torch.float32 if dtype in HALF else dtype).eps
    rtol = max(rtol, 8 * eps)
    while True:
        try:
            # Half of the remaining time, so that there is some left for a looser tolerance.
            grads = means.gradient(subject, rtol, wide, share=0.5 if rtol < LOOSEST else 1.0)
            break
        except OutOfTime:
            if rtol >= LOOSEST:
                raise
            notes.append(f"rtol {rtol:.0e}: not finished within half of time_limit={means.time_limit:g} s")
            rtol = LOOSEST  # dopri8 is not much faster with a slightly looser tolerance
        except SolveError as error:
            if rtol * RELAXED > LOOSEST:
                raise
            notes.append(f"rtol {rtol:.0e}: {_first_sentence(error)}")
            rtol *= RELAXED
    if wide:
        _check_complete(grads, own, max(rtol, LOOSEST), means)
    gradient = flat_gradient(grads, subject.targets)
    good_to = None
    with contextlib.suppress(SolveError, OutOfTime):
        looser = flat_gradient(means.gradient(subject, RELAXED * rtol, wide), subject.targets)
        # If outputs are close together, both take the same steps, and their difference is no estimate.
        good_to = max(rtol, relative_error(looser, gradient))
    return Reference(str(dtype).removeprefix("torch."), rtol, good_to, "; ".join(notes)), gradient


@contextlib.contextmanager
def default_double() -> Generator[None, None, None]:
    """New tensors that a field makes are in float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_complete(grads: Sequence[Tensor | None], own: Subject, rtol: float, means: Means) -> None:
    """A gradient must not be missing in float64 if it exists in the problem's own dtype: a substitute was not used."""
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

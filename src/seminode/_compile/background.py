"""`compile="background"`: solves run eagerly until a copy of this process has compiled their programs.

The copy takes the first steps of a solve compiled and differentiates them, which stores all programs on disk. The next
solve of the same kind finds them there. The compiler does not run in a thread: it would hold Python's lock for most of
the time, and it is not safe while a program runs, since it replaces methods of modules while it traces.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .._stepping.observers import Observer
from .._stepping.problem import Problem
from .._stepping.step import Step
from ..errors import CompileWarning, warn
from .capturing import EAGERLY, reason_against, warn_not_compiled
from .front_end import FRONT_ENDS
from .process import BackgroundProcess
from .torch_private import transforms_active

Run = Callable[[Problem], Any]

#: Seconds that solves of a kind take before it is worth to compile them. A copy of a process takes 10 to 20 ms.
AFTER = 0.2
#: How many kinds of solves are remembered; those that were not seen for longest are forgotten.
KINDS = 128
#: How many steps a copy takes. They use every program, but little memory.
STEPS = 12


class Kind:
    """Solves that need the same programs, and how far these are."""

    def __init__(self) -> None:
        self.seconds = 0.0  # that they have taken eagerly
        self._process: BackgroundProcess | None = None
        self._ready: bool | None = None  # None: not known yet

    def ready(self, problem: Problem, work: Callable[[], str | None]) -> bool:
        """Whether the programs are compiled; if not, have them compiled. Does not wait."""
        if self._ready is None and self._process is None:
            self._start(problem, work)
        elif self._process is not None:
            self._look()
        return self._ready is True

    @property
    def takes_room(self) -> bool:
        return self._ready is True or self._process is not None

    def _start(self, problem: Problem, work: Callable[[], str | None]) -> None:
        reason = reason_against(problem)
        if reason is not None:
            warn_not_compiled(reason)
            self._ready = False
        elif not _can_copy(problem):
            reason = '"background" needs Linux, tensors on a CPU, and a norm of one process'
            warn(f"compile: {reason}; the first solve waits for the compiler instead", CompileWarning)
            self._ready = True
        elif self.seconds >= AFTER and not _busy() and _room():
            self._process = BackgroundProcess(work)
            _processes.append(self._process)

    def _look(self) -> None:
        assert self._process is not None
        outcome = self._process.poll()
        if outcome is None:
            return
        self._process = None
        self._ready = outcome.problem is None
        if outcome.problem is not None:
            warn_not_compiled(outcome.problem)


_kinds: OrderedDict[Hashable, Kind] = OrderedDict()
_processes: list[BackgroundProcess] = []


def _busy() -> bool:
    """Whether a copy is compiling: only one does at a time, so that processors are left for the solves."""
    _processes[:] = [each for each in _processes if each.poll() is None]
    return bool(_processes)


def _room() -> bool:
    """Whether the front end can keep the graphs of one more kind. If not, it would trace solves again and again."""
    return sum(kind.takes_room for kind in _kinds.values()) < FRONT_ENDS


def _can_copy(problem: Problem) -> bool:
    # A copy that took part in reductions over ranks would send in the name of this process.
    return sys.platform == "linux" and problem.y0.device.type == "cpu" and not problem.ranks.several


def in_background(problem: Problem, run: Run, adjoint: Any) -> Any:
    """Run a problem: eagerly, or compiled as soon as its programs are on disk."""
    problem = replace(problem, compile=False)
    if transforms_active() or problem.trivial:
        return run(problem)
    key = _key(problem, adjoint)
    kind = _kinds[key] = _kinds.pop(key, None) or Kind()
    while len(_kinds) > KINDS:
        _kinds.popitem(last=False)
    grad = torch.is_grad_enabled()
    if kind.ready(problem, lambda: _rehearse(run, problem, grad)):
        return run(replace(problem, compile=True))
    begin = time.perf_counter()
    try:
        return run(problem)
    finally:
        kind.seconds += time.perf_counter() - begin


def _key(problem: Problem, adjoint: Any) -> Hashable:
    """What decides which programs a solve needs, as far as that is known without the compiler.

    A field whose Python values change has the same key. What the compiler then makes anew, it makes in the foreground.
    """
    field, y0, error = problem.field, problem.y0, problem.error
    return (
        (_kind_of(field.func), field.layout, field.dtype, tuple(_kind_of(x) for x in field.args)),
        (y0.dtype, y0.device, y0.requires_grad, problem.ts.requires_grad, torch.is_grad_enabled()),
        (_option(problem.solver), None if error is None else _option(error.norm), _option(adjoint)),
        (problem.save, len(problem.times) > 2, problem.dense, len(problem.events), bool(problem.jumps)),
        (problem.params is None, problem.lanes is None, torch.get_num_threads()),
    )


def _kind_of(thing: Any) -> Hashable:
    """What is the same for functions and modules with the same programs, made anew or not."""
    if isinstance(thing, Tensor):
        return thing.shape, thing.dtype, thing.requires_grad
    if isinstance(thing, nn.Module):
        return type(thing), thing.training, *(_kind_of(x) for x in thing.parameters())
    if isinstance(thing, functools.partial):
        return _kind_of(thing.func), *map(_kind_of, thing.args)
    if isinstance(thing, MethodType):
        return _kind_of(thing.__func__), _kind_of(thing.__self__)
    if isinstance(thing, FunctionType):
        return thing.__code__, *(_kind_of(x) for x in _closed_over(thing))
    return type(thing)  # not the thing itself, which would be kept alive


def _option(thing: Any) -> Hashable:
    """The same for a solver, a norm or an adjoint, which are compared by value."""
    if isinstance(thing, FunctionType | MethodType | functools.partial):
        return _kind_of(thing)
    try:
        hash(thing)
    except TypeError:
        return type(thing)
    return thing


def _closed_over(function: FunctionType) -> Iterable[Any]:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, (Tensor, nn.Module)):
            yield value


def _rehearse(run: Run, problem: Problem, grad: bool) -> str | None:
    """In the copy: make all programs of a solve and of its backward pass. Returns why that is not possible."""
    y0 = problem.y0.detach().requires_grad_(problem.y0.requires_grad)
    problem = replace(problem, y0=y0, observers=(), progress=False, record=False)
    with torch.set_grad_enabled(grad), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _differentiate(run(replace(_shortened(run, problem), compile=True)).ys)
    reasons = (str(each.message) for each in caught if issubclass(each.category, CompileWarning))
    return next((reason.removeprefix(EAGERLY) for reason in reasons), None)


class _Reached(Exception):
    """The time after a few steps."""

    def __init__(self, t: float):
        super().__init__()
        self.t = t


class _Limit(Observer):
    """Ends a solve after a few steps, whatever controls them."""

    def __init__(self) -> None:
        self._left = STEPS

    def accepted(self, step: Step, ratio: float) -> None:
        self._left -= 1
        if self._left == 0:
            raise _Reached(step.plan.t1)


def _shortened(run: Run, problem: Problem) -> Problem:
    """The first steps of a problem, with outputs inside of steps if it may have such."""
    if problem.lanes is not None:
        return problem
    try:
        with torch.no_grad():
            run(replace(problem, observers=(_Limit(),), events=()))
        return problem
    except _Reached as reached:
        t0, t1 = problem.times[0], reached.t
    count = 3 if len(problem.times) > 2 else 1
    times = (*(t0 + (t1 - t0) * i / count for i in range(count)), t1)
    ts = torch.tensor(times, dtype=problem.ts.dtype, device=problem.ts.device)
    return replace(problem, times=times, ts=ts.requires_grad_(problem.ts.requires_grad))


def _differentiate(ys: Tensor) -> None:
    """Backpropagate through the solve, but no further: what is before it may have hooks with effects."""
    node = ys.grad_fn
    while node is not None and "SolveFunction" not in node.name():
        node = next((before for before, _ in node.next_functions if before is not None), None)
    if node is None:
        return
    edges = [GradientEdge(before, i) for before, i in node.next_functions if before is not None]
    torch.autograd.grad(ys.sum(), edges, allow_unused=True)

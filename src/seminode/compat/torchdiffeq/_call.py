"""One call of torchdiffeq's functions, as a call of `solve`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ... import errors
from ..._compile.torch_private import transforms_active
from ...adjoints import Adjoint, Direct, Replay
from ...errors import SolveError, ToleranceWarning
from ...extending import ContinuousAdjoint, Observer
from ...grids import Grid
from ...solution import Solution
from ...solve import solve
from . import _arguments as arguments
from . import _events as events
from . import _ledger as ledger
from ._arguments import Callbacks, State, StepLimit
from ._errors import translated
from ._methods import Steps, steps
from ._switch import current


@dataclass(frozen=True)
class Call:
    """The checked arguments that all functions share."""

    func: Callable[..., Any]
    state: State
    t: Tensor
    rtol: Any
    atol: Any
    method: str | None
    options: dict[str, Any]
    event_fn: Callable[..., Any] | None = None

    @cached_property
    def adjoint(self) -> Adjoint | None:
        """The adjoint of the switch; `None` where gradients are those of torchdiffeq."""
        adjoint, taken = current().adjoint, self.steps
        if adjoint is None or taken.solver.external:
            return None  # SciPy's steps cannot be differentiated
        on_grid = isinstance(taken.controller, Grid)
        if transforms_active():
            return Direct()  # the others are autograd functions, which torch.func does not enter
        if (on_grid and self.t.requires_grad) or taken.solver.carries_slopes:
            return Direct()  # the others hold the times of a grid fixed, and take single steps
        if on_grid and isinstance(adjoint, ContinuousAdjoint):
            return Replay()  # there is no tolerance within which the gradients would agree
        return adjoint

    @cached_property
    def steps(self) -> Steps:
        """How to step: as torchdiffeq does, or with seminode's own methods for other adjoints and for events."""
        options, tolerances = self.options, (self.rtol, self.atol)
        if self.event_fn is not None:
            return events.steps(self.func, self.state, self.t, self.method, options, tolerances)
        own = current().adjoint is not None
        return steps(self.func, self.state.y0, self.t, self.method, options, tolerances, own)

    @cached_property
    def field(self) -> Callable[..., Any]:
        """The field, whose results have the structure, shapes and dtype of y0."""
        return arguments.adapted(self.func, self.state, self.steps.method)

    def run(
        self, adjoint: Adjoint, params: Sequence[Tensor] | None = None, t: Tensor | None = None, **options: Any
    ) -> Solution[Any]:
        """Solve; errors are those of torchdiffeq too."""
        taken, state = self.steps, self.state
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            checked = arguments.check_tolerance(name, value, state)
            if taken.tolerant:
                options[name] = checked
        # There is no graph through SciPy's steps; torchdiffeq returns a result without one.
        graph = torch.no_grad() if taken.solver.external and isinstance(adjoint, Direct) else nullcontext()
        try:
            with errors.without(ToleranceWarning), ledger.timed() as note, graph:
                sol = solve(
                    self.field,
                    state.y0,
                    self.t if t is None else t,
                    solver=taken.solver,
                    controller=taken.controller,
                    norm=taken.norm,
                    jumps=taken.jumps or None,
                    adjoint=adjoint,
                    params=params,
                    observers=self._observers(),
                    max_steps=taken.max_steps or sys.maxsize,
                    compile=current().compile,
                    **options,
                )
                note(sol.stats)
                return sol
        except SolveError as error:
            raise translated(error) from error

    def _observers(self) -> list[Observer]:
        observers: list[Observer] = []
        taken, given = self.steps, arguments.callbacks(self.func)
        if given:
            valid = arguments.supported(given, self.method or "dopri5", taken.method)
            dtype = torch.float64 if taken.method.adaptive else self.t.dtype
            observers.append(Callbacks(valid, self.state.unpack, dtype))
        if taken.max_num_steps is not None:
            observers.append(StepLimit(taken.max_num_steps, self.t.tolist()))
        return observers

    def result(self, adjoint: Adjoint, params: Sequence[Tensor] | None = None) -> Any:
        """The outputs or, with an event function, the event time and the states at the start and there."""
        if self.event_fn is None:
            return self.run(adjoint, params).ys
        return events.located(self, adjoint, params)


def call(
    func: Callable[..., Any],
    y0: Any,
    t: Any,
    rtol: Any,
    atol: Any,
    method: str | None,
    options: dict[str, Any] | None,
    event_fn: Callable[..., Any] | None = None,
) -> Call:
    """Check the arguments."""
    state = arguments.check_state(y0)
    if event_fn is not None and len(t) != 2:
        raise ValueError(
            f"We require len(t) == 2 when in event handling mode, but got len(t)={len(t)}. Pass the start and another "
            "time in the direction of the solve; its distance does not matter."
        )
    arguments.check_times(t, state.first)
    return Call(func, state, t, rtol, atol, method, options or {}, event_fn)

"""Event functions of torchdiffeq as events of seminode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...adjoints import Adjoint
from ...controllers import FixedStep
from ...events import Event
from ._arguments import State
from ._errors import ArgumentError, NonFiniteValues
from ._methods import Steps, find
from ._methods import steps as steps_of

if TYPE_CHECKING:
    from ._call import Call

#: How far a solve looks for its event. torchdiffeq goes on forever.
HORIZON = 1e6
#: The largest number of fixed steps before the event, as in torchdiffeq.
MAX_FIXED_STEPS = 20_000

EventFunction = Callable[..., Any]


def steps(
    func: Any, state: State, t: Tensor, method: str | None, options: dict[str, Any], tolerances: tuple[Any, Any]
) -> Steps:
    """How to step to an event: with seminode's own methods, which land on it."""
    taken = steps_of(func, state.y0, t, method, options, tolerances, own=True)
    if find(method).adaptive:
        return taken
    size = options.get("step_size")
    if size is None:
        raise ArgumentError(
            "Event handling for fixed step solvers currently requires `step_size` to be provided in options, such as "
            'options={"step_size": 0.01}; or take an adaptive method, such as "dopri5".'
        )
    return taken._replace(controller=FixedStep(float(size)), max_steps=MAX_FIXED_STEPS)


def combined(event_fn: EventFunction, t0: Tensor, y0: Any) -> EventFunction:
    """One function out of many: the smallest of their values, with signs that make them positive at the start."""
    with torch.no_grad():
        signs = torch.sign(torch.as_tensor(event_fn(t0, y0)))

    def smallest(t: Tensor, y: Any) -> Tensor:
        return torch.min(event_fn(t, y) * signs)

    return smallest


class Moving(NamedTuple):
    """An event function whose event time, and the state there, move with what they depend on.

    In torchdiffeq they do not before `odeint_event` makes them.
    """

    function: EventFunction

    def __call__(self, t: Tensor, y: Any) -> Any:
        return self.function(t, y)


def located(call: Call, adjoint: Adjoint, params: Sequence[Tensor] | None) -> tuple[Tensor, Any]:
    """The event time, and the states at the start and at the event, stacked."""
    assert call.event_fn is not None
    state, t = call.state, call.t
    first = t[0].to(state.first.device)
    event_fn = combined(call.event_fn, first.to(_real(state.first)), state.y0)
    with torch.no_grad():
        start = event_fn(first.to(_real(state.first)), state.y0)
    if bool(start == 0):
        return t[0], _stacked(state.y0, state.y0)
    begin, other = t.detach()
    far = begin + math.copysign(HORIZON, float(other - begin))
    sol = call.run(adjoint, params, torch.stack([t[0], far]).to(torch.float64), event=Event(event_fn))
    if not len(sol.events[0]):
        raise NonFiniteValues(
            f"event_fn did not become zero between t = {float(t[0].detach()):g} and t = {float(far):g}. Check the "
            "function, or solve without an event.",
            t=float(far),
        )
    time, y = sol.events[0].times[-1], _last(sol.events[0].states)
    if not isinstance(call.event_fn, Moving):
        time, y = held(call.field, time, y)
    return time.to(t), _stacked(state.y0, y)


def held(func: Callable[..., Any], time: Tensor, y: Any) -> tuple[Tensor, Any]:
    """The event as torchdiffeq returns it: at a fixed time, so that the state there does not move along its orbit."""
    fixed = time.detach()
    if not time.requires_grad:
        return fixed, y
    return fixed, _moved(func, fixed, y, -(time - fixed))


def rerouted(func: Callable[..., Any], event_fn: EventFunction, time: Tensor, y: Any) -> tuple[Tensor, Any]:
    """An event at a fixed time, made to move: dtₑ = −dg / (∂g/∂t + ∂g/∂y·f), dyₑ = dy + f·dtₑ."""
    leaves = [x.detach().requires_grad_() for x in (y if isinstance(y, tuple) else (y,))]
    at = time.detach().to(_real(leaves[0])).requires_grad_()
    with torch.enable_grad():
        value = event_fn(at, tuple(leaves) if isinstance(y, tuple) else leaves[0])
    slopes = torch.autograd.grad(value, [at, *leaves], allow_unused=True)
    f = _field(func, at.detach(), tuple(leaves) if isinstance(y, tuple) else leaves[0])
    rate = sum((g * x).sum() for g, x in zip(slopes[1:], f, strict=True) if g is not None)
    rate = torch.as_tensor(rate if slopes[0] is None else rate + slopes[0]).detach()
    now = event_fn(at.detach(), y)
    shift = -(now - now.detach()) / (rate + math.copysign(1e-12, float(rate)))
    return time + shift.to(time), _moved(func, at.detach(), y, shift, f)


def _moved(
    func: Callable[..., Any], time: Tensor, y: Any, shift: Tensor, slopes: Sequence[Tensor] | None = None
) -> Any:
    """y, which moves by f·shift; the shift is zero and carries a derivative."""
    slopes = _field(func, time, y) if slopes is None else slopes
    leaves = y if isinstance(y, tuple) else (y,)
    found = tuple(x + f.to(x.dtype) * shift.to(_real(x)) for x, f in zip(leaves, slopes, strict=True))
    return found if isinstance(y, tuple) else found[0]


def _field(func: Callable[..., Any], time: Tensor, y: Any) -> list[Tensor]:
    first = y[0] if isinstance(y, tuple) else y
    with torch.no_grad():
        f = func(time.to(_real(first)), tuple(x.detach() for x in y) if isinstance(y, tuple) else y.detach())
    return [x.detach() for x in (f if isinstance(y, tuple) else (f,))]


def _real(y: Tensor) -> torch.dtype:
    return y.dtype.to_real()


def _last(states: Any) -> Any:
    return tuple(x[-1] for x in states) if isinstance(states, tuple) else states[-1]


def _stacked(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(torch.stack([x, y]) for x, y in zip(a, b, strict=True))
    return torch.stack([a, b])

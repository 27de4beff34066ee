"""`odeint`, `odeint_adjoint`, `odeint_dense` and `odeint_event`: their arguments as those of `solve`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._compile.torch_private import transforms_active
from ...adjoints import Direct, Replay
from ...extending import Observer
from . import _arguments as arguments
from . import _events as events
from ._adjoint import AdjointNorms, NamedParameters, PeerAdjoint
from ._arguments import Callbacks, StepLimit
from ._call import Call, call
from ._errors import ArgumentError
from ._methods import find, steps


def odeint(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | None = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[..., Any] | None = None,
) -> Any:
    """Solve y′ = func(t, y), y(t[0]) = y0; gradients by autograd through the steps.

    The arguments are those of torchdiffeq. The page "Coming from torchdiffeq" lists what differs.

    Arguments:
        func: func(t, y).
        y0: a tensor, or a tuple of tensors.
        t: times of the outputs.
        rtol, atol: tolerances: numbers, or one for each tensor of a tuple.
        method: by default `"dopri5"`.
        options: of the method.
        event_fn: ends the solve where it becomes zero. The result is then the event time and the states at t[0] and
            there; t[1] only gives the direction of time.

    >>> ys = odeint(lambda t, y: -y, torch.ones(2), torch.tensor([0.0, 1.0]))
    >>> bool((ys[-1] - torch.exp(torch.tensor(-1.0))).abs().max() < 1e-6)
    True
    """
    each = call(func, y0, t, rtol, atol, method, options, event_fn)
    return each.result(Direct() if each.adjoint is None else each.adjoint)


def odeint_adjoint(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | None = None,
    options: dict[str, Any] | None = None,
    event_fn: Callable[..., Any] | None = None,
    adjoint_rtol: Any = None,
    adjoint_atol: Any = None,
    adjoint_method: str | None = None,
    adjoint_options: dict[str, Any] | None = None,
    adjoint_params: Iterable[Tensor] | None = None,
) -> Any:
    """Like `odeint`, with gradients by solving the adjoint equation backwards, in constant memory.

    Arguments:
        func, y0, t, rtol, atol, method, options, event_fn: as in `odeint`; func is a module unless `adjoint_params` is
            given.
        adjoint_rtol, adjoint_atol, adjoint_method, adjoint_options: of the backward solve; by default those of the
            forward solve. `adjoint_options["norm"]` may be `"seminorm"` or a function of (a_t, y, a_y, *a_params).
        adjoint_params: the tensors that get gradients; by default the parameters of func.

    >>> net = nn.Linear(2, 2)
    >>> field = type("Field", (nn.Module,), {"forward": lambda self, t, y: net(y)})()
    >>> ys = odeint_adjoint(field, torch.ones(2), torch.tensor([0.0, 1.0]), adjoint_params=net.parameters())
    >>> ys[-1].sum().backward()
    >>> net.weight.grad.shape
    torch.Size([2, 2])
    """
    if adjoint_params is None and not isinstance(func, nn.Module):
        raise ValueError(
            "func must be an instance of nn.Module to specify the adjoint parameters; alternatively they can be "
            "specified explicitly via the `adjoint_params` argument. If there are no parameters then it is allowable "
            "to set `adjoint_params=()`."
        )
    if adjoint_method not in (None, method) and options is not None and adjoint_options is None:
        raise ValueError(
            "If `adjoint_method != method` then we cannot infer `adjoint_options` from `options`. So as `options` has "
            "been passed then `adjoint_options` must be passed as well."
        )
    if adjoint_options is None:
        adjoint_options = {key: value for key, value in (options or {}).items() if key != "norm"}
    each = call(func, y0, t, rtol, atol, method, options, event_fn)
    if torch.is_grad_enabled():  # torchdiffeq keeps the outputs only: y0 may be overwritten before the backward pass
        each = replace(each, state=each.state.copied())
    backward = {
        "rtol": rtol if adjoint_rtol is None else adjoint_rtol,
        "atol": atol if adjoint_atol is None else adjoint_atol,
        "method": method if adjoint_method is None else adjoint_method,
        "options": dict(adjoint_options),
    }
    return _adjoint(each, adjoint_params, backward)


def _adjoint(each: Call, adjoint_params: Iterable[Tensor] | None, backward: dict[str, Any]) -> Any:
    options, state = backward["options"], each.state
    params = _adjoint_params(each.func, adjoint_params, options)
    chosen = each.adjoint
    if chosen is None and (each.steps.solver.implicit or find(backward["method"]).own().implicit):
        # A stiff equation cannot be solved backwards: its steps are differentiated, without keeping their graph.
        chosen = Direct() if each.t.requires_grad else Replay()
    if chosen is not None:
        found = each.result(chosen, None if adjoint_params is None else params)
        return _with_zeros(found, params)
    norms = AdjointNorms(state, each.steps.norm)
    # With an event, its own parameters are detected too, unless the user's norm relies on the order of the gradients.
    detected = each.event_fn is not None and adjoint_params is None and not callable(options.get("norm"))
    options["norm"] = norms.chosen(options.get("norm"))
    adjoint = _peer_adjoint(each, backward, norms, params)
    found = each.result(adjoint, None if detected and not adjoint.whole else params)
    ys = found if each.event_fn is None else found[1]
    _attach(ys if state.shapes is None else ys[0], options)
    return found if len(each.t) > 1 else _with_zeros(found, params)  # without a step, nothing depends on parameters


def _peer_adjoint(each: Call, backward: dict[str, Any], norms: AdjointNorms, params: Sequence[Tensor]) -> PeerAdjoint:
    """The backward solve of torchdiffeq."""
    state, times, func = each.state, each.t.detach().flip(0), each.func
    rtol, atol, method, options = (backward[name] for name in ("rtol", "atol", "method", "options"))
    if method == "scipy_solver":  # which cannot solve the adjoint equation
        method, options = "dopri5", {"norm": options["norm"]}
    taken = steps(func, state.y0, times, method, options, (rtol, atol))
    observers: list[Observer] = []
    given, named = arguments.callbacks(func, "_adjoint"), NamedParameters(params)
    if given:
        valid = arguments.supported(given, method or "dopri5", taken.method)
        observers.append(Callbacks(valid, named.unpacking(state), torch.float64))
    if taken.max_num_steps is not None and len(times) > 1:
        observers.append(StepLimit(taken.max_num_steps, times.tolist()))
    return PeerAdjoint(
        restart="every",
        check=False,
        solver=taken.solver,
        controller=taken.controller,
        rtol=arguments.check_tolerance("adjoint_rtol", rtol, state) if taken.tolerant else None,
        atol=arguments.check_tolerance("adjoint_atol", atol, state) if taken.tolerant else None,
        max_steps=sys.maxsize,
        observers=observers,
        adjoint_options=options,
        tuple_norms=norms,
        named=named,
        whole=bool(given) or taken.solver.carries_slopes,
    )


def odeint_dense(
    func: Callable[..., Any],
    y0: Any,
    t0: Any,
    t1: Any,
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[[Any], Any]:
    """The solution from t0 to t1 as a function of time; for every method, and for tuples too.

    >>> y = odeint_dense(lambda t, y: -y, torch.ones(2), torch.tensor(0.0), torch.tensor(1.0))
    >>> bool((y(torch.tensor(0.5)) - torch.exp(torch.tensor(-0.5))).abs().max() < 1e-6)
    True
    """
    t = torch.stack([torch.as_tensor(x).reshape(()) for x in (t0, t1)])
    t = t if t.is_floating_point() else t.to(torch.float64)
    sol = call(func, y0, t, rtol, atol, method, options).run(Direct(), dense=True)
    dense = sol.dense
    assert dense is not None

    def at(t: Any) -> Any:
        try:
            return dense(t)
        except ValueError as error:
            raise ArgumentError(f"{error}; pass t0 and t1 to odeint_dense that include it") from error

    return at


def odeint_event(
    func: Callable[..., Any],
    y0: Any,
    t0: Any,
    *,
    event_fn: Callable[..., Any],
    reverse_time: bool = False,
    odeint_interface: Callable[..., Any] = odeint,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The event time, and the states at t0 and at the event, both with gradients that include the motion of the event.

    Arguments:
        func, y0: as in `odeint`.
        t0: the time of y0.
        event_fn: `event_fn(t, y)`; the first zero of any of its entries is the event.
        reverse_time: whether to solve backwards in time.
        odeint_interface: `odeint`, `odeint_adjoint`, or a function that calls one of them.
        kwargs: its other arguments.

    >>> fall = lambda t, y: torch.stack([y[1], torch.full_like(y[1], -2.0)])
    >>> start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> t, ys = odeint_event(fall, start, torch.tensor(0.0), event_fn=lambda t, y: y[0])
    >>> round(float(t), 6), round(float(ys[-1][1]), 6)
    (1.0, -2.0)
    """
    t0 = torch.as_tensor(t0).reshape(-1)
    t = torch.cat([t0, t0.detach() + (-1.0 if reverse_time else 1.0)])
    if odeint_interface in (odeint, odeint_adjoint):
        return odeint_interface(func, y0, t, event_fn=events.Moving(event_fn), **kwargs)
    time, ys = odeint_interface(func, y0, t, event_fn=event_fn, **kwargs)
    function = events.combined(event_fn, t0[0].detach(), y0)
    y = tuple(x[-1] for x in ys) if isinstance(ys, tuple) else ys[-1]
    time, y = events.rerouted(arguments.adapted(func, arguments.check_state(y0)), function, time, y)
    if isinstance(ys, tuple):
        return time, tuple(torch.cat([x[:-1], end[None]]) for x, end in zip(ys, y, strict=True))
    return time, torch.cat([ys[:-1], y[None]])


def _adjoint_params(
    func: Any, adjoint_params: Iterable[Tensor] | None, adjoint_options: dict[str, Any]
) -> tuple[Tensor, ...]:
    params = tuple(arguments.find_parameters(func) if adjoint_params is None else adjoint_params)
    needed = tuple(x for x in params if x.requires_grad)
    if len(needed) < len(params) and callable(adjoint_options.get("norm")):
        warnings.warn(
            "An adjoint parameter was passed without requiring gradient. For efficiency this will be excluded from the "
            "adjoint pass, and will not appear as a tensor in the adjoint norm.",
            stacklevel=4,
        )
    return needed


def _with_zeros(found: Any, params: Sequence[Tensor]) -> Any:
    """The same result; parameters in need of a gradient have one of zero at least."""
    if not params or not torch.is_grad_enabled() or transforms_active():
        return found
    if isinstance(found, tuple):
        return (_with_zeros(found[0], params), *found[1:])
    return ZerosFor.apply(found, *params)


class ZerosFor(torch.autograd.Function):
    """The identity of its first input, with gradients of zero for the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.others]
        return grads[0], *zeros


def _attach(ys: Tensor, options: dict[str, Any]) -> None:
    """Make the adjoint options reachable from the result, as in torchdiffeq."""
    node: Any = ys.grad_fn
    while node is not None and not hasattr(node, "solve"):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        node.adjoint_options = options

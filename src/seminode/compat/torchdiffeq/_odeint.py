"""`odeint`, `odeint_adjoint` and `odeint_dense`: their arguments as those of `solve`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import errors
from ...adjoints import Adjoint, Direct
from ...errors import SolveError, ToleranceWarning
from ...extending import Observer
from ...grids import Grid
from ...solution import Solution
from ...solve import solve
from . import _arguments as arguments
from . import _ledger as ledger
from ._adjoint import AdjointNorms, PeerAdjoint, unpacking
from ._arguments import Callbacks, State, StepLimit
from ._errors import translated
from ._methods import Steps, steps
from ._switch import current


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

    The arguments are those of torchdiffeq: see [Coming from torchdiffeq](../torchdiffeq.md).

    Arguments:
        func: func(t, y).
        y0: a tensor, or a tuple of tensors.
        t: times of the outputs.
        rtol, atol: tolerances: numbers, or one for each tensor of a tuple.
        method: by default `"dopri5"`.
        options: of the method.
        event_fn: ends the solve where it becomes zero.

    >>> ys = odeint(lambda t, y: -y, torch.ones(2), torch.tensor([0.0, 1.0]))
    >>> bool((ys[-1] - torch.exp(torch.tensor(-1.0))).abs().max() < 1e-6)
    True
    """
    refuse_event(event_fn)
    state = arguments.check_state(y0)
    arguments.check_times(t, state.first)
    chosen, taken = _chosen(func, state, t, method, options, (rtol, atol))
    adjoint = Direct() if chosen is None else chosen
    return _outputs(_run(func, state, t, taken, method, rtol, atol, adjoint), state)


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
    refuse_event(event_fn)
    if adjoint_params is None and not isinstance(func, nn.Module):
        raise ValueError(
            "func must be an instance of nn.Module to specify the adjoint parameters; alternatively they can be "
            "specified explicitly via the `adjoint_params` argument. If there are no parameters then it is allowable "
            "to set `adjoint_params=()`."
        )
    backward_method = method if adjoint_method is None else adjoint_method
    if backward_method != method and options is not None and adjoint_options is None:
        raise ValueError(
            "If `adjoint_method != method` then we cannot infer `adjoint_options` from `options`. So as `options` has "
            "been passed then `adjoint_options` must be passed as well."
        )
    if adjoint_options is None:
        adjoint_options = {key: value for key, value in (options or {}).items() if key != "norm"}
    adjoint_options = dict(adjoint_options)
    params = _adjoint_params(func, adjoint_params, adjoint_options)
    state = arguments.check_state(y0)
    arguments.check_times(t, state.first)
    chosen, taken = _chosen(func, state, t, method, options, (rtol, atol))
    if chosen is not None:
        sol = _run(
            func, state, t, taken, method, rtol, atol, chosen, adjoint_params if adjoint_params is None else params
        )
        return _outputs(sol, state, params)
    tuple_norms = AdjointNorms(state, taken.norm)
    adjoint_options["norm"] = tuple_norms.chosen(adjoint_options.get("norm"))
    adjoint = _peer_adjoint(
        func, state, t, backward_method, adjoint_options, tuple_norms, params,
        rtol if adjoint_rtol is None else adjoint_rtol, atol if adjoint_atol is None else adjoint_atol,
    )  # fmt: skip
    sol = _run(func, state, t, taken, method, rtol, atol, adjoint, params)
    _attach(sol.ys if state.shapes is None else sol.ys[0], adjoint_options)
    return _outputs(sol, state)


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
    state = arguments.check_state(y0)
    t = torch.stack([torch.as_tensor(x, device=state.first.device).reshape(()) for x in (t0, t1)])
    t = t if t.is_floating_point() else t.to(torch.float64)
    arguments.check_times(t, state.first, "t0, t1")
    taken = steps(func, y0, t, method, options or {}, (rtol, atol))
    sol = _run(func, state, t, taken, method, rtol, atol, Direct(), dense=True)
    assert sol.dense is not None
    return sol.dense.__call__


def _chosen(
    func: Any,
    state: State,
    t: Tensor,
    method: str | None,
    options: dict[str, Any] | None,
    tolerances: tuple[Any, Any],
) -> tuple[Adjoint | None, Steps]:
    """The adjoint of the switch, where it applies, and how to step."""
    adjoint = current().adjoint
    taken = steps(func, state.y0, t, method, options or {}, tolerances, own=adjoint is not None)
    on_grid = isinstance(taken.controller, Grid)
    if adjoint is not None and ((on_grid and t.requires_grad) or taken.solver.carries_slopes):
        adjoint = Direct()  # the others hold the times of a grid fixed, and take single steps
    return adjoint, taken


def _run(
    func: Callable[..., Any],
    state: State,
    t: Tensor,
    taken: Steps,
    method: str | None,
    rtol: Any,
    atol: Any,
    adjoint: Adjoint,
    params: Sequence[Tensor] | None = None,
    dense: bool = False,
) -> Solution[Any]:
    tolerances = {}
    for name, value in (("rtol", rtol), ("atol", atol)):
        checked = arguments.check_tolerance(name, value, state)
        if taken.controller.adaptive:
            tolerances[name] = checked
    try:
        with errors.without(ToleranceWarning), ledger.timed() as note:
            sol = solve(
                arguments.adapted(func, state),
                state.y0,
                t,
                solver=taken.solver,
                controller=taken.controller,
                norm=taken.norm,
                jumps=taken.jumps or None,
                adjoint=adjoint,
                params=params,
                observers=_observers(func, state, t, taken, method),
                max_steps=sys.maxsize,
                dense=dense,
                compile=current().compile,
                **tolerances,
            )
            note(sol.stats)
            return sol
    except SolveError as error:
        raise translated(error) from error


def _observers(func: Any, state: State, t: Tensor, taken: Steps, method: str | None) -> list[Observer]:
    observers: list[Observer] = []
    given = arguments.callbacks(func)
    if given:
        valid = arguments.supported(given, method or "dopri5", taken.method)
        dtype = torch.float64 if taken.method.adaptive else t.dtype
        observers.append(Callbacks(valid, state.unpack, dtype))
    if taken.max_num_steps is not None:
        observers.append(StepLimit(taken.max_num_steps, t.tolist()))
    return observers


def _peer_adjoint(
    func: Any,
    state: State,
    t: Tensor,
    method: str | None,
    options: dict[str, Any],
    tuple_norms: AdjointNorms,
    params: Sequence[Tensor],
    rtol: Any,
    atol: Any,
) -> PeerAdjoint:
    taken = steps(func, state.y0, t.detach().flip(0), method, options, (rtol, atol))
    observers: list[Observer] = []
    given = arguments.callbacks(func, "_adjoint")
    if given:
        valid = arguments.supported(given, method or "dopri5", taken.method)
        observers.append(Callbacks(valid, unpacking(state, params), torch.float64))
    if taken.max_num_steps is not None and len(t) > 1:
        observers.append(StepLimit(taken.max_num_steps, t.flip(0).tolist()))
    adaptive = taken.controller.adaptive
    return PeerAdjoint(
        restart="every",
        check=False,
        solver=taken.solver,
        controller=taken.controller,
        rtol=arguments.check_tolerance("adjoint_rtol", rtol, state) if adaptive else None,
        atol=arguments.check_tolerance("adjoint_atol", atol, state) if adaptive else None,
        max_steps=sys.maxsize,
        observers=observers,
        adjoint_options=options,
        tuple_norms=tuple_norms,
        whole=bool(given) or taken.solver.carries_slopes,
    )


def _adjoint_params(
    func: Any, adjoint_params: Iterable[Tensor] | None, adjoint_options: dict[str, Any]
) -> tuple[Tensor, ...]:
    params = tuple(arguments.find_parameters(func) if adjoint_params is None else adjoint_params)
    needed = tuple(x for x in params if x.requires_grad)
    if len(needed) < len(params) and callable(adjoint_options.get("norm")):
        warnings.warn(
            "An adjoint parameter was passed without requiring gradient. For efficiency this will be excluded from the "
            "adjoint pass, and will not appear as a tensor in the adjoint norm.",
            stacklevel=3,
        )
    return needed


def _outputs(sol: Solution[Any], state: State, params: Sequence[Tensor] = ()) -> Any:
    """The states at the output times; parameters in need of a gradient have one of zero at least."""
    if not params:
        return sol.ys
    if state.shapes is None:
        return ZerosFor.apply(sol.ys, *params)
    return (ZerosFor.apply(sol.ys[0], *params), *sol.ys[1:])


class ZerosFor(torch.autograd.Function):
    """The identity of its first input, with gradients of zero for the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes]
        return grads[0], *zeros


def _attach(ys: Tensor, options: dict[str, Any]) -> None:
    """Make the adjoint options reachable from the result, as in torchdiffeq."""
    node: Any = ys.grad_fn
    while node is not None and not hasattr(node, "solve"):
        node = node.next_functions[0][0] if node.next_functions else None
    if node is not None:
        node.adjoint_options = options


def refuse_event(event_fn: Any) -> None:
    if event_fn is not None:
        raise NotImplementedError("event_fn")

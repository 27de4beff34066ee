"""The methods of torchdiffeq by name, and their options as solvers and controllers."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import solvers
from ...controllers import Controller, Integral
from ...grids import Grid
from ...solvers import ExplicitRungeKutta, Solver
from ._errors import ArgumentError

#: Options of methods that adapt their steps, and of those on a grid.
ADAPTIVE_OPTIONS = {
    "norm", "min_step", "max_step", "first_step", "step_t", "jump_t", "safety", "ifactor", "dfactor", "max_num_steps",
    "dtype",
}  # fmt: skip
GRID_OPTIONS = {"norm", "step_size", "grid_constructor", "interp", "perturb"}
ADAMS_OPTIONS = GRID_OPTIONS | {"max_order", "max_iters"}
IMPLICIT_OPTIONS = GRID_OPTIONS | {"max_iters"}
SCIPY_OPTIONS = {"norm", "solver", "min_step", "max_step", "grid_points", "eps"}
#: Below this order Adams methods are no more than the 3/8 rule.
MIN_ORDER = 4

STEP_CALLBACK = "callback_step"
ALL_CALLBACKS = ("callback_step", "callback_accept_step", "callback_reject_step")


@dataclass(frozen=True)
class Method:
    """A method: its name in messages of torchdiffeq, the solver that takes its steps, and seminode's own for it.

    Attributes:
        peer: the name of its class in torchdiffeq.
        solver: takes the steps of torchdiffeq.
        own: what seminode takes under the same name, where gradients are seminode's.
        adaptive: whether it adapts its steps to the error.
    """

    peer: str
    solver: Callable[[], Solver]
    own: Callable[[], Solver]
    adaptive: bool
    options: frozenset[str] = frozenset(ADAPTIVE_OPTIONS)

    @property
    def order(self) -> int:
        """The order of convergence."""
        return self.own().order

    @property
    def external(self) -> bool:
        """Whether SciPy takes the steps."""
        return self.options == SCIPY_OPTIONS

    def valid_callbacks(self) -> set[str]:
        """The callbacks that it calls."""
        if self.external:
            return set()
        return set(ALL_CALLBACKS) if self.adaptive else {STEP_CALLBACK}


def _on_grid(peer: str, kind: type[ExplicitRungeKutta]) -> Method:
    return Method(peer, kind, kind, adaptive=False, options=frozenset(GRID_OPTIONS))


def _implicit() -> dict[str, Method]:
    """The implicit methods on a grid; seminode's own, so that `gl4` is of order 4."""
    peers = {
        "implicit_euler": "ImplicitEuler",
        "implicit_midpoint": "ImplicitMidpoint",
        "trapezoid": "Trapezoid",
        "radauIIA3": "RadauIIA3",
        "gl4": "GaussLegendre4",
        "radauIIA5": "RadauIIA5",
        "gl6": "GaussLegendre6",
        "sdirk2": "SDIRK2",
        "trbdf2": "TRBDF2",
    }
    options = frozenset(IMPLICIT_OPTIONS)
    kinds = ((name, peer, solvers.BY_NAME.get(name)) for name, peer in peers.items())
    return {name: Method(peer, kind, kind, False, options) for name, peer, kind in kinds if kind is not None}


def _adams(peer: str, implicit: bool = False) -> Method:
    make = functools.partial(solvers.GrowingAdams, implicit)
    return Method(peer, make, make, adaptive=False, options=frozenset(ADAMS_OPTIONS))


def _lagged(name: str) -> Callable[[], Solver]:
    return lambda: solvers.Lagged(name)


SOLVERS: dict[str, Method] = {
    "dopri8": Method("Dopri8Solver", solvers.QuarticDopri8, solvers.Dopri8, True),
    "dopri5": Method("Dopri5Solver", solvers.Dopri5, solvers.Dopri5, True),
    "tsit5": Method("Tsit5Solver", solvers.Tsit5, solvers.Tsit5, True),
    "bosh3": Method("Bosh3Solver", solvers.QuarticBosh3, solvers.Bosh3, True),
    "fehlberg2": Method("Fehlberg2", _lagged("fehlberg2"), solvers.Fehlberg2, True),
    "adaptive_heun": Method("AdaptiveHeunSolver", _lagged("adaptive_heun"), solvers.AdaptiveHeun, True),
    "euler": _on_grid("Euler", solvers.Euler),
    "midpoint": _on_grid("Midpoint", solvers.Midpoint),
    "heun2": _on_grid("Heun2", solvers.Heun),
    "heun3": _on_grid("Heun3", solvers.Heun3),
    "rk4": _on_grid("RK4", solvers.RK38),
    "explicit_adams": _adams("AdamsBashforth"),
    "implicit_adams": _adams("AdamsBashforthMoulton", implicit=True),
    "fixed_adams": _adams("AdamsBashforthMoulton", implicit=True),
    **_implicit(),
    "scipy_solver": Method(
        "ScipyWrapperODESolver", solvers.SciPy, solvers.SciPy, adaptive=True, options=frozenset(SCIPY_OPTIONS)
    ),
}


class Steps(NamedTuple):
    """How a solve steps, from a method and its options."""

    method: Method
    solver: Solver
    controller: Controller | None  # None: the solver controls its steps itself
    jumps: tuple[float, ...]
    norm: Any  # None: the default
    max_num_steps: int | None  # between two output times
    max_steps: int | None = None

    @property
    def tolerant(self) -> bool:
        """Whether it takes tolerances."""
        return self.controller is None or self.controller.adaptive


def is_adams(method: Method) -> bool:
    return method.peer.startswith("Adams")


def find(name: str | None) -> Method:
    if name is None:
        name = "dopri5"
    if name not in SOLVERS:
        known = ", ".join(f'"{each}"' for each in SOLVERS)
        raise ValueError(f'Invalid method "{name}". Must be one of {{{known}}}.')
    method: Any = SOLVERS[name]
    if not isinstance(method, Method):
        raise TypeError(
            f'SOLVERS["{name}"]: expected a method of this library, found {method!r}. Solver classes for torchdiffeq '
            "do not run here; write a seminode solver and pass it to seminode.solve(..., solver=...)."
        )
    return method


def steps(
    func: Any,
    y0: Any,
    t: Tensor,
    name: str | None,
    options: dict[str, Any],
    tolerances: tuple[Any, Any],
    own: bool = False,
) -> Steps:
    """The solver, controller, jumps, norm and step limit of a method with its options; unknown options warn.

    `own` takes seminode's method of that name and lands on the last output time, instead of stepping as torchdiffeq.
    """
    method = find(name)
    unknown = {key: value for key, value in options.items() if key not in method.options}
    if unknown:
        warnings.warn(f"{method.peer}: Unexpected arguments {unknown}", stacklevel=4)
    if method.external:
        return Steps(method, _scipy(options), None, (), None, None)
    if not method.adaptive:
        controller, solver = _grid(func, y0, t, method, options), _solver_on_grid(method, options, tolerances)
        return Steps(method, solver, controller, (), None, None)
    step_t, jump_t = (_times(key, options.get(key), t) for key in ("step_t", "jump_t"))
    if len({*step_t, *jump_t}) < len(step_t) + len(jump_t):
        raise ValueError("`step_t` and `jump_t` must not have any repeated elements between them.")
    controller = _integral(options, step_t, own)
    solver = method.own() if own else method.solver()
    limit = options.get("max_num_steps")
    limit = None if limit is None else int(limit)
    return Steps(method, solver, controller, jump_t, options.get("norm"), limit)


def _scipy(options: dict[str, Any]) -> Solver:
    name = options.get("solver", "LSODA")
    smallest = {"min_step": float(options["min_step"])} if name == "LSODA" and "min_step" in options else {}
    return solvers.SciPy(name, max_step=float(options.get("max_step", math.inf)), **smallest)


def _integral(options: dict[str, Any], step_t: tuple[float, ...], land: bool) -> Integral:
    smallest, largest = float(options.get("min_step", 0.0)), float(options.get("max_step", math.inf))
    first = options.get("first_step")
    return Integral(
        safety=float(options.get("safety", 0.9)),
        factor_min=float(options.get("dfactor", 0.2)),
        factor_max=float(options.get("ifactor", 10.0)),
        dt0=None if first is None else min(max(abs(float(first)), smallest), largest),
        dt_min=smallest,
        dt_max=largest,
        at_dt_min="accept" if smallest > 0.0 else "raise",
        step_to=step_t,
        land=land,
    )


def _times(name: str, times: Any, t: Tensor) -> tuple[float, ...]:
    """The times of an option, as numbers; what lies before the start is left out."""
    if times is None:
        return ()
    values = torch.as_tensor(times, dtype=torch.float64).detach().reshape(-1).tolist()
    t = t.detach()
    start, backward = float(t[0]), len(t) > 1 and bool(t[1] < t[0])
    return tuple(x for x in values if (x <= start if backward else x >= start))


def _solver_on_grid(method: Method, options: dict[str, Any], tolerances: tuple[Any, Any]) -> Solver:
    interp = options.get("interp", "linear")
    if interp not in ("linear", "cubic"):
        raise ValueError(f"Unknown interpolation method {interp}")
    if is_adams(method):
        return _adams_solver(method, options, tolerances, interp)
    solver = method.solver()
    return solvers.with_interpolant(type(solver), interp) if isinstance(solver, ExplicitRungeKutta) else solver


def _adams_solver(method: Method, options: dict[str, Any], tolerances: tuple[Any, Any], interp: Any) -> Solver:
    order = int(options.get("max_order", solvers.MAX_ORDER))
    if order > solvers.MAX_ORDER:
        raise ArgumentError(f"max_order must be at most {solvers.MAX_ORDER}, found {order}; pass a smaller one")
    if order < MIN_ORDER:
        warnings.warn(f"max_order is below {MIN_ORDER}, so the solver reduces to `rk4`.", stacklevel=6)
    rtol, atol = (float(torch.as_tensor(x, dtype=torch.float64).min()) for x in tolerances)
    iterations = int(options.get("max_iters", 4))
    make: Any = method.solver
    return make(max_order=max(order, 1), max_iters=iterations, rtol=rtol, atol=atol, interp=interp)


def _grid(func: Any, y0: Any, t: Tensor, method: Method, options: dict[str, Any]) -> Controller:
    step_size, constructor = options.get("step_size"), options.get("grid_constructor")
    if step_size is not None and constructor is not None:
        raise ValueError("step_size and grid_constructor are mutually exclusive arguments.")
    construct = None
    if step_size is not None:
        construct = evenly(step_size)
    elif constructor is not None:
        construct = functools.partial(_constructed, constructor, func, y0, t.device)
    return Grid(
        checked_grid(construct) if construct is not None else None,
        dtype=t.dtype,
        perturb=bool(options.get("perturb", False)),
        sums_ends=method.peer == "Heun2",
    )


def _constructed(constructor: Any, func: Any, y0: Any, device: torch.device, ts: Tensor) -> Tensor:
    return constructor(func, y0, ts.to(device))


def evenly(step_size: float | Tensor) -> Callable[[Tensor], Tensor]:
    """A grid of steps of equal length; the last one is shorter. It moves with the first and the last output time."""

    def construct(ts: Tensor) -> Tensor:
        start, end = ts[0], ts[-1]
        sign = -1.0 if bool(end < start) else 1.0
        # In the direction of time, with the operations of torchdiffeq: its times are the same to the last bit.
        count = int(torch.ceil((sign * end - sign * start) / step_size + 1))
        inner = torch.arange(0, count, dtype=ts.dtype, device=ts.device) * step_size + sign * start
        return torch.cat([sign * inner[:-1], end.reshape(1)])

    return construct


def checked_grid(construct: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def checked(ts: Tensor) -> Tensor:
        grid = torch.as_tensor(construct(ts))
        ends: Sequence[Any] = [] if grid.ndim != 1 or not len(grid) else [grid[0], grid[-1]]
        if not ends or bool(ends[0] != ts[0]) or bool(ends[1] != ts[-1]):
            found = "no times" if not ends else f"{float(ends[0])} and {float(ends[1])}"
            raise ArgumentError(
                f"grid_constructor: the grid must start at t[0] = {float(ts[0])} and end at t[-1] = {float(ts[-1])}, "
                f"found {found}. Return a 1-D tensor that begins and ends with these times."
            )
        return grid

    return checked

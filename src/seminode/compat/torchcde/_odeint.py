"""The solvers of torchdiffeq that `cdeint` calls, as calls of `solve`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ... import norms
from ...adjoints import Backsolve, Direct
from ...controllers import Controller, FixedStep, Integral, PrescribedSteps
from ...solve import solve
from ...solvers import BY_NAME, Solver

ADAPTIVE = ("dopri8", "dopri5", "tsit5", "bosh3", "fehlberg2", "adaptive_heun")
FIXED = {"euler": "euler", "midpoint": "midpoint", "heun2": "heun"}
#: Options of the controller by the names that torchdiffeq gives them.
CONTROL = {"safety": "safety", "ifactor": "factor_max", "dfactor": "factor_min", "first_step": "dt0"}
LIMITS = {"min_step": "dt_min", "max_step": "dt_max"}


def odeint(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    return _solved(func, y0, t, Direct(), rtol, atol, method, options)


def odeint_adjoint(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    adjoint_rtol: Any = None,
    adjoint_atol: Any = None,
    adjoint_method: str | None = None,
    adjoint_options: Mapping[str, Any] | None = None,
    adjoint_params: Sequence[Tensor] | None = None,
) -> Any:
    options = dict(options or {})
    adjoint_options = {**{k: v for k, v in options.items() if k != "norm"}, **(adjoint_options or {})}
    solver, controller, _ = _method(adjoint_method or method, adjoint_options, t)
    norm = adjoint_options.get("norm", "mixed_per_tensor")
    adjoint = Backsolve(
        norm=norm if isinstance(norm, str) else lambda y: norm((y.a_t, y.z, y.a_z, *y.a_params)),
        restart="fresh" if controller.adaptive else "carry",
        rtol=adjoint_rtol,
        atol=adjoint_atol,
        solver=solver,
        controller=controller,
        max_steps=adjoint_options.get("max_num_steps", 2**31 - 1),
    )
    return _solved(func, y0, t, adjoint, rtol, atol, method, options, adjoint_params)


def _solved(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    adjoint: Any,
    rtol: Any,
    atol: Any,
    method: str | None,
    options: Mapping[str, Any] | None,
    params: Sequence[Tensor] | None = None,
) -> Any:
    options = options or {}
    solver, controller, jumps = _method(method, options, t)
    norm = options.get("norm", norms.mixed_per_tensor)
    return solve(
        func,
        y0,
        t,
        solver=solver,
        controller=controller,
        rtol=rtol,
        atol=atol,
        norm=norm,
        jumps=jumps,
        adjoint=adjoint,
        params=params,
        max_steps=options.get("max_num_steps", 2**31 - 1),
    ).ys


def _method(method: str | None, options: Mapping[str, Any], t: Tensor) -> tuple[Solver, Controller, Any]:
    """The solver, its controller, and the jumps."""
    method = method or "dopri5"
    if method in ADAPTIVE:
        settings = {ours: options[name] for name, ours in {**CONTROL, **LIMITS}.items() if name in options}
        settings = {name: float(x) for name, x in settings.items() if x is not None}
        if settings.get("dt_min", 0.0) > 0.0:
            settings["at_dt_min"] = "accept"
        step_to = options.get("step_t")
        controller = Integral(step_to=[] if step_to is None else step_to.tolist(), **settings)
        return BY_NAME[method](), controller, options.get("jump_t")
    if method not in FIXED:
        raise ValueError(f"method: expected one of {', '.join((*ADAPTIVE, *FIXED))}, found {method!r}")
    solver = BY_NAME[FIXED[method]]()
    if "step_size" in options:
        return solver, FixedStep(float(options["step_size"])), None
    times = t.detach().tolist()
    return solver, PrescribedSteps([math.inf for _ in itertools.pairwise(times)], step_to=times[1:-1]), None

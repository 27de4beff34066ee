"""The solvers of torchsde that `cdeint` can call, without their noise, as calls of `solve`.

The noise of the backend "torchsde" is zero. What is left of a method is a Runge–Kutta method for its drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...adjoints import Backsolve, Direct, Reversible
from ...adjoints.base import Adjoint
from ...controllers import Controller, FixedStep, Integral
from ...errors import warn
from ...paths import ControlledField
from ...solve import solve
from ...solvers import AdaptiveHeun, Euler, ExplicitRungeKutta, Heun, Midpoint, ReversibleHeun, Solver
from ...tableaux import Tableau

ITO, STRATONOVICH = "ito", "stratonovich"
#: No step limit: a fixed step defines the number of steps.
UNLIMITED = 2**31 - 1


class SRA1(ExplicitRungeKutta):
    """The drift part of the stochastic Runge–Kutta method for additive noise of Rößler (SINUM 48, 2010)."""

    tableau = Tableau.classical("sra1", 2, (0, 3 / 4), ((), (3 / 4,)), (1 / 3, 2 / 3))


class SRI2(ExplicitRungeKutta):
    """The drift part of the stochastic Runge–Kutta method for diagonal noise of Rößler (SINUM 48, 2010)."""

    tableau = Tableau.classical("sri2", 3, (0, 1, 1 / 2), ((), (1,), (1 / 4, 1 / 4)), (1 / 6, 1 / 6, 2 / 3))


#: By the kind of stochastic integral and the kind of noise. The first method is the default.
METHODS: dict[str, dict[str, dict[str, type[Solver]]]] = {
    ITO: {
        "additive": {"srk": SRA1, "euler": Euler, "milstein": Euler},
        "scalar": {"srk": SRI2, "euler": Euler, "milstein": Euler},
        "general": {"euler": Euler},
    },
    STRATONOVICH: {
        noise: {
            "midpoint": Midpoint,
            "log_ode": Midpoint,
            "heun": Heun,
            "euler_heun": Euler,
            "reversible_heun": ReversibleHeun,
            **({} if noise == "general" else {"milstein": Euler}),
        }
        for noise in ("additive", "scalar", "general")
    },
}
#: Methods that read the noise itself, which the adjoint equation does not have.
FORWARD_ONLY = ("srk", "log_ode", "reversible_heun")


def sdeint(
    field: ControlledField,
    z0: Any,
    ts: Tensor,
    *,
    adjoint: bool,
    bm: Any = None,
    method: str | None = None,
    dt: float = 1e-3,
    adaptive: bool = False,
    rtol: float = 1e-5,
    atol: float = 1e-4,
    dt_min: float = 1e-5,
    options: Any = None,
    adjoint_method: str | None = None,
    adjoint_adaptive: bool = False,
    adjoint_rtol: float = 1e-5,
    adjoint_atol: float = 1e-4,
    adjoint_options: Any = None,
    adjoint_params: Sequence[Tensor] | None = None,
    **unused: Any,
) -> Tensor:
    """`torchsde.sdeint` or `torchsde.sdeint_adjoint` of a field without noise.

    With `adaptive`, Heun's method with an embedded error estimate takes the place of every method.
    """
    _check(z0, ts, unused)
    if adaptive and dt < dt_min:
        raise ValueError(f"dt: expected at least dt_min = {dt_min}, found {dt}")
    methods = _methods(field)
    name = next(iter(methods)) if method is None else method
    if name not in methods:
        raise ValueError(f"method: expected one of {', '.join(methods)}, found {name!r}")
    steps = {True: Integral(dt0=dt, dt_min=dt_min, at_dt_min="accept"), False: FixedStep(dt)}
    differentiate: Adjoint = Direct()
    if adjoint:
        tolerances = adjoint_rtol, adjoint_atol
        differentiate = _adjoint(name, adjoint_method, methods, adjoint_adaptive, steps, tolerances)
    return solve(
        field,
        z0,
        ts,
        solver=AdaptiveHeun() if adaptive else methods[name](),
        controller=steps[adaptive],
        rtol=rtol if adaptive else None,
        atol=atol if adaptive else None,
        adjoint=differentiate,
        params=adjoint_params if adjoint else None,
        max_steps=UNLIMITED,
    ).ys


def _check(z0: Any, ts: Tensor, unused: dict[str, Any]) -> None:
    if not isinstance(z0, Tensor) or z0.ndim != 2:
        found = tuple(z0.shape) if isinstance(z0, Tensor) else type(z0).__name__
        raise ValueError(f"z0: expected a tensor of shape (batch, hidden) with backend='torchsde', found {found}")
    if ts.requires_grad:
        raise ValueError("t: requires a gradient, which backend='torchsde' does not compute; pass t.detach()")
    if not bool((ts.diff() > 0).all()):
        raise ValueError("t: expected strictly increasing times with backend='torchsde'")
    for name in ("names", "logqp", "extra", "extra_solver_state"):
        if unused.pop(name, None):
            raise ValueError(f"{name}: cdeint returns the solution only; leave it out")
    if unused:
        warn(f"unknown arguments of backend='torchsde' are ignored: {', '.join(unused)}", UserWarning)


def _methods(field: ControlledField) -> dict[str, type[Solver]]:
    """The methods for the kind of equation that `func` says it is, with torchcde's defaults."""
    kind = getattr(field.field, "sde_type", STRATONOVICH)
    noise = getattr(field.field, "noise_type", "additive")
    if kind not in METHODS:
        raise ValueError(f"func.sde_type: expected {ITO!r} or {STRATONOVICH!r}, found {kind!r}")
    if noise not in METHODS[kind]:
        raise ValueError(f"func.noise_type: expected one of {', '.join(METHODS[kind])}, found {noise!r}")
    return METHODS[kind][noise]


def _adjoint(
    forward: str,
    backward: str | None,
    methods: dict[str, type[Solver]],
    adaptive: bool,
    steps: dict[bool, Controller],
    tolerances: tuple[float, float],
) -> Adjoint:
    """How to differentiate: undo the steps of the reversible method, or solve the adjoint equation."""
    if forward == "reversible_heun" and backward in (None, "adjoint_reversible_heun"):
        return Reversible()
    allowed = [name for name in methods if name not in FORWARD_ONLY]
    name = allowed[0] if backward is None else backward
    if name not in allowed:
        raise ValueError(f"adjoint_method: expected one of {', '.join(allowed)}, found {name!r}")
    if adaptive:
        rtol, atol = tolerances
        return Backsolve(solver=AdaptiveHeun(), controller=steps[True], max_steps=UNLIMITED, rtol=rtol, atol=atol)
    return Backsolve(solver=methods[name](), controller=steps[False], max_steps=UNLIMITED)

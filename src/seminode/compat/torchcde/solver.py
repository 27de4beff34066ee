"""`cdeint`: solve a controlled differential equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..._field.reach import reachable
from ...errors import warn
from ...paths import ControlledField
from ..torchdiffeq import odeint, odeint_adjoint
from ._torchsde import sdeint


def cdeint(
    X: Any,
    func: Callable[..., Any],
    z0: Any,
    t: Tensor,
    adjoint: bool = True,
    backend: str = "torchdiffeq",
    **kwargs: Any,
) -> Any:
    """Solve dz = func(t, z) dX, z(t[0]) = z0, and return z(t) with time as the second to last axis.

    Arguments:
        X: the control, an object with a method `derivative(t)` that returns (batch..., channels).
        func: `func(t, z)` of shape (batch..., hidden, channels). If it has a method `prod(t, z, dXdt)`, this is called
            for the product.
        z0: (batch..., hidden), or a tuple of such tensors for a control that returns a tuple.
        t: (T,), the times of the outputs.
        adjoint: whether to solve the adjoint equation on the backward pass, instead of differentiating the steps.
        backend: `"torchdiffeq"`, or `"torchsde"` for the methods of torchsde without their noise.
        kwargs: those of `odeint` and `odeint_adjoint` of torchdiffeq, or of `sdeint` and `sdeint_adjoint` of torchsde.
            By default `rtol=1e-4` and `atol=1e-6`.

    Returns:
        z at the times t, of shape (batch..., T, hidden); or a tuple.
    """
    kwargs = {"atol": 1e-6, "rtol": 1e-4, **kwargs}
    if backend not in ("torchdiffeq", "torchsde"):
        raise ValueError(f"backend: expected 'torchdiffeq' or 'torchsde', found {backend!r}")
    field = ControlledField(func, X)
    field.check(t[0].detach(), z0)
    z0 = z0 if isinstance(z0, Tensor) else tuple(z0)
    if adjoint:
        kwargs = {"adjoint_atol": kwargs["atol"], "adjoint_rtol": kwargs["rtol"], **kwargs}
        if kwargs.get("adjoint_params") is None:
            kwargs["adjoint_params"] = _differentiable_tensors(field)
    if backend == "torchsde":
        zs = sdeint(field, z0, t, adjoint=adjoint, **kwargs)
    else:
        zs = (odeint_adjoint if adjoint else odeint)(field, z0, t, **kwargs)
    return zs.movedim(0, -2) if isinstance(zs, Tensor) else tuple(z.movedim(0, -2) for z in zs)


def _differentiable_tensors(field: ControlledField) -> tuple[Tensor, ...]:
    """All tensors of the equation that require a gradient, also those that a function as the field closes over."""
    closed_over = [] if isinstance(field.field, nn.Module) else reachable(field.field).leaves()
    buffers = [x for x in field.buffers() if x.requires_grad]
    if buffers:
        warn(
            "X: the control requires a gradient, but adjoint_params is not given. torchcde gives no gradient in this "
            "case; here it is computed, at the cost of one more integral. If you need it, name the coefficients: "
            "adjoint_params=(*func.parameters(), coeffs). If not, call coeffs.detach().",
            UserWarning,
        )
    return *field.parameters(), *buffers, *closed_over

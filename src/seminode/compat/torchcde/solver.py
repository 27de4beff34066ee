"""`cdeint`: solve a controlled differential equation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ...errors import warn
from ...paths import ControlledField
from ._gradients import control_tensors, leading_to
from ._odeint import odeint, odeint_adjoint
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
        _name_control_tensors(field, kwargs)
    if backend == "torchsde":
        zs = sdeint(field, z0, t, adjoint=adjoint, **kwargs)
    else:
        zs = (odeint_adjoint if adjoint else odeint)(field, z0, t, **kwargs)
    return zs.movedim(0, -2) if isinstance(zs, Tensor) else tuple(z.movedim(0, -2) for z in zs)


def _name_control_tensors(field: ControlledField, kwargs: dict[str, Any]) -> None:
    """Add the tensors of the control to `adjoint_params`, if these name what the control was made from.

    A path is computed from the coefficients of a control when that is made. The field reads the result, so this is
    what the backward pass differentiates; autograd takes the gradient on to the coefficients.
    """
    read = control_tensors(field.control)
    params: Iterable[Tensor] | None = kwargs.get("adjoint_params")
    if params is not None:
        params = tuple(params)
        kwargs["adjoint_params"] = *params, *leading_to(read, params)
    elif read:
        warn(
            "X: the control requires a gradient, but adjoint_params is not given. torchcde gives no gradient in this "
            "case; here it is computed, at the cost of one more integral. If you need it, name the coefficients: "
            "adjoint_params=(*func.parameters(), coeffs). If not, call coeffs.detach().",
            UserWarning,
        )

"""The field of a controlled differential equation, as a field of an ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


class ControlledField(nn.Module):
    r"""The field F(t, z) dX/dt of the controlled differential equation dz = F(t, z) dX, for `solve`.

    The state may be a tuple, driven by as many controls: then `field` returns one matrix per state. If the field has a
    method `prod(t, z, slope)`, it is called for the product instead of `field(t, z)`. A sparse or low-rank field can
    avoid building its matrix this way.

    Reference: Kidger, Morrill, Foster and Lyons, *Neural Controlled Differential Equations for Irregular Time Series*,
    NeurIPS 2020.

    Arguments:
        field: `field(t, z)`, a tensor of shape (batch..., hidden, channels) for z of shape (batch..., hidden); or one
            per state.
        control: X, a [`Path`][seminode.paths.Path] or any object whose `derivative(t)` returns dX/dt of shape
            (batch..., channels), or one per state.

    Example:
        >>> import torch, seminode as sn
        >>> from seminode import paths
        >>> path = paths.linear(torch.tensor([[0.0], [1.0], [3.0]]))
        >>> field = paths.ControlledField(lambda t, z: z.unsqueeze(-1), path)  # dz = z dX
        >>> zs = sn.solve(field, torch.ones(1), [0.0, 2.0], jumps=path.jumps).ys
        >>> bool((zs[-1].log() - 3.0).abs() < 1e-3)
        True
    """

    def __init__(self, field: Callable[..., Any], control: Any):
        super().__init__()
        if not callable(getattr(control, "derivative", None)):
            raise ValueError(
                f"control: expected a path, or an object with a method derivative(t), found {type(control).__name__}"
            )
        self.field = field
        self.control = control
        self.has_product = hasattr(field, "prod")

    def forward(self, t: Tensor, z: Any) -> Any:
        """F(t, z) dX/dt."""
        slope = self.control.derivative(t)
        if self.has_product:
            return cast("Any", self.field).prod(t, z, slope)
        matrix = self.field(t, z)
        if isinstance(matrix, Tensor):
            return _product(matrix, slope)
        return tuple(_product(m, s) for m, s in zip(matrix, slope, strict=True))

    def check(self, t: Tensor, z: Any) -> None:
        """Evaluate the field at `t`, `z`, and raise an error if the shapes of state, field and control do not match."""
        if not isinstance(z, (Tensor, tuple, list)):
            raise ValueError(f"z0: expected a tensor, or a tuple or list of tensors, found {type(z).__name__}")
        name = "field.prod" if self.has_product else "field"
        with torch.no_grad():
            slope = self.control.derivative(t)
            value = cast("Any", self.field).prod(t, z, slope) if self.has_product else self.field(t, z)
        check = _check_vector if self.has_product else _check_matrix
        states: Sequence[Tensor] = _parts("z0", z, z)
        slopes, values = _parts("control.derivative", slope, z), _parts(name, value, z)
        for i, (z_i, slope_i, value_i) in enumerate(zip(states, slopes, values, strict=True)):
            where = "" if isinstance(z, Tensor) else f"[{i}]"
            if slope_i.shape[:-1] != z_i.shape[:-1]:
                raise ValueError(
                    f"control.derivative(t){where}: expected the batch axes of z0{where}, {tuple(z_i.shape[:-1])}, "
                    f"and then the channels, found shape {tuple(slope_i.shape)}"
                )
            check(f"{name}(...){where}", value_i, z_i, slope_i)


def _product(matrix: Tensor, slope: Tensor) -> Tensor:
    return (matrix @ slope.unsqueeze(-1)).squeeze(-1)


def _parts(name: str, x: Any, z: Any) -> Sequence[Tensor]:
    """The tensors of x, which has the structure of the state z."""
    if isinstance(z, Tensor):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor, as z0 is one, found {type(x).__name__}")
        return [x]
    if not isinstance(x, (tuple, list)):
        raise ValueError(f"{name}: expected a tuple or list, as z0 is one, found {type(x).__name__}")
    parts = cast("Sequence[Any]", x)
    if len(parts) != len(z):
        raise ValueError(f"{name}: expected {len(z)} tensors, as many as z0 has, found {len(parts)}")
    for i, part in enumerate(parts):
        if not isinstance(part, Tensor):
            raise ValueError(f"{name}[{i}]: expected a tensor, found {type(part).__name__}")
    return parts


def _check_vector(name: str, vector: Tensor, z: Tensor, slope: Tensor) -> None:
    if vector.shape != z.shape:
        raise ValueError(f"{name}: expected the shape of z0, {tuple(z.shape)}, found {tuple(vector.shape)}")


def _check_matrix(name: str, matrix: Tensor, z: Tensor, slope: Tensor) -> None:
    expected = (*z.shape, slope.shape[-1])
    if matrix.shape != expected:
        raise ValueError(
            f"{name}: expected shape {expected} (batch..., hidden, control channels), found {tuple(matrix.shape)}"
        )

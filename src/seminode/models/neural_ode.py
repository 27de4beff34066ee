"""Neural ordinary differential equations, with optional augmentation and random end times (STEER)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from .._field.checks import check_count, check_number
from .base import SolvingModule, check_channels, check_end
from .ends import steer
from .running import Regulariser, check_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions


class NeuralODE(SolvingModule):
    r"""A neural ordinary differential equation,

        z(0) = ℓ₁(x) or [x, 0],    z′ = f(t, z),    y = ℓ₂(z(t₁)).

    References: Chen et al., *Neural Ordinary Differential Equations*, NeurIPS 2018; augmentation: Dupont, Doucet and
    Teh, *Augmented Neural ODEs*, NeurIPS 2019; `steer`: Ghosh et al., NeurIPS 2020.

    Arguments:
        field: f(t, z), a module or any other callable; z has shape (batch, channels, ...).
        augment: number of zero channels to append to x, along axis 1.
        lift: ℓ₁, a module that maps x to z(0), such as `nn.Linear(2, 16)`, instead of appending zeros.
        readout: ℓ₂, a module applied to every output, such as `nn.Linear(16, 3)`; none by default.
        t1: the end t₁ of the interval, above 0.
        steer: b; in training mode every output time t is replaced by a sample from U(t − b, t + b) (see
            [`steer`][seminode.models.ends.steer]).
        regularisers: running costs along the solution; `forward(x, costs=True)` returns them.
        options: options of [`solve`][seminode.solve]: `solver`, `rtol`, `atol`, `adjoint`, `norm`, …

    Shapes: x (batch, channels, ...) ↦ (batch, outputs, ...), or with `ts` (times, batch, outputs, ...).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from seminode.models import NeuralODE
        >>> class Field(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        ...
        ...     def forward(self, t, z):
        ...         return self.net(z)
        >>> model = NeuralODE(Field(), augment=2, readout=nn.Linear(4, 1), solver="tsit5", rtol=1e-3)
        >>> model(torch.randn(8, 2)).shape
        torch.Size([8, 1])
        >>> model(torch.randn(8, 2), ts=[0.0, 0.5, 1.0]).shape
        torch.Size([3, 8, 1])
    """

    def __init__(
        self,
        field: Callable[[Tensor, Tensor], Tensor],
        *,
        augment: int = 0,
        lift: nn.Module | None = None,
        readout: nn.Module | None = None,
        t1: float = 1.0,
        steer: float = 0.0,
        regularisers: Sequence[Regulariser] = (),
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        if not callable(field):
            raise TypeError(f"field: expected a callable field(t, z), found {type(field).__name__}")
        self.field = field
        self.augment = check_count("augment", augment, least=0)
        if augment and lift is not None:
            raise ValueError("augment, lift: expected at most one of them, found both")
        self.lift = lift
        self.readout = readout
        self.t1 = check_end(t1)
        self.steer = check_number("steer", steer)
        if not self.steer < self.t1:
            raise ValueError(f"steer: expected below t1 = {self.t1:g}, found {self.steer:g}")
        self.regularisers = check_names(regularisers)

    @overload
    def forward(
        self, x: Tensor, ts: Tensor | Sequence[float] | None = None, *, costs: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, ts: Tensor | Sequence[float] | None = None, *, costs: Literal[True]
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def forward(self, x: Tensor, ts: Tensor | Sequence[float] | None = None, *, costs: bool = False) -> Any:
        """The output at t₁, or the outputs at all times `ts`.

        Arguments:
            x: data of shape (batch, ...).
            ts: times of the outputs; ts[0] is the time of z(0).
            costs: whether to return also the integral of each regulariser over the whole interval by name, one value
                per sample.
        """
        times: Any = (0.0, self.t1) if ts is None else ts
        if self.training and self.steer:
            times = steer(times, self.steer)
        z0 = self.initial(x)
        save = "last" if ts is None else "ts"
        zs, integrals = self.solve_along(self.field, z0, times, self.regularisers if costs else (), save=save)
        y = read_out(self.readout, zs)
        y = y[-1] if ts is None else y
        return (y, integrals) if costs else y

    def initial(self, x: Tensor) -> Tensor:
        """z(0): x with augmented channels, or lifted."""
        if isinstance(self.lift, nn.Linear):
            check_channels("x", x, (self.lift.in_features,), "data")
        if self.lift is not None:
            return self.lift(x)
        if not self.augment:
            return x
        _check_augmentable(x)
        return torch.cat([x, x.new_zeros(x.shape[0], self.augment, *x.shape[2:])], 1)

    def extra_repr(self) -> str:
        parts = [f"{name}={value!r}" for name, value in (("augment", self.augment), ("steer", self.steer)) if value]
        parts += [f"regularisers={self.regularisers!r}"] if self.regularisers else []
        return ", ".join([*parts, f"t1={self.t1:g}", *filter(None, [super().extra_repr()])])


def _check_augmentable(x: Any) -> None:
    if not isinstance(x, Tensor) or x.ndim < 2:
        raise ValueError(f"x: expected shape (batch, channels, ...) to augment, found {tuple(getattr(x, 'shape', ()))}")


def read_out(readout: nn.Module | None, zs: Tensor) -> Tensor:
    """Apply a readout for inputs of shape (batch, ...) to zs of shape (times, batch, ...)."""
    if zs.ndim < 3:
        raise ValueError(f"x: expected a batch, shape (batch, ...), found a state of shape {tuple(zs.shape[1:])}")
    return zs if readout is None else readout(zs.flatten(0, 1)).unflatten(0, zs.shape[:2])

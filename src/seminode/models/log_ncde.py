"""Log-NCDEs: neural controlled differential equations over windows, with the Lie brackets of their field."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from .. import paths
from .._field.checks import check_count, check_flags, check_number
from .._untyped import numbers
from ..paths import Path
from .base import SolvingModule
from .neural_cde import MatrixField, with_channels
from .neural_ode import read_out
from .products import vjp

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions


def bracket_sum(field: Callable[[Tensor], Tensor], z: Tensor, areas: Tensor) -> tuple[Tensor, Tensor]:
    r"""F(z), and the sum of its Lie brackets with given coefficients, Σ_{a<b} λ_{ab} [f_a, f_b](z).

    The f_a are the columns of F, and [f_a, f_b] = (∂f_b/∂z) f_a − (∂f_a/∂z) f_b. With the antisymmetric matrix Λ of
    the λ_{ab} this is Σ_b (∂f_b/∂z) w_b, w = F Λ: one Jacobian–vector product per channel.

    Arguments:
        field: F, from (batch, hidden) to (batch, hidden, channels), independently for each sample.
        z: (batch, hidden).
        areas: λ, (batch, channels·(channels − 1)/2), in the order (0, 1), (0, 2), …, (1, 2), …

    Example:
        >>> import torch
        >>> field = lambda z: torch.stack((torch.ones_like(z), z), -1)  # f₀ = 1, f₁ = z
        >>> bracket_sum(field, torch.tensor([[3.0]]), torch.tensor([[2.0]]))[1]  # [f₀, f₁] = 1
        tensor([[2.]])
    """
    matrix = field(z)
    channels = matrix.shape[-1]
    rows, columns = torch.triu_indices(channels, channels, 1, device=z.device).unbind()
    upper = areas.new_zeros(*areas.shape[:-1], channels, channels).index_put(
        (torch.arange(len(areas), device=z.device).unsqueeze(-1), rows, columns), areas
    )
    directions = matrix @ (upper - upper.mT)  # (batch, hidden, channels): w_b is column b

    def columns_of(copies: Tensor) -> Tensor:
        """Column b of F at copy b of the states, (batch, hidden, channels)."""
        return torch.unflatten(field(copies), 0, (channels, -1)).diagonal(dim1=0, dim2=-1)

    # The JVP is two VJPs: u ↦ uᵀJ is linear, and its own VJP is w ↦ Jw. Unlike forward mode, this can be compiled.
    columns_at, pull = vjp(columns_of, z.repeat(channels, 1))

    def transposed(u: Tensor) -> Tensor:
        return pull(u)[0]

    _, push = vjp(transposed, torch.zeros_like(columns_at))
    (terms,) = push(directions.movedim(-1, 0).flatten(0, 1).to(z.dtype))
    return matrix, terms.sum(-1)


def log_velocity(field: Callable[[Tensor], Tensor], path: Path, channels: int, t: Tensor, z: Tensor) -> Tensor:
    """The field of the log-ODE method, F(z) λ¹ + Σ λ_{ab} [f_a, f_b](z), where dX/dt = (λ¹, λ²)."""
    slope = path.derivative(t)
    checked = partial(_matrix, field, channels)
    if slope.shape[-1] == channels:
        return (checked(z) @ slope.unsqueeze(-1)).squeeze(-1)
    matrix, brackets = bracket_sum(checked, z, slope[..., channels:])
    return (matrix @ slope[..., :channels].unsqueeze(-1)).squeeze(-1) + brackets


def _matrix(field: Callable[[Tensor], Tensor], channels: int, z: Tensor) -> Tensor:
    matrix = field(z)
    if matrix.shape != (*z.shape, channels):
        raise ValueError(
            f"field: expected a matrix of shape {(*z.shape, channels)} (batch, hidden, control channels), found "
            f"{tuple(matrix.shape)}"
        )
    return matrix


class LogNCDE(SolvingModule):
    r"""A neural controlled differential equation, solved over windows by the log-ODE method,

        dz = F(z) dX   becomes   z′ = [Σ_a λ_a f_a(z) + Σ_{a<b} λ_{ab} [f_a, f_b](z)] / |w|   in window w,

    where f_a are the columns of F, λ is the log-signature of X over the window, and [f_a, f_b] are Lie brackets. A
    window takes a few steps, however many observations it has. Unlike a neural rough differential equation, which
    learns a field of its own for the areas λ_{ab}, a Log-NCDE derives it from F.

    Reference: Walker, McLeod, Qin, Cheng, Li and Lyons, *Log Neural Controlled Differential Equations: The Lie Brackets
    Make a Difference*, ICML 2024, arXiv:2402.18512.

    Arguments:
        channels: number of channels of the observations.
        hidden: number of channels of z.
        outputs: number of outputs of the linear readout; `None` returns z itself.
        window_length: length of a window in units of time.
        depth: of the log-signature, 1 or 2. With 1 there are no brackets: then X is a straight line in each window.
        field: F, a module from z of shape (batch, hidden) to (batch, hidden, control channels), twice differentiable;
            by default a [`MatrixField`][seminode.models.MatrixField] with SiLU.
        time, intensity: as in [`NeuralCDE`][seminode.models.NeuralCDE].
        options: options of [`solve`][seminode.solve]: `solver`, `rtol`, `atol`, `adjoint`, `norm`, … Time in the solve
            counts windows: with `solver="heun"` and `FixedStep(0.5)`, each window takes two steps.

    Shapes: x (batch, times, channels) ↦ (batch, outputs), or with `ts="windows"` (windows + 1, batch, outputs).

    Example:
        >>> import torch, seminode as sn
        >>> from seminode.models import LogNCDE
        >>> model = LogNCDE(3, 8, 2, window_length=10.0, solver="heun", controller=sn.FixedStep(1.0))
        >>> model(torch.randn(4, 101, 3), lengths=torch.tensor([101, 80, 30, 7])).shape
        torch.Size([4, 2])
        >>> model.nfe  # ten windows, two evaluations each
        20
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        outputs: int | None = None,
        *,
        window_length: float,
        depth: int = 2,
        field: nn.Module | None = None,
        time: bool = True,
        intensity: bool = False,
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        check_flags(time=time, intensity=intensity)
        if check_count("depth", depth) > 2:
            raise ValueError(
                f"depth: expected 1 or 2, found {depth}; brackets of more than two fields are not computed"
            )
        if check_number("window_length", window_length) == 0.0:
            raise ValueError("window_length: expected a number above 0, found 0")
        self.channels = check_count("channels", channels)
        self.hidden = check_count("hidden", hidden)
        self.window_length = float(window_length)
        self.depth = depth
        self.time = time
        self.intensity = intensity
        self.initial = nn.Linear(self.control_channels, hidden)
        if field is None:
            field = MatrixField(hidden, self.control_channels, activation=nn.SiLU)
        self.field = field
        self.readout = None if outputs is None else nn.Linear(hidden, check_count("outputs", outputs))

    @property
    def control_channels(self) -> int:
        return self.time + self.channels * (1 + self.intensity)

    def forward(
        self,
        x: Tensor | Path,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: Literal["windows"] | None = None,
    ) -> Tensor:
        """The output at the end of every series, or with `ts="windows"` at the ends of all windows.

        Arguments:
            x: observations of shape (batch, knots, channels), NaN where missing; or a path from `control`, which can be
                computed once for a data set.
            times, lengths: as in [`NeuralCDE.forward`][seminode.models.NeuralCDE.forward].
            ts: `"windows"` returns outputs at the start and at the end of every window.
        """
        if ts not in (None, "windows"):
            raise ValueError(f"ts: expected None or 'windows', found {ts!r}")
        if isinstance(x, Path) and not (times is None and lengths is None):
            raise ValueError("times, lengths: expected None with a path, which has its own")
        control = x if isinstance(x, Path) else self.control(x, times, lengths)
        expected = paths.logsignature_channels(self.control_channels, self.depth)
        if control.channels != expected:
            raise ValueError(f"x: expected a path with {expected} channels, found {control.channels}")
        if not control.batch_shape:
            raise ValueError("x: expected a path of a batch of series, found one of a single series")
        user_jumps = self.options.get("jumps")
        jumps = sorted({*numbers(control.jumps), *map(float, () if user_jumps is None else user_jumps)})
        z0 = self.initial(control.evaluate(control.times[0])[..., : self.control_channels])
        field = partial(log_velocity, self.field, control, self.control_channels)
        output_times = control.interval if ts is None else control.times
        zs = self.solve(field, z0, output_times, jumps=jumps, save="last" if ts is None else "ts").ys
        y = read_out(self.readout, zs)
        return y[-1] if ts is None else y

    def control(self, x: Tensor, times: Tensor | None = None, lengths: Tensor | None = None) -> Path:
        """The cumulative log-signatures of the windows as a piecewise linear path, on a clock that counts windows.

        `x`, `times` and `lengths` are as in `forward`.
        """
        data = with_channels(x, times, lengths, channels=self.channels, time=self.time, intensity=self.intensity)
        knots = paths.logsignature_windows(
            data, self.depth, self.window_length, times, lengths=lengths, basis="brackets"
        )
        return paths.linear(knots)

    def extra_repr(self) -> str:
        text = f"channels={self.channels}, hidden={self.hidden}, window_length={self.window_length:g}"
        text += f", depth={self.depth}, time={self.time}, intensity={self.intensity}"
        return ", ".join([text, *filter(None, [super().extra_repr()])])

"""Neural controlled differential equations: the continuous-time counterpart of recurrent networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from .. import paths
from .._field.checks import check_count, check_flags, check_times
from .._untyped import numbers
from ..controllers import Adaptive, Integral
from ..paths import Path
from .base import SolvingModule, check_channels
from .neural_ode import read_out
from .running import Regulariser, check_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions

#: Names of the interpolations of the observations.
PathKind = Literal["linear", "rectilinear", "natural_cubic", "hermite_cubic"]

INTERPOLATIONS: dict[PathKind, Callable[..., Path]] = {
    "linear": paths.linear,
    "rectilinear": paths.rectilinear,
    "natural_cubic": paths.natural_cubic,
    "hermite_cubic": paths.hermite_cubic,
}


#: Times at which a neural CDE returns outputs: the end of every series, given times, or the observation times.
OutputTimes = Tensor | Sequence[float] | Literal["knots"] | None


class MatrixField(nn.Sequential):
    """F of z′ = F(z) dX/dt: an MLP from z to a matrix of shape (hidden, channels), with a final tanh.

    Reference: Kidger, Morrill, Foster and Lyons, *Neural Controlled Differential Equations for Irregular Time Series*,
    NeurIPS 2020, arXiv:2005.08926.

    Arguments:
        hidden: number of channels of z.
        channels: number of channels of the control X.
        width, layers: width and number of the hidden layers, each followed by the activation.
        activation: makes the activation, by default a ReLU; `nn.SiLU` for a smooth field.

    Example:
        >>> import torch
        >>> MatrixField(8, 3, width=16)(torch.zeros(5, 8)).shape
        torch.Size([5, 8, 3])
    """

    def __init__(
        self,
        hidden: int,
        channels: int,
        width: int = 64,
        layers: int = 2,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ):
        sizes = [check_count("hidden", hidden), *[check_count("width", width)] * check_count("layers", layers)]
        inner = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), activation())]
        last = nn.Linear(width, hidden * check_count("channels", channels))
        super().__init__(*inner, last, nn.Tanh(), nn.Unflatten(-1, (hidden, channels)))


def controlled(field: Callable[[Tensor], Tensor], path: Path, t: Tensor, z: Tensor) -> Tensor:
    """F(z) dX/dt."""
    matrix, slope = field(z), path.derivative(t)
    if matrix.shape != (*z.shape, slope.shape[-1]):
        raise ValueError(
            f"field: expected a matrix of shape {(*z.shape, slope.shape[-1])} (batch, hidden, control channels), found "
            f"{tuple(matrix.shape)}"
        )
    return (matrix @ slope.unsqueeze(-1)).squeeze(-1)


def with_channels(
    x: Tensor, times: Tensor | None, lengths: Tensor | None, *, channels: int, time: bool, intensity: bool
) -> Tensor:
    """Checked observations with the channels that a model adds, time and intensity."""
    check_channels("x", x, (channels,), "observations")
    if x.ndim != 3:
        raise ValueError(f"x: expected shape (batch, times, channels), found {tuple(x.shape)}")
    data = paths.append_intensity(x) if intensity else x
    return paths.append_time(data, times, lengths=lengths) if time else data


class NeuralCDE(SolvingModule):
    r"""A neural controlled differential equation,

        z(t₀) = ζ(X(t₀)),    dz/dt = F(z) dX/dt,    y = ℓ(z(t₁)),

    driven by a path X through the observations, with time as its first channel. Observation times may be irregular,
    values may be missing (NaN), and each series of a batch may have its own times and length.

    Reference: Kidger, Morrill, Foster and Lyons, *Neural Controlled Differential Equations for Irregular Time Series*,
    NeurIPS 2020.

    Arguments:
        channels: number of channels of the observations.
        hidden: number of channels of z.
        outputs: number of outputs of the linear readout ℓ; `None` returns z itself.
        field: F, a module from z of shape (batch, hidden) to (batch, hidden, control channels); by default a
            [`MatrixField`][seminode.models.MatrixField]. The control has `channels` channels, or twice as many with
            `intensity`, and one more with `time`.
        path: `"hermite_cubic"`, `"natural_cubic"`, `"linear"` or `"rectilinear"`; see [Paths](paths.md).
        time: whether time is the first channel of the control. Without it, z does not depend on the speed at which the
            path is traversed, because the equation is invariant under reparametrisation of time.
        intensity: whether to add one channel per observed channel that counts the observations so far. Useful if the
            times of the measurements carry information.
        land: whether adaptive steps end on every knot. On a cubic path the field is continuous at a knot but its
            derivative is not, so a step across a knot has a larger error than its estimate. With `False`, steps end
            only on the knots where the field is discontinuous: fewer steps for smooth data at loose tolerances, but
            with errors of 100 tolerances and more.
        regularisers: running costs along the solution; `forward(x, costs=True)` returns them.
        options: options of [`solve`][seminode.solve]: `solver`, `rtol`, `atol`, `adjoint`, `norm`, …

    Shapes: x (batch, times, channels) ↦ (batch, outputs), or with `ts` (times, batch, outputs).

    Example:
        >>> import torch
        >>> from seminode.models import NeuralCDE
        >>> model = NeuralCDE(channels=3, hidden=8, outputs=2, rtol=1e-3, atol=1e-3)
        >>> x = torch.randn(4, 10, 3)
        >>> x[0, 2:5, 1] = float("nan")
        >>> model(x, lengths=torch.tensor([10, 7, 10, 4])).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        outputs: int | None = None,
        *,
        field: nn.Module | None = None,
        path: PathKind = "hermite_cubic",
        time: bool = True,
        intensity: bool = False,
        land: bool = True,
        regularisers: Sequence[Regulariser] = (),
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        check_flags(time=time, intensity=intensity, land=land)
        if path not in INTERPOLATIONS:
            raise ValueError(f"path: expected one of {', '.join(INTERPOLATIONS)}, found {path!r}")
        if path == "rectilinear" and not time:
            raise ValueError("path: 'rectilinear' needs the time channel, but time is False")
        self.channels = check_count("channels", channels)
        self.hidden = check_count("hidden", hidden)
        self.path: PathKind = path
        self.time = time
        self.intensity = intensity
        self.land = land
        self.regularisers = check_names(regularisers)
        self.initial = nn.Linear(self.control_channels, hidden)
        self.field = MatrixField(hidden, self.control_channels) if field is None else field
        self.readout = None if outputs is None else nn.Linear(hidden, check_count("outputs", outputs))

    @property
    def control_channels(self) -> int:
        return self.time + self.channels * (1 + self.intensity)

    @overload
    def forward(
        self,
        x: Tensor | Path,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: OutputTimes = None,
        *,
        costs: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor | Path,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: OutputTimes = None,
        *,
        costs: Literal[True],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def forward(
        self,
        x: Tensor | Path,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: OutputTimes = None,
        *,
        costs: bool = False,
    ) -> Any:
        """The output at the end of every series, or the outputs at the times `ts`.

        Arguments:
            x: observations of shape (batch, knots, channels), NaN where missing; or a path from `control`.
            times: times of the observations: (knots,), or (batch, knots) for different times per series; by default
                0, 1, 2, …
            lengths: number of observations of each series, shape (batch,). Later entries of x are ignored.
            ts: increasing times of the outputs, starting at the first observation; or `"knots"`, the times of all
                observations. After the end of a series its output is constant. If `times` differ per series or require
                gradients, only `"knots"` is possible.
            costs: whether to return `(output, costs)`, where `costs` holds the integral of each regulariser by name,
                one value per sample. The integration variable is the time of the solve: if `times` differ per series,
                that is the index of the knot.
        """
        control = x if isinstance(x, Path) else self.control(x, times, lengths)
        if isinstance(x, Path) and not (times is None and lengths is None):
            raise ValueError("times, lengths: expected None with a path, which has its own")
        if control.channels != self.control_channels:
            raise ValueError(f"x: expected a path with {self.control_channels} channels, found {control.channels}")
        if not control.batch_shape:
            raise ValueError("x: expected a path of a batch of series, found one of a single series")
        # The equation is invariant under reparametrisation of time. The index of the knot is a time variable that all
        # series share and that does not depend on `times`.
        if control.times.ndim > 1 or control.times.requires_grad:
            if not (ts is None or (isinstance(ts, str) and ts == "knots")):
                raise ValueError("ts: expected None or 'knots' if times differ per series or require gradients")
            control = control.on_index_clock()
        output_times = self._output_times(control, ts)
        z0 = self.initial(control.evaluate(control.times[0]))
        zs, integrals = self.solve_along(
            partial(controlled, self.field, control),
            z0,
            output_times,
            self.regularisers if costs else (),
            **self._step_ends(control),
            save="last" if ts is None else "ts",
        )
        y = read_out(self.readout, zs)
        y = y[-1] if ts is None else y
        return (y, integrals) if costs else y

    def _output_times(self, control: Path, ts: OutputTimes) -> Any:
        """The times of the outputs; the first one must be the first knot, the time of the initial value."""
        if ts is None:
            return control.interval
        if isinstance(ts, str):
            if ts != "knots":
                raise ValueError(f"ts: expected times or 'knots', found {ts!r}")
            # A rectilinear path adds a knot between each two observations.
            return control.times[::2] if self.path == "rectilinear" else control.times
        _, times = check_times(ts, control.times)
        first = control.interval[0]
        if abs(times[0] - first) > 1e-6 * max(1.0, abs(first)) or times[-1] < times[0]:
            raise ValueError(f"ts: expected increasing times that start at the first knot, {first:g}, found {times}")
        return ts

    def _step_ends(self, control: Path) -> SolveOptions:
        """Options that make steps end on jumps and, if the controller is adaptive, on the other knots."""
        user_jumps = self.options.get("jumps")
        jumps = sorted({*numbers(control.jumps), *map(float, () if user_jumps is None else user_jumps)})
        controller = self.options.get("controller") or Integral()
        if not (self.land and control.smooth and isinstance(controller, Adaptive)):
            return {"jumps": jumps}
        return {
            "jumps": jumps,
            "controller": replace(controller, step_to=[*controller.step_to, *numbers(control.bends)]),
        }

    def control(self, x: Tensor, times: Tensor | None = None, lengths: Tensor | None = None) -> Path:
        """The path through the observations, including the channels that the model adds (time and intensity).

        `x`, `times` and `lengths` are as in `forward`. A path can be computed once for a data set.
        """
        data = with_channels(x, times, lengths, channels=self.channels, time=self.time, intensity=self.intensity)
        if self.path == "rectilinear" and times is None:
            # By default `paths.rectilinear` would number its added knots, too.
            times = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
        return INTERPOLATIONS[self.path](data, times, lengths=lengths)

    def extra_repr(self) -> str:
        text = f"channels={self.channels}, hidden={self.hidden}, path={self.path!r}, time={self.time}"
        text += f", intensity={self.intensity}, land={self.land}"
        text += f", regularisers={self.regularisers!r}" if self.regularisers else ""
        return ", ".join([text, *filter(None, [super().extra_repr()])])

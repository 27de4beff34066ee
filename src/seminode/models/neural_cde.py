"""Neural controlled differential equations: recurrent networks in continuous time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from .. import paths
from .._field.checks import check_count, check_flags, check_times
from ..controllers import Adaptive, Integral
from ..paths import Path
from .base import SolvingModule, check_channels
from .neural_ode import read_out
from .running import Regulariser, check_names

INTERPOLATIONS: dict[str, Callable[..., Path]] = {
    "linear": paths.linear,
    "rectilinear": paths.rectilinear,
    "natural_cubic": paths.natural_cubic,
    "hermite_cubic": paths.hermite_cubic,
}


class MatrixField(nn.Sequential):
    """F of z′ = F(z) dX/dt: a perceptron from z to a matrix of shape (hidden, channels), bounded by tanh.

    Arguments:
        hidden: channels of z.
        channels: channels of X.
        width, layers: of the hidden layers, each followed by a ReLU.

    Example:
        >>> import torch
        >>> MatrixField(8, 3, width=16)(torch.zeros(5, 8)).shape
        torch.Size([5, 8, 3])
    """

    def __init__(self, hidden: int, channels: int, width: int = 64, layers: int = 2):
        sizes = [check_count("hidden", hidden), *[check_count("width", width)] * check_count("layers", layers)]
        inner = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
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


class NeuralCDE(SolvingModule):
    r"""A neural controlled differential equation,

        z(t₀) = ζ(X(t₀)),    dz/dt = F(z) dX/dt,    y = ℓ(z(t₁)),

    driven by a path X through the observations, with time as its first channel. Observations may come at irregular
    times, be missing (NaN), and series in a batch may have their own times and lengths.

    Reference: Kidger, Morrill, Foster and Lyons, *Neural Controlled Differential Equations for Irregular Time Series*,
    NeurIPS 2020.

    Arguments:
        channels: of the observations.
        hidden: channels of z.
        outputs: of the linear readout ℓ; without one, z itself is returned.
        field: F, a module from z (batch, hidden) to (batch, hidden, control channels); by default a
            [`MatrixField`][seminode.models.MatrixField]. The control has `channels` channels, one more with `time`, and
            twice `channels` with `intensity`.
        path: `"hermite_cubic"`, `"natural_cubic"`, `"linear"` or `"rectilinear"`; see [Paths](paths.md).
        time: whether time is the first channel of the control. Without it z cannot tell how fast a path is run
            through, since the equation is invariant to that.
        intensity: whether to add, for every channel, how often it has been observed so far: for data in which that
            something was measured says something.
        land: whether adaptive steps end on every knot. On a cubic path the field is continuous there but its derivative
            is not, and a step across is less accurate than its error estimate says. Without, only on knots where the
            field itself jumps: fewer steps for smooth data at loose tolerances, with errors of 100 tolerances and more.
        regularisers: running costs along the solution, to be returned by `forward(x, costs=True)`.
        options: of [`solve`][seminode.solve]: `solver`, `rtol`, `atol`, `adjoint`, `norm`, …

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
        path: str = "hermite_cubic",
        time: bool = True,
        intensity: bool = False,
        land: bool = True,
        regularisers: Sequence[Regulariser] = (),
        **options: Any,
    ):
        super().__init__(**options)
        check_flags(time=time, intensity=intensity, land=land)
        if path not in INTERPOLATIONS:
            raise ValueError(f"path: expected one of {', '.join(INTERPOLATIONS)}, found {path!r}")
        if path == "rectilinear" and not time:
            raise ValueError("path: 'rectilinear' moves along the time channel, but time is False")
        self.channels = check_count("channels", channels)
        self.hidden = check_count("hidden", hidden)
        self.path = path
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
        ts: Any = None,
        *,
        costs: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor | Path,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: Any = None,
        *,
        costs: Literal[True],
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def forward(
        self,
        x: Tensor | Path,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: Any = None,
        *,
        costs: bool = False,
    ) -> Any:
        """The output at the end of every series; with `ts` the outputs at these times.

        Arguments:
            x: observations (batch, knots, channels), NaN where missing; or a path made by `control` before.
            times: of the observations: (knots,), or (batch, knots) for times of each series' own; by default 0, 1, 2, …
            lengths: how many observations each series has (batch,); what comes after them is not looked at.
            ts: times of the outputs, increasing, the first of them that of the first observation; `"knots"` for the
                times of all observations. After its own end, the output of a series stays as it is. With times of each
                series' own, or with times that are differentiated, only `"knots"`.
            costs: whether to return `(output, costs)`: the integrals of the regularisers by name, one value per sample.
                They are integrals over the clock of the solve: with times of each series' own that counts knots.
        """
        control = x if isinstance(x, Path) else self.control(x, times, lengths)
        if isinstance(x, Path) and not (times is None and lengths is None):
            raise ValueError("times, lengths: a path has its own; expected neither of them with it")
        if control.channels != self.control_channels:
            raise ValueError(f"x: expected a path with {self.control_channels} channels, found {control.channels}")
        if not control.batch_shape:
            raise ValueError("x: expected a path of a batch of series, found one of a single series")
        # The equation does not care about the clock. That one counts knots, which all series share and nothing moves.
        if control.times.ndim > 1 or control.times.requires_grad:
            if not (ts is None or (isinstance(ts, str) and ts == "knots")):
                raise ValueError("ts: expected None or 'knots' where times are each series' own, or differentiated")
            control = control.on_index_clock()
        asked = self._asked(control, ts)
        z0 = self.initial(control.evaluate(control.times[0]))
        zs, integrals = self.solve_along(
            partial(controlled, self.field, control),
            z0,
            asked,
            self.regularisers if costs else (),
            **self._places(control),
            save="last" if ts is None else "ts",
        )
        y = read_out(self.readout, zs)
        y = y[-1] if ts is None else y
        return (y, integrals) if costs else y

    def _asked(self, control: Path, ts: Any) -> Any:
        """The times of the outputs; the first knot is where the initial value belongs."""
        if ts is None:
            return control.interval
        if isinstance(ts, str):
            if ts != "knots":
                raise ValueError(f"ts: expected times or 'knots', found {ts!r}")
            return control.times[::2] if self.path == "rectilinear" else control.times  # half of its knots are added
        _, times = check_times(ts, control.times)
        first = control.interval[0]
        if abs(times[0] - first) > 1e-6 * max(1.0, abs(first)) or times[-1] < times[0]:
            raise ValueError(f"ts: expected increasing times that begin with the first knot, {first:g}, found {times}")
        return ts

    def _places(self, control: Path) -> dict[str, Any]:
        """Where steps must end: at jumps, and as far as a controller has a choice on the other knots."""
        own = self.options.get("jumps")
        jumps = sorted({*control.jumps.tolist(), *map(float, () if own is None else own)})
        controller = self.options.get("controller") or Integral()
        if not (self.land and control.smooth and isinstance(controller, Adaptive)):
            return {"jumps": jumps}
        return {
            "jumps": jumps,
            "controller": replace(controller, step_to=[*controller.step_to, *control.bends.tolist()]),
        }

    def control(self, x: Tensor, times: Tensor | None = None, lengths: Tensor | None = None) -> Path:
        """The path through observations, with the channels that the model adds to them."""
        check_channels("x", x, (self.channels,), "observations")
        if x.ndim != 3:
            raise ValueError(f"x: expected shape (batch, times, channels), found {tuple(x.shape)}")
        data = paths.append_intensity(x) if self.intensity else x
        if self.time:
            data = paths.append_time(data, times, lengths=lengths)
        if self.path == "rectilinear" and times is None:
            times = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)  # else it would count its own knots
        return INTERPOLATIONS[self.path](data, times, lengths=lengths)

    def extra_repr(self) -> str:
        own = f"channels={self.channels}, hidden={self.hidden}, path={self.path!r}, time={self.time}"
        own += f", intensity={self.intensity}, land={self.land}"
        own += f", regularisers={self.regularisers!r}" if self.regularisers else ""
        return ", ".join([own, *filter(None, [super().extra_repr()])])

"""ODE-RNNs: recurrent networks whose hidden state follows a differential equation between observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._field.checks import check_count, check_flags, check_solver
from .._untyped import integers
from ..paths.knots import Knots, check_knots
from ..solution import Record, Stats
from ..solvers.explicit import ExplicitRungeKutta
from .base import SolvingModule, check_channels
from .neural_ode import read_out

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..solve import SolveOptions


class GRUODECell(nn.Module):
    r"""The field of a GRU in continuous time,

        h′ = (1 − z) ⊙ (g − h),    z = σ(W_z h + b_z),  r = σ(W_r h + b_r),  g = tanh(W_g (r ⊙ h) + b_g).

    Forward in time, a state that starts in [−1, 1] stays there. The field is Lipschitz continuous in such states.

    Reference: De Brouwer, Simm, Arany and Moreau, *GRU-ODE-Bayes: Continuous Modeling of Sporadically-Observed Time
    Series*, NeurIPS 2019, arXiv:1905.12374.

    Arguments:
        hidden: number of channels of h.

    Example:
        >>> import torch
        >>> GRUODECell(8)(torch.tensor(0.0), torch.zeros(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(self, hidden: int):
        super().__init__()
        self.hidden = check_count("hidden", hidden)
        self.gates = nn.Linear(hidden, 2 * hidden)
        self.candidate = nn.Linear(hidden, hidden)

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        z, g = self._gate_and_target(h)
        return (1.0 - z) * (g - h)

    def exponential_step(self, h: Tensor, dt: Tensor) -> Tensor:
        """One step of the exponential Euler method: exact for constant z and g,

            h(t + dt) ≈ g + (h − g) ⊙ exp((z − 1) dt).

        It costs as much as a step of Euler's method and is more accurate in long intervals. Forward in time, the state
        stays in [−1, 1] for any dt.
        """
        z, g = self._gate_and_target(h)
        return g + (h - g) * torch.exp((z - 1.0) * dt)

    def _gate_and_target(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z, r = torch.sigmoid(self.gates(h)).chunk(2, -1)
        return z, torch.tanh(self.candidate(r * h))


class Visits(NamedTuple):
    """The rows of series in the order in which an ODE-RNN visits them; each series has its own order.

    Attributes:
        times: (rows, batch); rows after the end of a series repeat its last time.
        values: (rows, batch, channels), zero where nothing was observed.
        observed: (rows, batch, channels).
    """

    times: Tensor
    values: Tensor
    observed: Tensor


def visits(knots: Knots, *, backward: bool, packed: bool) -> Visits:
    """Rows forward or backward in time; with `packed`, without rows in which a series was not observed.

    The first row in time is always visited, since a backward pass ends there.
    """
    values = knots.values
    rows, batch = values.shape[:2]
    times = knots.times.unsqueeze(-1).expand(-1, batch) if knots.times.ndim == 1 else knots.times.T
    observed = knots.observed
    counts = values.new_full((batch,), rows, dtype=torch.int64) if knots.lengths is None else knots.lengths
    position = torch.arange(rows, device=values.device).unsqueeze(-1)
    index = position.expand(-1, batch)
    if packed:
        kept = observed.any(-1)
        kept[0] = True
        counts = kept.sum(0)
        index = kept.int().argsort(dim=0, descending=True, stable=True)
        rows = int(counts.max())
        position = position[:rows]
    last = counts - 1
    order = (last - position).clamp(min=0) if backward else torch.minimum(position, last)
    inside = position < counts
    index = index.gather(0, order)
    wide = index.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    seen = observed.gather(0, wide) & inside.unsqueeze(-1)
    filled = torch.where(observed, values, 0.0).gather(0, wide)
    return Visits(times.gather(0, index), torch.where(seen, filled, 0.0), seen)


class ODERNN(SolvingModule):
    r"""A recurrent network whose hidden state follows an ODE between observations,

        h(t₀) = 0,    h′ = f(t, h)  between observations,    h ← cell([x, m], h)  at an observation,    y = ℓ(h),

    where m says which channels of x were observed. A series is updated only where it was observed. Times may be
    irregular and differ between the series of a batch: all series are solved together, each over its own interval.

    Reference: Rubanova, Chen and Duvenaud, *Latent ODEs for Irregularly-Sampled Time Series*, NeurIPS 2019,
    arXiv:1907.03907.

    Arguments:
        channels: number of channels of the observations.
        hidden: number of channels of h.
        outputs: number of outputs of the linear readout ℓ; `None` returns h itself.
        field: f(t, h) with t of shape (batch,), as in batched solves; by default a
            [`GRUODECell`][seminode.models.GRUODECell].
        cell: the update, a module from ([x, m], h) to h; by default `nn.GRUCell(2 * channels, hidden)`.
        backward: whether to visit the observations from the last to the first.
        packed: whether to skip the times at which a series was not observed. Its state then goes from one of its own
            observations to the next in one interval, however many times other series have in between. The first of
            all times is always visited: the states of all series start, or with `backward` end, there.
        steps: number of steps of an explicit Runge–Kutta method in every interval, differentiated directly; this is
            much cheaper than a solve per interval. By default, every interval is solved with the options of `solve`.
            With `steps`, the only option is `solver`, by default `"euler"`, as in the publication.
        exponential: whether the steps are those of the exponential Euler method, instead of `solver`. The field must
            have a method `exponential_step(h, dt)`, as [`GRUODECell`][seminode.models.GRUODECell] has.
        options: options of [`solve`][seminode.solve]: `solver`, `rtol`, `atol`, `adjoint`, `norm`, …

    Shapes: x (batch, times, channels) ↦ (batch, outputs), or with `ts="knots"` (times, batch, outputs).

    Example:
        >>> import torch
        >>> from seminode.models import ODERNN
        >>> model = ODERNN(channels=3, hidden=8, outputs=2, steps=2, solver="midpoint")
        >>> x = torch.randn(4, 10, 3)
        >>> x[0, 2:5] = float("nan")  # not observed
        >>> model(x, times=torch.rand(4, 10).cumsum(1), lengths=torch.tensor([10, 7, 10, 4])).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        outputs: int | None = None,
        *,
        field: Callable[[Tensor, Tensor], Tensor] | None = None,
        cell: nn.Module | None = None,
        backward: bool = False,
        packed: bool = False,
        steps: int | None = None,
        exponential: bool = False,
        **options: Unpack[SolveOptions],
    ):
        super().__init__(**options)
        check_flags(backward=backward, packed=packed, exponential=exponential)
        self.channels = check_count("channels", channels)
        self.hidden = check_count("hidden", hidden)
        self.field = GRUODECell(hidden) if field is None else field
        self.cell = nn.GRUCell(2 * channels, hidden) if cell is None else cell
        self.backward_in_time = backward
        self.packed = packed
        self.steps = None if steps is None else check_count("steps", steps)
        self.exponential = exponential
        if exponential:
            self._check_exponential()
        elif steps is not None:
            self._explicit()  # raises an error if the options do not allow fixed steps
        self.readout = None if outputs is None else nn.Linear(hidden, check_count("outputs", outputs))

    def forward(
        self,
        x: Tensor | Knots,
        times: Tensor | None = None,
        lengths: Tensor | None = None,
        ts: Literal["knots"] | None = None,
    ) -> Tensor:
        """The output after the last visited row of every series, or after all rows.

        Arguments:
            x: observations of shape (batch, knots, channels), NaN where missing; a series without any observation at a
                time is not updated there.
            times: (knots,), or (batch, knots) for different times per series; by default 0, 1, 2, …
            lengths: number of rows of each series, shape (batch,). Later entries of x are ignored.
            ts: `"knots"` returns the outputs after all rows, in the order in which they are visited. After the end of
                a series its output is constant.
        """
        if ts not in (None, "knots"):
            raise ValueError(f"ts: expected None or 'knots', found {ts!r}")
        knots = x if isinstance(x, Knots) else self._knots(x, times, lengths)
        rows = visits(knots, backward=self.backward_in_time, packed=self.packed)
        h = rows.values.new_zeros(rows.values.shape[1], self.hidden)
        inputs = torch.cat((rows.values, rows.observed.to(h.dtype)), -1).unbind()
        observed = rows.observed.any(-1, keepdim=True)
        # Packed rows have read the numbers of observations already; reading more costs nothing then. A compiler would
        # have to branch on values that it does not know.
        reads = self.packed and not torch.compiler.is_compiling()
        full = integers(observed.all(1).flatten().int()) if reads else []
        # As in a solve, times of half precision would be too coarse: float32 at least.
        clock = torch.promote_types(h.dtype, torch.float32)
        begins, widths = rows.times[:-1].to(clock).unbind(), rows.times.diff(dim=0).to(clock).unbind()
        solver = None if self.steps is None or self.exponential else self._explicit()
        states: list[Tensor] = []
        stats: list[Stats] = []
        records: list[Record] = []
        for k, some in enumerate(observed.unbind()):
            if k > 0:
                h = self._evolved(h, begins[k - 1], widths[k - 1], solver)
                stats += self._stats
                records += self._records
            updated = self.cell(inputs[k], h).to(h.dtype)
            h = updated if full and full[k] else torch.where(some, updated, h)
            if ts is not None:
                states.append(h)
        self._stats, self._records = tuple(stats), tuple(records)
        y = read_out(self.readout, h.unsqueeze(0) if ts is None else torch.stack(states))
        return y[-1] if ts is None else y

    def _knots(self, x: Tensor, times: Tensor | None, lengths: Tensor | None) -> Knots:
        check_channels("x", x, (self.channels,), "observations")
        if x.ndim != 3:
            raise ValueError(f"x: expected shape (batch, times, channels), found {tuple(x.shape)}")
        return check_knots(x, times, lengths)

    def _velocity(self, s: Tensor, h: Tensor, begin: Tensor, width: Tensor) -> Tensor:
        """dh/ds on a clock from 0 to 1, which the intervals of all series share."""
        return width.to(h.dtype).unsqueeze(-1) * self.field(begin + s * width, h)

    def _evolved(self, h: Tensor, begin: Tensor, width: Tensor, solver: ExplicitRungeKutta | None) -> Tensor:
        """h at the end of the interval, by a solve or by fixed steps."""
        if self.steps is None:
            return self.solve(self._velocity, h, (0.0, 1.0), args=(begin, width), save="last").ys[-1]
        dt = width if self.steps == 1 else width / self.steps
        length = dt.to(h.dtype).unsqueeze(-1)
        if solver is None:
            for _ in range(self.steps):
                h = self.field.exponential_step(h, length)  # type: ignore[operator, union-attr]
            self._stats = (Stats(nfe=self.steps, accepted=self.steps),)
            return h
        for i in range(self.steps):

            def evaluate(c: float, y: Tensor, /, *, stage: int, i: int = i) -> Tensor:
                t = begin + (i + c) * dt if i + c > 0.0 else begin
                return self.field(t, y).to(y.dtype)

            h = solver.step(evaluate, length, h, None).y1
        self._stats = (Stats(nfe=self.steps * solver.stages, accepted=self.steps),)
        return h

    def _check_exponential(self) -> None:
        if self.steps is None or self.options:
            raise ValueError("exponential: expected steps and no options of solve, since it replaces the solver")
        if not callable(getattr(self.field, "exponential_step", None)):
            raise ValueError(
                f"exponential: expected a field with a method exponential_step, found {type(self.field).__name__}"
            )

    def _explicit(self) -> ExplicitRungeKutta:
        """The solver of fixed steps."""
        others = sorted(set(self.options) - {"solver"})
        if others:
            raise ValueError(
                f"{others[0]}: expected only the option solver with steps, which takes fixed steps; leave out steps to "
                "solve every interval with the options of solve"
            )
        solver = check_solver(self.options.get("solver", "euler"))
        if not isinstance(solver, ExplicitRungeKutta):
            raise ValueError(f"solver: expected an explicit Runge–Kutta method with steps, found {solver.name!r}")
        return solver

    def extra_repr(self) -> str:
        text = f"channels={self.channels}, hidden={self.hidden}, backward={self.backward_in_time}"
        text += f", packed={self.packed}" + ("" if self.steps is None else f", steps={self.steps}")
        text += ", exponential=True" if self.exponential else ""
        return ", ".join([text, *filter(None, [super().extra_repr()])])

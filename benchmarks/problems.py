"""Problems for comparing adjoints: each has a field, an initial value, output times and a loss.

Each problem draws its random numbers in float64 from its own generator and rounds them to the requested dtype, so a
seed gives the same problem in either precision. "The paper" is Kidger, Chen and Lyons, "Hey, that's not an ODE": Faster
ODE Adjoints via Seminorms (ICML 2021).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from seminode.models.symplectic import SymplecticField as LibraryField
from seminode_lab.models.pendulum import DT as PENDULUM_DT
from seminode_lab.models.pendulum import fit_accelerations
from seminode_lab.models.pendulum import trajectories as pendulum_trajectories
from seminode_lab.models.pendulum import windows as pendulum_windows


@dataclass(frozen=True, eq=False)
class GradientProblem:
    """The gradient of loss(ys), where y′ = field(t, y), y(ts[0]) = start(), and ys are the outputs at all ts.

    `start` is a function because the initial value may have parameters. `modules` contains all parameters. `data` holds
    the other tensors that define the problem, for implementations in other libraries.
    """

    field: nn.Module
    start: Callable[[], Any]
    ts: Tensor
    loss: Callable[[Any], Tensor]
    modules: nn.ModuleList
    rtol: float
    atol: float
    jumps: Tensor | None = None
    data: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A float64 layer with PyTorch's default initialisation, drawn from the given generator."""
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64))
    bound = 1.0 / math.sqrt(inputs)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer


def mlp(widths: Sequence[int], activation: type[nn.Module], generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [linear(inputs, outputs, generator), activation()]
    return nn.Sequential(*layers[:-1])


# The fully actuated double pendulum and its Symplectic ODE-Net (third experiment of the paper).


class SymplecticField(LibraryField):
    """The field of a Symplectic ODE-Net for two angles and two torques, initialised from a seed."""

    def __init__(self, widths: tuple[int, int] = (400, 300), seed: int = 0, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(seed)
        wide, narrow = widths
        super().__init__(
            inverse_mass=mlp((4, wide, wide, wide, 3), nn.Softplus, generator),
            potential=mlp((4, narrow, narrow, 1), nn.Softplus, generator),
            input_matrix=mlp((4, narrow, narrow, 4), nn.Softplus, generator),
        )
        self.to(dtype)


def pendulum_batch(batch: int = 256, trials: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random windows of the first trials. Fewer than about four trials do not represent the data set well."""
    windows = pendulum_windows(pendulum_trajectories(trials), dtype=dtype)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:batch]]


def fitted_pendulum(
    iterations: int = 800, batch: int = 64, lr: float = 1e-2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> SymplecticField:
    """A Symplectic ODE-Net fitted to the true accelerations of the pendulum, which takes seconds instead of hours.

    The mean squared error on windows of the data set is about 1e-5; the training of the paper reaches 1e-4. With 200
    iterations it is 1e-3. The network is fitted in float32 and then converted to the requested dtype.
    """
    field = SymplecticField(seed=seed)
    fit_accelerations(field, iterations, batch, lr, seed)
    return field.to(dtype)


def pendulum_problem(field: SymplecticField, windows: Tensor) -> GradientProblem:
    """Predict windows (batch, times, 8) from their first points; mean squared error, tolerances of the paper."""
    return GradientProblem(
        field=field,
        start=lambda: windows[:, 0],
        ts=PENDULUM_DT * torch.arange(windows.shape[1], dtype=torch.float64),
        loss=lambda ys: functional.mse_loss(ys, windows.transpose(0, 1)),
        modules=nn.ModuleList([field]),
        rtol=1e-4,
        atol=1e-4,
        data={"windows": windows},
    )


# A neural controlled differential equation on random data (first experiment of the paper, with other data).


class LinearControl(nn.Module):
    """A piecewise linear path through values (batch, knots, channels) at increasing times."""

    times: Tensor
    values: Tensor
    slopes: Tensor

    def __init__(self, times: Tensor, values: Tensor):
        super().__init__()
        self.register_buffer("times", times)
        self.register_buffer("values", values)
        slopes = values.diff(dim=1) / times.diff().unsqueeze(-1)
        self.register_buffer("slopes", slopes.transpose(0, 1).contiguous())

    def derivative(self, t: Tensor) -> Tensor:
        """dX/dt, of shape (batch, channels): at a knot the left derivative, outside that of the nearest interval."""
        interval = torch.searchsorted(self.times, t.detach()) - 1
        # Converting the index to a Python number would break the compiled graph.
        return self.slopes.index_select(0, interval.clamp(0, len(self.slopes) - 1).reshape(1)).squeeze(0)


class ControlledField(nn.Module):
    """z′ = F(z) dX/dt with a network F from z to (hidden, channels) matrices; 86,050 parameters as in the paper."""

    def __init__(self, control: LinearControl, hidden: int, width: int, generator: torch.Generator):
        super().__init__()
        channels = control.values.shape[-1]
        self.control = control
        self.shape = (hidden, channels)
        self.net = mlp((hidden, width, width, width, width, hidden * channels), nn.ReLU, generator)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        matrix = self.net(z).tanh().unflatten(-1, self.shape)
        return (matrix @ self.control.derivative(t).unsqueeze(-1)).squeeze(-1)


def random_control(batch: int, knots: int, channels: int, generator: torch.Generator) -> LinearControl:
    """A path with the time as channel 0 and stationary series of unit variance as the others, at knots 0, 1, 2, …

    Neighbouring values have a correlation of 0.7, between white noise and a random walk, as normalised speech features
    have.
    """
    times = torch.arange(knots, dtype=torch.float64)
    first, *rest = normal((batch, knots, channels - 1), generator).unbind(1)
    series = list(itertools.accumulate(rest, lambda x, noise: 0.7 * x + math.sqrt(1.0 - 0.7**2) * noise, initial=first))
    values = torch.cat((times.expand(batch, knots).unsqueeze(-1), torch.stack(series, 1)), -1)
    return LinearControl(times, values)


def cde_problem(
    batch: int = 16,
    knots: int = 161,
    channels: int = 21,
    hidden: int = 90,
    width: int = 40,
    classes: int = 10,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> GradientProblem:
    """A neural CDE that classifies random series; the default sizes are those of the paper for Speech Commands.

    z(0) is linear in X(0), the logits are linear in z at the end, and the loss is the mean cross-entropy. The field is
    discontinuous at every knot.
    """
    generator = torch.Generator().manual_seed(seed)
    control = random_control(batch, knots, channels, generator)
    labels = torch.randint(classes, (batch,), generator=generator)
    field = ControlledField(control, hidden, width, generator)
    initial, readout = linear(channels, hidden, generator), linear(hidden, classes, generator)
    modules = nn.ModuleList([field, initial, readout]).to(dtype)
    return GradientProblem(
        field=field,
        start=lambda: initial(control.values[:, 0]),
        ts=torch.tensor([0.0, knots - 1.0], dtype=torch.float64),
        loss=lambda ys: functional.cross_entropy(readout(ys[-1]), labels),
        modules=modules,
        rtol=1e-3,
        atol=1e-6,
        jumps=torch.arange(knots, dtype=torch.float64),
        data={"slopes": control.slopes, "x0": control.values[:, 0], "labels": labels},
    )


# Contracting systems: easy forward in time, but errors of a backward solve grow exponentially.


class DrivenLinear(nn.Module):
    """y′ = A y + C (cos ωt, sin ωt); A is not normal, and its eigenvalues are geometric from −1 to −stiffness."""

    def __init__(self, size: int = 6, stiffness: float = 20.0, omega: float = 2.0, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rates = torch.logspace(0.0, math.log10(stiffness), size, dtype=torch.float64)
        triangular = torch.diag(-rates) + normal((size, size), generator).triu(1)
        Q = torch.linalg.qr(normal((size, size), generator)).Q
        self.A = nn.Parameter(Q @ triangular @ Q.T)
        self.C = nn.Parameter(normal((size, 2), generator))
        self.omega = omega

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        phase = self.omega * t
        return y @ self.A.T + self.C @ torch.stack((phase.cos(), phase.sin()))

    def exact(self, t: Tensor | float, y0: Tensor) -> Tensor:
        """y(t) for y(0) = y0 of shape (…, size), differentiable with respect to A, C, t and y0.

        The driving term solves a linear ODE, too, so y(t) is a part of one matrix exponential.
        """
        size = len(self.A)
        rotation = self.A.new_tensor([[0.0, -self.omega], [self.omega, 0.0]])
        top = torch.cat((self.A, self.C), 1)
        bottom = torch.cat((self.A.new_zeros(2, size), rotation), 1)
        driving = y0.new_tensor([1.0, 0.0]).expand(*y0.shape[:-1], 2)
        flow = torch.linalg.matrix_exp(t * torch.cat((top, bottom)))
        return (torch.cat((y0, driving), -1) @ flow.T)[..., :size]


def linear_problem(
    batch: int = 4,
    size: int = 6,
    stiffness: float = 20.0,
    end: float = 2.0,
    outputs: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> GradientProblem:
    """`DrivenLinear` from random initial values; the loss is half the sum of squares at all output times."""
    field = DrivenLinear(size, stiffness, seed=seed)
    y0 = normal((batch, size), torch.Generator().manual_seed(seed + 1)).to(dtype)
    return GradientProblem(
        field=field.to(dtype),
        start=lambda: y0,
        ts=torch.linspace(0.0, end, outputs, dtype=torch.float64),
        loss=lambda ys: 0.5 * ys.square().sum(),
        modules=nn.ModuleList([field]),
        rtol=1e-6,
        atol=1e-8,
    )


def exact_linear_outputs(problem: GradientProblem) -> Tensor:
    """The outputs of a `linear_problem` in closed form, for the exact gradient of its loss."""
    field, y0 = problem.field, problem.start()
    assert isinstance(field, DrivenLinear)
    return torch.stack([field.exact(t, y0) for t in problem.ts.to(y0).unbind()])


class Contracting(nn.Module):
    """y′ = −D (y − sin 3t) + W tanh y with diagonal D: y is attracted to sin 3t at rates from 1 to `stiffness`."""

    def __init__(self, size: int = 8, stiffness: float = 60.0, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.D = nn.Parameter(torch.linspace(1.0, stiffness, size, dtype=torch.float64))
        self.W = nn.Parameter(normal((size, size), generator) / math.sqrt(size))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.D * (y - (3.0 * t).sin()) + y.tanh() @ self.W.T


def contracting_problem(
    batch: int = 1, size: int = 8, stiffness: float = 60.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> GradientProblem:
    """`Contracting` on [0, 2] from random initial values; the loss is half the sum of squares at the end."""
    field = Contracting(size, stiffness, seed)
    y0 = normal((batch, size), torch.Generator().manual_seed(seed + 1)).to(dtype)
    return GradientProblem(
        field=field.to(dtype),
        start=lambda: y0,
        ts=torch.tensor([0.0, 2.0], dtype=torch.float64),
        loss=lambda ys: 0.5 * ys[-1].square().sum(),
        modules=nn.ModuleList([field]),
        rtol=1e-6,
        atol=1e-8,
    )


# A continuous normalising flow.


class Flow(nn.Module):
    """z′ = f(t, z) = W₂ tanh(W₁ z + t w + b₁) + b₂, with the log-density and the kinetic energy of each sample.

    logp′ = −tr ∂f/∂z (Chen et al., 2018), with the exact trace; energy′ = ½ mean f² (Finlay et al., 2020). Both are
    plain integrals, which the field does not read.
    """

    def __init__(self, size: int = 2, width: int = 16, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = linear(size + 1, width, generator)
        self.outer = linear(width, size, generator)

    def velocity(self, t: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """f and the trace of its Jacobian."""
        h = self.inner(torch.cat((z, t.expand(*z.shape[:-1], 1)), -1)).tanh()
        diagonal = (self.inner.weight[:, :-1] * self.outer.weight.T).sum(1)
        return self.outer(h), (1.0 - h.square()) @ diagonal

    def forward(self, t: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        f, trace = self.velocity(t, state["z"])
        return {"z": f, "logp": -trace, "energy": 0.5 * f.square().mean(-1)}


def flow_problem(
    batch: int = 32, size: int = 2, width: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GradientProblem:
    """A flow on [0, 1] from random data to a standard normal; the loss is the NLL plus 0.01 of the kinetic energy."""
    field = Flow(size, width, seed)
    z0 = (1.5 * normal((batch, size), torch.Generator().manual_seed(seed + 1)) + 0.5).to(dtype)

    def start() -> dict[str, Tensor]:
        return {"z": z0, "logp": z0.new_zeros(batch), "energy": z0.new_zeros(batch)}

    def loss(ys: dict[str, Tensor]) -> Tensor:
        z, logp, energy = (ys[name][-1] for name in ("z", "logp", "energy"))
        base = -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
        return (0.01 * energy - base + logp).mean()

    return GradientProblem(
        field=field.to(dtype),
        start=start,
        ts=torch.tensor([0.0, 1.0], dtype=torch.float64),
        loss=loss,
        modules=nn.ModuleList([field]),
        rtol=1e-5,
        atol=1e-5,
    )

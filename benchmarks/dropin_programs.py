"""Typical programs for torchdiffeq, written anew: each trains or samples for a few iterations with the library it gets.

A program is a function of the library and of a number of iterations. It returns what it has computed, to be compared,
and the evaluations of its field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Outcome(NamedTuple):
    """What a program has computed, and the evaluations of its field."""

    values: list[Tensor]
    evaluations: int


Program = Callable[[Any, int], Outcome]


class Counted(nn.Module):
    """A field that counts its evaluations, as many programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.nfe = 0


class Network(Counted):
    """A fully connected field."""

    def __init__(self, size: int, width: int, inner: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Linear(width, size))
        self.inner = inner

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(y if self.inner is None else self.inner(y))


def train(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    iterations: int,
    rate: float = 1e-3,
    optimiser: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    """Losses and, at the end, the parameters."""
    optimiser = optimiser or torch.optim.RMSprop(model.parameters(), lr=rate)
    losses = []
    for i in range(iterations):
        optimiser.zero_grad()
        value = loss(i)
        value.backward()
        optimiser.step()
        losses.append(value.detach())
    return [torch.stack(losses), *(x.detach() for x in model.parameters())]


def spiral(library: Any, iterations: int) -> Outcome:
    """Fit a network to pieces of a spiral, with `odeint` and the default tolerances."""
    torch.manual_seed(0)
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    times = torch.linspace(0.0, 25.0, 1000)
    with torch.no_grad():
        curve = library.odeint(lambda t, y: (y**3) @ matrix, torch.tensor([[2.0, 0.0]]), times, method="dopri5")
    field = Network(2, 50, lambda y: y**3)
    starts = torch.randint(0, 990, (iterations, 20))

    def loss(i: int) -> Tensor:
        pieces = torch.stack([curve[starts[i] + j] for j in range(10)])
        return (library.odeint(field, pieces[0], times[:10]) - pieces).abs().mean()

    return Outcome(train(field, loss, iterations), field.nfe)


class LatentModel(nn.Module):
    """A recurrent encoder, a field in the latent space, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(2, 16, batch_first=True)
        self.mean = nn.Linear(16, 4)
        self.field = Network(4, 20)
        self.decoder = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))


def latent_ode(library: Any, iterations: int) -> Outcome:
    """A latent ODE of spirals, with the adjoint."""
    torch.manual_seed(1)
    model, times = LatentModel(), torch.linspace(0.0, 3.0, 30)
    phase = 6.28 * torch.rand(24, 1)
    data = torch.stack([torch.cos(phase + times), torch.sin(phase + times)], -1) * (0.5 + 0.1 * times)[:, None]

    def loss(i: int) -> Tensor:
        z0 = model.mean(model.encoder(data.flip(1))[0][:, -1])
        zs = library.odeint_adjoint(model.field, z0, times, rtol=1e-5, atol=1e-6)
        return functional.mse_loss(model.decoder(zs).transpose(0, 1), data)

    return Outcome(train(model, loss, iterations), model.field.nfe)


class ConvolutionalField(Counted):
    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.first = nn.Conv2d(channels + 1, channels, 3, padding=1)
        self.second = nn.Conv2d(channels + 1, channels, 3, padding=1)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        time = torch.ones_like(y[:, :1]) * t
        y = torch.relu(self.first(torch.cat([time, self.norm(y)], 1)))
        return self.second(torch.cat([time, y], 1))


class ImageClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.field, self.out = nn.Conv2d(1, 16, 3, 2, 1), ConvolutionalField(16), nn.Linear(16, 10)


def ode_net(library: Any, iterations: int) -> Outcome:
    """An ODE-Net that classifies small images, with the adjoint and loose tolerances."""
    torch.manual_seed(2)
    model, images, labels = ImageClassifier(), torch.randn(32, 1, 14, 14), torch.randint(0, 10, (32,))

    def loss(i: int) -> Tensor:
        ends = library.odeint_adjoint(model.field, model.into(images), torch.tensor([0.0, 1.0]), rtol=1e-3, atol=1e-3)
        return functional.cross_entropy(model.out(ends[-1].mean((2, 3))), labels)

    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Outcome(train(model, loss, iterations, optimiser=optimiser), model.field.nfe)


class FlowField(Counted):
    """A continuous normalising flow in the plane with the exact trace."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.nfe += 1
        with torch.enable_grad():
            z = state[0] if state[0].requires_grad else state[0].requires_grad_()
            dz = self.net(torch.cat([z, torch.ones_like(z[:, :1]) * t], 1))
            rows = [torch.autograd.grad(dz[:, i].sum(), z, create_graph=True)[0][:, i] for i in range(2)]
        return dz, -(rows[0] + rows[1]).reshape(-1, 1)


def ffjord(library: Any, iterations: int) -> Outcome:
    """A toy density by a continuous normalising flow: tuple states and the adjoint."""
    torch.manual_seed(3)
    field = FlowField()
    angles = 6.28 * torch.rand(64)
    points = torch.stack([torch.cos(angles), torch.sin(angles)], -1) * (1.0 + 0.1 * torch.randn(64, 1))

    def loss(i: int) -> Tensor:
        z, change = library.odeint_adjoint(
            field, (points, torch.zeros(64, 1)), torch.tensor([1.0, 0.0]), rtol=1e-5, atol=1e-5, method="dopri5"
        )
        normal = -0.5 * z[-1].square().sum(-1, keepdim=True) - 1.8378770664
        return -(normal - change[-1]).mean()

    return Outcome(train(field, loss, iterations), field.nfe)


class Ball(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.gravity = nn.Parameter(torch.tensor([9.0], dtype=torch.float64))
        self.bounce = nn.Parameter(torch.tensor([0.8], dtype=torch.float64))

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.nfe += 1
        return state[1], -self.gravity * torch.ones_like(state[1])


def bouncing_ball(library: Any, iterations: int) -> Outcome:
    """Learn gravity and restitution from the times of three bounces: events with gradients."""
    field = Ball()

    def loss(i: int) -> Tensor:
        t, state = torch.tensor(0.0, dtype=torch.float64), tuple(
            torch.tensor([x], dtype=torch.float64) for x in (10.0, 0.0)
        )  # fmt: skip
        found = []
        for _ in range(3):
            t, (height, speed) = library.odeint_event(
                field, state, t, event_fn=lambda t, y: y[0], odeint_interface=library.odeint_adjoint,
                rtol=1e-8, atol=1e-8,
            )  # fmt: skip
            state = height[-1] + 1e-7, -speed[-1] * field.bounce
            found.append(t.reshape(()))
        return (torch.stack(found) - torch.tensor([1.43, 4.0, 6.3], dtype=torch.float64)).square().sum()

    return Outcome(train(field, loss, iterations, 1e-2), field.nfe)


class Physics(Counted):
    """A predator and its prey, of unknown rates."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.tensor([1.2, 0.8, 2.5, 0.9], dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        a, b, c, d = self.rates
        return torch.stack([y[..., 0] * (a - b * y[..., 1]), -y[..., 1] * (c - d * y[..., 0])], -1)


def learned_physics(library: Any, iterations: int) -> Outcome:
    """Estimate the rates of a predator–prey system from measurements, with `odeint`."""
    field, times = Physics(), torch.linspace(0.0, 4.0, 20, dtype=torch.float64)
    truth = Physics()
    truth.rates.data = torch.tensor([1.5, 1.0, 3.0, 1.0], dtype=torch.float64)
    start = torch.tensor([[1.0, 1.0], [2.0, 0.7]], dtype=torch.float64)
    with torch.no_grad():
        measured = library.odeint(truth, start, times, rtol=1e-8, atol=1e-8)

    def loss(i: int) -> Tensor:
        return functional.mse_loss(library.odeint(field, start, times, rtol=1e-6, atol=1e-8), measured)

    return Outcome(train(field, loss, iterations, 1e-2), field.nfe)


class Hamiltonian(Counted):
    """q′ = ∂H/∂p, p′ = −∂H/∂q for a learned H."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        with torch.enable_grad():
            y = y if y.requires_grad else y.requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(y).sum(), y, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], -1)


def symplectic_net(library: Any, iterations: int) -> Outcome:
    """A Symplectic ODE-Net of a pendulum, on the grid of the data with `rk4` and the adjoint."""
    torch.manual_seed(4)
    field, times = Hamiltonian(), torch.linspace(0.0, 1.0, 11)
    angle = torch.rand(32, 1) * 2.0
    data = torch.stack([angle * torch.cos(times), -angle * torch.sin(times)], -1).transpose(0, 1).contiguous()

    def loss(i: int) -> Tensor:
        return functional.mse_loss(library.odeint_adjoint(field, data[0], times, method="rk4"), data)

    return Outcome(train(field, loss, iterations), field.nfe)


class Velocity(Counted):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(size + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, size)
        )

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(torch.cat([y, t.expand(len(y), 1)], 1))


def flow_matching(library: Any, iterations: int) -> Outcome:
    """Sample from a flow-matching model: Euler and midpoint steps without gradients."""
    torch.manual_seed(5)
    field, times = Velocity(16, 256), torch.linspace(0.0, 1.0, 51)
    found = []
    with torch.no_grad():
        for _ in range(iterations):
            noise = torch.randn(256, 16)
            found.append(library.odeint(field, noise, times, method="euler")[-1])
            found.append(library.odeint(field, noise, times[::10], method="midpoint", options={"step_size": 0.04})[-1])
    return Outcome(found, field.nfe)


#: The programs by name.
PROGRAMS: dict[str, Program] = {
    "spiral": spiral,
    "latent ODE": latent_ode,
    "ODE-Net": ode_net,
    "FFJORD": ffjord,
    "bouncing ball": bouncing_ball,
    "learned physics": learned_physics,
    "Symplectic ODE-Net": symplectic_net,
    "flow matching": flow_matching,
}

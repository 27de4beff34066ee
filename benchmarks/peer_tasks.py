"""The benchmark problems of other libraries, defined from their public descriptions.

`diffrax_task` is diffrax's small neural ODE, `spiral_task` the spiral of SciMLSensitivity, `reversible_task` the double
pendulum on which McCallum and Foster (2024) compare reversible solvers with checkpointing, and `sampling_task` the
sampling of a flow-matching network, which has no gradient. torchode's van der Pol loop is in `benchmarks.batched`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from seminode_lab.models.pendulum import TORQUES, trajectories

from .problems import GradientProblem, mlp, normal
from .tasks import Task, of_problem


class LayersField(nn.Module):
    """y′ = net(y)."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def inference(field: nn.Module, y0: Tensor, ts: Tensor, tolerance: float) -> Task:
    """The outputs of a solve after the initial value, without a gradient."""
    return Task(
        modules=nn.ModuleList([field]),
        start=lambda: y0,
        through=lambda start, solve: solve(field, start, ts)[1:],
        rtol=tolerance,
        atol=tolerance,
        data={"y0": y0, "ts": ts},
        differentiate=False,
    )


def diffrax_task(
    outputs: int = 1,
    differentiate: bool = True,
    batch: int = 64,
    width: int = 32,
    end: float = 100.0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """A network of 4-32-4 with softplus inside and tanh outside; rtol = atol = 1e-6. The loss is the mean of outputs.

    Its square is taken, so that the gradient depends on the solution.
    """
    generator = torch.Generator().manual_seed(0)
    field = LayersField(nn.Sequential(mlp((4, width, 4), nn.Softplus, generator), nn.Tanh())).to(dtype)
    y0 = normal((batch, 4), generator).to(dtype)
    ts = torch.linspace(0.0, end, outputs + 1, dtype=torch.float64)
    if not differentiate:
        return inference(field, y0, ts, 1e-6)
    problem = GradientProblem(
        field=field,
        start=lambda: y0,
        ts=ts,
        loss=lambda ys: ys[1:].square().mean(),
        modules=nn.ModuleList([field]),
        rtol=1e-6,
        atol=1e-6,
        data={"y0": y0},
    )
    return of_problem(problem)


class CubicField(nn.Module):
    """y′ = W₂ tanh(W₁ y³ + b₁) + b₂."""

    def __init__(self, width: int, generator: torch.Generator):
        super().__init__()
        self.net = mlp((2, width, 2), nn.Tanh, generator)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y * y * y)


def spiral_data(ts: Tensor) -> Tensor:
    """y′ = (y³)ᵀ A from (2, 0) with A = [[−0.1, 2], [−2, −0.1]], by many steps of the classical method."""
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]], dtype=torch.float64)
    slope = lambda y: y**3 @ matrix
    y = torch.tensor([2.0, 0.0], dtype=torch.float64)
    ys = [y]
    for length in ts.diff().tolist():
        h = length / 64
        for _ in range(64):
            k1 = slope(y)
            k2 = slope(y + 0.5 * h * k1)
            k3 = slope(y + 0.5 * h * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + h * k3))
        ys.append(y)
    return torch.stack(ys)


def spiral_task(width: int = 50, outputs: int = 30, dtype: torch.dtype = torch.float32) -> Task:
    """One trajectory from (2, 0) with 30 outputs on [0, 1.5]; squared distance from the true spiral.

    The tolerances are the defaults of the Julia solvers, 1e-3 and 1e-6.
    """
    field = CubicField(width, torch.Generator().manual_seed(0)).to(dtype)
    ts = torch.linspace(0.0, 1.5, outputs, dtype=torch.float64)
    targets = spiral_data(ts).to(dtype)
    y0 = torch.tensor([2.0, 0.0], dtype=dtype)
    problem = GradientProblem(
        field=field,
        start=lambda: y0,
        ts=ts,
        loss=lambda ys: (ys - targets).square().sum(),
        modules=nn.ModuleList([field]),
        rtol=1e-3,
        atol=1e-6,
        data={"y0": y0, "targets": targets},
    )
    return of_problem(problem)


def steep(net: nn.Sequential, factor: float = 10.0) -> nn.Sequential:
    """The network with a larger last layer: as initialised, it is so flat that steps of any size are accurate."""
    with torch.no_grad():
        for parameter in net[-1].parameters():
            parameter.mul_(factor)
    return net


class RotatingField(nn.Module):
    """Two angles as (cos q, sin q, q′): the angles turn as q′ says, and a network gives the accelerations."""

    def __init__(self, width: int, generator: torch.Generator):
        super().__init__()
        self.net = mlp((6, width, width, 2), nn.Tanh, generator)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        cos, sin, w = y[..., :2], y[..., 2:4], y[..., 4:]
        return torch.cat((-sin * w, cos * w, self.net(y)), -1)


def reversible_task(
    batch: int = 16, width: int = 32, outputs: int = 20, end: float = 20.0, dtype: torch.dtype = torch.float32
) -> Task:
    """Double pendulums from states of the paper's data; the settings take 1,000 steps of bosh3.

    With 44 checkpoints no step out of 1,000 is recomputed more than twice. The network is ours, and so is the loss, the
    mean squared distance of the outputs from random numbers.
    """
    generator = torch.Generator().manual_seed(0)
    field = RotatingField(width, generator).to(dtype)
    y0 = trajectories(-(-batch // len(TORQUES)), 1).flatten(0, 2)[:batch, :6].to(dtype).contiguous()
    targets = normal((outputs + 1, batch, 6), generator).to(dtype)
    problem = GradientProblem(
        field=field,
        start=lambda: y0,
        ts=torch.linspace(0.0, end, outputs + 1, dtype=torch.float64),
        loss=lambda ys: (ys - targets).square().mean(),
        modules=nn.ModuleList([field]),
        rtol=1e-4,
        atol=1e-4,
        data={"y0": y0, "targets": targets},
    )
    return of_problem(problem)


class VelocityField(nn.Module):
    """A flow-matching network, y′ = net(y, time features), with SiLU and sines and cosines of the time."""

    frequencies: Tensor

    def __init__(self, size: int, width: int, depth: int, generator: torch.Generator):
        super().__init__()
        self.net = steep(mlp((size + 8, *depth * (width,), size), nn.SiLU, generator))
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(4, dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        phase = t * self.frequencies
        features = torch.cat((phase.sin(), phase.cos())).to(y).expand(*y.shape[:-1], 8)
        return self.net(torch.cat((y, features), -1))


def sampling_task(
    batch: int = 256,
    size: int = 2,
    width: int = 64,
    depth: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Samples at t = 1 from a standard normal at t = 0; 50 fixed steps, which the settings choose."""
    generator = torch.Generator().manual_seed(0)
    field = VelocityField(size, width, depth, generator).to(dtype)
    y0 = normal((batch, size), generator).to(dtype)
    return inference(field, y0, torch.tensor([0.0, 1.0], dtype=torch.float64), 1e-3)

"""The tasks of the race: scalar losses, to be differentiated with respect to all parameters and the initial value.

A task receives the function that solves, so one definition works with every PyTorch library. It may call the function
several times, as a flow of several blocks does. Weights and data are drawn in float64 from seeds and rounded; `arrays`
passes the same numbers to other processes and to JAX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .problems import (
    GradientProblem,
    SymplecticField,
    cde_problem,
    mlp,
    normal,
    pendulum_batch,
    pendulum_problem,
)

#: (field, y0, ts) to the outputs at all ts, in the structure of y0.
Solve = Callable[[nn.Module, Any, Tensor], Any]


@dataclass(frozen=True, eq=False)
class Task:
    """The loss `through(start(), solve)`, a function of `modules.parameters()` and of the leaves of the initial value.

    `data` holds the other tensors that define the task, for implementations in other libraries. With
    `differentiate=False` the task is inference: `through` returns outputs instead of a loss, without a gradient.
    """

    modules: nn.ModuleList
    start: Callable[[], Any]
    through: Callable[[Any, Solve], Tensor]
    rtol: float
    atol: float
    jumps: Tensor | None = None
    data: Mapping[str, Tensor] = field(default_factory=dict)
    differentiate: bool = True

    def leaves(self) -> tuple[Any, list[Tensor]]:
        """An initial value and its tensors, which require gradients even if the initial value is constant."""
        y0 = self.start()
        tensors = [y0] if isinstance(y0, Tensor) else list(y0)
        tensors = [x if x.requires_grad else x.detach().requires_grad_() for x in tensors]
        return (tensors[0] if isinstance(y0, Tensor) else tuple(tensors)), tensors


def gradient(task: Task, solve: Solve) -> Tensor:
    """What the race compares: the flat gradient of the loss, or the flat outputs of a task without one."""
    if not task.differentiate:
        with torch.no_grad():
            return task.through(task.start(), solve).flatten()
    y0, leaves = task.leaves()
    inputs = [*task.modules.parameters(), *leaves]
    grads = torch.autograd.grad(task.through(y0, solve), inputs, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def arrays(task: Task) -> dict[str, np.ndarray]:
    """All arrays of a task by name, the parameters in the order of the gradient."""
    named = {f"parameter:{name}": value for name, value in task.modules.named_parameters()}
    named |= {f"data:{name}": value for name, value in task.data.items()}
    if task.jumps is not None:
        named["data:jumps"] = task.jumps
    return {name: value.detach().numpy() for name, value in named.items()}


def load(task: Task, values: Mapping[str, np.ndarray]) -> Task:
    """Copy the parameters of `arrays` into the task, and return it."""
    with torch.no_grad():
        for name, parameter in task.modules.named_parameters():
            parameter.copy_(torch.from_numpy(values[f"parameter:{name}"]))
    return task


def digest(task: Task) -> str:
    """A hash of the numbers of a task, for the names of cached files."""
    sha = hashlib.sha256(repr((task.rtol, task.atol)).encode())
    for name, value in arrays(task).items():
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(value).tobytes())
    return sha.hexdigest()[:16]


def of_problem(problem: GradientProblem) -> Task:
    """The task of a problem with one solve."""
    return Task(
        modules=problem.modules,
        start=problem.start,
        through=lambda y0, solve: problem.loss(solve(problem.field, y0, problem.ts)),
        rtol=problem.rtol,
        atol=problem.atol,
        jumps=problem.jumps,
        data={"ts": problem.ts, **problem.data},
    )


class TanhField(nn.Module):
    """A typical small neural ODE, y′ = W₃ tanh(W₂ tanh(W₁ y + b₁) + b₂) + b₃."""

    def __init__(self, channels: int, width: int, generator: torch.Generator):
        super().__init__()
        self.net = mlp((channels, width, width, channels), nn.Tanh, generator)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def small_task(
    batch: int = 256, channels: int = 4, width: int = 32, end: float = 10.0, dtype: torch.dtype = torch.float32
) -> Task:
    """A small neural ODE; the loss is the mean square at the end."""
    generator = torch.Generator().manual_seed(0)
    field = TanhField(channels, width, generator).to(dtype)
    y0 = normal((batch, channels), generator).to(dtype)
    problem = GradientProblem(
        field=field,
        start=lambda: y0,
        ts=torch.tensor([0.0, end], dtype=torch.float64),
        loss=lambda ys: ys[-1].square().mean(),
        modules=nn.ModuleList([field]),
        rtol=1e-3,
        atol=1e-6,
        data={"y0": y0},
    )
    return of_problem(problem)


def cde_task(batch: int = 256, dtype: torch.dtype = torch.float32, **sizes: int) -> Task:
    """The neural CDE of the paper on random series; its field is discontinuous at the knots."""
    return of_problem(cde_problem(batch, dtype=dtype, **sizes))


def pendulum_task(
    batch: int = 256,
    trials: int = 16,
    widths: tuple[int, int] = (400, 300),
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The Symplectic ODE-Net of the paper with its initial parameters."""
    windows = pendulum_batch(batch, trials=trials, dtype=dtype)
    return of_problem(pendulum_problem(SymplecticField(widths, dtype=dtype), windows))

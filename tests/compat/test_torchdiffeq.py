"""The drop-in for torchdiffeq: the same evaluations and results as the original, forward and backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchdiffeq as original
from torch import Tensor, nn
from torch.nn import functional as F

import seminode as sn
import seminode.compat.torchdiffeq as ours

DOUBLE = torch.float64


class Net(nn.Module):
    """A network of the state and the time that notes when it is evaluated."""

    def __init__(self, seed: int, size: int = 3, stretch: float = 1.0, dtype: torch.dtype = DOUBLE):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: nn.Parameter(
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / shape[-1] ** 0.5
        )
        self.first, self.bias, self.last = draw(12, size), draw(12), draw(size, 12)
        self.stretch = stretch
        self.times: list[float] = []

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t))
        return self.stretch * torch.tanh(y @ self.first.T + self.bias * torch.cos(2 * t)) @ self.last.T


class Predation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.tensor([1.5, 1.0, 3.0, 1.0], dtype=DOUBLE))
        self.times: list[float] = []

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t))
        a, b, c, d = self.rates
        return torch.stack([y[..., 0] * (a - b * y[..., 1]), -y[..., 1] * (c - d * y[..., 0])], -1)


class Oscillator(nn.Module):
    """A van der Pol oscillator with a driving force."""

    def __init__(self, mu: float):
        super().__init__()
        self.mu = nn.Parameter(torch.tensor(mu, dtype=DOUBLE))
        self.times: list[float] = []

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t))
        x, v = y[..., 0], y[..., 1]
        return torch.stack([v, self.mu * (1 - x**2) * v - x + 0.3 * torch.sin(1.7 * t)], -1)


class Pair(nn.Module):
    """A tuple: a state, and the running cost of it."""

    def __init__(self, seed: int):
        super().__init__()
        self.net = Net(seed)

    @property
    def times(self) -> list[float]:
        return self.net.times

    def forward(self, t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        f = self.net(t, y[0])
        return f, f.square().sum(-1)


class Problem(NamedTuple):
    field: Callable[[], Any]
    y0: Any
    t: Tensor
    rtol: float = 1e-5
    atol: float = 1e-7


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def times(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


PROBLEMS: dict[str, Problem] = {
    **{f"net{s}": Problem(lambda s=s: Net(s), drawn(s, 4, 3), times(0.0, 1.0, 1.3, 2.0)) for s in range(6)},
    **{f"back{s}": Problem(lambda s=s: Net(s), drawn(s, 2, 3), times(2.0, 0.7, 0.0), 1e-6, 1e-8) for s in range(3)},
    **{f"wild{s}": Problem(lambda s=s: Net(s, stretch=3.0), drawn(s, 5, 3), times(0.0, 1.5), 1e-4) for s in range(3)},
    "wide": Problem(lambda: Net(7, size=20), drawn(7, 3, 20), times(0.0, 0.5, 1.0)),
    "predation": Problem(Predation, torch.tensor([1.0, 1.0], dtype=DOUBLE), times(0.0, 1.0, 2.0, 3.0)),
    "predations": Problem(Predation, 1.0 + drawn(3, 4, 2).square(), times(0.0, 2.0), 1e-4, 1e-6),
    "mild": Problem(lambda: Oscillator(1.0), torch.tensor([2.0, 0.0], dtype=DOUBLE), times(0.0, 1.0, 4.0)),
    "stiffer": Problem(lambda: Oscillator(5.0), torch.tensor([2.0, 0.0], dtype=DOUBLE), times(0.0, 1.5), 1e-4),
    **{
        f"pair{s}": Problem(lambda s=s: Pair(s), (drawn(s, 4, 3), torch.zeros(4, dtype=DOUBLE)), times(0.0, 1.0, 2.0))
        for s in range(3)
    },
}

ADAPTIVE = ["dopri5", "bosh3", "dopri8", "adaptive_heun", "fehlberg2"]
ON_GRID = ["euler", "midpoint", "heun2", "heun3", "rk4"]


def start(problem: Problem) -> Any:
    if isinstance(problem.y0, tuple):
        return tuple(x.clone().requires_grad_() for x in problem.y0)
    return problem.y0.clone().requires_grad_()


def leaves(y: Any) -> list[Tensor]:
    return list(y) if isinstance(y, tuple) else [y]


class Run(NamedTuple):
    forward: list[float]
    backward: list[float]
    ys: list[Tensor]
    grads: list[Tensor]


def run(library: Any, problem: Problem, adjoint: bool, **options: Any) -> Run:
    """Solve and differentiate; the times of all evaluations."""
    field, y0 = problem.field(), start(problem)
    solve = library.odeint_adjoint if adjoint else library.odeint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.DriftWarning)
        ys = leaves(solve(field, y0, problem.t, **options))
        forward = list(field.times)
        field.times.clear()
        loss = sum((y * (1.0 + i)).square().mean() for i, y in enumerate(ys))
        grads = torch.autograd.grad(loss, [*leaves(y0), *field.parameters()])
    return Run(forward, list(field.times), ys, list(grads))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    x, y = (torch.cat([each.detach().reshape(-1) for each in many]) for many in (a, b))
    return float((x - y).norm() / y.norm())


def tolerances(problem: Problem) -> dict[str, float]:
    return {"rtol": problem.rtol, "atol": problem.atol}


def test_there_are_twenty_problems() -> None:
    assert len(PROBLEMS) == 20


@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.parametrize("name", PROBLEMS)
def test_adaptive_solves_cost_what_they_cost_in_torchdiffeq(name: str, method: str) -> None:
    problem = PROBLEMS[name]
    if method in ("adaptive_heun", "fehlberg2"):  # of order 2
        problem = problem._replace(rtol=1e-3, atol=1e-4)
    options = {"method": method, **tolerances(problem)}
    theirs, found = (run(library, problem, False, **options) for library in (original, ours))
    assert len(found.forward) <= len(theirs.forward)
    assert method == "dopri8" or len(found.forward) == len(theirs.forward)
    assert distance(found.ys, theirs.ys) < 1e-7
    assert distance(found.grads, theirs.grads) < 1e-6
    for norm in (None, "seminorm"):
        settings = {**options, "adjoint_options": {} if norm is None else {"norm": norm}}
        theirs, found = (run(library, problem, True, **settings) for library in (original, ours))
        assert len(found.forward) <= len(theirs.forward)
        assert len(found.backward) <= len(theirs.backward)
        assert method == "dopri8" or len(found.backward) == len(theirs.backward)
        assert distance(found.grads, theirs.grads) < 1e-4


@pytest.mark.parametrize("perturb", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ON_GRID)
def test_grids_are_evaluated_at_the_same_times_to_the_last_bit(method: str, dtype: torch.dtype, perturb: bool) -> None:
    for t in (times(0.1, 0.4, 1.3), times(2.0, 0.7, 0.1, 0.0), torch.linspace(0, 3, 11)):
        for options in ({}, {"step_size": 0.1}, {"step_size": 0.07}, {"interp": "cubic"}):
            problem = Problem(lambda: Net(1, dtype=dtype), drawn(1, 4, 3).to(dtype), t.to(dtype))
            settings = {"method": method, "options": {**options, "perturb": perturb}}
            for adjoint in (False, True):
                theirs, found = (run(library, problem, adjoint, **settings) for library in (original, ours))
                if "interp" in options:  # the slope at an output is evaluated for each output, even on the grid
                    assert set(found.forward) <= set(theirs.forward)
                else:
                    assert found.forward == theirs.forward
                    assert found.backward == theirs.backward
                assert distance(found.ys, theirs.ys) < 50 * torch.finfo(dtype).eps
                assert distance(found.grads, theirs.grads) < 1e4 * torch.finfo(dtype).eps

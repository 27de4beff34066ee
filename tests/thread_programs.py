"""What other processes run for `test_threads`."""

from __future__ import annotations

import math
from typing import Any

import torch
from compiled import run_graph
from torch import Tensor
from torch.utils.data import Dataset

import seminode as sn
from seminode._compile import inductor

#: e⁻¹: eagerly, compiled, and by a random field whose numbers have no effect; then a gradient, −e⁻¹.
EXPECTED = [math.exp(-1.0)] * 3 + [-math.exp(-1.0)]


def solve_all() -> list[float]:
    inductor.back_end = run_graph
    y0, rate = torch.ones(1, dtype=torch.float64), torch.ones((), dtype=torch.float64, requires_grad=True)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return -rate * y

    def random(t: Tensor, y: Tensor) -> Tensor:
        return -y + 0.0 * torch.randn(1, dtype=y.dtype)

    solutions = [sn.solve(field, y0, [0.0, 1.0], rtol=1e-9, atol=1e-9, compile=c) for c in (False, True)]
    solutions.append(sn.solve(random, y0, [0.0, 1.0], rtol=1e-9, atol=1e-9))
    solutions[1].ys[-1].sum().backward()
    assert rate.grad is not None
    return [*(float(sol.ys[-1]) for sol in solutions), float(rate.grad)]


def solve_and_send(connection: Any) -> None:
    try:
        connection.send(solve_all())
    except BaseException as error:  # whatever it is, the parent should not wait for it
        connection.send(repr(error))


class Solves(Dataset[tuple[Tensor, Tensor]]):
    """Item i is the end of y′ = −r·y for a rate r that the field draws, and the rate."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        state = torch.get_rng_state()
        sol = sn.solve(lambda t, y: -torch.rand(1) * y, torch.ones(1), [0.0, 1.0], rtol=1e-6, atol=1e-6)
        torch.set_rng_state(state)
        return sol.ys[-1], torch.rand(1)

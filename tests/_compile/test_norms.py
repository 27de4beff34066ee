"""Norms that a user has written: programs do not contain them, since they may read what changes between solves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import replace_back_end, run_graph
from torch import Tensor

import seminode as sn

D = torch.float64
TOLERANCES: dict[str, Any] = {"solver": "adaptive_heun", "rtol": 1e-3, "atol": 1e-3}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that were made."""
    modules: list[Any] = []
    replace_back_end(monkeypatch, lambda module, examples: modules.append(module) or run_graph(module, examples))
    return modules


class Weighted:
    """A norm with values that change."""

    weight: Any = 1.0

    def __call__(self, y: Tensor) -> Tensor:
        return (self.weight * y).abs().max()


def field(t: Tensor, y: Tensor) -> Tensor:
    return -y.sin()


def solved(compile: bool, norm: Any, n: int = 6, **options: Any) -> tuple[int, list[Tensor]]:
    y0 = torch.linspace(0.5, 1.0, 2 * n, dtype=D).reshape(n, 2).requires_grad_()
    sol = sn.solve(field, y0, [0.0, 0.4, 1.0], norm=norm, compile=compile, **TOLERANCES, **options)
    sol.ys.square().sum().backward()
    assert y0.grad is not None
    return sol.stats.accepted, [sol.ys.detach(), y0.grad]


@pytest.mark.parametrize(
    "options", [{}, {"adjoint": sn.Direct()}, {"batched": True}], ids=["replay", "direct", "batched"]
)
def test_what_a_norm_reads_may_change(options: dict[str, Any], made: list[Any]) -> None:
    norm, counts = Weighted(), []
    for weight in (1.0, 100.0, torch.full((2,), 0.01, dtype=D)):
        norm.weight = weight
        compiled, eager = (solved(each, norm, **options) for each in (True, False))
        assert compiled[0] == eager[0]
        torch.testing.assert_close(compiled[1], eager[1], rtol=1e-11, atol=1e-11)
        counts.append(compiled[0])
    assert counts[2] < counts[0] < counts[1]
    assert made


def test_what_the_norm_of_a_backward_pass_reads_may_change(made: list[Any]) -> None:
    norm, counts = Weighted(), []
    adjoint = sn.Backsolve(norm=sn.norms.Reading(lambda y: norm(y.a_z)))
    for weight in (1.0, 1000.0):
        norm.weight = weight
        y0 = torch.ones(6, 2, dtype=D, requires_grad=True)
        steps = []
        for each in (True, False):
            sol = sn.solve(field, y0, [0.0, 1.0], adjoint=adjoint, compile=each, **TOLERANCES)
            sol.ys[-1].sum().backward()
            assert sol.stats.backward is not None
            steps.append(sol.stats.backward.accepted)
        assert steps[0] == steps[1]
        counts.append(steps[0])
    assert counts[0] < counts[1]
    assert made


def test_a_new_function_is_no_new_program(made: list[Any]) -> None:
    for n in (6, 9):
        solved(True, lambda y: y.abs().max(), n)
    before = len(made)
    for n in (6, 9, 7, 6):
        solved(True, lambda y: 2.0 * y.abs().max(), n)
    assert len(made) == before > 0

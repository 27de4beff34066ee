"""Compiled `Direct`: every step is differentiated with its own activations, also if the loss ends before the solve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor

import seminode as sn

D = torch.float64


def gradient(compiled: bool, output: int, **options: Any) -> Tensor:
    rate = torch.tensor(0.3, dtype=D, requires_grad=True)
    y0 = torch.tensor([1.0, 2.0], dtype=D)
    sol = sn.solve(lambda t, y: -rate * y * y.sin(), y0, adjoint=sn.Direct(), compile=compiled, **options)
    return torch.autograd.grad(sol.ys[output].sum(), rate)[0]


@pytest.mark.parametrize(
    ("output", "options"),
    [
        (2, {"ts": [0.0, 5.0], "save": "steps"}),
        (1, {"ts": [0.0, 0.5, 5.0]}),
        (1, {"ts": [0.0, 0.5, 50.0], "throw": False, "max_steps": 10}),
    ],
    ids=["steps", "times", "partial"],
)
def test_a_loss_that_ends_before_the_solve(monkeypatch: pytest.MonkeyPatch, output: int, options: Any) -> None:
    replace_back_end(monkeypatch)
    torch.testing.assert_close(gradient(True, output, **options), gradient(False, output, **options))

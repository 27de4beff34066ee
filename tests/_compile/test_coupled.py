"""Compiled steps of reversible solvers, and compiled VJPs that undo them, against eager ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor

import seminode as sn
from seminode._compile.programs import pieces

D = torch.float64
RK: dict[str, Any] = {"solver": sn.ReversibleRK("bosh3", coupling=0.99), "rtol": 1e-6, "atol": 1e-8}
HEUN: dict[str, Any] = {"solver": "reversible_heun", "rtol": 1e-4, "atol": 1e-6}
FIXED: dict[str, Any] = {"solver": "reversible_heun", "controller": sn.FixedStep(0.1)}


def solved(compiled: bool, adjoint: Any, output: Any = slice(None), **options: Any) -> tuple[list[Tensor], sn.Solution]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    y0 = torch.linspace(-1.0, 1.0, 6, dtype=D).reshape(2, 3).requires_grad_()
    scale = torch.tensor(0.7, dtype=D, requires_grad=True)

    def field(t: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return scale * layers(y).roll(1, -1) * torch.cos(2 * t)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs eagerly in silence
        sol = sn.solve(field, y0, args=(scale,), adjoint=adjoint, compile=compiled, **options)
    inputs = [y0, scale, *layers.parameters()]
    return list(torch.autograd.grad(sol.ys[output].square().sum(), inputs)), sol


@pytest.mark.parametrize(
    "options",
    [
        RK | {"ts": [0.0, 1.0], "save": "last"},
        RK | {"ts": [0.0, 0.3, 0.31, 1.0]},
        RK | {"ts": [1.0, 0.0], "jumps": [0.5], "save": "steps"},
        HEUN | {"ts": [0.0, 1.0], "save": "last"},
        HEUN | {"ts": [0.0, 0.25, 1.0], "output": 1},
        FIXED | {"ts": [0.0, 0.5, 1.0]},
    ],
    ids=["rk", "rk times", "rk steps", "heun", "heun before the end", "heun fixed"],
)
def test_as_eagerly(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    replace_back_end(monkeypatch)
    expected, eager = solved(False, sn.Reversible(), **options)
    found, sol = solved(True, sn.Reversible(), **options)
    torch.testing.assert_close(sol.ys, eager.ys, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    assert (sol.stats.nfe, sol.stats.accepted) == (eager.stats.nfe, eager.stats.accepted)
    assert sol.stats.backward is not None
    assert eager.stats.backward is not None
    assert sol.stats.backward.vjp_y == eager.stats.backward.vjp_y
    # A step that has an output at its end only is undone and differentiated at once.
    assert sol.stats.backward.nfe <= eager.stats.backward.nfe


def test_each_evaluation_serves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    _, sol = solved(True, sn.Reversible(), ts=[0.0, 1.0], save="last", **RK)
    stats = sol.stats.backward
    assert stats is not None
    assert stats.nfe == stats.vjp_y == stats.vjp_params == 6 * stats.accepted == 6 * sol.stats.accepted


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Checkpointed(2), sn.Direct()], ids=str)
def test_other_adjoints(monkeypatch: pytest.MonkeyPatch, adjoint: Any) -> None:
    """The forward pass is compiled; steps are differentiated eagerly."""
    replace_back_end(monkeypatch)
    options = FIXED | {"ts": [0.0, 0.25, 1.0]}
    expected, _ = solved(False, sn.Direct(), **options)
    found, _ = solved(True, adjoint, **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_large_fields_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    monkeypatch.setattr(pieces, "LARGE", 0)
    options = FIXED | {"ts": [0.0, 0.25, 1.0]}
    torch.testing.assert_close(
        solved(True, sn.Reversible(), **options)[0], solved(False, sn.Reversible(), **options)[0], rtol=1e-9, atol=1e-10
    )


def test_a_program_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: Any, examples: Any) -> Any:
        raise RuntimeError("no compiler")

    replace_back_end(monkeypatch, fails)
    y0 = torch.ones(2, dtype=D, requires_grad=True)
    with pytest.warns(sn.CompileWarning, match="no compiler"):
        sol = sn.solve(lambda t, y: -y.sin(), y0, [0.0, 1.0], adjoint=sn.Reversible(), compile=True, **FIXED)
    with pytest.warns(sn.CompileWarning, match="no compiler"):
        (found,) = torch.autograd.grad(sol.ys[-1].sum(), y0)
    sol = sn.solve(lambda t, y: -y.sin(), y0, [0.0, 1.0], adjoint=sn.Direct(), **FIXED)
    torch.testing.assert_close(found, torch.autograd.grad(sol.ys[-1].sum(), y0)[0], rtol=1e-10, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("options", [RK, HEUN], ids=["rk", "heun"])
def test_with_the_compiler(options: dict[str, Any]) -> None:
    options = options | {"ts": [0.0, 0.4, 1.0]}
    expected, _ = solved(False, sn.Reversible(), **options)
    found, _ = solved(True, sn.Reversible(), **options)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)

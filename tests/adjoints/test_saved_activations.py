"""Compiled `Direct`: every step is differentiated with its own activations, also if the loss ends before the solve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor, nn

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


def network() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    # Square layers: activations and parameters of one shape do not give a mistake away.
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(D)
    return net, torch.randn(3, 3, dtype=D, requires_grad=True)


@pytest.mark.parametrize("later", [(), ("0.weight",), ("0.weight", "0.bias", "2.weight", "2.bias")])
@pytest.mark.parametrize("ts", [[0.0, 1.0], [0.0, 0.3, 1.0]], ids=["ends", "inside"])
def test_parameters_that_are_frozen_after_the_solve(
    monkeypatch: pytest.MonkeyPatch, later: tuple[str, ...], ts: list[float]
) -> None:
    """The backward pass reads the activations by the programs that have kept them, whatever is frozen since."""
    replace_back_end(monkeypatch)
    net, y0 = network()
    wanted = [y0, net[2].weight, net[2].bias]

    def gradients(compiled: bool) -> tuple[Tensor, ...]:
        net.requires_grad_(True)
        net[0].bias.requires_grad_(False)
        sol = sn.solve(lambda t, y: net(y), y0, ts, adjoint=sn.Direct(), compile=compiled)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name == "0.bias" or name not in later)
        return torch.autograd.grad(sol.ys.square().sum(), wanted[: 1 if "2.weight" in later else 3])

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("error::seminode.CompileWarning")
@pytest.mark.parametrize("solver", ["dopri5", "tsit5", "bosh3"])
def test_a_last_step_that_runs_past_the_end(monkeypatch: pytest.MonkeyPatch, solver: Any) -> None:
    """The only output is then inside of a step, and reads its slopes."""
    replace_back_end(monkeypatch)
    options = {"solver": solver, "controller": sn.Integral(land=False), "ts": [0.0, 1.0]}
    torch.testing.assert_close(gradient(True, 1, **options), gradient(False, 1, **options))


@pytest.mark.parametrize("params", [False, True], ids=["all", "chosen"])
def test_a_parameter_that_is_changed_after_the_solve(monkeypatch: pytest.MonkeyPatch, params: bool) -> None:
    """Autograd notices, also if the parameter is not one of those that get gradients."""
    replace_back_end(monkeypatch)
    net, y0 = network()
    chosen: Any = {"params": [net[0].weight]} if params else {}
    sol = sn.solve(lambda t, y: net(y), y0, [0.0, 3.0], adjoint=sn.Direct(), compile=True, **chosen)
    with torch.no_grad():
        torch.nn.init.ones_(net.get_parameter("2.weight"))
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        sol.ys[-1].sum().backward()


def test_a_second_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    net, y0 = network()
    sol = sn.solve(lambda t, y: net(y), y0, [0.0, 1.0], adjoint=sn.Direct(), compile=True)
    first, second = (torch.autograd.grad(sol.ys[-1].sum(), [y0, *net.parameters()], retain_graph=True) for _ in "12")
    assert all(map(torch.equal, first, second))

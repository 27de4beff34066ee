"""What a type checker infers for calls of the public interface; `test_types.py` runs pyright on this file."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import assert_type

import seminode as sn
from seminode.models import CNF, NeuralCDE, NeuralODE, OTFlow
from seminode.solve import SolveOptions


class Body(NamedTuple):
    q: Tensor
    p: Tensor


def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


def rotation(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return y[1], -y[0]


def oscillator(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"q": y["p"], "p": -y["q"]}


def fall(t: Tensor, y: Body) -> Body:
    return Body(y.p, -torch.ones_like(y.p))


def energy(t: Tensor, y: dict[str, Tensor]) -> Tensor:
    return y["q"] ** 2 + y["p"] ** 2


def both(t: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y, t * y


def structures_of_the_state() -> None:
    one = torch.ones(1)
    assert_type(sn.solve(decay, one, [0.0, 1.0]), sn.Solution[Tensor])
    assert_type(sn.solve(decay, one, torch.tensor([0.0, 1.0])).ys, Tensor)
    assert_type(sn.solve(oscillator, {"q": one, "p": one}, [0.0, 1.0]), sn.Solution[dict[str, Tensor]])
    assert_type(sn.solve(fall, Body(one, one), [0.0, 1.0]).ys.q, Tensor)
    assert_type(sn.solve(rotation, (one, one), [0.0, 1.0]).ys, tuple[Tensor, Tensor])


def functions_of_the_output() -> None:
    one = torch.ones(1)
    assert_type(sn.solve(decay, one, [0.0, 1.0], save="last"), sn.Solution[Tensor])
    assert_type(sn.solve(oscillator, {"q": one, "p": one}, [0.0, 1.0], save="steps").ys, dict[str, Tensor])
    assert_type(sn.solve(oscillator, {"q": one, "p": one}, [0.0, 1.0], save=energy), sn.Solution[Tensor])
    assert_type(sn.solve(decay, one, [0.0, 1.0], save=both).ys, tuple[Tensor, Tensor])
    assert_type(sn.solve(decay, one, [0.0, 1.0], save=lambda t, y: {"y": y}).ys, dict[str, Tensor])


def options_by_name() -> None:
    one = torch.ones(1)
    adjoint = sn.Backsolve(norm="mixed", restart="fresh", solver="tsit5")
    sol = sn.solve(decay, one, [0.0, 1.0], solver="tsit5", adjoint=adjoint, norm="rms", dense=True, record=True)
    assert_type(sol, sn.Solution[Tensor])
    assert_type(sol.stats, sn.Stats)
    assert_type(sol.dense, sn.DenseSolution | None)
    assert_type(sol.record, sn.Record | None)
    assert_type(sn.solve(decay, one, [0.0, 1.0], adjoint="interpolating", controller=sn.PID()).ys, Tensor)
    assert_type(sn.Quadrature(rule="gauss", z="dense"), sn.Quadrature)
    assert_type(sn.PID.preset("PI42", at_dt_min="accept", dt_min=1e-3), sn.PID)


def models_and_paths() -> None:
    x = torch.ones(2, 3)
    node = NeuralODE(decay, solver="tsit5", rtol=1e-3, adjoint="replay")
    assert_type(node.options, SolveOptions)
    assert_type(node.solve(oscillator, {"q": x, "p": x}, [0.0, 1.0]), sn.Solution[dict[str, Tensor]])
    assert_type(node.solve_along(decay, x, [0.0, 1.0]), tuple[Tensor, dict[str, Tensor]])
    assert_type(node.forward(x, costs=True), tuple[Tensor, dict[str, Tensor]])
    flow = CNF(decay, trace="exact", noise="rademacher", norm="mixed")
    assert_type(flow.log_prob(x), Tensor)
    assert_type(OTFlow(3, compile=False).costs(x), dict[str, Tensor])
    cde = NeuralCDE(3, 4, path="linear", max_steps=100)
    assert_type(cde.forward(torch.ones(2, 5, 3), ts="knots"), Tensor)
    path = sn.paths.hermite_cubic(torch.ones(2, 5, 3), lengths=[5, 4])
    assert_type(path, sn.paths.Path)
    assert_type(path.interval, tuple[float, float])
    assert_type(path.derivative(0.5, side="right"), Tensor)
    assert_type(sn.paths.logsignature(torch.ones(2, 5, 3), 2, basis="brackets"), Tensor)

"""`Solution.verify` against closed forms."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn

DOUBLE = torch.float64


def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


def swing(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], -y[0]])


@pytest.mark.parametrize("solver", ["dopri5", "tsit5", "bosh3", "kvaerno5"])
@pytest.mark.parametrize("rtol", [1e-4, 1e-7])
def test_error_is_near_the_true_one(solver: Any, rtol: float) -> None:
    ts = torch.linspace(0.0, 6.0, 7, dtype=DOUBLE)
    sol = sn.solve(swing, torch.tensor([1.0, 0.0], dtype=DOUBLE), ts, solver=solver, rtol=rtol, atol=rtol)
    true = float((sol.ys - torch.stack([ts.cos(), -ts.sin()], 1)).abs().max())
    report = sol.verify()
    assert 0.4 < report.error / true < 2.5
    assert report.rtol == rtol
    assert report.nfe == sol.stats.nfe < report.reference_nfe
    assert report.gradient_error is None
    assert report.tolerances is not None
    assert 0.1 < report.tolerances * rtol / true < 3.0  # each entry may err by rtol·(1 + |y|)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Backsolve(), sn.Interpolating(), sn.Quadrature()])
def test_gradient_error_is_near_the_true_one(adjoint: Any) -> None:
    rate = torch.tensor(1.3, dtype=DOUBLE, requires_grad=True)
    y0 = torch.ones(1, dtype=DOUBLE, requires_grad=True)
    sol = sn.solve(lambda t, y: -rate * y, y0, [0.0, 2.0], rtol=1e-4, atol=1e-6, adjoint=adjoint)
    found = torch.autograd.grad(sol.ys[-1].sum(), [y0, rate])
    end = math.exp(-2.6)
    true = math.hypot(float(found[0]) - end, float(found[1]) + 2.0 * end) / math.hypot(end, 2.0 * end)
    report = sol.verify(loss=lambda ys: ys[-1].sum())
    assert report.gradient_error is not None
    assert 0.4 < report.gradient_error / true < 2.5
    assert rate.grad is None
    assert y0.grad is None


def test_tensors_in_args_have_gradients_too() -> None:
    rate = torch.tensor(1.3, dtype=DOUBLE, requires_grad=True)
    y0 = torch.ones(1, dtype=DOUBLE)
    sol = sn.solve(lambda t, y, rate: -rate * y, y0, [0.0, 2.0], args=(2.0 * rate,), rtol=1e-4)
    report = sol.verify(loss=lambda ys: ys[-1].sum())
    assert report.gradient_error is not None
    assert 1e-8 < report.gradient_error < 1e-2


def test_fixed_steps_are_halved() -> None:
    options: Any = {"solver": "rk4", "controller": sn.FixedStep(0.1)}
    sol = sn.solve(decay, torch.ones(1, dtype=DOUBLE), [0.0, 1.0], **options)
    report = sol.verify()
    true = abs(float(sol.ys[-1]) - math.exp(-1.0))
    assert 0.9 < report.error / true < 1.0  # 15/16 of it
    assert report.rtol is None
    assert report.tolerances is None
    assert "fixed steps" in str(report)


@pytest.mark.parametrize("options", [{"batched": True}, {"save": "last"}, {"save": "steps"}, {"norm": "max"}])
def test_other_options(options: Any) -> None:
    sol = sn.solve(decay, torch.ones(2, 1, dtype=DOUBLE), [0.0, 1.0], rtol=1e-5, atol=1e-8, **options)
    true = float((sol.ys[-1] - math.exp(-1.0)).abs().max())
    assert 0.4 < sol.verify().error / true < 2.5


def test_structures_and_functions() -> None:
    def field(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": y["v"], "v": -y["x"]}

    y0 = {"x": torch.ones(1, dtype=DOUBLE), "v": torch.zeros(1, dtype=DOUBLE)}
    plain = sn.solve(field, y0, [0.0, 1.0]).verify()
    assert plain.tolerances is not None
    assert 0.0 < plain.error < 1e-4
    saved = sn.solve(field, y0, [0.0, 1.0], save=lambda t, y: y["x"]).verify()
    assert saved.tolerances is None
    assert 0.0 < saved.error < 1e-4


def test_events() -> None:
    event = sn.Event(lambda t, y: y.sum() - 0.5, terminal=True)
    sol = sn.solve(decay, torch.ones(1, dtype=DOUBLE), [0.0, 0.3, 5.0], event=event, rtol=1e-5)
    assert sol.verify().error < 1e-4


def test_report_is_readable() -> None:
    sol = sn.solve(decay, torch.ones(1, dtype=DOUBLE), [0.0, 1.0])
    text = str(sol.verify(loss=lambda ys: ys.sum()))
    assert text.startswith("asked: rtol=1.0e-06, atol=1.0e-08; observed global error: ")
    assert " tolerances; gradient: " in text


def test_refuses_a_changed_problem() -> None:
    net = nn.Linear(2, 2).double()
    sol = sn.solve(lambda t, y: net(y), torch.ones(2, dtype=DOUBLE), [0.0, 1.0])
    with torch.no_grad():
        net.weight += 0.1
    with pytest.raises(RuntimeError, match="before the optimiser's step"):
        sol.verify()


def test_refuses_a_random_field() -> None:
    dropout = nn.Dropout(0.5)
    sol = sn.solve(lambda t, y: dropout(y), torch.ones(20, dtype=DOUBLE), [0.0, 1.0])
    with pytest.raises(RuntimeError, match="draws random numbers"):
        sol.verify()


def test_refuses_bad_losses() -> None:
    sol = sn.solve(decay, torch.ones(2, dtype=DOUBLE), [0.0, 1.0])
    with pytest.raises(TypeError, match="loss: expected a function of ys that returns one number"):
        sol.verify(loss=lambda ys: ys)
    with pytest.raises(ValueError, match="found a constant one"):
        sol.verify(loss=lambda ys: ys.detach().sum())


def test_refuses_failures_copies_and_grids() -> None:
    y0 = torch.ones(1, dtype=DOUBLE)
    failed = sn.solve(lambda t, y: y**2, y0, [0.0, 2.0], throw=False)
    with pytest.raises(RuntimeError, match="expected a solve that has succeeded"):
        failed.verify()
    sol = sn.solve(decay, y0, [0.0, 1.0])
    for other in (copy.deepcopy(sol), pickle.loads(pickle.dumps(sol))):
        assert torch.equal(other.ys, sol.ys)
        with pytest.raises(RuntimeError, match="does not know its problem"):
            other.verify()


def test_no_graph_is_kept_alive() -> None:
    x = torch.ones(3, dtype=DOUBLE, requires_grad=True)
    y0 = x * 2.0
    node = weakref.ref(y0)
    sol = sn.solve(decay, y0, [0.0, 1.0], args=())
    ys = sol.ys.detach()
    kept = sol.rerun
    del sol, y0
    gc.collect()
    assert kept is not None
    assert node() is None
    assert ys.shape == (2, 3)


@pytest.mark.parametrize("dt", [1.9, 2.0, 3.0, 10.0])
def test_fixed_steps_longer_than_the_interval_are_halved(dt: float) -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 2.0], solver="midpoint", controller=sn.FixedStep(dt))
    true = abs(float(sol.ys[-1]) - math.exp(-2.0))
    assert 0.5 * true < sol.verify().error < 2.0 * true


@pytest.mark.parametrize(
    "controller",
    [
        sn.Integral(dt_max=0.05),
        sn.Integral(dt_max=0.05, dt0=0.05, dt_min=0.01),
        sn.Integral(dt_min=0.1, at_dt_min="accept"),
    ],
)
def test_steps_with_a_limit_of_their_own_are_halved(controller: sn.Integral) -> None:
    """A tenth of the tolerances does not change steps that are not limited by them."""
    y0 = torch.ones(1, dtype=torch.float64)
    tolerance = 1e-12 if controller.at_dt_min == "accept" else 1e-1
    options: Any = {"controller": controller, "solver": "adaptive_heun", "rtol": tolerance, "atol": tolerance}
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], **options)
    true = abs(float(sol.ys[-1]) - math.exp(-1.0))
    assert 0.5 * true < sol.verify().error < 2.0 * true


def test_a_single_step_is_compared_with_two() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 0.1], rtol=1.0, atol=1.0, controller=sn.Integral(dt0=0.1))
    true = abs(float(sol.ys[-1]) - math.exp(-0.1))
    assert sol.stats.accepted == 1
    assert 0.5 * true < sol.verify().error < 2.0 * true

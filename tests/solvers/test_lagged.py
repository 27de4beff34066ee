"""Methods as torchdiffeq runs them: order, evaluations, gradients, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode.extending import Observer, Plan, Solver, Step
from seminode.solvers import GrowingAdams, Lagged, QuarticBosh3, QuarticDopri8


def field(t: Tensor, y: Tensor) -> Tensor:
    return torch.cos(t) * y


def exact(t: Tensor) -> Tensor:
    return torch.exp(torch.sin(t))


def end_error(solver: Solver, dt: float) -> float:
    y0 = torch.ones(1, dtype=torch.float64)
    sol = sn.solve(field, y0, [0.0, 2.0], solver=solver, controller=sn.FixedStep(dt), adjoint=sn.Direct())
    return float((sol.ys[-1] - exact(torch.tensor(2.0, dtype=torch.float64))).abs())


@pytest.mark.parametrize(
    ("solver", "order"),
    [
        (Lagged("adaptive_heun"), 2),
        (Lagged("fehlberg2"), 2),
        (GrowingAdams(max_order=5), 4),
        (GrowingAdams(corrected=True, max_order=4), 4),
        (QuarticBosh3(), 3),
    ],
    ids=repr,
)
def test_order(solver: Solver, order: int) -> None:
    assert end_error(solver, 0.0125) / end_error(solver, 0.00625) == pytest.approx(2.0**order, rel=0.35)


@pytest.mark.parametrize("base", ["adaptive_heun", "fehlberg2"])
def test_one_evaluation_less_per_step(base: Any) -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    counts = []
    for solver in (Lagged(base), base):
        sol = sn.solve(field, y0, [0.0, 1.0], solver=solver, controller=sn.FixedStep(0.1), adjoint=sn.Direct())
        counts.append(sol.stats.nfe)
    assert counts[1] - counts[0] == 9


@pytest.mark.parametrize("solver", [Lagged("adaptive_heun"), GrowingAdams(), GrowingAdams(corrected=True)], ids=repr)
def test_gradients_are_those_of_the_steps(solver: Solver) -> None:
    """Against central differences."""

    def solved(rate: Tensor) -> Tensor:
        controller = sn.FixedStep(0.1)
        adjoint = sn.Direct()
        ts = [0.0, 0.73, 1.0]
        y0 = torch.ones(1, dtype=torch.float64)
        return sn.solve(
            lambda t, y: rate * field(t, y), y0, ts, solver=solver, controller=controller, adjoint=adjoint
        ).ys

    rate = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(solved(rate).sum(), rate)
    expected = (solved(rate.detach() + 1e-6).sum() - solved(rate.detach() - 1e-6).sum()) / 2e-6
    torch.testing.assert_close(grad, expected, rtol=1e-7, atol=0.0)


def test_adjoints_that_take_single_steps_are_refused() -> None:
    y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
    for adjoint in (sn.Replay(), sn.Interpolating(solver="dopri5")):
        with pytest.raises(ValueError, match=r"depends on slopes of the one before it; pass adjoint=sn\.Direct\(\)"):
            sn.solve(field, y0, [0.0, 1.0], solver=Lagged("adaptive_heun"), adjoint=adjoint)
    with pytest.raises(ValueError, match=r"pass Backsolve\(norm='mixed_per_tensor'\)"):
        sn.solve(field, y0, [0.0, 1.0], solver=Lagged("adaptive_heun"), adjoint=sn.Backsolve(check=False))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="base: expected one of adaptive_heun, fehlberg2, found 'dopri5'"):
        Lagged("dopri5")
    with pytest.raises(ValueError, match="max_order: expected a whole number from 1 to 12, found 13"):
        GrowingAdams(max_order=13)
    with pytest.raises(ValueError, match="interp: expected 'linear' or 'cubic', found 'quartic'"):
        GrowingAdams(interp="quartic")  # pyright: ignore[reportArgumentType]


def test_solvers_are_values() -> None:
    for solver in (
        Lagged("fehlberg2"),
        GrowingAdams(True, 6),
        QuarticDopri8(),
        sn.solvers.with_interpolant(sn.RK38, "cubic"),
    ):
        again = pickle.loads(pickle.dumps(solver))
        assert again == solver
        assert hash(again) == hash(solver)
    assert Lagged("fehlberg2") != Lagged("adaptive_heun")


def test_corrections_that_do_not_converge_warn() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    solver = GrowingAdams(corrected=True, max_iters=1)
    with pytest.warns(UserWarning, match="Functional iteration did not converge"):
        sn.solve(field, y0, [0.0, 2.0], solver=solver, controller=sn.FixedStep(0.2), adjoint=sn.Direct())


class Watcher(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def tried(self, plan: Plan, y0: Tensor) -> None:
        self.seen.append(("tried", plan.t0))

    def accepted(self, step: Step, ratio: float) -> None:
        self.seen.append(("accepted", step.plan.t0))

    def rejected(self, step: Step, ratio: float) -> None:
        self.seen.append(("rejected", step.plan.t0))


def test_observers_see_every_step_forward_and_backward() -> None:
    forward, backward = Watcher(), Watcher()
    y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
    adjoint = sn.Backsolve(observers=[backward])
    controller = sn.Integral(dt0=2.0)
    sol = sn.solve(field, y0, [0.0, 2.0], observers=[forward], adjoint=adjoint, controller=controller)
    sol.ys[-1].sum().backward()
    for watcher, stats in ((forward, sol.stats), (backward, sol.stats.backward)):
        assert stats is not None
        names = [name for name, _ in watcher.seen]
        assert names.count("accepted") == stats.accepted
        assert names.count("rejected") == stats.rejected
        assert names[::2] == ["tried"] * (stats.accepted + stats.rejected)
    assert sol.stats.rejected > 0


def test_a_last_step_may_run_past_the_end() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    ts = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    sol = sn.solve(field, y0, ts, controller=sn.Integral(land=False), record=True, rtol=1e-8, atol=1e-10)
    assert sol.record is not None
    assert sol.record.accepted[-1].t1 > 2.0
    torch.testing.assert_close(sol.ys[:, 0], exact(ts), rtol=1e-6, atol=0.0)
    with pytest.raises(ValueError, match=r"save: 'last' needs steps that end on ts\[-1\]"):
        sn.solve(field, y0, ts, controller=sn.Integral(land=False), save="last")


@pytest.mark.parametrize("solver", ["adaptive_heun", "dopri8", QuarticDopri8()])
def test_parameter_gradients_of_steps_that_run_past_their_end(solver: Any) -> None:
    """The slope at the end of the last step is part of its polynomial, also if the error estimate does not read it."""
    rate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    y0 = torch.ones(1, dtype=torch.float64)
    grads = []
    for norm in ("seminorm", "mixed_per_tensor"):
        adjoint = sn.Backsolve(norm=norm, restart="every", rtol=1e-6, atol=1e-6)
        sol = sn.solve(lambda t, y: rate * field(t, y), y0, [0.0, 0.6, 1.5], solver=solver, adjoint=adjoint)
        grads.append(torch.autograd.grad(sol.ys.sum(), rate)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=0.0)

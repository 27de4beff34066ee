"""A GPU is not kept waiting: a solve reads at most one value per attempted step, and none with fixed steps.

There is no GPU here. Reads are counted on the CPU, in two solves that differ in the number of steps only; what the
longer one reads more is read by steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from host_reads import host_reads, method_reads
from torch import Tensor, nn

import seminode as sn
from seminode._stepping import loop
from seminode.adjoints._discrete import finite
from seminode.extending import Observer


class Oscillators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(2.0))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        x, v = y.unbind(-1)
        return torch.stack((v, -self.rate * x.sin()), -1)


Y0 = torch.tensor([[1.0, 0.0], [2.0, 0.3], [0.1, -1.0]])


def reads_per_step(
    solve: Callable[[float], sn.Solution[Tensor]], count: Callable[[Callable[[], Any]], int] = host_reads
) -> float:
    """Additional reads of a longer solve, divided by its additional steps."""
    reads, steps = [], []
    solve(1.0)  # programs are made here
    for end in (4.0, 40.0):
        solutions: list[sn.Solution[Tensor]] = []
        reads.append(count(lambda end=end, solutions=solutions: solutions.append(solve(end))))
        stats = solutions[0].stats
        steps.append(stats.accepted + stats.rejected)
    assert steps[1] > steps[0] + 10
    return (reads[1] - reads[0]) / (steps[1] - steps[0])


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop takes the CPU for a device on which reads have to wait."""
    for module in (loop, finite):
        monkeypatch.setattr(module, "on_host", lambda x: False)


def test_reads_are_counted() -> None:
    x = torch.ones(3)
    assert host_reads(lambda: x + 1.0) == 0
    for read in (lambda: x.sum().item(), lambda: bool(x[0] > 0.0), lambda: float(x[0]), x.tolist, x.nonzero, x.numpy):
        assert host_reads(read) >= 1, read
    assert method_reads(lambda: x + 1.0) == 0
    assert method_reads(lambda: (x.sum().item(), bool(x[0] > 0.0), x.tolist())) == 3


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("outputs", [2, 9])
@pytest.mark.parametrize("solver", ["dopri5", "bosh3", "tsit5", "dopri8"])
def test_an_adaptive_step_reads_one_value(solver: Any, outputs: int) -> None:
    field = Oscillators()

    def solve(end: float) -> sn.Solution[Tensor]:
        return sn.solve(field, Y0, torch.linspace(0.0, end, outputs), solver=solver, rtol=1e-5, atol=1e-5)

    assert reads_per_step(solve) == 1.0


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Backsolve(), sn.Checkpointed(4), sn.Interpolating()])
@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4", "bosh3"])
def test_a_fixed_step_reads_nothing(solver: Any, adjoint: Any) -> None:
    field, start = Oscillators(), Y0.clone().requires_grad_()
    fixed = sn.FixedStep(0.05)

    def solve(end: float) -> sn.Solution[Tensor]:
        return sn.solve(field, start, torch.linspace(0.0, end, 5), solver=solver, controller=fixed, adjoint=adjoint)

    assert reads_per_step(solve) == 0.0


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("controller", "expected"), [(None, 1.0), (sn.FixedStep(0.05), 0.0)])
def test_compiled_steps_read_no_more(
    controller: sn.FixedStep | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_back_end(monkeypatch)
    field = Oscillators()

    def solve(end: float) -> sn.Solution[Tensor]:
        return sn.solve(field, Y0, [0.0, end], controller=controller, compile=True)

    assert reads_per_step(solve, method_reads) == expected
    torch._dynamo.reset()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("adjoint", "expected"),
    # On the CPU, Replay compares each state with that of the forward pass at once; on a GPU at the end, too.
    [(sn.Direct(), 0.0), (sn.Replay(), 1.0), (sn.Backsolve(), 1.0)],
)
def test_a_backward_pass_waits_no_more_than_the_solve(adjoint: Any, expected: float) -> None:
    field, start = Oscillators(), Y0.clone().requires_grad_()
    reads, steps = [], []
    for end in (4.0, 40.0):
        options: dict[str, Any] = {"controller": sn.FixedStep(0.05), "adjoint": adjoint}
        sol = sn.solve(field, start, [0.0, end], **options)
        reads.append(host_reads(lambda sol=sol: sol.ys[-1].sum().backward()))
        steps.append(sol.stats.accepted)
    assert (reads[1] - reads[0]) / (steps[1] - steps[0]) == expected


@pytest.mark.usefixtures("elsewhere")
def test_gradients_that_are_tested_together_still_fail() -> None:
    def root(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t < 0.25, y.abs().sqrt(), y)  # whose derivative at 0 is infinite

    start = torch.zeros(2, requires_grad=True)
    sol = sn.solve(root, start, [0.0, 1.0], solver="rk4", controller=sn.FixedStep(0.1), adjoint=sn.Replay())
    with pytest.raises(sn.NonFiniteState, match="gradient with respect to the state became NaN"):
        sol.ys[-1].sum().backward()


def blowing_up(t: Tensor, y: Tensor) -> Tensor:
    return torch.where(t > 0.42, math.inf, 1.0) * y


def test_states_that_are_tested_together_fail_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.1)}
    times = []
    for host in (True, False):
        monkeypatch.setattr(loop, "on_host", lambda x, host=host: host)
        with pytest.raises(sn.NonFiniteState, match=r"NaN or infinite at t = 0\.5") as failure:
            sn.solve(blowing_up, torch.ones(2), [0.0, 1.0], **options)
        times.append(failure.value.t)
    assert times[0] == times[1]


@pytest.mark.usefixtures("elsewhere")
def test_long_solves_are_tested_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.PendingTests, "MANY", 3)
    steps: list[float] = []

    class Watch(Observer):
        def accepted(self, step: Any, ratio: float) -> None:
            steps.append(step.plan.t1)

    options: dict[str, Any] = {"solver": "rk4", "controller": sn.FixedStep(0.1), "observers": [Watch()]}
    with pytest.raises(sn.NonFiniteState, match=r"at t = 0\.5"):
        sn.solve(blowing_up, torch.ones(2), [0.0, 5.0], **options)
    assert len(steps) == 5  # the sixth step was the last of the second three


@pytest.mark.usefixtures("elsewhere")
def test_without_exceptions_a_solve_ends_where_it_failed() -> None:
    ts = [0.0, 0.2, 0.8, 1.0]
    sol = sn.solve(blowing_up, torch.ones(1), ts, solver="rk4", controller=sn.FixedStep(0.1), throw=False)
    assert sol.stats.accepted == 4
    assert torch.isfinite(sol.ys[:2]).all()

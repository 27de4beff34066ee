"""norm="auto": leaves that are only integrals steer neither the forward nor the backward solve."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from benchmarks.problems import GradientProblem, flow_problem
from seminode._field.pytree import leaves_of


class Rotation:
    """z turns slowly; a cost along the way changes fast. A plain callable, remembered by no one."""

    def __init__(self, reads: Any = None):
        self.reads = reads
        self.calls = 0

    def __call__(self, t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        self.calls += 1
        z = torch.stack([-y["z"][1], y["z"][0]])
        if self.reads is not None:
            z = self.reads(t, y, z)
        return {"z": z, "cost": torch.sin(20.0 * t) ** 2 * y["z"].square().sum()}


def start(cost: float = 0.0) -> dict[str, Tensor]:
    return {
        "z": torch.tensor([1.0, 0.5], dtype=torch.float64),
        "cost": torch.tensor(cost, dtype=torch.float64),
    }


def test_integrals_do_not_steer() -> None:
    y0, ts = start(), [0.0, 2.0]
    plain = sn.solve(Rotation(), y0, ts, rtol=1e-5, atol=1e-7)
    field = Rotation()
    auto = sn.solve(field, y0, ts, rtol=1e-5, atol=1e-7, norm="auto")
    alone = sn.solve(lambda t, z: torch.stack([-z[1], z[0]]), y0["z"], ts, rtol=1e-5, atol=1e-7)
    assert auto.stats.nfe == alone.stats.nfe < plain.stats.nfe
    assert field.calls == auto.stats.nfe + auto.stats.checks
    assert torch.equal(auto.ys["z"], alone.ys)


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Backsolve(), sn.Quadrature()], ids=lambda a: type(a).__name__)
def test_integrals_may_be_named(adjoint: Any) -> None:
    """As good as found, forward and backward, and without looking."""
    found = {}
    for norm in ("auto", sn.norms.Without((False, True))):
        y0 = {name: leaf.requires_grad_() for name, leaf in start().items()}
        field = Rotation()
        sol = sn.solve(field, y0, [0.0, 2.0], rtol=1e-5, atol=1e-7, norm=norm, adjoint=adjoint)
        (sol.ys["z"][-1].sum() + sol.ys["cost"][-1]).backward()
        assert sol.stats.backward is not None
        found[str(norm)] = (sol.stats.nfe, sol.stats.backward.nfe, y0["z"].grad, y0["cost"].grad)
        checks = sol.stats.checks
    assert checks == 0
    (nfe, back, *grads), (nfe2, back2, *grads2) = found.values()
    assert (nfe, back) == (nfe2, back2)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads2, strict=True))


def test_named_integrals_must_fit_the_state() -> None:
    with pytest.raises(ValueError, match=r"norm: Without\(\) expects one flag for each of the 2 leaves"):
        sn.solve(Rotation(), start(), [0.0, 1.0], norm=sn.norms.Without((False, True, True)))
    with pytest.raises(ValueError, match="integrals: expected at least one leaf that is not"):
        sn.norms.Without((True,))


def flow() -> GradientProblem:
    """Twice as lively as it comes out of the initialisation: like one that has been trained a little."""
    problem = flow_problem(size=4, width=32, dtype=torch.float64)
    with torch.no_grad():
        for p in problem.modules.parameters():
            p.mul_(2.0)
    return problem


def test_a_flow() -> None:
    """Finds the log-probability and the energy; they cost fewer evaluations and stay accurate."""
    problem = flow()
    y0 = problem.start()
    assert sn.integral_leaves(problem.field, y0, problem.ts) == {"z": False, "logp": True, "energy": True}
    with torch.no_grad():
        exact = sn.solve(problem.field, y0, problem.ts, rtol=1e-11, atol=1e-11).ys["logp"][-1]
        for rtol in (1e-5, 1e-6, 1e-7):
            plain = sn.solve(problem.field, y0, problem.ts, rtol=rtol, atol=rtol)
            auto = sn.solve(problem.field, y0, problem.ts, rtol=rtol, atol=rtol, norm="auto")
            assert auto.stats.nfe < plain.stats.nfe
            error = (auto.ys["logp"][-1] - exact) / (1.0 + exact.abs())
            assert float(error.abs().max()) < 10 * rtol


@pytest.mark.parametrize(
    "adjoint", [sn.Replay(), sn.Backsolve(), sn.Backsolve(norm="mixed"), sn.Interpolating(), sn.Quadrature()], ids=repr
)
def test_gradients(adjoint: Any) -> None:
    problem = flow()
    inputs = list(problem.modules.parameters())

    def run(adjoint: Any, rtol: float, norm: Literal["auto"] | None) -> tuple[list[Tensor], sn.Stats]:
        y0 = {name: leaf.clone().requires_grad_() for name, leaf in problem.start().items()}
        sol = sn.solve(problem.field, y0, problem.ts, rtol=rtol, atol=1e-2 * rtol, adjoint=adjoint, norm=norm)
        loss = sum((leaf * torch.cos(leaf)).mean() for leaf in leaves_of(sol.ys))
        grads = torch.autograd.grad(loss, [*leaves_of(y0), *inputs])  # type: ignore[arg-type]
        assert sol.stats.backward is not None
        return list(grads), sol.stats.backward

    exact, _ = run(sn.Replay(), 1e-11, None)
    found, auto = run(adjoint, 1e-6, "auto")
    for x, y in zip(found, exact, strict=True):
        assert float((x - y).norm() / y.norm()) < 5e-5
    if not isinstance(adjoint, sn.Replay):
        assert auto.nfe <= run(adjoint, 1e-6, None)[1].nfe


def test_the_adjoint_of_an_integral_is_constant() -> None:
    """Its gradient is the sum of its cotangents, to rounding."""
    y0 = {name: leaf.requires_grad_() for name, leaf in start().items()}
    sol = sn.solve(Rotation(), y0, [0.0, 0.5, 1.0], norm="auto", adjoint=sn.Backsolve())
    (0.3 * sol.ys["cost"][1] + 0.4 * sol.ys["cost"][2]).backward()
    assert float(y0["cost"].grad) == pytest.approx(0.7, rel=1e-15)  # type: ignore[arg-type]


READS = {
    "where": lambda t, y, z: torch.where(y["cost"] > 0.3, z, 2.0 * z),
    "nan_to_num": lambda t, y, z: z + 0.1 * torch.nan_to_num(y["cost"]),
    "branch": lambda t, y, z: 2.0 * z if float(y["cost"]) > 0.3 else z,
    "late": lambda t, y, z: z + 0.1 * y["cost"] * (t > 1.9),
    "in a window": lambda t, y, z: z + 0.1 * y["cost"] * ((t > 0.9) & (t < 1.1)),
    "when the state is elsewhere": lambda t, y, z: z + 0.1 * y["cost"] * (y["z"][0] < 0),
}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_a_leaf_that_is_read_steers(reads: Any) -> None:
    y0 = start()
    options: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-8}
    auto = sn.solve(Rotation(reads), y0, [0.0, 2.0], norm="auto", **options)
    plain = sn.solve(Rotation(reads), y0, [0.0, 2.0], **options)
    assert auto.stats.nfe == plain.stats.nfe
    assert torch.equal(auto.ys["cost"], plain.ys["cost"])


def test_a_module_is_looked_at_once() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Rotation()

        def forward(self, t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
            return self.field(t, y)

    module = Module()
    checks = [sn.solve(module, start(), [0.0, 2.0], norm="auto").stats.checks for _ in range(2)]
    assert checks[1] < 6 < checks[0]
    module.field.reads = READS["late"]  # what was true need not stay true
    changed = sn.solve(module, start(), [0.0, 2.0], norm="auto", rtol=1e-6, atol=1e-8)
    plain = sn.solve(module, start(), [0.0, 2.0], rtol=1e-6, atol=1e-8)
    assert changed.stats.nfe == plain.stats.nfe


def test_something_must_steer() -> None:
    """Where all leaves are integrals, all of them do."""
    y0 = torch.zeros(1, dtype=torch.float64)
    sol = sn.solve(lambda t, y: torch.cos(9.0 * t).reshape(1), y0, [0.0, 2.0], norm="auto", rtol=1e-8, atol=1e-8)
    assert float(sol.ys[-1]) == pytest.approx(float(torch.sin(torch.tensor(18.0, dtype=torch.float64)) / 9.0), abs=1e-6)


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"norm: does nothing with FixedStep"):
        sn.solve(Rotation(), start(), [0.0, 1.0], norm="auto", controller=sn.FixedStep(0.1))
    with pytest.raises(ValueError, match=r"norm: 'auto' reads values of the field"):
        torch.func.grad(
            lambda z: (
                sn.solve(Rotation(), {"z": z, "cost": z.sum()}, [0.0, 1.0], norm="auto", adjoint=sn.Direct())
                .ys["z"]
                .sum()
            )
        )(start()["z"])


@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Direct(), sn.Quadrature()], ids=repr)
def test_buffers_that_are_only_read_are_not_written_to(adjoint: Any) -> None:
    """Autograd would take them for changed."""

    class Noisy(torch.nn.Module):
        noise: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2, dtype=torch.float64)
            self.register_buffer("noise", torch.ones(3, 2, dtype=torch.float64))

        def forward(self, t: torch.Tensor, y: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            f, pull = torch.func.vjp(lambda z: torch.tanh(self.layer(z)), y[0])  # type: ignore[misc]
            return f, (pull(self.noise)[0] * self.noise).sum(1)

    field = Noisy()
    z0 = torch.ones(3, 2, dtype=torch.float64)
    sol = sn.solve(field, (z0, z0.new_zeros(3)), [0.0, 1.0], norm="auto", adjoint=adjoint)
    (sol.ys[0][-1].sum() + sol.ys[1][-1].sum()).backward()
    assert field.noise._version == 0

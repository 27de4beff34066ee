"""Leapfrog and Yoshida's composition: orders, reversal, energy over long times, gradients, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode.solvers.symplectic import Symplectic

SOLVERS = [sn.Leapfrog(), sn.Yoshida4()]
every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=repr)


def driven(t: Tensor, y: Any) -> Any:
    """q'' = (2 + cos t)-weighted forces: both halves depend on the time."""
    q, p = y
    return p * (1.0 + 0.2 * torch.cos(3.0 * t)), -torch.sin(q) * (1.0 + 0.3 * torch.sin(2.0 * t))


def start() -> tuple[Tensor, Tensor]:
    return torch.tensor([0.7, -0.2], dtype=torch.float64), torch.tensor([0.1, 0.9], dtype=torch.float64)


def slope(counts: list[int], errors: list[float]) -> float:
    x, y = torch.tensor(counts).double().log(), torch.tensor(errors).double().log()
    return -float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@every_solver
def test_order(solver: Symplectic) -> None:
    times = torch.linspace(0.0, 2.0, 203, dtype=torch.float64)
    reference = torch.cat(sn.solve(driven, start(), times, solver="dopri8", rtol=1e-13, atol=1e-13).ys, -1)
    counts, at_end, between = [40, 57, 80, 113], [], []
    for n in counts:
        options: Any = {"solver": solver, "controller": sn.FixedStep(2.0 / n)}
        ys = torch.cat(sn.solve(driven, start(), times, **options).ys, -1)
        at_end.append(float((ys[-1] - reference[-1]).abs().max()))
        between.append(float((ys - reference).abs().max()))
    assert slope(counts, at_end) == pytest.approx(solver.order, abs=0.2)
    assert slope(counts, between) == pytest.approx(solver.order, abs=0.2)


@every_solver
def test_evaluations(solver: Symplectic) -> None:
    sol = sn.solve(driven, start(), [0.0, 2.0], solver=solver, controller=sn.FixedStep(0.1))
    assert sol.stats.nfe == 1 + 20 * solver.evaluations
    assert solver.evaluations == {2: 2, 4: 6}[solver.order]
    declared = sn.solve(driven, start(), [0.0, 2.0], solver=type(solver)(separable=True), controller=sn.FixedStep(0.1))
    assert declared.stats.checks == 0
    assert torch.equal(declared.ys[0], sol.ys[0])


@every_solver
def test_interpolants_are_continuous(solver: Symplectic) -> None:
    """The polynomial of a step ends at y1; its weights there are those of the step."""
    assert [sum(row) for row in solver.interpolant] == pytest.approx([*solver.weights, 0.0], abs=1e-14)
    for i, (a, b) in enumerate(itertools.pairwise(solver.weights)):  # v of a drift, F of a kick between two drifts
        assert a + b == pytest.approx(solver.kicks[(i + 1) // 2] if i % 2 else solver.drifts[i // 2], abs=1e-14)
    assert (solver.weights[0], solver.weights[-1]) == pytest.approx((solver.kicks[0], solver.kicks[-1]))
    sol = sn.solve(driven, start(), [0.0, 1.0], solver=solver, controller=sn.FixedStep(0.1), dense=True, save="steps")
    assert sol.dense is not None
    for found, expected in zip(sol.dense(sol.ts), sol.ys, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@every_solver
def test_time_reversal(solver: Symplectic) -> None:
    y0 = start()
    options: Any = {"solver": solver, "controller": sn.FixedStep(0.05), "save": "last"}
    there = sn.solve(driven, y0, [0.0, 20.0], **options).ys
    back = sn.solve(driven, tuple(y[0] for y in there), [20.0, 0.0], **options).ys
    assert float((torch.cat(there, -1) - torch.cat(y0)).abs().max()) > 0.1
    assert float((torch.cat(back, -1) - torch.cat(y0)).abs().max()) < 1e-12


@every_solver
def test_symplectic(solver: Symplectic) -> None:
    """The Jacobian of the map preserves the symplectic form."""

    def pendulums(t: Tensor, y: Tensor) -> Tensor:
        q, p = y.chunk(2)
        return torch.cat([p + 0.1 * p**3, -torch.sin(q) - 0.3 * (q - q.flip(0))])

    def flow(y: Tensor) -> Tensor:
        options: Any = {"controller": sn.FixedStep(0.3), "save": "last", "adjoint": sn.Direct()}
        return sn.solve(pendulums, y, [0.0, 3.0], solver=solver, **options).ys[0]

    jacobian = torch.autograd.functional.jacobian(flow, torch.tensor([0.5, -0.3, 0.2, 0.8], dtype=torch.float64))
    form = torch.kron(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), torch.eye(2)).double()
    torch.testing.assert_close(jacobian.T @ form @ jacobian, form, rtol=0.0, atol=1e-12)


def kepler(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    q, p = y
    return p, -q / q.square().sum().pow(1.5)


def kepler_energy(q: Tensor, p: Tensor) -> Tensor:
    return p.square().sum(-1) / 2 - 1 / q.square().sum(-1).sqrt()


def henon_heiles(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    q, p = y
    x, z = q.unbind()
    return p, -torch.stack([x + 2 * x * z, z + x * x - z * z])


def henon_heiles_energy(q: Tensor, p: Tensor) -> Tensor:
    x, z = q.unbind(-1)
    return (p.square().sum(-1) + x**2 + z**2) / 2 + x**2 * z - z**3 / 3


E = 0.4
LONG = {
    "kepler": (kepler, kepler_energy, ([1 - E, 0.0], [0.0, math.sqrt((1 + E) / (1 - E))]), 0.02),
    "henon-heiles": (henon_heiles, henon_heiles_energy, ([0.0, 0.1], [0.45, 0.0]), 0.1),
}


def energy_errors(name: str, solver: Symplectic, steps: int) -> Tensor:
    field, energy, (q, p), dt = LONG[name]
    y0 = torch.tensor(q, dtype=torch.float64), torch.tensor(p, dtype=torch.float64)
    times = torch.linspace(0.0, steps * dt, 1001, dtype=torch.float64)
    options: Any = {"controller": sn.FixedStep(dt), "max_steps": 2 * steps}
    with torch.no_grad():
        sol = sn.solve(field, y0, times, solver=solver, **options)
    assert sol.stats.accepted == steps
    return (energy(*sol.ys) - energy(*y0)).abs()


def bounded(name: str, solver: Symplectic, steps: int, growth: float) -> None:
    """The error is of the order of the method, and the second half of the interval is no worse than the first."""
    errors = energy_errors(name, solver, steps)
    scale = {2: 1e-3, 4: 3e-5}[solver.order]
    assert 1e-3 * scale < float(errors.max()) < scale
    assert float(errors[501:].max()) < growth * float(errors[:501].max())


@every_solver
@pytest.mark.parametrize("name", LONG)
def test_energy_error_is_bounded(name: str, solver: Symplectic) -> None:
    bounded(name, solver, 2000, growth=3.0)


@pytest.mark.slow
@every_solver
@pytest.mark.parametrize("name", LONG)
def test_energy_error_is_bounded_over_a_hundred_thousand_steps(name: str, solver: Symplectic) -> None:
    bounded(name, solver, 100_000, growth=1.5)


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    p: Tensor
    ts: Tensor
    weight: Tensor
    arg: Tensor

    def leaves(self) -> dict[str, Tensor]:
        return dict(vars(self))

    def loss(self, **options: Any) -> Tensor:
        def field(t: Tensor, y: dict[str, Tensor], arg: Tensor) -> dict[str, Tensor]:
            return {
                "q": torch.tanh(self.weight @ y["p"]) * (1 + 0.1 * t),
                "p": -torch.sin(self.weight.T @ y["q"]) * arg,
            }

        sol = sn.solve(field, {"q": self.q, "p": self.p}, self.ts, args=(self.arg,), **options)
        weights = torch.linspace(1.0, -2.0, sol.ys["q"].numel(), dtype=torch.float64).reshape(sol.ys["q"].shape)
        return (weights * sol.ys["q"]).sum() + sol.ys["p"].square().sum()


def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, p = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    weight = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    ts = torch.tensor([0.0, 0.33, 0.71, 1.0], dtype=torch.float64)
    return Inputs(q, p, ts, weight, torch.tensor(1.3, dtype=torch.float64))


@every_solver
@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Checkpointed(3), sn.Reversible()], ids=repr)
def test_gradients(solver: Symplectic, adjoint: Any) -> None:
    """Against central differences of the solve, whose steps are fixed; outputs inside of steps, a short last step."""
    base = inputs()
    options: Any = {"solver": solver, "controller": sn.FixedStep(0.08)}
    moving = Inputs(**{name: x.clone().requires_grad_() for name, x in base.leaves().items()})
    moving.loss(adjoint=adjoint, **options).backward()
    generator = torch.Generator().manual_seed(1)
    for name, x in base.leaves().items():
        direction = torch.randn(x.shape, dtype=torch.float64, generator=generator)

        def at(h: float, name: str = name, x: Tensor = x, direction: Tensor = direction) -> float:
            with torch.no_grad():
                return float(replace(base, **{name: x + h * direction}).loss(**options))

        h = 1e-4
        expected = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        grad = moving.leaves()[name].grad
        assert grad is not None
        assert float((grad * direction).sum()) == pytest.approx(expected, rel=1e-7, abs=1e-9), name


@every_solver
def test_reversible_keeps_one_state_and_agrees_with_direct(solver: Symplectic) -> None:
    """A loss at the end only: each step is undone and differentiated at once."""
    grads, stats = [], []
    for adjoint in (sn.Direct(), sn.Reversible()):
        weight = torch.tensor([[0.3, -0.5], [0.8, 0.1]], dtype=torch.float64, requires_grad=True)
        y0 = tuple(y.clone().requires_grad_() for y in start())
        sol = sn.solve(
            lambda t, y, w=weight: (torch.tanh(w @ y[1]), -torch.sin(w.T @ y[0])),
            y0,
            [0.0, 10.0],
            solver=solver,
            controller=sn.FixedStep(0.05),
            adjoint=adjoint,
            save="last",
        )
        grads.append(torch.autograd.grad(sol.ys[0].sum() + sol.ys[1].square().sum(), (*y0, weight)))
        stats.append(sol.stats.backward)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert stats[1] is not None
    assert stats[1].vjp_y == 200 * (solver.evaluations + 1)
    assert stats[1].nfe == 201 * (solver.evaluations + 1)  # the last step is undone before it is differentiated


def test_states_in_one_tensor() -> None:
    """Along the last dimension by default, or along another one."""
    q, p = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    options: Any = {"controller": sn.FixedStep(0.1), "save": "last"}
    expected = sn.solve(lambda t, y: (y[1], -(y[0] ** 3)), (q, p), [0.0, 1.0], solver="leapfrog", **options).ys

    def joined(t: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y[:, 3:], -(y[:, :3] ** 3)], -1)

    found = sn.solve(joined, torch.cat([q, p], -1), [0.0, 1.0], solver="leapfrog", **options).ys[0]
    torch.testing.assert_close(found, torch.cat([expected[0][0], expected[1][0]], -1))
    stacked = torch.stack([q, p])
    found = sn.solve(
        lambda t, y: torch.stack([y[1], -(y[0] ** 3)]), stacked, [0.0, 1.0], solver=sn.Leapfrog(dim=0), **options
    ).ys[0]
    torch.testing.assert_close(found, torch.stack([expected[0][0], expected[1][0]]))


Q, P = torch.tensor([0.5, 0.2], dtype=torch.float64), torch.tensor([0.1, -0.4], dtype=torch.float64)
INSEPARABLE: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "friction": (lambda t, y: (y[1], -y[0] - 0.1 * y[1]), (Q, P), "p′ depends on p"),
    "a mass that depends on q": (lambda t, y: (y[1] / (1 + y[0] ** 2), -y[0]), (Q, P), "q′ depends on q"),
    "a branch": (lambda t, y: (y[1], -y[0] if float(y[1].sum()) > 0 else y[0]), (Q, P), "p′ depends on p"),
    "a wrong dimension": (lambda t, y: torch.stack([y[1], -y[0]]), torch.stack([Q, P]), "q′ depends on q"),
}


@pytest.mark.parametrize("name", INSEPARABLE)
def test_inseparable_fields_are_refused(name: str) -> None:
    field, y0, reason = INSEPARABLE[name]
    with pytest.raises(ValueError, match=f"{reason}.*implicit_midpoint"):
        sn.solve(field, y0, [0.0, 1.0], solver="leapfrog", controller=sn.FixedStep(0.1))


def test_separable_fields_are_accepted() -> None:
    """Gradients of an energy, comparisons, and errors at values that are not finite do not hinder the check."""

    def of_energy(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            q, p = (x.detach().requires_grad_() for x in y)
            dq, dp = torch.autograd.grad((torch.cosh(q) + p.square() / 2).sum(), (q, p))
        return dp, -dq

    def walls(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        assert bool(torch.isfinite(y[0]).all())
        return y[1], torch.where(y[0] > 0.3, -1.0, 1.0).to(y[0])

    for field in (of_energy, walls):
        sol = sn.solve(field, (Q, P), [0.0, 1.0], solver="leapfrog", controller=sn.FixedStep(0.1))
        assert 0 < sol.stats.checks < 12
        again = sn.solve(field, (Q, P), [0.0, 1.0], solver="leapfrog", controller=sn.FixedStep(0.1))
        assert again.stats.checks == 0  # it is remembered


@pytest.mark.parametrize(
    ("y0", "options", "message"),
    [
        ((Q, P, P), {}, r"two leaves \(q, p\) of equal size, found 3 with 2, 2, 2 elements"),
        ((Q, P[:1]), {}, r"found 2 with 2, 1 elements"),
        (torch.ones(3, dtype=torch.float64), {}, r"halves of dimension -1, found shape \(3,\)"),
        (torch.ones(4, dtype=torch.float64), {"solver": sn.Leapfrog(dim=1)}, r"halves of dimension 1, found shape"),
        ((Q, P), {"solver": sn.Leapfrog(dim=0)}, "dim: describes a state that is one tensor"),
        (
            (Q, P),
            {"solver": "yoshida4", "jumps": [0.5]},
            "jumps: solver 'yoshida4' evaluates the field at times outside",
        ),
        ((Q, P), {"controller": None}, "controller: solver 'leapfrog' has no error estimate"),
        ((Q, P), {"controller": sn.Integral()}, "controller: Integral needs an error estimate"),
    ],
)
def test_states_and_options_that_do_not_fit_are_refused(y0: Any, options: dict[str, Any], message: str) -> None:
    all_options: Any = {"solver": "leapfrog", "controller": sn.FixedStep(0.1), **options}
    with pytest.raises(ValueError, match=message):
        sn.solve(lambda t, y: y, y0, [0.0, 1.0], **all_options)


def test_transforms_need_a_declaration() -> None:
    x0 = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def last(x: Tensor, **options: Any) -> Tensor:
        field = lambda t, y: torch.cat([y[..., 2:], -torch.sin(y[..., :2])], -1)
        more: Any = {"controller": sn.FixedStep(0.1), "save": "last", "adjoint": sn.Direct()}
        return sn.solve(field, x, [0.0, 1.0], solver=sn.Leapfrog(**options), **more).ys[0]

    torch.testing.assert_close(torch.func.vmap(lambda x: last(x, separable=True))(x0), last(x0))
    with pytest.raises(
        ValueError, match=r"torch.func does not allow; if it is, pass solver=sn.Leapfrog\(separable=True\)"
    ):
        torch.func.vmap(last)(x0)


def test_compilation_is_refused_with_a_warning() -> None:
    options: Any = {"solver": "leapfrog", "controller": sn.FixedStep(0.1)}
    with pytest.warns(sn.CompileWarning, match="leapfrog"):
        compiled = sn.solve(driven, start(), [0.0, 1.0], compile=True, **options).ys
    torch.testing.assert_close(compiled[0], sn.solve(driven, start(), [0.0, 1.0], **options).ys[0])


def test_continuous_adjoints_need_a_solver_of_their_own() -> None:
    q = Q.clone().requires_grad_()
    options: Any = {"solver": "leapfrog", "controller": sn.FixedStep(0.01)}
    with pytest.raises(ValueError, match=r"Backsolve solves the adjoint equation, for which solver 'leapfrog'"):
        sn.solve(driven, (q, P), [0.0, 1.0], adjoint=sn.Backsolve(), **options)
    adjoint = sn.Backsolve(solver="dopri5", controller=sn.Integral())
    (grad,) = torch.autograd.grad(sn.solve(driven, (q, P), [0.0, 1.0], adjoint=adjoint, **options).ys[0][-1].sum(), q)
    (expected,) = torch.autograd.grad(sn.solve(driven, (q, P), [0.0, 1.0]).ys[0][-1].sum(), q)
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-4)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(TypeError, match="dim: expected a whole number, found str"):
        sn.Leapfrog(dim="q")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"separable: expected None \(to be detected\) or True \(declared\), found False"
    ):
        sn.Leapfrog(separable=False)
    assert repr(sn.Yoshida4(dim=0, separable=True)) == "Yoshida4(dim=0, separable=True)"
    assert sn.Leapfrog() == sn.Leapfrog() != sn.Leapfrog(dim=0)
    assert hash(sn.Leapfrog()) == hash(sn.Leapfrog())

"""Gradients of implicit steps: against central differences of the frozen map and against the exact solution."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from benchmarks.stiff import TORCH
from benchmarks.stiff_problems import POLLUTION_RATES, pollution, problems

SCALES = torch.tensor([1.0, 1e4, 1.0], dtype=torch.float64)
ADJOINTS = [sn.Direct(), sn.Replay(), sn.Replay(every=3), sn.Checkpointed(4)]


def robertson(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
    first, second, third = k[0] * y[0], k[1] * y[1] * y[2], k[2] * y[1] ** 2
    return torch.stack([second - first, first - second - third, third])


def leaves() -> list[Tensor]:
    y0, ts, k = [1.0, 1e-6, 1e-3], [0.0, 0.5, 30.0, 100.0], [0.04, 1e4, 3e7]
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (y0, ts, k)]


def loss(ys: Tensor) -> Tensor:
    return torch.sin(ys[1:] * SCALES).sum()


def central(f: Callable[..., float], inputs: Sequence[Tensor], sizes: Sequence[Sequence[float]]) -> list[Tensor]:
    """Central differences, extrapolated: their error is of order four."""
    grads = []
    for i, (x, steps) in enumerate(zip(inputs, sizes, strict=True)):
        grad = torch.zeros_like(x)
        for j, h in enumerate(steps):
            slopes = []
            for m in (1.0, 2.0):
                e = torch.zeros_like(x)
                e[j] = m * h
                ends = [f(*(v + s * e if n == i else v for n, v in enumerate(inputs))) for s in (1.0, -1.0)]
                slopes.append((ends[0] - ends[1]) / (2.0 * m * h))
            grad[j] = (4.0 * slopes[0] - slopes[1]) / 3.0
        grads.append(grad.detach())
    return grads


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module", params=["kvaerno5", "kvaerno3", "radauIIA5"])
def frozen(request: pytest.FixtureRequest) -> tuple[str, Any, list[Tensor]]:
    """A solver, its steps, and the gradient of the map that they define."""
    y0, ts, k = (x.detach() for x in leaves())
    steps = sn.PrescribedSteps([1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0])

    def value(y0: Tensor, ts: Tensor, k: Tensor) -> float:
        with torch.no_grad():
            return loss(sn.solve(robertson, y0, ts, args=(k,), solver=request.param, controller=steps).ys).item()

    sizes = [[1e-4, 1e-8, 1e-6], [1e-4] * 4, [x * 1e-4 for x in k.tolist()]]
    return request.param, steps, central(value, [y0, ts, k], sizes)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_gradient_of_the_frozen_map(frozen: tuple[str, Any, list[Tensor]], adjoint: Any) -> None:
    solver, steps, expected = frozen
    y0, ts, k = leaves()
    sol = sn.solve(robertson, y0, ts, args=(k,), solver=solver, controller=steps, adjoint=adjoint)  # type: ignore[arg-type]
    found = torch.autograd.grad(loss(sol.ys), (y0, ts, k))
    for grad, reference in zip(found, expected, strict=True):
        assert relative(grad, reference) < 1e-6
    scales = torch.tensor([0.04, 1e4, 3e7], dtype=torch.float64)
    assert relative(found[2] * scales, expected[2] * scales) < 1e-6


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
def test_adaptive_steps_have_the_gradient_of_the_frozen_map_to_newtons_tolerance(adjoint: Any) -> None:
    grads = []
    choices: Any = ({"rtol": 1e-6, "atol": 1e-10}, {"rtol": 1e-9, "atol": 1e-13})
    for options in choices:
        y0, ts, k = leaves()
        sol = sn.solve(robertson, y0, ts, args=(k,), solver="kvaerno5", adjoint=adjoint, save="last", **options)
        grads.append(torch.autograd.grad(torch.sin(sol.ys[-1] * SCALES).sum(), (y0, k)))
        adjoint = sn.Replay()
    scales = torch.tensor([0.04, 1e4, 3e7], dtype=torch.float64)
    assert relative(grads[0][0], grads[1][0]) < 1e-3
    assert relative(grads[0][1] * scales, grads[1][1] * scales) < 1e-3


def test_forward_values_do_not_depend_on_the_adjoint() -> None:
    ys = []
    for adjoint in (sn.Direct(), sn.Replay()):
        y0, ts, k = leaves()
        ys.append(sn.solve(robertson, y0, ts.detach(), args=(k,), solver="kvaerno5", adjoint=adjoint).ys.detach())
    # Without a graph, outputs of several steps are computed together, which may round differently.
    torch.testing.assert_close(*ys, rtol=1e-14, atol=1e-20)


def test_pollution_rates() -> None:
    """25 rate constants of very different sizes, relative to each."""
    y0 = torch.tensor(problems()["POLLU"].y0, dtype=torch.float64)
    rates = torch.tensor(POLLUTION_RATES, dtype=torch.float64)
    steps = sn.PrescribedSteps([1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0])

    def end(logs: Tensor, **options: Any) -> Tensor:
        def field(t: Tensor, y: Tensor, logs: Tensor) -> Tensor:
            return pollution(TORCH, t, y, rates * logs.exp())

        sol = sn.solve(field, y0, [0.0, 20.0], args=(logs,), solver="kvaerno5", controller=steps, **options)
        return (sol.ys[-1].clamp_min(1e-30).log() * torch.linspace(0.5, 1.5, 20, dtype=torch.float64)).sum()

    logs = torch.zeros(25, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(end(logs), logs)
    direction = torch.randn(25, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values = {s: end(s * 1e-3 * direction).item() for s in (-2, -1, 1, 2)}
    expected = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / 12e-3
    assert float(found @ direction) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
def test_robertson_rates_of_the_exact_solution_over_three_decades(adjoint: Any) -> None:
    ts = [0.0, 0.1, 1.0, 10.0, 100.0]
    y0, rates = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([0.04, 1e4, 3e7], dtype=torch.float64)

    def value(logs: Tensor, rtol: float, **options: Any) -> Tensor:
        def field(t: Tensor, y: Tensor, logs: Tensor) -> Tensor:
            return robertson(t, y, rates * logs.exp())

        return loss(sn.solve(field, y0, ts, args=(logs,), solver="kvaerno5", rtol=rtol, atol=rtol * 1e-6, **options).ys)

    logs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(value(logs, 1e-6, adjoint=adjoint), logs)
    with torch.no_grad():
        (expected,) = central(lambda x: value(x, 1e-10).item(), [logs.detach()], [[2e-2] * 3])
    assert relative(found, expected) < 1e-3


@pytest.mark.slow
def test_pollution_rates_of_the_exact_solution() -> None:
    y0 = torch.tensor(problems()["POLLU"].y0, dtype=torch.float64)
    rates = torch.tensor(POLLUTION_RATES, dtype=torch.float64)
    weights = 1.0 / torch.tensor([0.06, 0.13, 0.2, 0.05, 0.1], dtype=torch.float64)

    def value(logs: Tensor, rtol: float) -> Tensor:
        def field(t: Tensor, y: Tensor, logs: Tensor) -> Tensor:
            return pollution(TORCH, t, y, rates * logs.exp())

        sol = sn.solve(field, y0, [0.0, 60.0], args=(logs,), solver="kvaerno5", rtol=rtol, atol=rtol * 1e-6)
        return torch.sin(sol.ys[-1, :5] * weights).sum()

    logs = torch.zeros(25, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(value(logs, 1e-6), logs)
    direction = torch.randn(25, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values = {s: value(s * 1e-2 * direction, 1e-9).item() for s in (-2, -1, 1, 2)}
    expected = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / 12e-2
    assert float(found @ direction) == pytest.approx(expected, rel=1e-3)


def linear_in_time(t: Tensor, y: Tensor, a: Tensor) -> Tensor:
    return -a * (y**3 - torch.cos(t))


@pytest.mark.parametrize("solver", ["implicit_euler", "trapezoid", "sdirk2", "trbdf2", "gl4", "radauIIA3", "gl6"])
@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
def test_second_derivatives(solver: Any, adjoint: Any) -> None:
    def end(a: Tensor, y0: Tensor) -> Tensor:
        controller = sn.FixedStep(0.25)
        sol = sn.solve(linear_in_time, y0, [0.0, 0.5], args=(a,), solver=solver, controller=controller, adjoint=adjoint)
        return sol.ys[-1].square().sum()

    a = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([0.3, 1.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(end, (a, y0), atol=1e-8, rtol=1e-6)
    assert torch.autograd.gradgradcheck(end, (a, y0), atol=1e-7, rtol=1e-5)


def test_third_derivatives_are_refused() -> None:
    a = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([0.3, 1.2], dtype=torch.float64)
    controller = sn.FixedStep(0.25)
    sol = sn.solve(
        linear_in_time, y0, [0.0, 0.5], args=(a,), solver="sdirk2", controller=controller, adjoint=sn.Direct()
    )
    (first,) = torch.autograd.grad(sol.ys[-1].sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first, a, create_graph=True)
    with pytest.raises(RuntimeError, match="up to the second order"):
        torch.autograd.grad(second, a)


def test_complex_states_and_captured_parameters() -> None:
    matrix = torch.nn.Parameter(torch.tensor([[0.3j, 1.0], [-0.5, 0.2 - 0.1j]], dtype=torch.complex128))

    def field(t: Tensor, y: Tensor) -> Tensor:
        return matrix @ y - 20.0 * y * y.abs() ** 2

    grads = []
    for options in ({"solver": "kvaerno5"}, {"solver": "dopri5"}):
        y0 = torch.tensor([0.3 + 0.5j, -0.2j], dtype=torch.complex128, requires_grad=True)
        sol = sn.solve(field, y0, [0.0, 1.0], rtol=1e-9, atol=1e-11, **options)  # type: ignore[arg-type]
        grads.append(torch.autograd.grad(sol.ys[-1].abs().sum(), (y0, matrix)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("linear_solver", ["dense", "batched", "gmres"])
@pytest.mark.parametrize("solver", [sn.Kvaerno3, sn.RadauIIA5])
def test_linear_solvers_give_the_same_gradient(linear_solver: Any, solver: Any) -> None:
    grads = []
    for choice in ("auto", linear_solver):
        y0 = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        a = torch.tensor(30.0, dtype=torch.float64, requires_grad=True)
        options: Any = {"solver": solver(linear_solver=choice), "controller": sn.FixedStep(0.1)}
        sol = sn.solve(linear_in_time, y0, [0.0, 0.3], args=(a,), **options)
        grads.append(torch.autograd.grad(sol.ys[-1].square().sum(), (y0, a)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("solver", ["kvaerno3", "kvaerno5"])
def test_interpolating_solves_a_stiff_adjoint(solver: Any) -> None:
    rate = torch.tensor(300.0, dtype=torch.float64, requires_grad=True)

    def field(t: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        return torch.stack([-rate * (y[0] - y[1] ** 2), -y[1] + 0.1 * torch.sin(t)])

    grads, counts = [], []
    choices: Any = ((sn.Interpolating(), 1e-6, solver), (sn.Replay(), 1e-9, "kvaerno5"))
    for adjoint, rtol, name in choices:
        y0 = torch.tensor([2.0, 1.0], dtype=torch.float64, requires_grad=True)
        sol = sn.solve(field, y0, [0.0, 0.3, 1.0], args=(rate,), solver=name, rtol=rtol, atol=rtol, adjoint=adjoint)
        grads.append(torch.autograd.grad((sol.ys[1:] * torch.tensor([1.0, 2.0])).sum(), (y0, rate)))
        counts.append(sol.stats.backward)
    assert relative(grads[0][0], grads[1][0]) < 1e-4
    assert relative(grads[0][1], grads[1][1]) < 1e-2
    assert counts[0] is not None
    assert counts[0].accepted < 500
    assert counts[0].jacobians > 0


@pytest.mark.parametrize(
    ("adjoint", "message"),
    [
        (sn.Backsolve(), "Backsolve cannot use the implicit solver 'kvaerno5'"),
        (sn.Quadrature(), "Quadrature cannot use the implicit solver"),
        (sn.Quadrature(z="dense"), "Quadrature cannot use the implicit solver"),
        (sn.Reversible(), "Reversible needs a solver whose steps can be undone"),
        (sn.Interpolating(memory=40), "memory: Interpolating keeps the polynomials of all steps"),
    ],
)
def test_combinations_that_make_no_sense(adjoint: Any, message: str) -> None:
    y0, ts, k = leaves()
    with pytest.raises(ValueError, match=message):
        sn.solve(robertson, y0, ts, args=(k,), solver="kvaerno5", adjoint=adjoint)


def test_coarse_polynomials_are_refused() -> None:
    y0, ts, k = leaves()
    with pytest.raises(ValueError, match="take 'kvaerno5' or 'kvaerno3'"):
        sn.solve(robertson, y0, ts, args=(k,), solver="radauIIA5", adjoint=sn.Interpolating())


def test_a_field_that_has_changed_is_noticed() -> None:
    shift = [0.0]
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    sol = sn.solve(lambda t, y: -50.0 * (y - shift[0]), y0, [0.0, 1.0], solver="kvaerno5")
    shift[0] = 0.1
    with pytest.raises(RuntimeError, match="gives a different result"):
        sol.ys[-1].sum().backward()


def test_exact_gradient_at_the_slow_manifold() -> None:
    """y′ = −λ(y − cos t): for λ → ∞ the end does not depend on y0, and ∂y/∂λ is tiny."""
    y0 = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    rate = torch.tensor(1e6, dtype=torch.float64, requires_grad=True)
    sol = sn.solve(lambda t, y, r: -r * (y - torch.cos(t)), y0, [0.0, 1.0], args=(rate,), solver="kvaerno5")
    grad_y, grad_rate = torch.autograd.grad(sol.ys[-1].sum(), (y0, rate))
    assert abs(float(grad_y)) < 1e-6
    assert float(grad_rate) == pytest.approx(-math.sin(1.0) / 1e12, rel=1e-2)

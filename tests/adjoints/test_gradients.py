"""Gradients of Direct and Replay with respect to y0, ts, args and parameters, against central differences."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from frozen import NESTINGS, Case, case, directional, gradients
from torch import Tensor

import seminode as sn
from seminode.solvers import BY_NAME
from seminode.solvers.symplectic import Symplectic

#: Solvers of any equation whose steps can be differentiated.
KINDS = {
    name: kind
    for name, kind in BY_NAME.items()
    if not kind.external and not kind.implicit and not issubclass(kind, Symplectic)
}
FIXED = [name for name, kind in KINDS.items() if kind.error_order is None]


def options_for(solver: str, rtol: float = 1e-3) -> dict[str, Any]:
    if solver in FIXED:
        return {"solver": solver, "controller": sn.FixedStep(0.17)}
    return {"solver": solver, "rtol": rtol, "atol": 1e-2 * rtol}


def frozen(solution: sn.Solution) -> dict[str, Any]:
    """Options that take the recorded steps again, whatever the inputs."""
    assert solution.record is not None
    return {"controller": sn.PrescribedSteps.recorded(solution.record)}


def relative(a: list[Tensor], b: list[Tensor]) -> float:
    joined_a, joined_b = (torch.cat([x.reshape(-1) for x in xs]) for xs in (a, b))
    return float((joined_a - joined_b).norm() / joined_b.norm().clamp(min=1e-3))


def directions_of(problem: Case) -> list[tuple[str, list[Tensor]]]:
    """One random direction for each kind of input, and every single time."""
    generator = torch.Generator().manual_seed(11)
    found: list[tuple[str, list[Tensor]]] = []
    for name, tensors in problem.inputs().items():
        if name != "ts":
            found.append((name, [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in tensors]))
    found += [("ts", [e]) for e in torch.eye(len(problem.ts), dtype=torch.float64)]
    return found


def assert_matches(problem: Case, *many: dict[str, list[Tensor]], h: float, tolerance: float, **options: Any) -> None:
    """All these gradients are that of the problem with these options, whose differences are taken once."""
    for name, directions in directions_of(problem):
        expected = directional(problem, name, directions, h, **options)
        for grads in many:
            size = max(float(g.abs().max()) for gs in grads.values() for g in gs)
            found = sum(float((g * d).sum()) for g, d in zip(grads[name], directions, strict=True))
            # Relative to the number itself, or to the gradient as a whole where a single one happens to vanish.
            assert found == pytest.approx(expected, rel=tolerance, abs=0.1 * tolerance * size), (name, directions)


@pytest.mark.parametrize("jumps", [False, True], ids=["smooth", "jumps"])
@pytest.mark.parametrize("backward", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("solver", KINDS)
def test_gradients_of_the_frozen_map(solver: str, nesting: str, backward: bool, jumps: bool) -> None:
    problem = case(nesting, backward, jumps)
    direct, solution = gradients(problem, adjoint=sn.Direct(), record=True, **options_for(solver))
    replay, replayed = gradients(problem, adjoint=sn.Replay(), **options_for(solver))
    assert solution.stats == replayed.stats
    for name in direct:
        assert relative(replay[name], direct[name]) < 1e-11
    options = {"solver": solver, **frozen(solution)}
    assert_matches(problem, direct, h=1e-5, tolerance=1e-7, order=2, **options)


@pytest.mark.parametrize("every", [2, 3, 100])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_sparse_tapes_give_the_same_gradient(nesting: str, every: int) -> None:
    problem = case(nesting, jumps=True)
    options = options_for("bosh3", 1e-4)
    full, _ = gradients(problem, adjoint=sn.Replay(), **options)
    sparse, _ = gradients(problem, adjoint=sn.Replay(every=every), **options)
    for name in full:
        assert relative(sparse[name], full[name]) < 1e-13


@pytest.mark.parametrize("backward", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("solver", ["dopri5", "tsit5", "dopri8"])
def test_gradients_of_the_solve_at_tight_tolerance(solver: str, backward: bool) -> None:
    problem = case("dict", backward, jumps=True)
    options = options_for(solver, 1e-11)
    direct, replay = (gradients(problem, adjoint=adjoint, **options)[0] for adjoint in (sn.Direct(), sn.Replay()))
    assert_matches(problem, direct, replay, h=1e-3, tolerance=1e-5, **options)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("solver", ["bosh3", "adaptive_heun", "fehlberg2"])
def test_gradients_of_low_order_solves_at_tight_tolerance(solver: str) -> None:
    problem = case("tensor", jumps=True, end=0.02)
    options = options_for(solver, 1e-11)
    grads, _ = gradients(problem, adjoint=sn.Replay(), **options)
    assert_matches(problem, grads, h=1e-4, tolerance=1e-5, **options)


@pytest.mark.parametrize("solver", FIXED)
def test_gradients_with_fixed_steps_need_no_freezing(solver: str) -> None:
    """Inputs other than ts do not move a fixed grid: the solve is its own frozen map."""
    problem = case("tuple")
    grads, _ = gradients(problem, **options_for(solver))
    grads.pop("ts")
    for name, directions in directions_of(problem):
        if name != "ts":
            expected = directional(problem, name, directions, 1e-3, **options_for(solver))
            found = sum(float((g * d).sum()) for g, d in zip(grads[name], directions, strict=True))
            assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("save", ["last", "steps"])
@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Replay(every=3)], ids=str)
def test_gradients_of_other_savings(save: str, adjoint: Any) -> None:
    problem = case("dict", jumps=True)
    grads, solution = gradients(problem, adjoint=adjoint, save=save, record=True, **options_for("dopri5"))
    assert_matches(problem, grads, h=1e-4, tolerance=1e-7, save=save, **frozen(solution))


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Replay(every=2)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forwards", "backwards"])
def test_gradients_of_dense_output(backward: bool, adjoint: Any) -> None:
    """Through the polynomials, for every input and for the times at which they are read."""
    problem = case("dict", backward, jumps=True).requiring_grad()
    inside = torch.tensor([[0.05, 0.5], [0.7, 0.93]], dtype=torch.float64, requires_grad=True)

    def value(p: Case, at: Tensor, **options: Any) -> Tensor:
        solution = p.solve(dense=True, **options)
        assert solution.dense is not None
        ys = solution.dense(at)
        assert ys["rest"]["p"].shape == (2, 2, 1)
        return sum((leaf * torch.cos(leaf)).sum() for leaf in (ys["q"], ys["rest"]["p"], ys["rest"]["s"]))  # type: ignore[return-value]

    recorded = problem.solve(record=True, **options_for("dopri5"))
    value(problem, inside, adjoint=adjoint, **options_for("dopri5")).backward()
    plain = case("dict", backward, jumps=True)

    def at(p: Case, times: Tensor) -> float:
        with torch.no_grad():
            return float(value(p, times, **frozen(recorded)))

    def difference(move: Any, h: float = 1e-4) -> float:
        return (8 * (at(*move(h)) - at(*move(-h))) - (at(*move(2 * h)) - at(*move(-2 * h)))) / (12 * h)

    assert inside.grad is not None
    times = inside.detach()
    for name, directions in directions_of(plain):
        expected = difference(lambda h, n=name, d=directions: (plain.moved(n, d, h), times))
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in problem.inputs()[name]]
        found = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))
        assert found == pytest.approx(expected, rel=1e-7, abs=1e-8), name
    for i in range(2):
        step = torch.zeros_like(times)
        step[i, 1] = 1.0
        expected = difference(lambda h, s=step: (plain, times + h * s))
        assert float(inside.grad[i, 1]) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=str)
def test_repeated_output_times_each_get_their_gradient(adjoint: Any) -> None:
    problem = case("tensor")
    ts = torch.tensor([0.0, 0.0, 0.4, 0.4, 1.0, 1.0], dtype=torch.float64)
    problem = Case(problem.y0, ts, problem.arg, problem.weight)
    grads, solution = gradients(problem, adjoint=adjoint, record=True, **options_for("dopri5"))
    assert torch.equal(solution.ys[0], solution.ys[1])
    assert torch.allclose(solution.ys[4], solution.ys[5], rtol=1e-15)
    # One-sided: a time must not leave the interval.
    for i in (2, 3):
        e = torch.zeros(6, dtype=torch.float64)
        e[2:4] = 1.0  # moved together, so that ts stays monotone
        expected = directional(problem, "ts", [e], 1e-4, **frozen(solution))
        assert float(grads["ts"][0][2:4].sum()) == pytest.approx(expected, rel=1e-7), i
    slope = problem.field()(ts[0], problem.y0, problem.arg)
    weights = torch.cos(torch.arange(24, dtype=torch.float64)).reshape(6, 2, 2)[1] + 0.2 * problem.y0
    assert float(grads["ts"][0][1]) == pytest.approx(float((weights * slope).sum()), rel=1e-10)


def test_outputs_inside_steps_cost_replay_nothing() -> None:
    """A pendulum-like field, 8 outputs in 2 steps: at most 7 evaluations a step; a thousand outputs cost the same."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[..., 1], -torch.sin(y[..., 0])], -1)

    counts = []
    for n in (8, 1000):
        y0 = torch.tensor([[0.5, 0.0], [1.0, 0.2]], dtype=torch.float64, requires_grad=True)
        ts = torch.linspace(0, 0.6, n, dtype=torch.float64)
        sol = sn.solve(field, y0, ts, rtol=1e-3, atol=1e-3, controller=sn.Integral(dt0=0.3))
        assert sol.stats.accepted == 2
        sol.ys.square().sum().backward()
        assert sol.stats.backward is not None
        counts.append(sol.stats.backward.nfe)
    assert counts[0] <= 14
    assert counts[0] == counts[1]


def test_replay_skips_what_the_loss_does_not_read() -> None:
    problem = case("tensor").requiring_grad()
    solution = problem.solve(**options_for("dopri5", 1e-6))
    solution.ys[1].sum().backward()
    early = solution.stats.backward
    solution = problem.solve(**options_for("dopri5", 1e-6))
    solution.ys[-1].sum().backward()
    late = solution.stats.backward
    assert early is not None
    assert late is not None
    assert early.accepted < late.accepted == solution.stats.accepted


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=str)
@pytest.mark.parametrize("order", ["dopri5", "rk4"])
def test_second_derivatives(order: str, adjoint: Any) -> None:
    base = case("tensor")
    ts = base.ts[[0, 2, -1]].clone()

    def function(y0: Tensor, ts: Tensor, arg: Tensor, weight: Tensor) -> Tensor:
        p = Case(y0, ts, arg, weight)
        return p.solve(adjoint=adjoint, solver=order, controller=sn.FixedStep(0.3)).ys.square()

    inputs = [x.clone().requires_grad_() for x in (base.y0, ts, base.arg, base.weight)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=str)
def test_complex_gradients_follow_torch(adjoint: Any) -> None:
    def function(y0: Tensor, a: Tensor, ts: Tensor) -> Tensor:
        field = lambda t, y: a * y + 0.1j * torch.conj(y) * torch.cos(t)
        return sn.solve(field, y0, ts, adjoint=adjoint, solver="tsit5", controller=sn.FixedStep(0.3)).ys

    y0 = torch.tensor([1.0 + 0.5j, -0.3j], dtype=torch.complex128, requires_grad=True)
    a = torch.tensor(-0.2 + 1.0j, dtype=torch.complex128, requires_grad=True)
    ts = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, [y0, a, ts])


def test_complex_solution_is_right() -> None:
    y0 = torch.tensor([1.0 + 0.0j], dtype=torch.complex128)
    sol = sn.solve(lambda t, y: 1j * y, y0, [0.0, 2.0], rtol=1e-10, atol=1e-12)
    assert abs(complex(sol.ys[-1, 0]) - cmath.exp(2j)) < 1e-9


class TestTransforms:
    """torch.func over a solve with Direct and fixed steps."""

    options: dict[str, Any] = {"adjoint": sn.Direct(), "controller": sn.FixedStep(0.25)}  # noqa: RUF012
    y0 = torch.tensor([0.3, -0.2], dtype=torch.float64)
    ts = torch.tensor([0.0, 0.6, 1.0], dtype=torch.float64)

    @staticmethod
    def field(t: Tensor, y: Tensor, a: Tensor) -> Tensor:
        return torch.sin(a * y) + t

    def run(self, y0: Tensor, a: Tensor, ts: Tensor | None = None) -> Tensor:
        return sn.solve(self.field, y0, self.ts if ts is None else ts, args=(a,), **self.options).ys

    def test_jvp(self) -> None:
        a = torch.tensor(1.3, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(self.run, (self.y0, a))
        tangents = (torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64))
        out = torch.func.jvp(self.run, (self.y0, a), tangents)[1]
        expected = jacobian[0] @ tangents[0] + jacobian[1] * tangents[1]  # type: ignore[operator]
        assert torch.allclose(out, expected, rtol=1e-12)

    def test_jvp_in_times(self) -> None:
        a = torch.tensor(1.3, dtype=torch.float64)
        run = lambda ts: self.run(self.y0, a, ts)
        tangent = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        out = torch.func.jvp(run, (self.ts,), (tangent,))[1]
        jacobian = torch.autograd.functional.jacobian(run, self.ts)
        assert torch.allclose(out, jacobian @ tangent, rtol=1e-12)  # type: ignore[operator]

    def test_vmap(self) -> None:
        y0s = torch.randn(5, 2, dtype=torch.float64)
        a = torch.linspace(0, 1, 5, dtype=torch.float64)
        mapped = torch.func.vmap(self.run)(y0s, a)
        looped = torch.stack([self.run(y, x) for y, x in zip(y0s, a, strict=True)])
        assert torch.allclose(mapped, looped, rtol=1e-13)

    def test_vmap_over_one_input_only(self) -> None:
        a = torch.linspace(0, 1, 5, dtype=torch.float64)
        mapped = torch.func.vmap(self.run, in_dims=(None, 0))(self.y0, a)
        assert torch.allclose(mapped, torch.stack([self.run(self.y0, x) for x in a]), rtol=1e-13)

    def test_jacrev_and_vmapped_grad(self) -> None:
        a = torch.tensor(1.3, dtype=torch.float64)
        expected = torch.autograd.functional.jacobian(lambda y: self.run(y, a), self.y0)
        assert torch.allclose(torch.func.jacrev(self.run)(self.y0, a), expected, rtol=1e-12)  # type: ignore[arg-type]
        y0s = torch.randn(4, 2, dtype=torch.float64)
        grads = torch.func.vmap(torch.func.grad(lambda y: self.run(y, a).sum()))(y0s)
        assert grads.shape == (4, 2)

    def test_grad_with_adaptive_steps(self) -> None:
        run = lambda y: sn.solve(lambda t, y: -(y**2), y, self.ts, adjoint=sn.Direct()).ys.sum()
        y0 = self.y0.clone().requires_grad_()
        run(y0).backward()
        assert torch.allclose(torch.func.grad(run)(self.y0), y0.grad, rtol=1e-12)  # type: ignore[arg-type]

    def test_replay_is_refused_with_a_reason(self) -> None:
        with pytest.raises(ValueError, match=r"adjoint: Replay cannot be used inside a torch.func transform.*Direct"):
            torch.func.vmap(lambda y: sn.solve(lambda t, y: -y, y, self.ts).ys)(self.y0[:, None])

    def test_mapping_over_times_is_refused_with_a_reason(self) -> None:
        with pytest.raises(ValueError, match="ts: cannot be mapped over"):
            torch.func.vmap(lambda ts: self.run(self.y0, self.y0[0], ts))(torch.stack([self.ts, self.ts]))


def test_inference_mode_and_autograd_inside_the_field() -> None:
    """A Hamiltonian field that differentiates its energy, in the usual style that calls requires_grad_ itself."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            y = y if y.requires_grad else y.requires_grad_()
            energy = (1 - torch.cos(y[..., 0])).sum() + 0.5 * (y[..., 1] ** 2).sum()
            (grad,) = torch.autograd.grad(energy, y, create_graph=True)
        return torch.stack([grad[..., 1], -grad[..., 0]], -1)

    y0 = torch.tensor([[0.4, 0.1]], dtype=torch.float64)
    ts = [0.0, 1.0]
    with torch.inference_mode():
        quiet = sn.solve(field, y0.clone(), ts).ys
    with torch.no_grad():
        silent = sn.solve(field, y0.clone(), ts).ys
    found = []
    for adjoint in (sn.Direct(), sn.Replay()):
        start = y0.clone().requires_grad_()
        ys = sn.solve(field, start, ts, adjoint=adjoint).ys
        assert torch.equal(ys, silent)
        assert torch.equal(ys, quiet)
        ys[-1].sum().backward()
        found.append(start.grad)
    assert torch.allclose(found[0], found[1], rtol=1e-12)


def test_second_derivatives_see_the_same_random_numbers() -> None:
    """The mask of the solve, not one drawn when the derivative is taken."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 16), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(16, 2)]
    net = torch.nn.Sequential(*layers).double()
    found = []
    for adjoint in (sn.Direct(), sn.Replay(), sn.Replay(every=3)):
        torch.manual_seed(1)
        y0 = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
        ys = sn.solve(lambda t, y: net(y), y0, [0.0, 1.0], adjoint=adjoint, controller=sn.FixedStep(0.2)).ys
        torch.rand(5)  # other code draws in between
        (first,) = torch.autograd.grad(ys[-1].square().sum(), y0, create_graph=True)
        torch.rand(3)
        found.append(torch.autograd.grad(first.square().sum(), [y0, *net.parameters()], allow_unused=True))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=str)
def test_a_state_without_axes_keeps_its_shape_where_times_are_differentiated(adjoint: Any) -> None:
    y0 = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    ts = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    sol = sn.solve(lambda t, y: -t * y, y0, ts, adjoint=adjoint, rtol=1e-9, atol=1e-9)
    assert sol.ys.shape == (3,)
    (grad,) = torch.autograd.grad(sol.ys[-1], ts)
    last = math.exp((0.5**2 - 1.5**2) / 2)
    torch.testing.assert_close(
        grad, torch.tensor([0.5 * last, 0.0, -1.5 * last], dtype=torch.float64), rtol=1e-6, atol=1e-8
    )

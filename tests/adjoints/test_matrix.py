"""The gradient matrix: every adjoint, for every input, nesting and direction, with and without jumps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from frozen import Case, case, gradients
from torch import Tensor

import seminode as sn

NESTED = ("tensor", "tuple", "dict")
SOLVERS = {"dopri5": 1e-6, "tsit5": 1e-6, "bosh3": 1e-5, "dopri8": 1e-7}

CONTINUOUS = {
    "seminorm": sn.Backsolve(),
    "seminorm_rms": sn.Backsolve(norm="seminorm_rms"),
    "mixed": sn.Backsolve(norm="mixed"),
    "mixed_per_tensor": sn.Backsolve(norm="mixed_per_tensor"),
    "a norm of one's own": sn.Backsolve(norm=sn.norms.max),
    "published": sn.Backsolve(norm="mixed", restart="fresh"),
    "published seminorm": sn.Backsolve(norm="seminorm", restart="fresh"),
    "interpolating": sn.Interpolating(),
    "interpolating in little memory": sn.Interpolating(memory=24),
    "lobatto": sn.Quadrature(),
    "lobatto, dense": sn.Quadrature(z="dense"),
    "lobatto in little memory": sn.Quadrature(z="dense", memory=24),
    "gauss": sn.Quadrature(rule="gauss"),
    "gauss, dense": sn.Quadrature(rule="gauss", z="dense"),
    "gauss-kronrod": sn.Quadrature(rule="gauss-kronrod"),
}
#: Reading between the steps of dopri8 is refused.
READS_POLYNOMIALS = {
    name
    for name, adjoint in CONTINUOUS.items()
    if isinstance(adjoint, sn.Interpolating | sn.Quadrature) or adjoint.restart == "fresh"
}
PAIRS = [(name, solver) for name in CONTINUOUS for solver in SOLVERS]
REFUSED = [(name, solver) for name, solver in PAIRS if solver == "dopri8" and name in READS_POLYNOMIALS]
#: Structures are packed before a solver sees them: all of them are tested with one solver, one with the others.
ALL_NESTINGS = [
    pytest.param(name, solver, nesting, marks=() if solver == "dopri5" or nesting == "dict" else pytest.mark.slow)
    for name, solver in PAIRS
    if (name, solver) not in REFUSED
    for nesting in NESTED
]

DISCRETE = {
    "replay": sn.Replay(),
    "every third": sn.Replay(every=3),
    "one checkpoint": sn.Checkpointed(1),
    "three checkpoints": sn.Checkpointed(3),
    "checkpoints for all": sn.Checkpointed(1000),
}
REVERSIBLE: dict[str, dict[str, Any]] = {
    "reversible_heun": {"solver": "reversible_heun", "rtol": 1e-3, "atol": 1e-5},
    "reversible_heun, fixed": {"solver": "reversible_heun", "controller": sn.FixedStep(0.03)},
    "dopri5": {"solver": sn.ReversibleRK("dopri5"), "rtol": 1e-5, "atol": 1e-7},
    "tsit5": {"solver": sn.ReversibleRK("tsit5", 0.99), "rtol": 1e-5, "atol": 1e-7},
    "bosh3": {"solver": sn.ReversibleRK("bosh3", 0.9), "rtol": 1e-4, "atol": 1e-6},
    "dopri8": {"solver": sn.ReversibleRK("dopri8"), "rtol": 1e-6, "atol": 1e-8},
    "rk4, fixed": {"solver": sn.ReversibleRK("rk4"), "controller": sn.FixedStep(0.07)},
}

_references: dict[Any, dict[str, list[Tensor]]] = {}


def reference(nesting: str, backward: bool, jumps: bool) -> dict[str, list[Tensor]]:
    """The gradient of the exact solution: by Replay, at a tolerance that leaves only rounding."""
    key = nesting, backward, jumps
    if key not in _references:
        _references[key] = gradients(case(*key), adjoint=sn.Replay(), solver="dopri8", rtol=1e-12, atol=1e-14)[0]
    return _references[key]


def distance(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], scale: float = 0.0) -> float:
    """The largest error of any kind of input, and of every single time, relative to the gradient for that kind."""
    worst = 0.0
    for name in expected:
        a, b = (torch.cat([x.reshape(-1) for x in xs[name]]) for xs in (found, expected))
        worst = max(worst, float((a - b).norm() / b.norm().clamp(min=max(scale, 1e-3))))
    return worst


@pytest.mark.parametrize("jumps", [False, True], ids=["smooth", "jumps"])
@pytest.mark.parametrize("backward", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(("name", "solver", "nesting"), ALL_NESTINGS)
def test_continuous_adjoints_follow_the_tolerance(
    name: str, solver: str, nesting: str, backward: bool, jumps: bool
) -> None:
    """y0, t0, inner times, t1, args and parameters within 50 rtol of the exact gradient."""
    rtol = SOLVERS[solver]
    options: dict[str, Any] = {"solver": solver, "rtol": rtol, "atol": 1e-2 * rtol}
    found, solution = gradients(case(nesting, backward, jumps), adjoint=CONTINUOUS[name], **options)
    assert distance(found, reference(nesting, backward, jumps), scale=0.1) < 50 * rtol
    assert solution.stats.backward is not None


@pytest.mark.parametrize(("name", "solver"), REFUSED)
def test_polynomials_that_are_too_coarse_are_refused(name: str, solver: str) -> None:
    with pytest.raises(ValueError, match=rf"^solver: .* polynomial of '{solver}' .* take 'dopri5'"):
        gradients(case("tensor"), adjoint=CONTINUOUS[name], solver=solver)


@pytest.mark.parametrize("jumps", [False, True], ids=["smooth", "jumps"])
@pytest.mark.parametrize("backward", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("nesting", NESTED)
@pytest.mark.parametrize("solver", SOLVERS)
def test_discrete_adjoints_equal_direct(solver: str, nesting: str, backward: bool, jumps: bool) -> None:
    rtol = 10 * SOLVERS[solver]
    options: dict[str, Any] = {"solver": solver, "rtol": rtol, "atol": 1e-2 * rtol}
    problem = case(nesting, backward, jumps)
    expected, _ = gradients(problem, adjoint=sn.Direct(), **options)
    for adjoint in DISCRETE.values():
        found, _ = gradients(problem, adjoint=adjoint, **options)
        assert distance(found, expected) < 1e-11, adjoint


@pytest.mark.parametrize("jumps", [False, True], ids=["smooth", "jumps"])
@pytest.mark.parametrize("backward", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("nesting", NESTED)
@pytest.mark.parametrize("name", REVERSIBLE)
def test_reversible_equals_direct(name: str, nesting: str, backward: bool, jumps: bool) -> None:
    problem, options = case(nesting, backward, jumps), REVERSIBLE[name]
    expected, _ = gradients(problem, adjoint=sn.Direct(), **options)
    for adjoint in (sn.Reversible(), sn.Replay(), sn.Checkpointed(3)):
        found, _ = gradients(problem, adjoint=adjoint, **options)
        assert distance(found, expected) < 1e-11, adjoint


@pytest.mark.parametrize("coupling", [0.999, 0.99, 0.9])
def test_reversible_keeps_nine_digits_within_its_reach(coupling: float) -> None:
    """N steps, N·ln(1/λ) = 10: rounding errors are amplified by 2e4."""
    steps = round(10 / -math.log(coupling))
    y0 = torch.tensor([[1.0, 0.2], [0.3, -0.4]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)

    def grads(adjoint: Any) -> tuple[Tensor, ...]:
        sol = sn.solve(
            lambda t, y: torch.sin(y @ weight),
            y0,
            [0.0, 10.0],
            solver=sn.ReversibleRK("bosh3", coupling),
            controller=sn.FixedStep(10.0 / steps),
            adjoint=adjoint,
        )
        assert sol.stats.accepted == steps
        return torch.autograd.grad(sol.ys[-1].square().sum(), [y0, weight])

    for found, expected in zip(grads(sn.Reversible()), grads(sn.Direct()), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-9


@pytest.mark.parametrize("adjoint", [*CONTINUOUS.values(), *DISCRETE.values()], ids=[*CONTINUOUS, *DISCRETE])
@pytest.mark.parametrize("save", ["last", "steps"])
def test_other_savings(save: str, adjoint: Any) -> None:
    """The gradient for times as well: outputs after every step move with the start, or not at all."""
    problem = case("dict", jumps=True)
    options: dict[str, Any] = {"rtol": 1e-7, "atol": 1e-9, "save": save}
    expected, _ = gradients(problem, adjoint=sn.Direct(), **options)
    found, _ = gradients(problem, adjoint=adjoint, **options)
    assert distance(found, expected, scale=0.1) < 1e-5


@pytest.mark.parametrize("adjoint", [*CONTINUOUS.values(), *DISCRETE.values()], ids=[*CONTINUOUS, *DISCRETE])
def test_repeated_times(adjoint: Any) -> None:
    problem = case("tensor")
    ts = torch.tensor([0.0, 0.0, 0.4, 0.4, 1.0, 1.0], dtype=torch.float64)
    problem = Case(problem.y0, ts, problem.arg, problem.weight)
    expected, _ = gradients(problem, adjoint=sn.Direct(), rtol=1e-9, atol=1e-11)
    found, _ = gradients(problem, adjoint=adjoint, rtol=1e-7, atol=1e-9)
    assert distance(found, expected) < 2e-5


@pytest.mark.parametrize("adjoint", CONTINUOUS.values(), ids=CONTINUOUS)
def test_fixed_steps(adjoint: Any) -> None:
    """Without error control the backward solve takes fixed steps too."""
    problem = case("tuple")
    expected = reference("tuple", False, False)
    found, solution = gradients(problem, adjoint=adjoint, solver="rk4", controller=sn.FixedStep(0.01))
    assert distance(found, expected) < 1e-6
    assert solution.stats.backward is not None
    assert solution.stats.backward.rejected == 0


def test_a_solver_and_tolerances_of_its_own() -> None:
    problem = case("dict")
    options: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
    exact, tight = gradients(problem, adjoint=sn.Backsolve(), **options)
    own = sn.Backsolve(solver="bosh3", rtol=1e-4, atol=1e-6, controller=sn.PID())
    loose, solution = gradients(problem, adjoint=own, **options)
    assert solution.stats.nfe == tight.stats.nfe
    assert 1e-8 < distance(loose, exact) < 5e-3
    assert solution.stats.backward is not None
    assert tight.stats.backward is not None
    assert solution.stats.backward.nfe < tight.stats.backward.nfe

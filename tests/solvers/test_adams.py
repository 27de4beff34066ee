"""Adams methods: coefficients, orders, steps of different lengths, gradients, refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import frozen
import pytest
import torch
import torchdiffeq
from torch import Tensor

import seminode as sn
from seminode.solvers.adams import Adams, integrated_basis

EXACT_ITERATIONS: Any = {"rtol": 0.0, "atol": 0.0}


def weights(nodes: Sequence[int]) -> list[Fraction]:
    return [sum(row, Fraction(0)) for row in integrated_basis([Fraction(n) for n in nodes])]


def test_coefficients_are_the_classical_ones() -> None:
    """Hairer, Nørsett and Wanner I, equations III.1.5' and III.1.9'."""
    assert weights([0, -1]) == [Fraction(3, 2), Fraction(-1, 2)]
    assert weights([0, -1, -2, -3]) == [Fraction(n, 24) for n in (55, -59, 37, -9)]
    assert weights([1, 0, -1]) == [Fraction(n, 12) for n in (5, 8, -1)]
    assert weights([1, 0, -1, -2]) == [Fraction(n, 24) for n in (9, 19, -5, 1)]


@pytest.mark.parametrize("order", range(1, 13))
@pytest.mark.parametrize("first", [0, 1])
def test_rules_integrate_polynomials_exactly(order: int, first: int) -> None:
    nodes = [first - i for i in range(order)]
    rows = integrated_basis([Fraction(n) for n in nodes])
    for power in range(order):
        columns = [
            sum((row[m] * n**power for row, n in zip(rows, nodes, strict=True)), Fraction(0)) for m in range(order)
        ]
        assert columns == [Fraction(1, power + 1) if m == power else 0 for m in range(order)]


def methods(order: int) -> list[Adams]:
    return [sn.ExplicitAdams(order), sn.ImplicitAdams(order, max_iters=2, **EXACT_ITERATIONS)]


RATE, END = 4.0, 3.0


def exact(t: Tensor) -> Tensor:
    return torch.stack([torch.sin(RATE * t), torch.cos(RATE * t)], -1)


def field(t: Tensor, y: Tensor) -> Tensor:
    """A forced motion with a weak nonlinear coupling: explicit methods of order 12 are stable for small couplings."""
    e, (u, v) = exact(t), y
    return torch.stack([RATE * e[1] + 0.02 * (v - e[1] + u * u - e[0] ** 2), -RATE * e[0] + 0.02 * (e[0] - u) * v])


def errors(solver: Adams, controller: Any) -> tuple[float, float]:
    """At the ends of all steps, and between them."""
    start = exact(torch.tensor(0.0, dtype=torch.float64))
    times = torch.linspace(0.0, END, 301, dtype=torch.float64)
    with torch.no_grad():
        sol = sn.solve(field, start, [0.0, END], solver=solver, controller=controller, save="steps", dense=True)
    assert sol.dense is not None
    return float((sol.ys - exact(sol.ts)).abs().max()), float((sol.dense(times) - exact(times)).abs().max())


def slope(counts: Sequence[int], found: Sequence[float]) -> float:
    x, y = torch.tensor(counts).double().log(), torch.tensor(found).double().log()
    return -float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


#: Numbers of steps at which errors are neither above the asymptotic range nor below rounding.
COUNTS = {1: (300, 600), 2: (150, 300), **dict.fromkeys((3, 4), (120, 240)), **dict.fromkeys((5, 6, 7), (90, 180))}


@pytest.mark.parametrize("order", range(1, 13))
@pytest.mark.parametrize("kind", [0, 1], ids=["explicit", "implicit"])
def test_order(order: int, kind: int) -> None:
    high_orders = ((90, 130), (70, 110)), ((45, 80), (38, 56))
    low, high = COUNTS.get(order, high_orders[kind][order > 10])
    counts = [round(low * (high / low) ** (i / 2)) for i in range(3)]
    found = [errors(methods(order)[kind], sn.FixedStep(END / n)) for n in counts]
    assert slope(counts, [at_ends for at_ends, _ in found]) == pytest.approx(order, abs=0.2)
    between = [error for _, error in found]
    assert slope(counts, between) > order - 0.2 if order <= 10 else max(between) < 1e-6


def uneven(n: int, ratio: float) -> list[float]:
    """Step sizes that change by a factor of `ratio` after every fourth step."""
    sizes = [ratio if i // 4 % 2 else 1.0 for i in range(n)]
    return [END * size / sum(sizes) for size in sizes]


@pytest.mark.parametrize("order", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", [0, 1], ids=["explicit", "implicit"])
@pytest.mark.parametrize("ratio", [1.3, 4.0])
def test_order_with_steps_of_different_lengths(order: int, kind: int, ratio: float) -> None:
    """Below a ratio of two the weights follow the steps, above it the history is begun again."""
    low, high = {2: (160, 320), 3: (120, 240), 5: (120, 240), 8: (64, 120)}[order]
    counts = [8 * round(low * (high / low) ** (i / 2) / 8) for i in range(3)]
    found = [errors(methods(order)[kind], sn.PrescribedSteps(uneven(n, ratio)))[0] for n in counts]
    assert slope(counts, found) == pytest.approx(order, abs=0.35)


def test_order_across_jumps() -> None:
    """y' = sign · y with the sign changing twice: slopes from before a jump must not be used after it."""

    def jumping(t: Tensor, y: Tensor) -> Tensor:
        return torch.where((t > 0.33) & (t < 0.71), -1.0, 1.0).to(y) * y * (1.0 + y.square())

    y0 = torch.full((1,), 0.3, dtype=torch.float64)
    options: Any = {"jumps": [0.33, 0.71], "save": "last"}
    reference = sn.solve(jumping, y0, [0.0, 1.0], solver="dopri8", rtol=1e-13, atol=1e-13, **options).ys
    counts = [40, 57, 80]
    for solver in methods(5):
        solutions = [
            sn.solve(jumping, y0, [0.0, 1.0], solver=solver, controller=sn.FixedStep(1.0 / n), **options).ys
            for n in counts
        ]
        assert slope(counts, [float((ys - reference).abs()) for ys in solutions]) == pytest.approx(5, abs=0.5)


def test_one_evaluation_per_step_beyond_the_start() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    explicit = [
        sn.solve(lambda t, y: -y, y0, [0.0, 1.0], solver=sn.ExplicitAdams(4), controller=sn.FixedStep(1.0 / n)).stats
        for n in (64, 128)
    ]
    assert explicit[1].nfe - explicit[0].nfe == 64
    # Bootstrapping to order 4 costs 1 + 2 + 3 evaluations in the first step, 2 + 3 in the second and 3 in the third.
    assert explicit[0].nfe == 64 + 6 + 5 + 3
    implicit = [
        sn.solve(
            lambda t, y: -y,
            y0,
            [0.0, 1.0],
            solver=sn.ImplicitAdams(4, max_iters=3, **EXACT_ITERATIONS),
            controller=sn.FixedStep(1.0 / n),
        ).stats
        for n in (64, 128)
    ]
    assert implicit[1].nfe - implicit[0].nfe == 4 * 64


def test_corrections_end_at_the_tolerance() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    options: Any = {"controller": sn.FixedStep(0.01)}
    loose = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], solver=sn.ImplicitAdams(4, max_iters=9), **options)
    tight = sn.solve(
        lambda t, y: -y, y0, [0.0, 1.0], solver=sn.ImplicitAdams(4, max_iters=9, rtol=1e-14, atol=0.0), **options
    )
    assert loose.stats.nfe < tight.stats.nfe < 1000
    # The converged method: for y' = -y the implicit step of order 4 is linear in y1.
    ys = sn.solve(
        lambda t, y: -y,
        y0,
        [0.0, 1.0],
        solver=sn.ImplicitAdams(4, max_iters=30, **EXACT_ITERATIONS),
        save="steps",
        **options,
    ).ys
    b = [float(w) for w in weights([1, 0, -1, -2])]
    residual = ys[10] - ys[9] + 0.01 * (b[0] * ys[10] + b[1] * ys[9] + b[2] * ys[8] + b[3] * ys[7])
    assert float(residual.abs()) < 1e-15


def test_corrections_that_grow_are_a_failure() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    solver = sn.ImplicitAdams(3, max_iters=10)
    with pytest.raises(sn.StepFailure, match=r"correction \d changed y1 by .* times as much"):
        sn.solve(lambda t, y: -100.0 * y, y0, [0.0, 1.0], solver=solver, controller=sn.FixedStep(0.1))


def test_agrees_with_torchdiffeq_within_the_error_of_its_start() -> None:
    """torchdiffeq starts with steps of order 4, and max_order=12 stands for eleven slopes in its explicit method."""
    y0 = torch.tensor([1.0, 0.5], dtype=torch.float64)
    times = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)

    def swing(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[1], -torch.sin(y[0])])

    truth = sn.solve(swing, y0, times, solver="dopri8", rtol=1e-13, atol=1e-13).ys
    for name, solver in (("explicit_adams", sn.ExplicitAdams(5)), ("implicit_adams", sn.ImplicitAdams(6))):
        theirs: Any = torchdiffeq.odeint(swing, y0, times, method=name, options={"max_order": 6})
        ours = sn.solve(swing, y0, times, solver=solver, controller=sn.FixedStep(0.01)).ys
        assert float((theirs - truth).abs().max()) < 1e-8
        assert float((ours - truth).abs().max()) < float((theirs - truth).abs().max())


@pytest.mark.parametrize(("kind", "theirs"), [(0, 4.0), (1, 5.0)], ids=["explicit", "implicit"])
def test_order_on_grids_of_times(kind: int, theirs: float) -> None:
    """torchdiffeq loses order at the start, and more of it on uneven grids, where ours keep the order."""
    counts = [100, 200]
    for uneven, expected in ((0.0, theirs), (0.2, 1.2)):
        peer, own = [], []
        for n in counts:
            times = torch.linspace(0.0, END, n + 1, dtype=torch.float64)
            times[1:-1] += uneven * END / n * torch.sin(1.7 * torch.arange(1, n, dtype=torch.float64))
            name, options = ("explicit_adams", "implicit_adams")[kind], {"max_order": 8}
            ys: Any = torchdiffeq.odeint(field, exact(times[0]), times, method=name, options=options)
            peer.append(float((ys - exact(times)).abs().max()))
            own.append(errors(methods(6)[kind], sn.PrescribedSteps(times.diff().tolist()))[0])
        assert slope(counts, peer) == pytest.approx(expected, abs=0.3)
        assert slope(counts, own) > 5.6


ADJOINTS = [sn.Direct(), sn.Replay(), sn.Replay(every=3), sn.Checkpointed(3)]
SOLVERS = [
    sn.ExplicitAdams(1),
    sn.ExplicitAdams(4),
    sn.ImplicitAdams(2, max_iters=2, **EXACT_ITERATIONS),
    sn.ImplicitAdams(5, max_iters=2, **EXACT_ITERATIONS),
]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("jumps", [False, True])
def test_gradients(solver: Adams, adjoint: Any, jumps: bool) -> None:
    """The last step is shorter than the others, so that weights and their derivatives differ there."""
    problem = frozen.case("dict" if jumps else "tensor", jumps=jumps)
    options: Any = {"solver": solver, "controller": sn.FixedStep(0.07)}
    grads, solution = frozen.gradients(problem, adjoint=adjoint, **options)
    assert solution.stats.backward is not None
    generator = torch.Generator().manual_seed(1)
    for name, tensors in grads.items():
        directions = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in tensors]
        found = sum(float((g * d).sum()) for g, d in zip(tensors, directions, strict=True))
        expected = frozen.directional(problem, name, directions, 1e-4, **options)
        assert found == pytest.approx(expected, rel=1e-7, abs=1e-9), name


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
def test_gradients_of_times_through_the_lengths_of_earlier_steps(adjoint: Any) -> None:
    """Steps that land on a fixed time while the start moves: their length is part of the history of later steps."""
    problem = frozen.case("tensor")
    options: Any = {"solver": sn.ExplicitAdams(4), "controller": sn.FixedStep(0.06, step_to=(0.215, 0.55))}
    grads, _ = frozen.gradients(problem, adjoint=adjoint, **options)
    direction = torch.linspace(1.0, -0.5, 6, dtype=torch.float64)
    expected = frozen.directional(problem, "ts", [direction], 1e-4, **options)
    assert float((grads["ts"][0] * direction).sum()) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=repr)
def test_second_derivatives(adjoint: Any) -> None:
    y0 = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    end = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)

    def solved(y0: Tensor, end: Tensor) -> Tensor:
        ts = torch.stack([torch.zeros_like(end), end])
        options: Any = {"solver": sn.ExplicitAdams(3), "controller": sn.FixedStep(0.15), "adjoint": adjoint}
        return sn.solve(lambda t, y: torch.sin(y) * (1.0 + t * y.flip(0)), y0, ts, **options).ys[-1]

    assert torch.autograd.gradgradcheck(solved, (y0, end), atol=1e-6)


def test_replay_keeps_two_tensors_per_step() -> None:
    """The state and its slope: slopes of earlier steps are the same tensors in the history of all later ones."""
    addresses: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        if x.shape == (5,):
            addresses.add(x.data_ptr())
        return x

    y0 = torch.ones(5, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        options: Any = {"solver": sn.ExplicitAdams(8), "controller": sn.FixedStep(0.01), "save": "last"}
        sn.solve(lambda t, y: -y, y0, [0.0, 1.0], **options)
    assert 200 <= len(addresses) < 210


def test_transforms_and_batches() -> None:
    y0 = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def last(y: Tensor) -> Tensor:
        options: Any = {"controller": sn.FixedStep(0.1), "adjoint": sn.Direct(), "save": "last"}
        return sn.solve(lambda t, y: torch.sin(y), y, [0.0, 1.0], solver=sn.ImplicitAdams(4), **options).ys[0]

    torch.testing.assert_close(torch.func.vmap(last)(y0), last(y0), rtol=1e-6, atol=0.0)


def test_complex_and_single_precision_states() -> None:
    for dtype, bound in ((torch.complex128, 1e-9), (torch.complex64, 2e-5), (torch.float32, 2e-5)):
        rate = 1j if dtype.is_complex else -1.0
        y0, solver = torch.ones(2, dtype=dtype, requires_grad=True), sn.ExplicitAdams(6)
        sol = sn.solve(lambda t, y, k=rate: k * y, y0, [0.0, 1.0], solver=solver, controller=sn.FixedStep(0.01))
        truth = torch.exp(torch.tensor(rate, dtype=torch.complex128 if dtype.is_complex else torch.float64))
        assert float((sol.ys[-1] - truth.to(dtype)).abs().max()) < bound
        sol.ys[-1].sum().abs().backward()


def test_backward_in_time() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    sol = sn.solve(lambda t, y: y, y0, [1.0, 0.3, 0.0], solver=sn.ExplicitAdams(5), controller=sn.FixedStep(0.01))
    assert [float(y) for y in sol.ys] == pytest.approx([1.0, math.exp(-0.7), math.exp(-1.0)], rel=1e-9)


def test_continuous_adjoints_need_a_solver_of_their_own() -> None:
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    options: Any = {"solver": sn.ExplicitAdams(6), "controller": sn.FixedStep(0.01)}
    with pytest.raises(ValueError, match=r"Backsolve\(solver='dopri5', controller=sn.Integral\(\)\)"):
        sn.solve(lambda t, y: -y, y0, [0.0, 1.0], adjoint=sn.Backsolve(), **options)
    for adjoint in (sn.Backsolve, sn.Interpolating, sn.Quadrature):
        method = adjoint(solver="dopri5", controller=sn.Integral())
        sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], adjoint=method, **options)
        (grad,) = torch.autograd.grad(sol.ys[-1].sum(), y0)
        torch.testing.assert_close(grad, torch.full_like(grad, math.exp(-1.0)), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sn.ExplicitAdams(0), r"max_order: expected a whole number from 1 to 12, found 0"),
        (lambda: sn.ExplicitAdams(13), r"max_order: .* found 13"),
        (lambda: sn.ImplicitAdams(2.0), r"max_order: .* found 2.0"),  # type: ignore[arg-type]
        (lambda: sn.ImplicitAdams(max_iters=0), r"max_iters: expected a whole number of at least 1, found 0"),
        (lambda: sn.ImplicitAdams(rtol=-1.0), r"rtol: expected a finite number of at least 0, found -1.0"),
    ],
)
def test_invalid_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_adaptive_controllers_are_refused() -> None:
    y0 = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="controller: solver 'explicit_adams' has no error estimate"):
        sn.solve(lambda t, y: -y, y0, [0.0, 1.0], solver="explicit_adams")

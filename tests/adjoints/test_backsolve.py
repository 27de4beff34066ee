"""Backsolve: the published procedure and its figures, the same without parameters in the state, and beyond."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torchdiffeq
from torch import Tensor, nn
from torchdiffeq._impl.interp import _interp_fit
from torchdiffeq._impl.rk_common import RKAdaptiveStepsizeODESolver

import seminode as sn
from benchmarks.problems import (
    SymplecticField,
    cde_problem,
    contracting_problem,
    fitted_pendulum,
    pendulum_batch,
    pendulum_problem,
)
from seminode.adjoints import BackwardNorm, Restart
from seminode.norms import Norm
from seminode.solvers import SolverName
from seminode_lab.modes import oversized_seminorm


class Field(nn.Module):
    """A small network of the state and the time."""

    def __init__(self, size: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: nn.Parameter(
            torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        )
        self.first, self.second = draw(16, size + 1), draw(16, 16)
        self.last, self.bias = draw(size, 16), draw(16)
        self.calls = 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        # Detached: torchdiffeq lets ∂f/∂t steer its steps even where ts needs no gradient.
        x = torch.cat([y, t.detach().expand(len(y), 1)], -1)
        x = torch.tanh(x @ self.first.T + self.bias)
        return 3.0 * nn.functional.softplus(x @ self.second.T) @ self.last.T


def random_problem(seed: int) -> tuple[Field, Tensor, Tensor, Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(100 + seed)
    size, outputs = 3 + seed % 3, 2 + seed % 5
    y0 = torch.randn(6, size, generator=generator, dtype=torch.float64)
    ts = 2.0 * torch.rand(outputs, generator=generator, dtype=torch.float64).sort(descending=seed % 2 == 1).values
    weights = torch.randn(outputs, 6, size, generator=generator, dtype=torch.float64)
    rtol = 1e-4 if seed % 3 else 1e-6
    return Field(size, seed), y0, ts, weights, {"rtol": rtol, "atol": 1e-2 * rtol}


def gradients(loss: Tensor, y0: Tensor, field: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [y0, *field.parameters()]))


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    a, b = (torch.cat([x.reshape(-1) for x in xs]) for xs in (found, expected))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("norm", ["mixed_per_tensor", "seminorm"])
@pytest.mark.parametrize("seed", range(10))
def test_fresh_restarts_take_the_steps_of_torchdiffeq(seed: int, norm: BackwardNorm) -> None:
    field, start, ts, weights, tolerances = random_problem(seed)
    options: dict[str, Any] = {} if norm == "mixed_per_tensor" else {"norm": norm}
    y0 = start.clone().requires_grad_()
    ys: Any = torchdiffeq.odeint_adjoint(field, y0, ts, adjoint_options=options, **tolerances)
    field.calls = 0
    theirs = gradients((ys * weights).sum(), y0, field)
    calls = field.calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.DriftWarning)  # these problems are random, not kind
        sol = sn.solve(field, y0, ts, adjoint=sn.Backsolve(norm=norm, restart="fresh"), **tolerances)
        ours = gradients((sol.ys * weights).sum(), y0, field)
    assert sol.stats.backward is not None
    assert sol.stats.backward.nfe == calls
    # The two forward passes differ at ts[-1], on which only ours lands.
    assert distance(ours, theirs) < 1e3 * tolerances["rtol"]


class Counts(NamedTuple):
    """Evaluations of one backward pass: torchdiffeq's and ours."""

    theirs: int
    ours: int


def backward_evaluations(
    seed: int,
    norm: BackwardNorm,
    solver: SolverName,
    *,
    only_ends: bool = False,
    silent: Sequence[int] = (),
    time_gradients: bool = False,
    rtol: float | None = None,
) -> Counts:
    """Solve one random problem backwards by both libraries, with the same solver, tolerances and norm.

    The forward pass is much more accurate than the backward pass: torchdiffeq interpolates its output at ts[-1], and we
    land there, and a difference as large as the tolerance might change a step. Outputs in `silent` do not enter the
    loss. `rtol` replaces the tolerance of the problem.
    """
    field, start, ts, weights, tolerances = random_problem(seed)
    if rtol is not None:
        tolerances.update(rtol=rtol, atol=1e-2 * rtol)
    if only_ends:
        ts, weights = ts[[0, -1]], weights[[0, -1]]
    weights[list(silent)] = 0.0
    ts.requires_grad_(time_gradients)
    options: dict[str, Any] = {} if norm == "mixed_per_tensor" else {"norm": norm}
    forward: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
    backward: dict[str, Any] = {f"adjoint_{name}": value for name, value in tolerances.items()}
    y0 = start.clone().requires_grad_()
    ys: Any = torchdiffeq.odeint_adjoint(
        field, y0, ts, method="dopri5", adjoint_method=solver, adjoint_options=options, **forward, **backward
    )
    field.calls = 0
    (ys * weights).sum().backward()
    calls = field.calls
    adjoint = sn.Backsolve(norm=norm, restart="fresh", solver=solver, **tolerances)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.DriftWarning)
        sol = sn.solve(field, y0, ts, solver="dopri5", adjoint=adjoint, **forward)
        (sol.ys * weights).sum().backward()
    assert sol.stats.backward is not None
    return Counts(calls, sol.stats.backward.nfe)


both_norms = pytest.mark.parametrize("norm", ["mixed_per_tensor", "seminorm"])


@both_norms
@pytest.mark.parametrize(("solver", "only_ends"), [("dopri5", False), ("bosh3", True)])
@pytest.mark.parametrize("seed", range(6))
def test_counts_of_torchdiffeq_from_equal_outputs(
    seed: int, solver: SolverName, only_ends: bool, norm: BackwardNorm
) -> None:
    """bosh3 with two outputs only: between them torchdiffeq interpolates with another polynomial."""
    counts = backward_evaluations(seed, norm, solver, only_ends=only_ends)
    assert counts.ours == counts.theirs


def like_ours(self: RKAdaptiveStepsizeODESolver, state: Any) -> Any:
    """A step of torchdiffeq, then f at its end where that is not the last stage, and the cubic Hermite polynomial."""
    new = _adaptive_step(self, state)
    if not new.t1 > state.t1:  # rejected
        return new
    y0, f0, y1 = state.y1, state.f1, new.y1
    first_same_as_last = self.tableau.c_sol[-1] == 0
    f1 = new.f1 if first_same_as_last else self.func(new.t1, y1)
    dt = (new.t1 - new.t0).type_as(y0)
    middle = (y0 + y1) / 2 + dt * (f0 - f1) / 8
    return new._replace(f1=f1, interp_coeff=_interp_fit(y0, y1, middle, f0, f1, dt))


_adaptive_step = RKAdaptiveStepsizeODESolver._adaptive_step


@both_norms
@pytest.mark.parametrize(
    ("solver", "seeds", "rtol"),
    [("bosh3", (14, 18, 28), None), ("fehlberg2", (1, 2, 4), None), ("adaptive_heun", (1, 2, 4), 1e-3)],
)
def test_end_slope_and_polynomial_are_all_that_differs(
    solver: SolverName, seeds: Sequence[int], rtol: float | None, norm: BackwardNorm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchdiffeq takes the last stage of every method for f(t1, y1), and has quartics for all of them."""
    found = [backward_evaluations(seed, norm, solver, rtol=rtol) for seed in seeds]
    if solver == "bosh3":  # another polynomial: a_z differs after the first of several outputs, and some counts with it
        assert norm == "seminorm" or all(counts.theirs != counts.ours for counts in found)
    else:  # the last stage is not f(t1, y1): we evaluate that once more on every accepted step
        assert all(counts.theirs < counts.ours for counts in found)
    monkeypatch.setattr(RKAdaptiveStepsizeODESolver, "_adaptive_step", like_ours)
    found = [backward_evaluations(seed, norm, solver, rtol=rtol) for seed in seeds]
    assert all(counts.theirs == counts.ours for counts in found)


@both_norms
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_fresh_restarts_skip_outputs_without_a_cotangent(seed: int, norm: BackwardNorm) -> None:
    all_outputs = backward_evaluations(seed, norm, "dopri5")
    last_output = backward_evaluations(seed, norm, "dopri5", silent=range(1, 1 + seed % 5))
    assert last_output.ours < last_output.theirs
    assert last_output.ours < all_outputs.ours == all_outputs.theirs


@both_norms
@pytest.mark.parametrize("seed", range(5))
def test_gradients_for_times_cost_torchdiffeq_an_evaluation_per_output(seed: int, norm: BackwardNorm) -> None:
    """We need one at the start of the interval only."""
    counts = backward_evaluations(seed, norm, "dopri5", time_gradients=True)
    outputs = 2 + seed % 5
    assert counts.theirs - counts.ours == outputs - 2


def augmented(field: nn.Module) -> Any:
    """The adjoint system as a plain field over a dict, parameters and all."""
    params = list(field.parameters())

    def right_hand_side(t: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        with torch.enable_grad():
            z = state["z"].detach().requires_grad_()
            f = field(t, z)
        grads = torch.autograd.grad(f, [z, *params], state["a_z"], allow_unused=True)
        found = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, [z, *params], strict=True)]
        return {"z": f.detach(), "a_z": -found[0], "params": tuple(-g for g in found[1:])}

    return right_hand_side


def over_state_and_adjoint(y: dict[str, Any]) -> Tensor:
    return torch.maximum(sn.norms.rms(y["z"]), sn.norms.rms(y["a_z"]))


@pytest.mark.parametrize("seed", range(6))
def test_accumulating_parameters_changes_no_step(seed: int) -> None:
    """Against the plain augmented system under the same norm, solved from the last output to the first."""
    field, start, ts, weights, tolerances = random_problem(seed)
    y0, ts, weights = start.clone().requires_grad_(), ts[[0, -1]], weights[-1] / weights[-1].abs().max()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.DriftWarning)
        adjoint = sn.Backsolve(norm="seminorm", relative_to="entry")
        sol = sn.solve(field, y0, ts, adjoint=adjoint, record=True, save="last", **tolerances)
        found = gradients((sol.ys[-1] * weights).sum(), y0, field)
    state = {"z": sol.ys[-1].detach(), "a_z": weights, "params": tuple(map(torch.zeros_like, field.parameters()))}
    with torch.no_grad():
        oracle = sn.solve(
            augmented(field), state, ts.flip(0), norm=over_state_and_adjoint, record=True, save="last", **tolerances
        )
    assert sol.record is not None
    assert sol.record.backward is not None
    assert oracle.record is not None
    for ours, theirs in (
        (sol.record.backward.accepted, oracle.record.accepted),
        (sol.record.backward.rejected, oracle.record.rejected),
    ):
        assert [plan.t1 for plan in ours] == pytest.approx([plan.t1 for plan in theirs], rel=1e-9)
    expected = [oracle.ys["a_z"][-1], *(x[-1] for x in oracle.ys["params"])]
    assert distance(found, expected) < 1e-6
    for x, y in zip(found, expected, strict=True):
        assert float((x - y).norm() / y.norm()) < 1e-6


@pytest.mark.parametrize("restart", ["carry", "fresh"])
@pytest.mark.parametrize("seed", range(4))
def test_accumulating_is_the_same_with_many_outputs(seed: int, restart: Restart) -> None:
    """A norm that is the seminorm under another name keeps the parameters in the state."""
    field, start, _, _, tolerances = random_problem(seed)
    y0 = start.clone().requires_grad_()
    results = []
    for norm in ("seminorm", lambda y: sn.norms.seminorm(y)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sn.DriftWarning)
            ts = torch.linspace(0.0, 1.0, 5, dtype=torch.float64)
            sol = sn.solve(field, y0, ts, adjoint=sn.Backsolve(norm=norm, restart=restart), **tolerances)
            grads = gradients(sol.ys.square().sum(), y0, field)
        results.append((grads, sol.stats.backward))
    (found, ours), (expected, theirs) = results
    assert (ours.nfe, ours.accepted, ours.rejected) == (theirs.nfe, theirs.accepted, theirs.rejected)
    assert distance(found, expected) < 1e-6
    assert ours.vjp_params < theirs.vjp_params


@pytest.mark.parametrize("fitted", [False, True], ids=["untrained", "fitted"])
def test_the_pendulum(fitted: bool) -> None:
    """98 evaluations for either norm; 56 for the published slice, which is no seminorm but a mistake."""
    torch.set_num_threads(1)
    field = fitted_pendulum(200) if fitted else SymplecticField()
    windows = pendulum_batch(batch=128) if fitted else pendulum_batch(batch=32, trials=4)
    problem = pendulum_problem(field, windows)

    def backward(adjoint: Any) -> tuple[sn.Stats, sn.Stats]:
        y0 = problem.start().requires_grad_()
        sol = sn.solve(problem.field, y0, problem.ts, rtol=1e-4, atol=1e-4, adjoint=adjoint)
        torch.autograd.grad(problem.loss(sol.ys), [y0, *field.parameters()], allow_unused=True)
        assert sol.stats.backward is not None
        return sol.stats, sol.stats.backward

    cases: list[tuple[BackwardNorm | Norm, int]] = [("mixed", 98), ("seminorm", 98), (oversized_seminorm, 56)]
    for norm, nfe in cases:
        _, stats = backward(sn.Backsolve(norm=norm, restart="fresh"))
        assert (stats.nfe, stats.rejected) == (nfe, 0)
    assert backward(sn.Backsolve())[1].nfe <= 56
    forward, stats = backward(sn.Replay())
    assert stats.nfe <= 7 * forward.accepted  # every step here holds an output


def test_norms_on_a_neural_cde() -> None:
    """The fewer integrals steer, the fewer evaluations."""
    torch.set_num_threads(1)
    problem = cde_problem(knots=41)
    counts, grads = [], []
    for norm in ("seminorm", "mixed", "mixed_per_tensor"):
        y0 = problem.start()
        sol = sn.solve(
            problem.field,
            y0,
            problem.ts,
            rtol=1e-3,
            atol=1e-6,
            jumps=problem.jumps,
            adjoint=sn.Backsolve(norm=norm, restart="fresh"),
        )
        grads.append(torch.autograd.grad(problem.loss(sol.ys), list(problem.modules.parameters())))
        assert sol.stats.backward is not None
        assert sol.stats.backward.jumps == 40  # one a knot, that at the end included
        counts.append(sol.stats.backward.nfe)
    assert counts[0] < counts[1] < counts[2]
    assert distance(grads[0], grads[2]) < 3e-2


@pytest.mark.parametrize(
    "adjoint",
    [
        sn.Backsolve(),
        sn.Backsolve(norm="mixed"),
        sn.Interpolating(),
        sn.Quadrature(),
        sn.Quadrature(z="dense"),
        sn.Replay(),
    ],
    ids=repr,
)
def test_the_scale_of_a_loss_changes_no_step(adjoint: Any) -> None:
    field, start, ts, weights, tolerances = random_problem(4)
    y0 = start.clone().requires_grad_()
    plans, unit = [], []
    for scale in (1.0, 1e-6, 1e-3, 1e3, 1e6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sn.DriftWarning)
            sol = sn.solve(field, y0, ts, adjoint=adjoint, record=True, **tolerances)
            grads = gradients(scale * (sol.ys * weights).sum(), y0, field)
        assert sol.record is not None
        assert sol.record.backward is not None
        plans.append([plan.t1 for plan in (*sol.record.backward.accepted, *sol.record.backward.rejected)])
        if scale == 1.0:
            unit = grads
        assert distance([g / scale for g in grads], unit) < 1e-9
    for other in plans[1:]:
        assert other == pytest.approx(plans[0], rel=1e-10)


def test_outputs_without_a_cotangent_are_not_landed_on() -> None:
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ts = torch.linspace(0.0, 2.0, 101, dtype=torch.float64)
    many = sn.solve(lambda t, y: torch.sin(y) * torch.cos(t), y0, ts, adjoint=sn.Backsolve(), record=True)
    many.ys[-1].sum().backward()
    one = sn.solve(lambda t, y: torch.sin(y) * torch.cos(t), y0, ts[[0, -1]], adjoint=sn.Backsolve())
    one.ys[-1].sum().backward()
    # Whether the field is still the same is checked between outputs, so more often where there are many.
    assert many.stats.backward is not None
    assert one.stats.backward is not None
    assert many.stats.backward.checks > one.stats.backward.checks > 0
    assert replace(many.stats.backward, checks=0) == replace(one.stats.backward, checks=0)
    few = sn.solve(lambda t, y: torch.sin(y) * torch.cos(t), y0, ts, adjoint=sn.Backsolve(), record=True)
    few.ys[50].sum().backward()
    assert few.record is not None
    assert few.record.backward is not None
    assert few.record.backward.accepted[0].t0 == 1.0


def test_steps_are_carried_across_outputs() -> None:
    """One evaluation a restart; a step cut short to land does not shrink the next ones."""
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ts = torch.linspace(0.0, 4.0, 41, dtype=torch.float64)
    field = lambda t, y: torch.sin(y) * torch.cos(t)
    counts = {}
    for restart in ("carry", "fresh"):
        sol = sn.solve(field, y0, ts, rtol=1e-5, atol=1e-7, adjoint=sn.Backsolve(restart=restart))
        sol.ys.sum().backward()
        assert sol.stats.backward is not None
        counts[restart] = sol.stats.backward
    assert counts["carry"].nfe <= 40 * 7 + 1 + 6 * 4
    assert counts["fresh"].nfe >= 40 * 8


def test_a_cotangent_that_outgrows_the_others_gets_a_new_first_step() -> None:
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ts = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    evaluations = []
    for weight in (1.0, 1e-10):
        sol = sn.solve(lambda t, y: torch.sin(y), y0, ts, adjoint=sn.Backsolve(), atol=1e-8, rtol=1e-6)
        (weight * sol.ys[2] + sol.ys[1]).sum().backward()
        assert sol.stats.backward is not None
        evaluations.append(sol.stats.backward.nfe - 6 * (sol.stats.backward.accepted + sol.stats.backward.rejected))
    assert evaluations == [3, 4]  # two starts and one probe; two probes


class TestContraction:
    """y' = −D(y − sin 3t) + W tanh y: going back in time is unstable, the more so the larger D."""

    def gradient(self, stiffness: float, adjoint: Any, rtol: float = 1e-6, **options: Any) -> tuple[list[Tensor], Any]:
        problem = contracting_problem(stiffness=stiffness)
        y0 = problem.start().requires_grad_()
        sol = sn.solve(problem.field, y0, problem.ts, rtol=rtol, atol=1e-2 * rtol, adjoint=adjoint, **options)
        return list(torch.autograd.grad(problem.loss(sol.ys), [y0, *problem.modules.parameters()])), sol

    @pytest.mark.parametrize("stiffness", [10.0, 60.0])
    @pytest.mark.parametrize(
        "adjoint", [sn.Backsolve(), sn.Backsolve(norm="mixed", restart="fresh"), sn.Quadrature()], ids=repr
    )
    def test_backsolve_warns(self, adjoint: Any, stiffness: float) -> None:
        message = r"the state recovered at t = 0 differs .* by [\d.e+]+ tolerances.* use sn.Replay\(\) or sn.Interpol"
        with pytest.warns(sn.DriftWarning, match=message):
            self.gradient(stiffness, adjoint)

    @pytest.mark.parametrize("coupling", [0.9, 0.999])
    def test_reversible_warns_where_it_fails(self, coupling: float) -> None:
        solver = sn.ReversibleRK("dopri5", coupling)
        with pytest.warns(sn.DriftWarning, match=r"Reversible: .* tolerances.* sn.Replay\(\) or sn.Interpolating\(\)"):
            self.gradient(60.0 if coupling == 0.9 else 7.0, sn.Reversible(), solver=solver)

    @pytest.mark.parametrize("stiffness", [10.0, 60.0])
    @pytest.mark.parametrize(
        "adjoint",
        [sn.Replay(), sn.Checkpointed(5), sn.Interpolating(), sn.Interpolating(memory=24), sn.Quadrature(z="dense")],
        ids=repr,
    )
    def test_others_stay_right(self, adjoint: Any, stiffness: float) -> None:
        expected, _ = self.gradient(stiffness, sn.Replay(), 1e-11)
        found, _ = self.gradient(stiffness, adjoint)
        for x, y in zip(found, expected, strict=True):
            assert float((x - y).norm() / y.norm()) < 1e-4


def test_estimates_of_the_parameter_integral() -> None:
    """Of the right size: not far below the error that is there, and not useless."""
    field, start, _, weights, _ = random_problem(2)
    y0 = start.clone().requires_grad_()

    def run(adjoint: Any, rtol: float) -> tuple[list[Tensor], sn.Stats | None]:
        sol = sn.solve(field, y0, [0.0, 0.8], rtol=rtol, atol=1e-2 * rtol, adjoint=adjoint)
        return gradients((sol.ys[-1] * weights[0]).sum(), y0, field)[1:], sol.stats.backward

    exact, _ = run(sn.Replay(), 1e-12)
    for adjoint in (sn.Backsolve(), sn.Interpolating(), sn.Quadrature(rule="gauss-kronrod")):
        for rtol in (1e-4, 1e-6):
            found, stats = run(adjoint, rtol)
            assert stats is not None
            assert stats.params_error is not None
            assert stats.params_error < 100 * rtol
            if not isinstance(adjoint, sn.Quadrature):
                assert distance(found, exact) < 10 * stats.params_error + rtol


class Uneven(nn.Module):
    """A field whose adjoint has large and small entries: half of the channels hardly matter to the loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn((16, 16), generator=generator, dtype=torch.float64) / 4.0)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.relu(y @ self.weight + torch.cos(3.0 * t)) - y


def uneven_gradient(compiled: bool = False, **options: Any) -> tuple[list[Tensor], int]:
    field = Uneven()
    y0 = torch.randn((8, 16), generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    weights = 10.0 ** -torch.arange(16.0, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.DriftWarning)
        sol = sn.solve(field, y0, [0.0, 3.0], save="last", compile=compiled, **options)
        found = gradients((sol.ys[-1] * weights).sum(), y0, field)
    assert sol.stats.backward is not None
    return found, sol.stats.backward.nfe


def test_small_entries_of_a_sample_do_not_shorten_the_steps() -> None:
    expected, _ = uneven_gradient(adjoint=sn.Direct(), rtol=1e-11, atol=1e-13)
    options: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-9}
    sample, few = uneven_gradient(adjoint=sn.Backsolve(), **options)
    entry, many = uneven_gradient(adjoint=sn.Backsolve(relative_to="entry"), **options)
    assert few < 0.75 * many
    assert distance(sample, expected) < 5.0 * distance(entry, expected)


def test_an_adjoint_that_decays_keeps_its_relative_accuracy() -> None:
    """y′ = −2y: on the backward pass a_z decays to e⁻¹², and stays accurate to some digits."""
    y0 = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64, requires_grad=True)
    sol = sn.solve(lambda t, y: -2.0 * y, y0, [0.0, 6.0], adjoint=sn.Interpolating(rtol=1e-6, atol=1e-12))
    sol.ys[-1].sum().backward()
    assert y0.grad is not None
    assert y0.grad.tolist() == [pytest.approx([math.exp(-12.0)] * 2, rel=1e-4)] * 2


def test_relative_to_is_checked() -> None:
    with pytest.raises(ValueError, match=r"relative_to: expected 'sample' or 'entry', found 'row'"):
        sn.Backsolve(relative_to="row")  # type: ignore[arg-type]

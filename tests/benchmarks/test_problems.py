"""The problems that adjoints are compared on are what they say they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from benchmarks.problems import (
    Contracting,
    ControlledField,
    DrivenLinear,
    Flow,
    GradientProblem,
    LinearControl,
    SymplecticField,
    cde_problem,
    contracting_problem,
    exact_linear_outputs,
    fitted_pendulum,
    flow_problem,
    linear_problem,
    pendulum_batch,
    pendulum_problem,
)
from seminode.models.symplectic import SymplecticODENet

T = torch.tensor(0.3, dtype=torch.float64)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def gradient(problem: GradientProblem, **options: Any) -> Tensor:
    """Of the loss with respect to all parameters that it depends on, as one vector."""
    options = {"rtol": problem.rtol, "atol": problem.atol, **options}
    ys = sn.solve(problem.field, problem.start(), problem.ts, jumps=problem.jumps, **options).ys
    return gradient_of(problem, problem.loss(ys))


def gradient_of(problem: GradientProblem, loss: Tensor) -> Tensor:
    grads = torch.autograd.grad(loss, list(problem.modules.parameters()), allow_unused=True)
    return torch.cat([grad.reshape(-1) for grad in grads if grad is not None])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# The double pendulum


def test_symplectic_field_is_that_of_the_library() -> None:
    """In the published size, and from a generator of its own."""
    field = SymplecticField()
    assert [size(net) for net in (field.inverse_mass, field.potential, field.input_matrix)] == [324_003, 92_101, 93_004]
    assert size(field) == 509_108
    names = [name.split(".")[0] for name, _ in field.named_parameters()]
    assert names == ["inverse_mass"] * 8 + ["potential"] * 6 + ["input_matrix"] * 6
    model = SymplecticODENet(mass_hidden=(10, 10, 10), potential_hidden=(8, 8), input_hidden=(8, 8)).double()
    small = SymplecticField(widths=(10, 8), seed=3, dtype=torch.float64)
    model.field.load_state_dict(small.state_dict())
    x = pendulum_batch(batch=3, trials=1, dtype=torch.float64)[:, 0]
    assert torch.equal(small(T, x), model.field(T, x))


def test_fitting_the_pendulum() -> None:
    """A few iterations of the fit already bring down the loss; the full one is for benchmarks."""
    windows = pendulum_batch(batch=32, trials=4)
    assert windows.shape == (32, 8, 8)
    with torch.no_grad():
        losses = []
        for field in (SymplecticField(), fitted_pendulum(iterations=60)):
            problem = pendulum_problem(field, windows)
            ys = sn.solve(field, problem.start(), problem.ts, rtol=problem.rtol, atol=problem.atol).ys
            losses.append(float(problem.loss(ys)))
    assert losses[1] < 0.3 * losses[0]


# The neural CDE


def test_control_is_linear_between_knots() -> None:
    times = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    values = torch.tensor([[[0.0, 1.0], [1.0, 3.0], [3.0, -1.0]]], dtype=torch.float64)
    control = LinearControl(times, values)
    before, after = [[1.0, 2.0]], [[1.0, -2.0]]
    expected = {
        -1.0: before,
        0.0: before,
        math.nextafter(0.0, 1.0): before,
        math.nextafter(1.0, 0.0): before,
        1.0: before,
        math.nextafter(1.0, 2.0): after,
        3.0: after,
        4.0: after,
    }
    for t, slope in expected.items():
        assert control.derivative(torch.tensor(t, dtype=torch.float64)).tolist() == slope, t
    integral = sn.solve(lambda t, x: control.derivative(t), values[:, 0], [0.0, 3.0], jumps=times).ys[-1]
    torch.testing.assert_close(integral, values[:, -1])


def test_cde_has_the_published_size() -> None:
    problem = cde_problem(batch=2)
    field, initial, readout = problem.modules
    assert (size(field), size(initial), size(readout)) == (86_050, 1_980, 910)
    assert size(problem.modules) == 88_940
    assert isinstance(field, ControlledField)
    assert field.control.values.shape == (2, 161, 21)
    assert field.control.values[:, :, 0].tolist() == [list(range(161))] * 2
    assert problem.start().shape == (2, 90)
    assert problem.jumps is not None
    assert problem.jumps.tolist() == list(range(161))


def test_random_control_is_stationary() -> None:
    field = cde_problem(batch=64, hidden=4, dtype=torch.float64).field
    assert isinstance(field, ControlledField)
    x = field.control.values[..., 1:]
    assert float(x.mean()) == pytest.approx(0.0, abs=0.03)
    assert float(x.std()) == pytest.approx(1.0, abs=0.03)
    assert float((x[:, 1:] * x[:, :-1]).mean()) == pytest.approx(0.7, abs=0.03)


def test_a_small_cde_is_solved_and_differentiated() -> None:
    problem = cde_problem(batch=4, knots=20, channels=3, hidden=8, width=10, classes=3, dtype=torch.float64)
    z = problem.start()
    field = problem.field
    assert isinstance(field, ControlledField)
    matrix = field.net(z).tanh().reshape(4, 8, 3)
    torch.testing.assert_close(
        field(T, z), torch.einsum("bhc,bc->bh", matrix, field.control.values[:, 1] - field.control.values[:, 0])
    )
    solution = sn.solve(field, z, problem.ts, jumps=problem.jumps, rtol=1e-6, atol=1e-8)
    assert solution.stats.jumps == 18
    coarse, fine = gradient(problem), gradient(problem, rtol=1e-8, atol=1e-10)
    assert 0.0 < distance(coarse, fine) < 1e-2


# Contracting systems


def test_driven_linear_system_has_a_closed_form() -> None:
    problem = linear_problem()
    ys = exact_linear_outputs(problem)
    torch.testing.assert_close(ys[0], problem.start())
    solved = sn.solve(problem.field, problem.start(), problem.ts, rtol=1e-9, atol=1e-11).ys
    torch.testing.assert_close(solved, ys, rtol=1e-6, atol=1e-8)
    exact = gradient_of(problem, problem.loss(ys))
    assert distance(gradient(problem, rtol=1e-9, atol=1e-11), exact) < 1e-7
    field = problem.field
    assert isinstance(field, DrivenLinear)
    rates = -torch.linalg.eigvals(field.A.detach()).real.sort(descending=True).values
    torch.testing.assert_close(rates, torch.logspace(0.0, math.log10(20.0), 6, dtype=torch.float64))


def test_closed_form_moves_with_time_as_the_field_says() -> None:
    field, y0 = DrivenLinear(), linear_problem().start()
    dy = torch.func.jvp(lambda t: field.exact(t, y0), (T,), (torch.ones_like(T),))[1]
    torch.testing.assert_close(dy, field(T, field.exact(T, y0)))


def test_contracting_system_contracts() -> None:
    problem = contracting_problem(batch=2)
    field = problem.field
    assert isinstance(field, Contracting)
    assert (field.D.shape, field.W.shape) == ((8,), (8, 8))
    assert field.D.tolist()[::7] == [1.0, 60.0]
    y = problem.start()
    expected = torch.stack([-torch.diag(field.D) @ (row - math.sin(3 * 0.3)) + field.W @ torch.tanh(row) for row in y])
    torch.testing.assert_close(field(T, y), expected)
    with torch.no_grad():
        ends = sn.solve(field, y, problem.ts).ys
    assert float((ends[-1, 0] - ends[-1, 1]).norm()) < float((y[0] - y[1]).norm())
    assert distance(gradient(problem), gradient(problem, rtol=1e-10, atol=1e-12)) < 1e-4


# The flow


def test_flow_has_the_exact_trace() -> None:
    field = Flow(size=3, width=7, seed=2)
    problem = flow_problem(batch=5, size=3, dtype=torch.float64)
    state = problem.start()
    k = field(T, state)
    for i, z in enumerate(state["z"]):
        jacobian = torch.func.jacrev(lambda z: field.velocity(T, z)[0])(z)
        torch.testing.assert_close(k["logp"][i], -jacobian.trace())
        torch.testing.assert_close(k["energy"][i], 0.5 * k["z"][i].square().mean())


def test_flow_transports_density() -> None:
    """log p(z(1)) − log p(z(0)) = −log |det ∂z(1)/∂z(0)|."""
    problem = flow_problem(batch=1, dtype=torch.float64)
    state = problem.start()

    def end(z: Tensor) -> dict[str, Tensor]:
        return sn.solve(problem.field, {**state, "z": z}, problem.ts, rtol=1e-9, atol=1e-11).ys

    jacobian = torch.autograd.functional.jacobian(lambda z: end(z)["z"][-1].squeeze(0), state["z"])
    assert isinstance(jacobian, Tensor)
    torch.testing.assert_close(end(state["z"])["logp"][-1, 0], -jacobian[:, 0].det().log())
    assert bool(end(state["z"])["energy"][-1, 0] > 0.0)
    assert gradient(problem).isfinite().all()


@pytest.mark.parametrize("make", [cde_problem, linear_problem, contracting_problem, flow_problem])
def test_a_seed_means_one_problem_in_both_precisions(make: Any) -> None:
    state = torch.get_rng_state()
    small = {"batch": 2, "knots": 5, "hidden": 4} if make is cde_problem else {"batch": 2}
    once, again = make(seed=5, dtype=torch.float64, **small), make(seed=5, dtype=torch.float64, **small)
    single, other = make(seed=5, dtype=torch.float32, **small), make(seed=6, dtype=torch.float64, **small)
    vectors = [nn.utils.parameters_to_vector(p.modules.parameters()) for p in (once, again, single, other)]
    assert torch.equal(vectors[0], vectors[1])
    assert torch.equal(vectors[0].float(), vectors[2])
    assert not torch.equal(vectors[0], vectors[3])
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn from the generator that all share

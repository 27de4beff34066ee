"""Symplectic ODE-Net: Hamilton's equations, agreement with the textbook implementation, and control."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seminode as sn
from benchmarks import symplectic as benchmark
from benchmarks.symplectic import Rows, Textbook, evaluation, product
from seminode.adjoints import Adjoint
from seminode.models.symplectic import SymplecticField, SymplecticODENet
from seminode_lab.models import pendulum

T = torch.tensor(0.3, dtype=torch.float64)


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def small(dof: int = 2, inputs: int | None = None, seed: int = 0, **options: Any) -> SymplecticODENet:
    torch.manual_seed(seed)
    hidden = {"mass_hidden": (10, 9, 8), "potential_hidden": (8, 7), "input_hidden": (6, 5)}
    return SymplecticODENet(dof, inputs, **hidden, **options).double()


def points(dof: int = 2, inputs: int | None = None, batch: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    draw = lambda size: torch.randn(batch, size, dtype=torch.float64, generator=generator)
    q, w, u = draw(dof), draw(dof), draw(dof if inputs is None else inputs)
    return torch.cat((q.cos(), q.sin(), w, u), -1)


def test_the_published_number_of_parameters() -> None:
    model = SymplecticODENet()
    assert [size(net) for net in (model.inverse_mass, model.potential, model.input_matrix)] == [324_003, 92_101, 93_004]
    assert size(model) == 509_108
    names = [name.split(".")[1] for name, _ in model.named_parameters()]
    assert names == ["inverse_mass"] * 8 + ["potential"] * 6 + ["input_matrix"] * 6
    assert {name.split(".")[0] for name in model.state_dict()} == {"field"}
    assert [type(layer) for layer in model.potential.children()][1::2] == [nn.Softplus] * 2


def test_entries_of_the_inverse_mass() -> None:
    """Outputs (a, b, o) give L = ((a, 0), (o, b)); for three angles, entries below the diagonal follow row by row."""
    field = small().field
    L = field.factor(torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64))
    assert L.tolist() == [[2.0, 0.0], [5.0, 3.0]]
    assert field.squared(L).tolist() == [[4.1, 10.0], [10.0, 34.1]]
    L = small(3).field.factor(torch.arange(1.0, 7.0, dtype=torch.float64))
    assert L.tolist() == [[1.0, 0.0, 0.0], [4.0, 2.0, 0.0], [5.0, 6.0, 3.0]]
    inverse = field.inverse_mass_matrix(points()[:, :4])
    assert bool((torch.linalg.eigvalsh(inverse.detach()) > 0.1 - 1e-12).all())
    g = field.actuation(points()[:, :4])
    torch.testing.assert_close(g.flatten(1), field.input_matrix(points()[:, :4]))


@pytest.mark.parametrize(("dof", "inputs"), [(1, 1), (2, 2), (3, 2), (2, 3)])
def test_field_is_hamiltonian(dof: int, inputs: int) -> None:
    """Compared with Hamilton's equations in (q, p), differentiated by torch.func."""
    model, x = small(dof, inputs), points(dof, inputs)[0]
    field = model.field
    cos, sin, w, u = x.split((dof, dof, dof, inputs))
    q = torch.atan2(sin, cos)
    angles = lambda q: torch.cat((q.cos(), q.sin()))

    def hamiltonian(q: Tensor, p: Tensor) -> Tensor:
        return 0.5 * p @ field.inverse_mass_matrix(angles(q)) @ p + field.potential(angles(q)).squeeze()

    p = torch.linalg.solve(field.inverse_mass_matrix(angles(q)), w)
    dq = torch.func.grad(hamiltonian, 1)(q, p)
    dp = -torch.func.grad(hamiltonian, 0)(q, p) + field.actuation(angles(q)) @ u
    dw = torch.func.jvp(lambda q, p: field.inverse_mass_matrix(angles(q)) @ p, (q, p), (dq, dp))[1]
    torch.testing.assert_close(dq, w)
    torch.testing.assert_close(field(T, x), torch.cat((-sin * dq, cos * dq, dw, torch.zeros_like(u))))
    torch.testing.assert_close(model.energy(x), hamiltonian(q, p))
    torch.testing.assert_close(field.force(x), torch.func.grad(hamiltonian)(q, torch.zeros_like(p)))


@pytest.mark.parametrize("other", [Textbook, Rows])
def test_agrees_with_the_textbook(other: type[nn.Module]) -> None:
    """In float32 and at full size: the field, with and without an autograd graph, and its gradients."""
    torch.manual_seed(0)
    ours = SymplecticODENet().field
    theirs = other(ours)
    x = pendulum.samples(16, 1, torch.Generator().manual_seed(0))[0].float()
    cotangent = torch.randn_like(x)
    (value, grads), (expected, references) = product(ours, x, cotangent), product(theirs, x, cotangent)
    assert float((value - expected).abs().max() / expected.abs().max()) < 1e-5
    torch.testing.assert_close(evaluation(ours, x), evaluation(theirs, x), rtol=1e-5, atol=1e-5)
    unused = [grad is None for grad in grads]
    assert unused == [grad is None for grad in references]
    assert sum(unused) == 1  # the constant of V has no gradient
    for grad, reference in zip(grads, references, strict=True):
        if grad is not None and reference is not None:
            assert float((grad - reference).norm() / reference.norm()) < 1e-5


def test_the_benchmark_prints_its_table() -> None:
    table = benchmark.report(benchmark.measure(repeats=2, batch=4, widths=(8, 6))).splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        [kind, name] for kind in ("forward", "vjp") for name in ("textbook", "rows", "seminode")
    ]


@pytest.mark.slow
def test_faster_than_the_textbook() -> None:
    for times in benchmark.measure(repeats=10).values():
        assert min(times["textbook"]) > 1.5 * min(times["seminode"])


def test_field_differentiates_inside_no_grad() -> None:
    field, x = small().field, points()
    with torch.no_grad():
        value = field(T, x)
        of_leaf = field(T, x.clone().requires_grad_())
    assert not value.requires_grad
    assert not of_leaf.requires_grad
    torch.testing.assert_close(value, field(T, x).detach())
    torch.testing.assert_close(value, of_leaf)


def test_field_under_transforms() -> None:
    field, x = small().field, points()
    expected = field(T, x)
    torch.testing.assert_close(torch.func.vmap(lambda x: field(T, x))(x), expected)
    tangent = torch.func.jvp(lambda x: field(T, x), (x,), (torch.ones_like(x),))[1]
    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: field(T, x)))(x)
    torch.testing.assert_close(tangent, jacobians.sum(-1))


@pytest.mark.parametrize("dof", [1, 2, 3])
def test_field_can_be_differentiated(dof: int) -> None:
    field, x = small(dof).field, points(dof, batch=2).requires_grad_()
    names = ("inverse_mass.2.weight", "potential.2.weight", "input_matrix.0.bias")
    weights = [field.get_parameter(name) for name in names]

    def value(x: Tensor, *replaced: Tensor) -> Tensor:
        return torch.func.functional_call(field, dict(zip(names, replaced, strict=True)), (T, x))

    torch.autograd.gradcheck(value, (x, *weights), fast_mode=True)


def field_vjp(field: SymplecticField, x: Tensor) -> Tensor:
    return torch.func.vjp(lambda x: field(T, x), x)[1](x)[0]


def test_field_is_one_graph() -> None:
    """No graph breaks, neither in the field nor in its VJP."""
    field, x = small().field, points()
    with torch.no_grad():
        for function in (lambda x: field(T, x), lambda x: field_vjp(field, x)):
            compiled = torch.compile(function, fullgraph=True, backend="eager")
            torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, as Inductor is loaded
def test_field_compiles() -> None:
    field, x = small().field, points()
    with torch.no_grad():
        for function in (lambda x: field(T, x), lambda x: field_vjp(field, x)):
            torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), function(x))


def test_energy_is_conserved_without_torques() -> None:
    """Also cos² + sin² = 1, and u is constant."""
    model, x0 = small(rtol=1e-11, atol=1e-11), points()
    x0[:, 6:] = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        xs = model(x0, [0.0, 1.0, 2.5])
    assert xs.shape == (3, 5, 8)
    assert float((model.energy(xs) - model.energy(x0)).detach().abs().max()) < 1e-8
    assert float((xs[..., :2].square() + xs[..., 2:4].square() - 1.0).abs().max()) < 1e-9
    driven = model(points(), [0.0, 1.0])
    assert torch.equal(driven[1, :, 6:], points()[:, 6:])
    assert float((model.energy(driven[1]) - model.energy(driven[0])).abs().detach().max()) > 1e-3


def test_training_through_a_solve() -> None:
    """A few iterations on windows of the data reduce the loss, and the evaluations are counted."""
    torch.manual_seed(0)
    model = SymplecticODENet(
        mass_hidden=(32, 32), potential_hidden=(32,), input_hidden=(32,), rtol=1e-4, atol=1e-4, adjoint=sn.Replay()
    )
    windows = pendulum.windows(pendulum.trajectories(trials=1, steps=9))
    ts = pendulum.DT * torch.arange(8)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = nn.functional.mse_loss(model(windows[:, 0], ts), windows.transpose(0, 1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert model.nfe > 0
    assert model.backward_nfe > 0


@pytest.mark.parametrize(
    "adjoint",
    [sn.Replay(), sn.Checkpointed(2), sn.Backsolve(), sn.Interpolating(), sn.Quadrature()],
    ids=lambda adjoint: type(adjoint).__name__,
)
def test_gradients_of_every_adjoint(adjoint: Adjoint) -> None:
    model, x0 = small(rtol=1e-8, atol=1e-8), points().requires_grad_()
    inputs = [x0, *(p for name, p in model.named_parameters() if name != "field.potential.4.bias")]
    grads = []
    for each in (sn.Direct(), adjoint):
        model.options["adjoint"] = each
        parts = torch.autograd.grad(model(x0, [0.0, 0.2, 0.5]).square().sum(), inputs)
        grads.append(torch.cat([grad.flatten() for grad in parts]))
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 1e-6


def test_control_inverts_the_potential() -> None:
    """In closed loop p′ = −∂T/∂q + ∂V/∂q − q′: the learned potential is inverted and the motion is damped."""
    model, x = small(), points()
    u = model.control(x[:, :6])
    assert u.shape == (5, 2)
    torch.testing.assert_close(model.control(x), u)
    g = model.field.actuation(x[:, :4])
    target = 2.0 * model.field.force(x) - x[:, 4:6]
    torch.testing.assert_close((g @ u.unsqueeze(-1)).squeeze(-1), target)
    still = model.control(x, potential_gain=0.0, damping=0.0)
    assert float(still.detach().abs().max()) == 0.0
    damped = model.control(x, potential_gain=0.0, damping=3.0)
    torch.testing.assert_close((g @ damped.unsqueeze(-1)).squeeze(-1), -3.0 * x[:, 4:6])
    for dof, inputs in ((1, 1), (3, 3), (2, 3)):
        model, x = small(dof, inputs), points(dof, inputs)
        g, u = model.field.actuation(x[:, : 2 * dof]), model.control(x)
        target = 2.0 * model.field.force(x) - x[:, 2 * dof : 3 * dof]
        torch.testing.assert_close((g @ u.unsqueeze(-1)).squeeze(-1), target)
    with torch.no_grad():
        assert not model.control(x).requires_grad


@pytest.mark.slow
def test_the_controller_swings_the_pendulum_up() -> None:
    torch.manual_seed(0)
    model = SymplecticODENet()
    losses = pendulum.fit_accelerations(model.field, 800)
    assert sum(losses[-20:]) / 20 < 5e-3
    run = pendulum.simulate(model.control)
    q = run.states[-1, :2]
    assert abs(float(q[0].cos()) + 1.0) < 0.01
    assert abs(float(q[1].cos()) - 1.0) < 0.01


def test_state_dict_copies_and_repr() -> None:
    model, other = small(seed=0, rtol=1e-6), small(seed=1, rtol=1e-6)
    other.load_state_dict(model.state_dict())
    x0 = points()
    assert torch.equal(model(x0, [0.0, 0.3]), other(x0, [0.0, 0.3]))
    assert torch.equal(copy.deepcopy(model)(x0, [0.0, 0.3]), model(x0, [0.0, 0.3]))
    assert model.extra_repr() == "dof=2, inputs=2, floor=0.1, rtol=1e-06"
    assert len(model.state_dict()) == 20  # parameters only
    exact = small().field.squared(torch.zeros(2, 2, dtype=torch.float64))
    assert exact[0, 0].item() == 0.1  # exact in float64


def test_errors_name_the_argument() -> None:
    model, x = small(), points()
    with pytest.raises(ValueError, match="dof: expected a whole number of at least 1, found 0"):
        SymplecticODENet(0)
    with pytest.raises(ValueError, match="inputs: expected a whole number of at least 1, found 0"):
        SymplecticODENet(2, 0)
    with pytest.raises(ValueError, match="floor: expected a positive number, found 0"):
        SymplecticODENet(floor=0.0)
    with pytest.raises(TypeError, match="potential_hidden: expected the widths"):
        SymplecticODENet(potential_hidden=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option 'tol'"):
        SymplecticODENet(tol=1e-3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"x0: expected states .* of shape \(..., 8\), found \(5, 6\)"):
        model(x[:, :6], [0.0, 1.0])
    with pytest.raises(ValueError, match=r"x: expected observations .* \(..., 6\) or \(..., 8\), found \(5, 4\)"):
        model.control(x[:, :4])
    with pytest.raises(ValueError, match="x: expected observations"):
        model.energy(x[:, :7])
    with pytest.raises(TypeError, match=r"x0: expected a floating-point dtype, found torch.int64"):
        model(x.long(), [0.0, 1.0])
    with pytest.raises(ValueError, match="control: expected at least as many inputs as angles, found 1 for 2"):
        small(2, 1).control(points(2, 1))

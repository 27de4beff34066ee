"""Every adjoint with fields of all kinds: what it costs, how it fails, and that it gets along with autograd."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import seminode as sn

NAN, INF = math.nan, math.inf
D = torch.float64
#: A rotation in space with a little growth: it can be solved in either direction.
TURN = torch.tensor([[0.05, 1.0, 0.2], [-1.0, 0.1, 0.3], [-0.2, -0.3, 0.0]], dtype=D)
Y0 = torch.tensor([1.0, 0.5, -0.2], dtype=D)
TS = (0.0, 0.3, 0.3, 1.0)

#: The adjoint, and the options of `solve` without which it cannot do its work.
DISCRETE: dict[str, tuple[Any, dict[str, Any]]] = {
    "replay": (sn.Replay(), {}),
    "checkpointed": (sn.Checkpointed(3), {}),
    "reversible": (sn.Reversible(), {"solver": sn.ReversibleRK("dopri5")}),
    "reversible heun": (sn.Reversible(), {"solver": "reversible_heun", "rtol": 1e-3, "atol": 1e-5}),
}
CONTINUOUS: dict[str, tuple[Any, dict[str, Any]]] = {
    "backsolve": (sn.Backsolve(), {}),
    "backsolve, mixed": (sn.Backsolve(norm="mixed"), {}),
    "backsolve, published": (sn.Backsolve(norm="mixed", restart="fresh"), {}),
    "interpolating": (sn.Interpolating(), {}),
    "interpolating in little memory": (sn.Interpolating(memory=16), {}),
    "quadrature": (sn.Quadrature(), {}),
    "quadrature, dense": (sn.Quadrature(z="dense"), {}),
    "gauss-kronrod": (sn.Quadrature(rule="gauss-kronrod"), {}),
}
OF_THEIR_OWN = {**DISCRETE, **CONTINUOUS}
ALL = {"direct": (sn.Direct(), {}), **OF_THEIR_OWN}
every_adjoint = pytest.mark.parametrize("name", ALL)
every_adjoint_of_its_own = pytest.mark.parametrize("name", OF_THEIR_OWN)
every_discrete = pytest.mark.parametrize("name", DISCRETE)
every_continuous = pytest.mark.parametrize("name", CONTINUOUS)


def solve(name: str, field: Any, y0: Any, ts: Any = TS, **options: Any) -> sn.Solution:
    """A solve with one of the adjoints; its own options come first."""
    adjoint, own = ALL[name]
    return sn.solve(field, y0, ts, adjoint=adjoint, **{**options, **own})


def turn(t: Tensor, y: Tensor) -> Tensor:
    return y @ TURN


def weighted(ys: Any) -> Tensor:
    """A loss that reads every entry of every output, each with a weight of its own."""
    total = torch.zeros((), dtype=D)
    for leaf in pytree.tree_leaves(ys):
        weights = torch.linspace(0.5, 2.0, leaf.numel(), dtype=D).reshape(leaf.shape)
        total = total + (weights * (leaf.real + 2.0 * leaf.imag if leaf.is_complex() else leaf).double()).sum()
    return total


def assert_near(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], rtol: float) -> None:
    """Tensor by tensor, relative to its largest entry; no gradient is a gradient of zero."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if b is None or not b.any():
            assert a is None or float(a.abs().max()) < rtol, f"input {i}"
        else:
            assert a is not None, f"input {i} has no gradient"
            assert a.dtype == b.dtype
            assert float((a - b).abs().max() / b.abs().max()) < rtol, f"input {i}"


# Fields of all kinds.


class Case(NamedTuple):
    """A field, its state, and what to differentiate besides y0 and ts."""

    field: Any
    y0: Any
    inputs: Sequence[Tensor]
    options: Mapping[str, Any] = MappingProxyType({})


class Hamiltonian(nn.Module):
    """(q, p)′ = (∂H/∂p, −∂H/∂q): a gradient inside the field."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1, bias=False)).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            y = y.requires_grad_()
            energy = self.net(y).sum() + 0.5 * y.square().sum()
            (slope,) = torch.autograd.grad(energy, y, create_graph=True)
        return torch.cat([slope[2:], -slope[:2]])


class Flow(nn.Module):
    """A normalising flow: the divergence by autograd, and a leaf that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def forward(self, t: Tensor, y: Any) -> Any:
        with torch.enable_grad():
            x = y["x"].requires_grad_()
            f = self.net(x) * torch.cos(t)
            columns = [torch.autograd.grad(f[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        return {"x": f, "logp": -sum(columns)}


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(12, 12).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.net(functional.dropout(y, 0.5)))


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return 0.2 * self.last(torch.tanh(self.norm(self.first(y))))


class Unused(nn.Module):
    """One parameter is used, one is not, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.7, dtype=D))
        self.idle = nn.Parameter(torch.tensor(0.7, dtype=D))
        self.frozen = nn.Parameter(torch.tensor(0.5, dtype=D), requires_grad=False)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return (self.rate + self.frozen) * turn(t, y)


BATCH = torch.linspace(-2.0, 3.0, 18, dtype=D).reshape(6, 3).sin() + 0.5


def number(value: complex) -> Tensor:
    return torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else D, requires_grad=True)


def hamiltonian() -> Case:
    field = Hamiltonian()
    return Case(field, torch.linspace(-1.0, 1.0, 4, dtype=D), list(field.parameters()))


def flow() -> Case:
    field = Flow()
    y0 = {"x": BATCH[:4, :2].clone(), "logp": torch.zeros(4, dtype=D)}
    return Case(field, y0, list(field.parameters()))


def flow_steered() -> Case:
    return flow()._replace(options={"norm": "auto"})


def derivative_in_time() -> Case:
    rate = number(0.7)

    def field(t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            t = t.requires_grad_()
            (speed,) = torch.autograd.grad(torch.sin(rate * t), t, create_graph=True)
        return speed * turn(t, y)

    return Case(field, Y0, [rate])


def dropout() -> Case:
    field = Dropout()
    return Case(field, torch.linspace(-1.0, 1.0, 12, dtype=D), list(field.parameters()))


def batch_norm() -> Case:
    field = BatchNorm()
    return Case(field, BATCH, list(field.parameters()))


def complex_state() -> Case:
    torch.manual_seed(4)
    weight = torch.randn(3, 3, dtype=torch.complex128).requires_grad_()
    rate = number(0.4)
    field = lambda t, y: 0.3j * (y @ weight) + torch.sin(t) * rate * y.conj()
    return Case(field, Y0 + 0.3j * Y0.flip(0), [weight, rate])


def complex_parameter() -> Case:
    weight = number(0.4 + 0.7j)
    return Case(lambda t, y: (weight * turn(t, y) * torch.complex(t, 1.0 + t)).imag, Y0, [weight])


def args() -> Case:
    first, second = Y0.clone().requires_grad_(), number(0.5)
    extra = (first, 0.3, {"rate": second, "name": "x", "index": torch.tensor([2, 0, 1])})

    def field(t: Tensor, y: Tensor, p: Tensor, k: float, more: dict[str, Any]) -> Tensor:
        assert more["name"] == "x"
        return turn(t, y) * p.sum() + k * more["rate"] * torch.sin(y[more["index"]])

    return Case(field, Y0, [first, second], {"args": extra})


def unused() -> Case:
    field, argument = Unused(), number(1.0)
    return Case(lambda t, y, p: field(t, y), Y0, [field.rate, field.idle, argument], {"args": (argument,)})


def at_some_times() -> Case:
    early, late = number(0.7), number(1.3)
    return Case(lambda t, y: turn(t, y) * (early if t < 0.5 else late), Y0, [early, late], {"jumps": [0.5]})


def chosen() -> Case:
    one, other = number(0.7), number(1.3)
    return Case(lambda t, y: turn(t, y) * one * other, Y0, [one, other], {"params": [one]})


def hypernetwork() -> Case:
    torch.manual_seed(5)
    net = nn.Linear(2, 3).double()
    weight = net(torch.ones(2, dtype=D))
    double = 2.0 * weight
    return Case(lambda t, y: turn(t, y) * weight * double, Y0, list(net.parameters()))


def constant() -> Case:
    slope = torch.full_like(Y0, 2.0)
    return Case(lambda t, y: slope, Y0, [])


def constant_of_a_parameter() -> Case:
    slope = Y0.clone().requires_grad_()
    return Case(lambda t, y: slope, Y0, [slope])


def of_time_alone() -> Case:
    rate = number(1.5)
    return Case(lambda t, y: torch.sin(3.0 * t) * rate.square().expand(3), Y0, [rate])


def start_within_reach() -> Case:
    start = Y0.clone().requires_grad_()
    return Case(lambda t, y: turn(t, y) + start, start, [start])


def frozen() -> Case:
    net = nn.Linear(3, 3).double().requires_grad_(False)
    return Case(lambda t, y: turn(t, y) + 0.1 * net(y), Y0, [])


KINDS: dict[str, Callable[[], Case]] = {
    "a gradient inside": hamiltonian,
    "a divergence inside": flow,
    "a divergence inside, and an integral that does not steer": flow_steered,
    "a derivative in time inside": derivative_in_time,
    "dropout": dropout,
    "batch normalisation": batch_norm,
    "complex state": complex_state,
    "complex parameter": complex_parameter,
    "args": args,
    "unused and frozen parameters": unused,
    "parameters used at some times": at_some_times,
    "chosen parameters": chosen,
    "hypernetwork": hypernetwork,
    "constant": constant,
    "constant of a parameter": constant_of_a_parameter,
    "of time alone": of_time_alone,
    "y0 is a parameter, too": start_within_reach,
    "frozen": frozen,
}
#: Kinds of fields in which time matters are differentiated with respect to it as well.
KINDS_AND_TIMES = [(kind, False) for kind in KINDS] + [
    ("a divergence inside", True),
    ("a derivative in time inside", True),
    ("complex state", True),
    ("parameters used at some times", True),
    ("of time alone", True),
]


def differentiate(name: str, kind: str, with_times: bool, **options: Any) -> list[Tensor | None]:
    """Gradients for y0, the times and the rest."""
    case = KINDS[kind]()
    y0 = pytree.tree_map(lambda x: x if x.requires_grad else x.clone().requires_grad_(), case.y0)
    ts = torch.tensor(TS, dtype=D, requires_grad=with_times)
    torch.manual_seed(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.StatefulFieldWarning)
        solution = solve(name, case.field, y0, ts, **{**options, **case.options})
    torch.rand(3)  # what is drawn in between is nobody's business
    inputs = [*pytree.tree_leaves(y0), *([ts] if with_times else []), *case.inputs]
    return list(torch.autograd.grad(weighted(solution.ys), inputs, allow_unused=True))


@lru_cache
def by_direct(kind: str, with_times: bool, name: str, rtol: float) -> list[Tensor | None]:
    """The gradient by Direct, with the solver that the adjoint of this name needs."""
    options = {"rtol": rtol, "atol": 1e-2 * rtol, **ALL[name][1]}
    return differentiate("direct", kind, with_times, **options)


@pytest.mark.parametrize(("kind", "with_times"), KINDS_AND_TIMES)
@every_discrete
def test_discrete_adjoints_of_fields_of_all_kinds(name: str, kind: str, with_times: bool) -> None:
    found = differentiate(name, kind, with_times, rtol=1e-5, atol=1e-7)
    same_solver = name if DISCRETE[name][1] else "replay"
    assert_near(found, by_direct(kind, with_times, same_solver, 1e-5), 1e-9)


@pytest.mark.parametrize(("kind", "with_times"), KINDS_AND_TIMES)
@every_continuous
def test_continuous_adjoints_of_fields_of_all_kinds(name: str, kind: str, with_times: bool) -> None:
    found = differentiate(name, kind, with_times, rtol=1e-6, atol=1e-8)
    assert_near(found, by_direct(kind, with_times, "direct", 1e-8), 1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["a gradient inside", "a divergence inside"])
@every_adjoint
def test_values_without_gradients(name: str, kind: str, mode: Any) -> None:
    case = KINDS[kind]()
    expected = solve(name, case.field, case.y0).ys
    with mode():
        ys = solve(name, case.field, pytree.tree_map(torch.clone, case.y0)).ys
    for a, b in zip(pytree.tree_leaves(ys), pytree.tree_leaves(expected), strict=True):
        assert not a.requires_grad
        # Without gradients, outputs of several steps are computed together, which may round differently.
        torch.testing.assert_close(a, b.detach(), rtol=1e-14, atol=1e-15)


@every_adjoint_of_its_own
def test_the_adjoint_may_be_easier_than_the_state(name: str) -> None:
    """a_z hardly moves here, while the integrand of the gradient does: its steps must not be those of a_z alone."""
    rate = number(1.5)
    field = lambda t, y: torch.sin(3.0 * t) * rate.square() - 1e-3 * y
    grads = []
    for each in ("replay", name):
        solution = solve(each, field, Y0, [0.0, 5.0], rtol=1e-6, atol=1e-8)
        grads.append(torch.autograd.grad(solution.ys[-1].sum(), rate)[0])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=0.0)


# Random numbers and buffers.


@every_adjoint
def test_a_backward_pass_leaves_the_generator_alone(name: str) -> None:
    case = dropout()
    y0 = case.y0.clone().requires_grad_()
    solution = solve(name, case.field, y0)
    torch.rand(5)  # now the generator is not where an evaluation leaves it
    before = torch.get_rng_state()
    weighted(solution.ys).backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "adjoint",
    [
        sn.Backsolve(),
        sn.Interpolating(),
        sn.Interpolating(memory=16),
        sn.Interpolating(memory=64),
        sn.Quadrature(batched=True),
        sn.Quadrature(batched=False),
        sn.Quadrature(z="dense", memory=16, rule="gauss"),
        sn.Checkpointed(2),
    ],
    ids=repr,
)
def test_one_mask_for_all_steps_that_are_taken(adjoint: Any) -> None:
    """With fixed steps no error test would notice another mask in some of the evaluations."""
    case = dropout()
    grads = []
    for each in (sn.Direct(), adjoint):
        y0 = case.y0.clone().requires_grad_()
        torch.manual_seed(6)
        solution = sn.solve(case.field, y0, [0.0, 2.5], adjoint=each, controller=sn.FixedStep(0.1))
        grads.append(torch.autograd.grad(weighted(solution.ys), [y0, *case.inputs]))
    assert_near(grads[1], grads[0], 1e-7)


@every_adjoint
def test_batch_normalisation_moves_its_buffers_once(name: str) -> None:
    field, once = BatchNorm(), BatchNorm()
    once(torch.zeros(()), BATCH)
    with pytest.warns(sn.StatefulFieldWarning, match=r"^field: an evaluation changes .*num_batches_tracked"):
        solution = solve(name, field, BATCH.clone().requires_grad_())
    weighted(solution.ys).backward()
    for key, buffer in once.named_buffers():
        torch.testing.assert_close(field.get_buffer(key), buffer, rtol=1e-12, atol=1e-12, msg=key)


class Interrupted(nn.Module):
    """Dropout and batch normalisation, so that there is something to leave behind; stops where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BatchNorm()
        self.calls = 0
        self.stop = 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        k = self.inner(t, functional.dropout(y, 0.1))
        if self.calls == self.stop:
            raise KeyboardInterrupt
        return k


@pytest.mark.parametrize("late", [1, 9])
@every_adjoint_of_its_own
def test_an_interrupt_of_the_backward_pass_leaves_nothing_behind(name: str, late: int) -> None:
    torch.manual_seed(7)
    field = Interrupted()
    y0 = BATCH.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sn.StatefulFieldWarning)
        solution = solve(name, field, y0)
    inputs = [y0, *field.parameters()]
    expected = torch.autograd.grad(weighted(solution.ys), inputs, retain_graph=True)
    buffers = {key: buffer.clone() for key, buffer in field.named_buffers()}
    torch.rand(5)
    random = torch.get_rng_state()
    field.stop = field.calls + late
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(weighted(solution.ys), inputs, retain_graph=True)
    assert torch.equal(torch.get_rng_state(), random)
    for key, buffer in field.named_buffers():
        assert torch.equal(buffer, buffers[key]), key
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.overrides._get_current_function_mode_stack()
    for one, other in zip(torch.autograd.grad(weighted(solution.ys), inputs), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# Precision.


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


@every_adjoint
def test_autocast(name: str) -> None:
    net = network()
    seen: list[torch.dtype] = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        k = net(y)
        seen.append(k.dtype)
        assert len(seen) < 3000  # rounding errors of the field are not to be chased
        return k

    y0 = Y0.float().requires_grad_()
    inputs = [y0, *net.parameters()]
    expected = torch.autograd.grad(weighted(solve("direct", field, y0).ys), inputs)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        solution = solve(name, field, y0)
    grads = torch.autograd.grad(weighted(solution.ys), inputs)  # outside, as usual
    assert set(seen) == {torch.bfloat16}
    assert solution.ys.dtype == torch.float32
    assert_near(grads, expected, 2e-2)


@every_continuous
def test_rounding_noise_is_not_chased(name: str) -> None:
    """Gradients of a parameter in single precision are noise at the tolerance of a state in double precision."""
    rate = torch.tensor(0.4, requires_grad=True)
    calls = 0

    def field(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        assert calls < 5000
        return turn(t, y) * rate

    solution = solve(name, field, Y0, rtol=1e-8, atol=1e-10)
    (grad,) = torch.autograd.grad(weighted(solution.ys), rate)
    (expected,) = torch.autograd.grad(weighted(solve("direct", field, Y0, rtol=1e-8, atol=1e-10).ys), rate)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@every_adjoint_of_its_own
def test_half_precision(name: str, half: torch.dtype) -> None:
    net = network(half)
    y0 = {"y": Y0.to(half).requires_grad_()}
    field = lambda t, y: {"y": net(y["y"])}
    inputs = [y0["y"], *net.parameters()]
    grads = [torch.autograd.grad(weighted(solve(each, field, y0).ys), inputs) for each in ("direct", name)]
    assert all(grad.dtype == half for grad in grads[1])
    assert_near(grads[1], grads[0], 3e-2)


@every_adjoint_of_its_own
def test_gradients_in_half_precision_are_summed_in_single(name: str) -> None:
    """y(1) = w·1 over 300 steps: each adds 1/300 to the gradient, too little for bfloat16 once the sum is near 1."""
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    adjoint = OF_THEIR_OWN[name][0]
    solver = {"reversible": sn.ReversibleRK("euler"), "reversible heun": "reversible_heun"}.get(name, "euler")
    options = {"solver": solver, "controller": sn.FixedStep(1 / 300)}
    y0 = torch.zeros(3, dtype=torch.bfloat16)
    solution = sn.solve(lambda t, y: weight.expand_as(y), y0, [0.0, 1.0], adjoint=adjoint, **options)
    solution.ys[-1].sum().backward()
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(3.0, rel=1e-2)


# A backward pass that cannot go on.


def assert_stopped_on_the_way_back(error: sn.SolveError) -> None:
    assert error.backward
    assert str(error).startswith("on the backward pass: ")
    assert isinstance(error.t, float)
    assert isinstance(error.stats, sn.Stats)


@every_continuous
def test_too_many_steps_on_the_way_back(name: str) -> None:
    y0 = Y0.clone().requires_grad_()
    adjoint = replace(CONTINUOUS[name][0], max_steps=3)
    solution = sn.solve(lambda t, y: torch.cos(5.0 * t) * turn(t, y), y0, [0.0, 0.4, 5.0], adjoint=adjoint)
    message = r"^on the backward pass: 3 steps were tried and the solve has only reached t = "
    with pytest.raises(sn.MaxStepsReached, match=message) as caught:
        solution.ys.sum().backward()
    error = caught.value
    assert_stopped_on_the_way_back(error)
    assert 0.4 < error.t < 5.0
    assert error.dt is not None
    assert error.dt < 0.0
    assert error.stats.accepted + error.stats.rejected == 3
    assert error.stats.nfe > 3
    assert y0.grad is None


@every_continuous
def test_max_steps_of_the_forward_pass_hold_on_the_way_back(name: str) -> None:
    """… over all output times together, unless the adjoint has a limit of its own."""
    y0 = Y0.clone().requires_grad_()
    field = lambda t, y: torch.cos(5.0 * t) * turn(t, y)
    ts = torch.linspace(0.0, 3.0, 20, dtype=D)
    needed = solve(name, field, Y0, ts).stats
    options: dict[str, Any] = {"max_steps": needed.accepted + needed.rejected}
    solution = sn.solve(field, y0, ts, adjoint=CONTINUOUS[name][0], **options)
    with pytest.raises(sn.MaxStepsReached, match=r"^on the backward pass: ") as caught:
        solution.ys.sum().backward()
    assert_stopped_on_the_way_back(caught.value)
    adjoint = replace(CONTINUOUS[name][0], max_steps=1000)
    sn.solve(field, y0, ts, adjoint=adjoint, **options).ys.sum().backward()


def root(t: Tensor, y: Any) -> Any:
    """√|q| has no derivative at 0, where q stays."""
    return {"p": -0.1 * y["p"], "q": torch.sqrt(y["q"].abs())}


@every_adjoint_of_its_own
def test_a_derivative_that_is_not_finite(name: str) -> None:
    y0 = {"p": Y0.clone().requires_grad_(), "q": torch.zeros(2, dtype=D, requires_grad=True)}
    solution = solve(name, root, y0, [0.0, 1.0])
    with pytest.raises(sn.NonFiniteState, match=r"^on the backward pass: .*NaN or infinite.*\['q'\]") as caught:
        solution.ys["q"].sum().backward()
    error = caught.value
    assert_stopped_on_the_way_back(error)
    assert error.leaf is not None
    assert error.leaf.endswith("['q']")
    assert 0.0 <= error.t <= 1.0
    assert error.dt is not None
    assert error.stats.nfe > 0
    assert y0["q"].grad is None


@every_adjoint_of_its_own
def test_a_derivative_of_a_parameter_that_is_not_finite(name: str) -> None:
    weight = torch.zeros((), dtype=D, requires_grad=True)
    solution = solve(name, lambda t, y: turn(t, y) * (1.0 - weight.sqrt()), Y0, [0.0, 1.0])
    with pytest.raises(sn.NonFiniteState, match=r"^on the backward pass: .* NaN or infinite") as caught:
        solution.ys.sum().backward()
    assert_stopped_on_the_way_back(caught.value)
    assert caught.value.stats.nfe > 0
    assert weight.grad is None


@pytest.mark.parametrize(("save", "bad"), [("ts", NAN), ("ts", INF), ("last", NAN), ("steps", -INF)])
@every_adjoint_of_its_own
def test_a_cotangent_that_is_not_finite(name: str, save: str, bad: float) -> None:
    y0 = Y0.clone().requires_grad_()
    solution = solve(name, turn, y0, [0.0, 0.3, 1.0], save=save)
    i = len(solution.ts) - 1
    grad = torch.ones_like(solution.ys)
    grad[i, 1] = bad
    message = rf"^on the backward pass: the gradient of the loss with respect to output {i} holds a NaN or an infinity"
    with pytest.raises(sn.NonFiniteState, match=message) as caught:
        solution.ys.backward(grad, retain_graph=True)
    assert_stopped_on_the_way_back(caught.value)
    assert caught.value.t == float(solution.ts[i])
    assert caught.value.stats.nfe == 0
    assert y0.grad is None
    solution.ys[-1].sum().backward()  # the solve itself is none the worse for it
    assert y0.grad is not None
    expected = torch.linalg.matrix_exp(TURN) @ torch.ones(3, dtype=D)
    torch.testing.assert_close(y0.grad, expected, rtol=1e-2, atol=1e-2)


class Rough(torch.autograd.Function):
    """−y, with a derivative that is wrong by a factor of a milliard before t = ½."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, y: Tensor) -> Tensor:
        ctx.factor = -1.0 if float(t) > 0.5 else 1e9
        return -y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, ctx.factor * grads[0]


@every_continuous
def test_steps_that_underflow_on_the_way_back(name: str) -> None:
    y0 = Y0.clone().requires_grad_()
    solution = solve(name, lambda t, y: Rough.apply(t, y), y0, [0.0, 1.0], rtol=1e-10, atol=1e-10)
    with pytest.raises(sn.StepSizeUnderflow, match=r"^on the backward pass: at t = 0\.5 a step ") as caught:
        solution.ys.sum().backward()
    error = caught.value
    assert_stopped_on_the_way_back(error)
    assert error.t == pytest.approx(0.5, abs=1e-9)
    assert error.dt is not None
    assert -1e-9 < error.dt < 0.0
    assert error.stats.rejected > 0


def test_the_leaf_to_blame_on_the_way_back() -> None:
    y0 = {"smooth": Y0.clone().requires_grad_(), "rough": Y0.clone().requires_grad_()}
    field = lambda t, y: {"smooth": -0.1 * y["smooth"], "rough": Rough.apply(t, y["rough"])}
    solution = sn.solve(field, y0, [0.0, 1.0], adjoint=sn.Backsolve(), rtol=1e-10, atol=1e-10)
    with pytest.raises(sn.StepSizeUnderflow, match=r"leaf a_z\['rough'\] is worst") as caught:
        weighted(solution.ys).backward()
    assert caught.value.leaf == "a_z['rough']"


@every_continuous
def test_an_error_of_a_solve_inside_the_field(name: str) -> None:
    """It is the inner one's own: it happened on its forward pass."""

    class Late(nn.Module):
        fails = False

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            limit = 1 if self.fails else 1000
            return sn.solve(turn, y, [0.0, 0.5], adjoint=sn.Direct(), max_steps=limit).ys[-1]

    field, y0 = Late(), Y0.clone().requires_grad_()
    solution = solve(name, field, y0, [0.0, 0.5], rtol=1e-3, atol=1e-5)
    field.fails = True
    with pytest.raises(sn.MaxStepsReached, match=r"^1 steps were tried") as caught:
        solution.ys.sum().backward()
    assert not caught.value.backward
    assert caught.value.stats.accepted == 1


# What it costs.


class Counted:
    """A field that counts its evaluations itself."""

    def __init__(self) -> None:
        self.rate = number(0.5)
        self.times: list[float] = []

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(float(t.detach()))
        return torch.tanh(turn(t, y)) * self.rate * torch.cos(3.0 * t) + 0.1 * y


def one_by_one(name: str) -> Any:
    """The adjoint, evaluating the nodes of a step in as many calls."""
    adjoint = OF_THEIR_OWN[name][0]
    return replace(adjoint, batched=False) if isinstance(adjoint, sn.Quadrature) else adjoint


COUNTED: dict[str, dict[str, Any]] = {
    "ts": {},
    "ts that move": {"ts": torch.tensor([0.0, 0.4, 3.0], dtype=D, requires_grad=True)},
    "last": {"save": "last"},
    "steps": {"save": "steps"},
    "backwards": {"ts": [3.0, 1.7, 0.4]},
    "repeated times": {"ts": [0.0, 0.0, 0.4, 0.4, 3.0, 3.0]},
    "jumps": {"jumps": [1.0, 2.0]},
    "fixed steps": {"controller": sn.FixedStep(0.125)},
}


@pytest.mark.parametrize("options", COUNTED.values(), ids=COUNTED.keys())
@every_adjoint_of_its_own
def test_counts_on_the_way_back(name: str, options: dict[str, Any]) -> None:
    field, y0 = Counted(), Y0.clone().requires_grad_()
    ts = options.get("ts", [0.0, 0.4, 3.0])
    own = {key: value for key, value in OF_THEIR_OWN[name][1].items() if key == "solver" or "controller" not in options}
    options = {**{key: value for key, value in options.items() if key != "ts"}, **own}
    solution = sn.solve(field, y0, ts, adjoint=one_by_one(name), record=True, **options)
    assert solution.record is not None
    assert solution.stats.nfe == len(field.times) == len(solution.record.evaluations)
    assert solution.stats.backward is None
    assert solution.record.backward is None
    field.times.clear()
    weighted(solution.ys).backward()
    stats, record = solution.stats.backward, solution.record.backward
    assert stats is not None
    assert record is not None
    # Evaluations that check whether the field is still the same come first, and are counted apart.
    assert stats.nfe + stats.checks == len(field.times)
    assert sorted(record.evaluations) == sorted(field.times[stats.checks :])
    assert (stats.accepted, stats.rejected) == (len(record.accepted), len(record.rejected))
    assert stats.accepted > 0
    assert len(record.ratios) in (0, stats.accepted + stats.rejected)
    assert 0 < stats.vjp_params <= stats.nfe
    assert 0 < stats.vjp_y <= stats.nfe


def backward_stats(name: str, *, frozen: bool = False, **options: Any) -> sn.Stats:
    field, y0 = Counted(), Y0.clone().requires_grad_()
    field.rate.requires_grad_(not frozen)
    solution = solve(name, field, y0, [0.0, 0.4, 3.0], **options)
    weighted(solution.ys).backward()
    assert solution.stats.backward is not None
    return solution.stats.backward


@every_adjoint_of_its_own
def test_without_parameters_none_are_pulled_back_to(name: str) -> None:
    stats = backward_stats(name, frozen=True)
    assert stats.vjp_params == 0
    assert stats.vjp_y > 0
    assert stats.params_error is None


def test_gradients_of_parameters_where_they_are_needed() -> None:
    """Seminorms skip stages of no weight; a quadrature needs three a step and sees no rejected one."""
    found = {name: backward_stats(name) for name in ("backsolve", "backsolve, mixed", "quadrature", "interpolating")}
    for name in ("backsolve", "interpolating"):
        assert found[name].vjp_params < found[name].vjp_y == found[name].nfe
    mixed, quadrature = found["backsolve, mixed"], found["quadrature"]
    assert mixed.vjp_params == mixed.vjp_y == mixed.nfe
    assert quadrature.vjp_params < 0.6 * found["backsolve"].vjp_params
    assert (quadrature.accepted, quadrature.rejected) == (found["backsolve"].accepted, found["backsolve"].rejected)


@every_adjoint_of_its_own
def test_a_second_backward_pass(name: str) -> None:
    field, y0 = Counted(), Y0.clone().requires_grad_()
    ts = torch.tensor([0.0, 0.4, 3.0], dtype=D, requires_grad=True)
    solution = solve(name, field, y0, ts)
    results = []
    for _ in range(3):
        grads = torch.autograd.grad(weighted(solution.ys), [y0, ts, field.rate], retain_graph=True)
        results.append((grads, solution.stats.backward))
    (first, stats), *others = results
    assert stats is not None
    for grads, again in others:
        for one, other in zip(grads, first, strict=True):
            assert torch.equal(one, other)
        assert again is not None
        if name in ("checkpointed", "interpolating in little memory"):
            # The states that were kept have been used up: all steps from the first one on are taken again.
            assert again.nfe >= stats.nfe
            again = replace(again, nfe=stats.nfe)
        assert again == stats


# Which outputs, and which times.


def closed_form(ts: Tensor) -> Tensor:
    """The solution y(t) = exp(tA)ᵀ y(t0) as a map from y(t0), for each of the times."""
    return torch.linalg.matrix_exp((ts - ts[0])[:, None, None] * TURN)


@pytest.mark.parametrize("rows", [[0], [1], [2], [3], [0, 1], [1, 3], [0, 3]], ids=str)
@every_adjoint
def test_a_loss_of_some_outputs(name: str, rows: list[int]) -> None:
    y0 = Y0.clone().requires_grad_()
    ts = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=D)
    solution = solve(name, turn, y0, ts, rtol=1e-8, atol=1e-10)
    solution.ys[rows].sum().backward()
    assert y0.grad is not None
    expected = (closed_form(ts)[rows] @ torch.ones(3, dtype=D)).sum(0)
    rtol = 1e-3 if name == "reversible heun" else 1e-6
    torch.testing.assert_close(y0.grad, expected, rtol=rtol, atol=rtol)
    assert solution.stats.backward is not None


@every_adjoint_of_its_own
def test_what_comes_after_the_last_output_in_a_loss_is_not_solved(name: str) -> None:
    y0 = Y0.clone().requires_grad_()
    solution = solve(name, Counted(), y0, [0.0, 0.2, 6.0], record=True)
    solution.ys[1].sum().backward()
    assert solution.record is not None
    assert solution.record.backward is not None
    reach = max(max(plan.t0, plan.t1) for plan in solution.record.backward.accepted)
    assert reach < 3.0


TIMES: dict[str, list[float]] = {
    "one": [2.0],
    "all the same": [2.0, 2.0, 2.0],
    "two": [0.0, 1.0],
    "backwards": [1.0, 0.6, 0.0],
    "repeated at the start": [0.0, 0.0, 0.0, 1.0],
    "repeated at the end": [0.0, 1.0, 1.0],
    "repeated inside": [0.0, 0.5, 0.5, 0.5, 1.0],
    "backwards and repeated": [1.0, 1.0, 0.5, 0.5, -0.5, -0.5],
}


SAVED = [(kind, "ts") for kind in TIMES] + [
    (kind, save) for kind in ("one", "all the same", "two", "backwards and repeated") for save in ("last", "steps")
]


@pytest.mark.parametrize(("kind", "save"), SAVED)
@every_adjoint
def test_times_of_all_kinds(name: str, kind: str, save: str) -> None:
    """Against the closed form: ∂y(t)/∂t = f, and moving t0 is moving all other times the other way."""
    times = TIMES[kind]
    y0 = Y0.clone().requires_grad_()
    moving = times[0] != times[-1] and save != "steps"
    ts = torch.tensor(times, dtype=D, requires_grad=moving)
    solution = solve(name, turn, y0, ts, save=save, rtol=1e-7, atol=1e-9)
    weights = torch.tensor([1.0, 2.0, -0.5], dtype=D)
    (solution.ys[0] @ weights + 2.0 * solution.ys[-1] @ weights).backward()
    outputs = solution.ts.detach()
    maps = torch.linalg.matrix_exp((outputs - times[0])[:, None, None] * TURN)
    expected = (maps[0] + 2.0 * maps[-1]) @ weights
    rtol = 1e-2 if name == "reversible heun" else 1e-5
    assert y0.grad is not None
    torch.testing.assert_close(y0.grad, expected, rtol=rtol, atol=rtol)
    if not moving:
        return
    assert ts.grad is not None
    slopes = (Y0 @ maps) @ TURN @ weights
    expected = torch.zeros_like(ts)
    expected[-1] += 2.0 * slopes[-1]
    expected[0] -= 2.0 * slopes[-1]
    if save == "last":
        expected[-1] += slopes[0]
        expected[0] -= slopes[0]
    torch.testing.assert_close(ts.grad, expected, rtol=5 * rtol, atol=5 * rtol)


@every_adjoint
def test_a_loss_that_is_flat(name: str) -> None:
    field, y0 = Counted(), Y0.clone().requires_grad_()
    ts = torch.tensor([0.0, 0.4, 1.0], dtype=D, requires_grad=True)
    solution = solve(name, field, y0, ts, record=True)
    calls = len(field.times)
    grads = torch.autograd.grad((0.0 * solution.ys).sum(), [y0, ts, field.rate], allow_unused=True)
    assert all(grad is None or not grad.any() for grad in grads)
    assert solution.stats.backward is not None
    assert solution.stats.backward.nfe == 0
    assert len(field.times) == calls
    if name != "direct":
        assert solution.record is not None
        assert solution.record.backward is not None
        assert solution.record.backward.evaluations == ()


# Partial solutions.


def pole(t: Tensor, y: Tensor) -> Tensor:
    """y' = y², with solution y0/(1 − y0 t), and not defined after t = 0.8."""
    return y * y + 0.0 * torch.sqrt(0.8 - t)


@pytest.mark.parametrize("save", ["ts", "steps"])
@every_adjoint
def test_gradients_of_a_partial_solution(name: str, save: str) -> None:
    y0 = torch.tensor([0.9, 0.5], dtype=D, requires_grad=True)
    ts = torch.linspace(0.0, 3.0, 13, dtype=D, requires_grad=save == "ts")
    scale = number(1.0)
    field = lambda t, y: scale * pole(t, y)
    solution = solve(name, field, y0, ts, throw=False, save=save, rtol=1e-6, atol=1e-8)
    assert solution.status is sn.Status.NON_FINITE_STATE
    last = solution.ys[-1]
    inputs = [y0, scale, *([ts] if save == "ts" else [])]
    grad_y0, grad_scale, *rest = torch.autograd.grad(last.sum(), inputs)
    y, t = last.detach(), float(solution.ts[-1].detach())
    rtol = 1e-2 if name == "reversible heun" else 1e-3
    # y = y0/(1 − s·y0·t): ∂y/∂y0 = (y/y0)², ∂y/∂t = s·y², ∂y/∂s = t·y².
    torch.testing.assert_close(grad_y0, (y / y0.detach()) ** 2, rtol=rtol, atol=0.0)
    torch.testing.assert_close(grad_scale, t * y.square().sum(), rtol=rtol, atol=0.0)
    if rest:
        expected = torch.zeros_like(ts)
        expected[len(solution.ts) - 1] = y.square().sum()
        expected[0] = -y.square().sum()  # an autonomous field: moving the start is moving the end the other way
        torch.testing.assert_close(rest[0], expected, rtol=10 * rtol, atol=1e-6)


@every_adjoint
def test_nothing_but_the_start(name: str) -> None:
    y0 = torch.tensor([1.0, -1.0], dtype=D, requires_grad=True)
    solution = solve(name, lambda t, y: torch.sqrt(y), y0, throw=False)
    assert solution.ts.tolist() == [0.0]
    solution.ys[0, 0].backward()
    assert y0.grad is not None
    assert y0.grad.tolist() == [1.0, 0.0]


@every_adjoint
def test_the_last_state_was_not_reached(name: str) -> None:
    y0 = Y0.clone().requires_grad_()
    solution = solve(name, pole, y0, throw=False, save="last")
    assert solution.ys.shape == (0, 3)
    if solution.ys.requires_grad:
        solution.ys.sum().backward()
    assert y0.grad is None or not y0.grad.any()


# Second derivatives.


def second(name: str, adjoint: Any) -> list[Tensor]:
    y0, rate = Y0.clone().requires_grad_(), number(0.5)
    ts = torch.tensor([0.0, 0.4, 1.0], dtype=D, requires_grad=True)
    field = lambda t, y: torch.tanh(turn(t, y)) * rate * torch.cos(t) + 0.1 * y * rate.square()
    solution = sn.solve(field, y0, ts, adjoint=adjoint, **ALL[name][1])
    inputs = [y0, ts, rate]
    first = torch.autograd.grad(solution.ys.square().sum(), inputs, create_graph=True)
    mixture = sum(weighted(grad) for grad in first)
    assert isinstance(mixture, Tensor)
    return [grad.detach() for grad in (*first, *torch.autograd.grad(mixture, inputs))]


@every_discrete
def test_second_derivatives(name: str) -> None:
    assert_near(second(name, DISCRETE[name][0]), second(name, sn.Direct()), 1e-11)


@every_continuous
def test_continuous_adjoints_have_no_second_derivative(name: str) -> None:
    kind = type(CONTINUOUS[name][0]).__name__
    message = rf"{kind} gives first derivatives only; for second ones use sn\.Replay\(\) or sn\.Direct\(\)"
    with pytest.raises(RuntimeError, match=message):
        second(name, CONTINUOUS[name][0])


@every_adjoint_of_its_own
def test_a_graph_of_the_first_derivative_does_no_harm(name: str) -> None:
    field, y0 = Counted(), Y0.clone().requires_grad_()
    solution = solve(name, field, y0)
    loss = weighted(solution.ys)
    plain = torch.autograd.grad(loss, [y0, field.rate], retain_graph=True)
    stats = solution.stats.backward
    graphed = torch.autograd.grad(loss, [y0, field.rate], create_graph=True)
    for one, other in zip(graphed, plain, strict=True):
        assert one.requires_grad
        assert torch.equal(one.detach(), other)
    assert stats is not None
    assert solution.stats.backward is not None
    assert solution.stats.backward.vjp_y == stats.vjp_y


# As part of something larger.


class Model(nn.Module):
    """An encoder, a solve and a decoder, and a parameter that the field does not use."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.encoder = nn.Linear(3, 3).double()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.decoder = nn.Linear(3, 1).double()
        self.name = name

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        return 0.5 * self.inner(y)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(solve(self.name, self.field, self.encoder(x)).ys[-1])


@every_adjoint
def test_hooks_of_parameters_fire_once_a_backward_pass(name: str) -> None:
    model = Model(name)
    fired: dict[str, list[str]] = {}
    for key, parameter in model.named_parameters():
        log = fired[key] = []
        parameter.register_hook(lambda grad, log=log: log.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda parameter, log=log: log.append("accumulated"))
    for _ in range(2):
        model(BATCH).square().sum().backward()
    assert all(log == ["gradient", "accumulated"] * 2 for log in fired.values()), fired


@every_adjoint
def test_a_hook_acts_on_the_gradient_and_on_nothing_else(name: str) -> None:
    """A hook that clips, say, must not clip what single steps contribute."""
    plain, hooked = Model(name), Model(name)
    for parameter in hooked.parameters():
        parameter.register_hook(lambda grad: 3.0 * grad)
    for model in (plain, hooked):
        model(BATCH).square().sum().backward()
    for one, other in zip(plain.parameters(), hooked.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad, 3.0 * one.grad, rtol=1e-12, atol=1e-14)


@every_adjoint
def test_gradients_accumulate(name: str) -> None:
    model = Model(name)
    model(BATCH).square().sum().backward()
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model(BATCH).square().sum().backward()
    twice = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(once) == len(twice) == len(list(model.parameters()))
    for one, two in zip(once, twice, strict=True):
        torch.testing.assert_close(two, 2.0 * one, rtol=1e-12, atol=1e-14)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_data_parallel_training() -> None:
    """The real thing with one process: every gradient must come by way of the parameter's own hook."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for name in ALL:
            alone, inner = Model(name), Model(name)
            wrapped = nn.parallel.DistributedDataParallel(inner)
            for model in (alone, wrapped):
                model(BATCH).square().sum().backward()
            for one, other in zip(alone.parameters(), inner.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-14)
    finally:
        torch.distributed.destroy_process_group()


@every_adjoint_of_its_own
def test_a_parameter_must_not_change_before_the_backward_pass(name: str) -> None:
    model = Model(name)
    loss = model(BATCH).sum()
    with torch.no_grad():
        model.inner[0].weight.mul_(1.1)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        loss.backward()


@every_adjoint
def test_what_is_not_needed_is_not_computed(name: str) -> None:
    """The gradient for y0 alone, or for the parameters alone, is the same as with the other."""
    field, y0 = Counted(), Y0.clone().requires_grad_()
    solution = solve(name, field, y0, rtol=1e-8, atol=1e-10)
    loss = weighted(solution.ys)
    both = torch.autograd.grad(loss, [y0, field.rate], retain_graph=True)
    alone = [torch.autograd.grad(loss, x, retain_graph=True)[0] for x in (y0, field.rate)]
    assert_near(alone, both, 1e-6)

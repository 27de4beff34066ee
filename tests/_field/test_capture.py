"""Which tensors a field uses, and that each gets its gradient."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import seminode as sn
from seminode._field.capture import chosen
from seminode._field.reach import Reach, parts_of, reachable

ADJOINTS = [sn.Direct(), sn.Replay(), sn.Replay(every=3)]
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=str)
replays = pytest.mark.parametrize("adjoint", ADJOINTS[1:], ids=str)

RATE = 0.7
TIGHT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def scalar(value: float = RATE, requires_grad: bool = True) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=requires_grad)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Decay(nn.Module):
    """y' = −w·y."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(scalar())

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.w * y

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return self(t, y)


class Plain:
    """The same, and no module."""

    def __init__(self, w: Tensor):
        self.w = w

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.w * y

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.w * y


class Slotted:
    """An object that cannot be looked into by its dictionary."""

    __slots__ = ("w",)

    def __init__(self, w: Tensor):
        self.w = w

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.w * y


GLOBAL = scalar()


def uses_global(t: Tensor, y: Tensor) -> Tensor:
    return -GLOBAL * y


def uses_global_inside(t: Tensor, y: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return -GLOBAL * y

    return inner(y)


def with_rate(t: Tensor, y: Tensor, w: Any) -> Tensor:
    return -w * y


def module():
    net = Decay()
    return net, net.w


def bound_method_of_a_module():
    net = Decay()
    return net.slope, net.w


def module_in_a_closure():
    net = Decay()
    return (lambda t, y: net(t, y)), net.w


def partial():
    w = scalar()
    return functools.partial(with_rate, w=w), w


def partial_of_a_partial():
    net = Decay()
    inner = functools.partial(lambda net, t, y: net(t, y), net)
    return functools.partial(inner), net.w


def bound_method_of_an_object():
    w = scalar()
    return Plain(w).slope, w


def callable_object():
    w = scalar()
    return Plain(w), w


def slotted_object():
    w = scalar()
    return Slotted(w), w


def object_in_an_object():
    w = scalar()
    outer = SimpleNamespace(inner=SimpleNamespace(weights=[w]))
    return (lambda t, y: -outer.inner.weights[0] * y), w


def closure():
    w = scalar()
    return (lambda t, y: -w * y), w


def closure_of_a_closure():
    w = scalar()

    def inner(y):
        return -w * y

    return (lambda t, y: inner(y)), w


def global_tensor():
    return uses_global, GLOBAL


def global_tensor_inside():
    return uses_global_inside, GLOBAL


def default_argument():
    w = scalar()

    def field(t, y, w=w):
        return -w * y

    return field, w


def keyword_default():
    w = scalar()

    def field(t, y, *, w=w):
        return -w * y

    return field, w


def decorated():
    w = scalar()

    def twice(f):
        @functools.wraps(f)
        def wrapped(t, y):
            return f(t, y)

        return wrapped

    @twice
    def field(t, y):
        return -w * y

    return field, w


def list_of_modules():
    nets = [nn.Identity(), Decay()]
    return (lambda t, y: nets[1](t, nets[0](y))), nets[1].w


def dict_of_tensors():
    weights = {"a": {"w": scalar()}}
    return (lambda t, y: -weights["a"]["w"] * y), weights["a"]["w"]


def functional():
    net = Decay()
    weights = {"w": scalar()}
    return (lambda t, y: functional_call(net, weights, (t, y))), weights["w"]


def compiled():
    w = scalar()
    return torch.compile(lambda t, y: -w * y, backend="eager"), w


WAYS = [
    module,
    bound_method_of_a_module,
    module_in_a_closure,
    partial,
    partial_of_a_partial,
    bound_method_of_an_object,
    callable_object,
    slotted_object,
    object_in_an_object,
    closure,
    closure_of_a_closure,
    global_tensor,
    global_tensor_inside,
    default_argument,
    keyword_default,
    decorated,
    list_of_modules,
    dict_of_tensors,
    functional,
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.replace("_", " "))


def gradient(field: Any, w: Tensor, adjoint: Any, ts: Any = (0.0, 0.4, 1.0)) -> Tensor | None:
    w.grad = None
    sn.solve(field, vector(1.0, -2.0), ts, adjoint=adjoint, **TIGHT).ys[-1].sum().backward()
    return w.grad


@every_adjoint
@every_way
def test_a_parameter_is_found_wherever_it_is_kept(way, adjoint):
    """y(1) = y0·exp(−w), so the gradient of the sum is −Σy0·exp(−w)."""
    field, w = way()
    grad = gradient(field, w, adjoint)
    assert grad is not None
    assert float(grad) == pytest.approx(math.exp(-RATE), rel=1e-7)


def late_gradient(field: Any, w: Tensor, adjoint: Any) -> Tensor | None:
    """y' = −v·y until t = 1/2, then −(v + w)·y: the first evaluation sees v but not w."""
    v = scalar(0.2)
    w.grad = None

    def late(t, y):
        return field(t, y) - v * y if t > 0.5 else -v * y

    sol = sn.solve(late, vector(1.0, -2.0), [0.0, 1.0], adjoint=adjoint, jumps=[0.5], **TIGHT)
    sol.ys[-1].sum().backward()
    assert v.grad is not None
    return w.grad


LATE_GRADIENT = 0.5 * math.exp(-0.2 - RATE / 2)


@every_adjoint
@pytest.mark.parametrize("way", [way for way in WAYS if way is not slotted_object], ids=lambda way: way.__name__)
def test_a_parameter_that_is_used_late(way, adjoint):
    field, w = way()
    grad = late_gradient(field, w, adjoint)
    assert grad is not None
    assert float(grad) == pytest.approx(LATE_GRADIENT, rel=1e-6)


@every_adjoint
def test_a_parameter_used_late_and_out_of_sight_is_not_lost_silently(adjoint):
    try:
        grad = late_gradient(*slotted_object(), adjoint)
    except (RuntimeError, ValueError) as error:
        assert "params" in str(error)  # noqa: PT017
    else:
        assert grad is not None
        assert float(grad) == pytest.approx(LATE_GRADIENT, rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # the compiler looks at everything, deprecated or not
@every_adjoint
def test_a_compiled_field(adjoint):
    grad = gradient(*compiled(), adjoint)
    assert grad is not None
    assert float(grad) == pytest.approx(math.exp(-RATE), rel=1e-7)


@every_adjoint
def test_a_field_that_names_something_not_there_yet(adjoint):
    def field(t, y):
        return later * y if t < -1.0 else -y

    sol = sn.solve(field, vector(1.0), [0.0, 1.0], adjoint=adjoint)
    assert float(sol.ys[-1]) == pytest.approx(math.exp(-1.0), rel=1e-4)
    later = 1.0


# Against each other: the same gradients from every adjoint.


def assert_like_direct(make: Any, adjoint: Any, tol: float = 1e-9) -> None:
    """`make()` returns inputs and a scalar loss as a function of the adjoint."""
    grads = []
    for way in (sn.Direct(), adjoint):
        inputs, loss = make(way)
        grads.append(torch.autograd.grad(loss, inputs, allow_unused=True))
    for direct, other in zip(*grads, strict=True):
        assert direct is not None
        assert other is not None
        assert direct.abs().max() > 1e-6
        torch.testing.assert_close(other, direct, rtol=tol, atol=tol)


def linear(seed: int, n_in: int = 3, n_out: int = 3) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(n_in, n_out).double()


X = vector(0.5, -1.0, 2.0)
TS = [0.0, 0.3, 1.0]


def hypernetwork(adjoint):
    """Weights made by a network that the field does not see."""
    hyper = linear(0, 3, 9)
    weight = hyper(X).reshape(3, 3)
    sol = sn.solve(lambda t, y: torch.tanh(weight @ y), X, TS, adjoint=adjoint)
    return list(hyper.parameters()), sol.ys.sum()


def hypernetwork_in_sight(adjoint):
    """The field's object holds both the network and the weights it made."""

    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.hyper = linear(0, 3, 9)
            self.weight = torch.zeros(())

        def forward(self, t, y):
            return torch.tanh(self.weight @ y)

    field = Hyper()
    field.weight = field.hyper(X).reshape(3, 3)
    sol = sn.solve(field, X, TS, adjoint=adjoint)
    return list(field.parameters()), sol.ys.sum()


def context(adjoint):
    """A context from an encoder that is a part of the same model as the field."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.f = linear(0), linear(1, 6, 3)

        def forward(self, x):
            code = self.encoder(x)
            return sn.solve(lambda t, y: torch.tanh(self.f(torch.cat([y, code]))), x, TS, adjoint=adjoint).ys

    model = Model()
    return list(model.parameters()), model(X).sum()


def tensor_and_what_was_made_from_it(adjoint):
    w = scalar()
    double = 2 * w
    sol = sn.solve(lambda t, y: torch.sin(double * y) - w * y, X, TS, adjoint=adjoint)
    return [w], sol.ys.sum()


def chain_of_captures(adjoint):
    w = scalar()
    square = w**2
    cube = square * w
    sol = sn.solve(lambda t, y: torch.sin(cube * y) - square * y, X, TS, adjoint=adjoint)
    return [w], sol.ys.sum()


def weight_norm(adjoint):
    layer = nn.utils.parametrizations.weight_norm(linear(0))
    sol = sn.solve(lambda t, y: torch.tanh(layer(y)), X, TS, adjoint=adjoint)
    return list(layer.parameters()), sol.ys.sum()


def start_in_a_closure(adjoint):
    y0 = X.clone().requires_grad_()
    sol = sn.solve(lambda t, y: torch.sin(y0) - y, y0, TS, adjoint=adjoint)
    return [y0], sol.ys.sum()


def start_out_of_sight(adjoint):
    y0 = X.clone().requires_grad_()
    sol = sn.solve(Slotted(y0), y0, TS, adjoint=adjoint)
    return [y0], sol.ys.sum()


def made_start_in_a_closure(adjoint):
    encoder = linear(0)
    y0 = encoder(X)
    sol = sn.solve(lambda t, y: torch.sin(y0) - y, y0, TS, adjoint=adjoint)
    return list(encoder.parameters()), sol.ys.sum()


def start_made_by_the_field(adjoint):
    net = linear(0)
    sol = sn.solve(lambda t, y: torch.tanh(net(y)), net(X), TS, adjoint=adjoint)
    return list(net.parameters()), sol.ys.sum()


def made_start_of_the_field_in_a_closure(adjoint):
    net = linear(0)
    y0 = net(X)
    sol = sn.solve(lambda t, y: torch.tanh(net(y)) + y0, y0, TS, adjoint=adjoint)
    return list(net.parameters()), sol.ys.sum()


def leaf_of_a_structure_in_a_closure(adjoint):
    q, p = X.clone().requires_grad_(), (2 * X).requires_grad_()
    sol = sn.solve(lambda t, y: {"q": y["p"] * q, "p": -y["q"]}, {"q": q, "p": p}, TS, adjoint=adjoint)
    return [q, p], sol.ys["q"].sum()


def nested_args(adjoint):
    a, b, c = scalar(), scalar(0.3), X.clone().requires_grad_()

    def field(t, y, table, flag, pair):
        assert flag == "flag"
        return table["rates"]["a"] * torch.sin(y) - pair[0][0] * y + table["bias"]

    args = ({"rates": {"a": a}, "bias": c, "unused": 3}, "flag", ([b], None))
    sol = sn.solve(field, X, TS, args=args, adjoint=adjoint)
    return [a, b, c], sol.ys.sum()


def made_args(adjoint):
    encoder = linear(0)
    sol = sn.solve(lambda t, y, c: torch.tanh(encoder(y)) * c, X, TS, args=(encoder(X),), adjoint=adjoint)
    return list(encoder.parameters()), sol.ys.sum()


def argument_in_a_closure_as_well(adjoint):
    w = scalar()
    sol = sn.solve(lambda t, y, v: torch.sin(w * y) - v * y, X, TS, args=(w,), adjoint=adjoint)
    return [w], sol.ys.sum()


def times_in_a_closure(adjoint):
    ts = vector(*TS).requires_grad_()
    sol = sn.solve(lambda t, y: torch.sin(y) * ts[1], X, ts, adjoint=adjoint)
    return [ts], sol.ys.sum()


def shared_parameter(adjoint):
    first, second = linear(0), linear(1)
    second.weight = first.weight
    sol = sn.solve(lambda t, y: second(torch.tanh(first(y))), X, TS, adjoint=adjoint)
    return [first.weight, first.bias, second.bias], sol.ys.sum()


def view_of_a_parameter(adjoint):
    table = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
    row = table[1]
    sol = sn.solve(lambda t, y: torch.sin(row * y) + table[2], X, TS, adjoint=adjoint)
    return [table], sol.ys.sum()


class Product(torch.autograd.Function):
    """x·y, out of torch's sight: no function mode sees the arguments of `apply`."""

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * y, grads[0] * x


def own_function_of_a_parameter(adjoint):
    w = X.clone().requires_grad_()
    sol = sn.solve(lambda t, y: Product.apply(w, torch.sin(y)), X, TS, adjoint=adjoint)
    return [w], sol.ys.sum()


def own_function_of_a_made_weight(adjoint):
    hyper = linear(0)
    weight = hyper(X)
    sol = sn.solve(lambda t, y: Product.apply(weight, torch.sin(y)), X, TS, adjoint=adjoint)
    return list(hyper.parameters()), sol.ys.sum()


PROBLEMS = [
    own_function_of_a_parameter,
    hypernetwork,
    hypernetwork_in_sight,
    context,
    tensor_and_what_was_made_from_it,
    chain_of_captures,
    weight_norm,
    start_in_a_closure,
    start_out_of_sight,
    made_start_in_a_closure,
    start_made_by_the_field,
    made_start_of_the_field_in_a_closure,
    leaf_of_a_structure_in_a_closure,
    nested_args,
    made_args,
    argument_in_a_closure_as_well,
    times_in_a_closure,
    shared_parameter,
    view_of_a_parameter,
]
every_problem = pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__.replace("_", " "))


@replays
@every_problem
def test_replay_finds_the_gradient_of_direct(make, adjoint):
    assert_like_direct(make, adjoint)


@replays
@every_problem
def test_second_derivatives_of_replay_are_those_of_direct(make, adjoint):
    def penalty(way):
        inputs, loss = make(way)
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        return inputs, sum(grad.square().sum() for grad in grads)

    assert_like_direct(penalty, adjoint, tol=1e-8)


@replays
def test_a_made_weight_out_of_the_sight_of_torch_is_not_lost_silently(adjoint):
    try:
        assert_like_direct(own_function_of_a_made_weight, adjoint)
    except (RuntimeError, ValueError) as error:
        assert "args" in str(error)  # noqa: PT017


@every_adjoint
def test_backward_reaches_the_leaves_behind_a_captured_tensor(adjoint):
    """y' = −v·y with v = w²: dy(1)/dw = −2w·exp(−w²)·y0."""
    w = scalar()
    v = w**2
    sol = sn.solve(lambda t, y: -v * y, vector(1.0, 2.0), [0.0, 1.0], adjoint=adjoint, **TIGHT)
    sol.ys[-1].sum().backward()
    assert w.grad is not None
    assert float(w.grad) == pytest.approx(-2 * RATE * 3 * math.exp(-(RATE**2)), rel=1e-7)


@every_adjoint
def test_a_start_in_a_closure_gets_both_contributions(adjoint):
    """y' = y0 gives y(1) = 2·y0: half of the gradient comes by the field."""
    y0 = vector(1.0, 2.0).requires_grad_()
    sn.solve(lambda t, y: y0 + 0 * y, y0, [0.0, 1.0], adjoint=adjoint).ys[-1].sum().backward()
    assert y0.grad is not None
    torch.testing.assert_close(y0.grad, vector(2.0, 2.0), rtol=1e-12, atol=0.0)


# Which parameters get a gradient.


@every_adjoint
def test_frozen_parameters_are_left_out(adjoint):
    net = nn.Sequential(linear(0), nn.Tanh(), linear(1))
    net[0].requires_grad_(False)
    sn.solve(lambda t, y: net(y), X, TS, adjoint=adjoint).ys.sum().backward()
    for name, parameter in net.named_parameters():
        assert (parameter.grad is not None) == name.startswith("2."), name


@every_adjoint
def test_nothing_to_differentiate(adjoint):
    net = linear(0).requires_grad_(False)
    sol = sn.solve(lambda t, y: net(y), X, TS, adjoint=adjoint)
    assert not sol.ys.requires_grad


@every_adjoint
def test_unused_parameters_keep_no_gradient(adjoint):
    net = nn.ModuleDict({"used": linear(0), "unused": linear(1)})
    spare = scalar()

    def field(t, y):
        assert spare is not None
        return torch.tanh(net["used"](y))

    sn.solve(field, X, TS, adjoint=adjoint).ys.sum().backward()
    assert all(p.grad is not None for p in net["used"].parameters())
    assert all(p.grad is None for p in net["unused"].parameters())
    assert spare.grad is None


@replays
@pytest.mark.parametrize("kind", ["list", "generator", "module", "tensor"])
def test_params_given_by_the_user(kind, adjoint):
    """Only they get gradients, whatever else the field uses."""
    first, second = linear(0), linear(1)
    params: Any = {
        "list": [first.weight, first.bias],
        "generator": (p for p in first.parameters()),
        "module": first,
        "tensor": first.weight,
    }[kind]
    y0 = X.clone().requires_grad_()
    sol = sn.solve(lambda t, y: second(torch.tanh(first(y))), y0, TS, adjoint=adjoint, params=params)
    sol.ys.sum().backward()
    given = [first.weight] if kind == "tensor" else list(first.parameters())
    expected = torch.autograd.grad(
        sn.solve(lambda t, y: second(torch.tanh(first(y))), y0, TS, adjoint=sn.Direct()).ys.sum(), [y0, *given]
    )
    for tensor, grad in zip([y0, *given], expected, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-9, atol=1e-9)
    for parameter in {*first.parameters(), *second.parameters()} - set(given):
        assert parameter.grad is None


@replays
def test_no_params_at_all(adjoint):
    net = linear(0)
    sol = sn.solve(lambda t, y: net(y), X, TS, adjoint=adjoint, params=())
    assert not sol.ys.requires_grad


def test_params_are_honoured_or_refused_by_direct():
    """Autograd through the steps finds all parameters by itself."""
    first, second = scalar(), scalar(0.2)
    try:
        sol = sn.solve(lambda t, y: -first * y + second, X, TS, adjoint=sn.Direct(), params=[first])
    except ValueError as error:
        assert str(error).startswith("params: ")  # noqa: PT017
    else:
        sol.ys.sum().backward()
        assert first.grad is not None
        assert second.grad is None


@pytest.mark.parametrize("adjoint", [*ADJOINTS, sn.Backsolve(), sn.Checkpointed(2)], ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_what_was_computed_from_params_before_the_solve(adjoint, later):
    """A tensor that was computed from a parameter carries its gradient, also where it is in use later only."""
    w, other = scalar(), scalar(0.3)
    computed, constant = 2.0 * w.exp(), other.sin()

    def field(t, y):
        return constant * y if later and t < 0.5 else -computed * y + constant

    jumps = [0.5] if later else None
    sol = sn.solve(field, X, TS, adjoint=adjoint, params=[w], jumps=jumps)
    (grad,) = torch.autograd.grad(sol.ys.sum(), w, retain_graph=True)
    direct = sn.solve(field, X, TS, adjoint=sn.Direct(), jumps=jumps)
    (expected,) = torch.autograd.grad(direct.ys.sum(), w, retain_graph=True)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(sol.ys.sum(), other, allow_unused=True) == (None,)


@replays
def test_params_and_args_of_each_own(adjoint):
    w, v = scalar(), scalar(0.2)
    sol = sn.solve(lambda t, y, v: -w * y + v, X, TS, args=(v,), params=[w], adjoint=adjoint)
    grads = torch.autograd.grad(sol.ys.sum(), [w, v])
    assert all(float(grad.abs()) > 0.1 for grad in grads)


@every_adjoint
def test_without_grad_mode(adjoint):
    net = linear(0)
    with torch.no_grad():
        sol = sn.solve(lambda t, y: net(y), X.clone().requires_grad_(), TS, adjoint=adjoint)
    assert not sol.ys.requires_grad


@every_adjoint
def test_gradients_accumulate_over_solves(adjoint):
    net, w = module()
    once = gradient(net, w, adjoint)
    assert once is not None
    once = once.clone()
    w.grad = None
    for _ in range(2):
        sn.solve(net, vector(1.0, -2.0), [0.0, 0.4, 1.0], adjoint=adjoint, **TIGHT).ys[-1].sum().backward()
    assert w.grad is not None
    assert torch.equal(w.grad, 2 * once)


# Changes in place between the passes.


def change_parameter(w, y0, v, ts):
    with torch.no_grad():
        w.mul_(2.0)


def change_argument(w, y0, v, ts):
    with torch.no_grad():
        v.mul_(2.0)


def change_start(w, y0, v, ts):
    with torch.no_grad():
        y0.add_(1.0)


@every_adjoint
@pytest.mark.parametrize("change", [change_parameter, change_argument, change_start])
def test_a_change_in_place_is_noticed(change, adjoint):
    w, y0, v = scalar(), X.clone().requires_grad_(), scalar(0.2)
    ts = vector(*TS)
    sol = sn.solve(lambda t, y, v: torch.sin(w * y) * v, y0, ts, args=(v,), adjoint=adjoint)
    change(w, y0, v, ts)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sol.ys.sum().backward()


@replays
def test_a_change_of_a_parameter_used_late_is_noticed(adjoint):
    w = scalar()
    sol = sn.solve(lambda t, y: -w * y if t > 0.5 else -y, X, [0.0, 1.0], jumps=[0.5], adjoint=adjoint)
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sol.ys.sum().backward()


@every_adjoint
@pytest.mark.parametrize("kept", ["module", "closure", "args"])
def test_a_change_of_a_constant_does_no_silent_harm(kept, adjoint):
    net, v = Decay().requires_grad_(False), scalar(0.2)
    w = net.w if kept == "module" else scalar(requires_grad=False)
    field, args = {
        "module": (lambda t, y: net(t, y) * v, ()),
        "closure": (lambda t, y: -w * y * v, ()),
        "args": (lambda t, y, w: -w * y * v, (w,)),
    }[kept]
    sol = sn.solve(field, vector(1.0, -2.0), [0.0, 1.0], args=args, adjoint=adjoint, **TIGHT)
    w.add_(1.0)
    try:
        sol.ys[-1].sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert v.grad is not None
        assert float(v.grad) == pytest.approx(RATE * math.exp(-0.2 * RATE), rel=1e-6)


@every_adjoint
@pytest.mark.parametrize("backward", [False, True])
def test_a_solution_that_goes_takes_everything_with_it(backward, adjoint):
    """At once, and not when the garbage collector next comes by: memory of a GPU cannot wait for that."""
    w, y0 = scalar(), X.clone().requires_grad_()
    seen: list[weakref.ref[Tensor]] = []

    def field(t, y):
        k = -w * y
        seen.extend(weakref.ref(x) for x in (y, k) if x is not y0)
        return k

    gc.collect()
    gc.disable()
    try:
        sol = sn.solve(field, y0, TS, adjoint=adjoint, dense=True)
        if backward:
            sol.ys.sum().backward()
        del sol
        alive = [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()
    assert seen
    assert alive == []


# The parts.


def test_reachable_finds_each_thing_once():
    net, w = Decay(), scalar()
    both = [net, {"again": net, "w": w}, (w,)]
    modules, parts, tensors, _ = reachable(lambda t, y: both)
    assert modules == [net]
    assert parts == list(net.modules())
    assert len(tensors) == 1
    assert tensors[0] is w


def test_parts_are_in_the_order_of_modules() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(nn.Sequential(shared, nn.Tanh()), shared, nn.ModuleDict({"a": nn.Linear(2, 2)}))
    net.register_module("nothing", None)
    assert parts_of(net) == list(net.modules())
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert parts_of(scripted) == list(scripted.modules())


def test_reachable_survives_a_circle():
    first, second = SimpleNamespace(), SimpleNamespace(w=scalar())
    first.other, second.other = second, first
    _, _, tensors, _ = reachable(lambda t, y: first)
    assert len(tensors) == 1


def test_reachable_gives_up_on_a_heap():
    heap = [object() for _ in range(50_000)]
    assert reachable(lambda t, y: heap)[:3] == ([], [], [])


def test_reachable_does_not_touch_builtins_and_modules():
    assert reachable(torch.sin)[:3] == ([], [], [])
    assert reachable(lambda t, y: math.sin(y))[:3] == ([], [], [])


def test_leaves_of_a_reach():
    first, second, w = linear(0), linear(1), scalar()
    second.weight = first.weight
    first.bias.requires_grad_(False)
    both = nn.Sequential(first, second)
    tensors = [w, scalar(requires_grad=False), first.weight]
    found = Reach([both, first], parts_of(both), tensors, []).leaves()
    assert [id(x) for x in found] == [id(first.weight), id(second.bias), id(w)]


def test_chosen():
    net = linear(0)
    w = scalar()
    assert [id(x) for x in chosen(net)] == [id(net.weight), id(net.bias)]
    assert [id(x) for x in chosen([w, w, scalar(requires_grad=False)])] == [id(w)]
    assert chosen(()) == ()
    assert chosen(w)[0] is w

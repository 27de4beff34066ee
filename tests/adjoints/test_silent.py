"""No silent wrong gradient: fields that change, cache, copy or draw give the right gradient, or an error says why not.

Each case runs with every adjoint, eagerly and compiled (by a stand-in for the back end). Its gradient is right, or the
solve or its backward pass is refused with a sentence that names the remedy. `Direct` differentiates what was computed
and is refused nothing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
import torch.nn.utils.parametrize as parametrize
from compiled import replace_back_end
from torch import Tensor, nn

import seminode as sn
from seminode._compile.programs import pieces

WIDE = torch.float64


class Way(NamedTuple):
    """A way to differentiate a solve: the adjoint, and the solver that it needs."""

    adjoint: sn.adjoints.Adjoint
    solver: Any = "dopri5"
    compiled: bool = False

    def solve(self, field: Any, y0: Any, ts: Any, **options: Any) -> sn.Solution:
        options = {"rtol": 1e-8, "atol": 1e-10, "solver": self.solver, **options}
        if "controller" in options:
            del options["rtol"], options["atol"]
        return sn.solve(field, y0, ts, adjoint=self.adjoint, compile=self.compiled, **options)

    @property
    def exact(self) -> bool:
        """Whether it differentiates the numbers that were computed."""
        return isinstance(self.adjoint, sn.Direct | sn.Replay | sn.Checkpointed | sn.Reversible)


WAYS = {
    "direct": Way(sn.Direct()),
    "budget": Way(sn.Direct(memory=1500)),
    "replay": Way(sn.Replay()),
    "checkpointed": Way(sn.Checkpointed(3)),
    "reversible": Way(sn.Reversible(), sn.ReversibleRK("dopri5")),
    "backsolve": Way(sn.Backsolve()),
    "interpolating": Way(sn.Interpolating()),
    "quadrature": Way(sn.Quadrature()),
}


NAMES = [f"{name}{mode}" for name in WAYS for mode in ("", " compiled")]
all_but_direct = pytest.mark.parametrize("way", [name for name in NAMES if "direct" not in name], indirect=True)


@pytest.fixture(params=NAMES)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    name, *compiled = request.param.split()
    if not compiled:
        yield WAYS[name]
        return
    replace_back_end(monkeypatch)
    monkeypatch.setattr(pieces, "LARGE", 0)  # a program per evaluation is traced in less time than one per step
    yield WAYS[name]._replace(compiled=True)
    torch._dynamo.reset()


def number(x: Any, **options: Any) -> Tensor:
    return torch.tensor(x, dtype=WIDE, **options)


def leaf(x: Any) -> Tensor:
    return number(x, requires_grad=True)


def gradients(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


def check(way: Way, run: Callable[[Way], Sequence[Tensor | None]], exact: Sequence[Any], remedy: str | None) -> None:
    """Right, or refused with the remedy; without one, right."""
    refusable = remedy is not None and not (way.adjoint == sn.Direct() and not way.compiled)
    try:
        found = run(way)
    except (ValueError, RuntimeError) as error:
        if not refusable:
            raise
        with pytest.raises(type(error), match=remedy or ""):
            raise
        return
    for grad, expected in zip(found, exact, strict=True):
        assert grad is not None
        torch.testing.assert_close(grad.to(WIDE), torch.as_tensor(expected, dtype=WIDE), rtol=1e-4, atol=1e-6)


# Some of these fields cannot be compiled, which is warned of; then they run eagerly.
pytestmark = pytest.mark.filterwarnings("ignore::seminode.CompileWarning")

#: A field that gives a different result than before.
CHANGED = r"(?s)gives a different result than during the solve.*pass such values in args=.*adjoint=sn\.Direct\(\)"
#: A tensor of which nothing was known when the solve began.
UNDETECTED = r"(?s)was not detected when the solve began.*Name such tensors in params= or pass them in args="
FIRST_ONLY = r"gives first derivatives only; for second ones use sn\.Replay\(\) or sn\.Direct\(\)"
BATCHED = r"cannot compute batches of gradients.*Pass adjoint=sn\.Direct\(\)"
CUT = r"(?s)the gradient ends there and would be lost\. Call requires_grad_\(\) on the tensor itself"


# The cases


def twice_in_args(way: Way) -> list[Tensor | None]:
    k = leaf(0.5)
    ys = way.solve(lambda t, y, p, q: -y * p * q, number([1.0, 2.0]), [0.0, 1.0], args=(k, k)).ys
    return gradients(ys[-1].sum(), [k])


def thrice_in_args(way: Way) -> list[Tensor | None]:
    """Once of them in a dict in a list."""
    k = leaf(0.5)

    def field(t: Tensor, y: Tensor, p: Tensor, more: Any, q: Tensor) -> Tensor:
        return -y * p * more["all"][0] * q

    ys = way.solve(field, number([1.0, 2.0]), [0.0, 1.0], args=(k, {"all": [k]}, k)).ys
    return gradients(ys[-1].sum(), [k])


def in_args_and_closed_over(way: Way) -> list[Tensor | None]:
    k = leaf(0.5)
    ys = way.solve(lambda t, y, p: -y * p * k, number([1.0, 2.0]), [0.0, 1.0], args=(k,)).ys
    return gradients(ys[-1].sum(), [k])


def loop_variable(way: Way) -> list[Tensor | None]:
    k, loss = leaf(0.5), number(0.0)
    for i in (1.0, 2.0, 3.0):
        loss = loss + way.solve(lambda t, y: -k * i * y, number([1.0]), [0.0, 1.0]).ys[-1].sum()  # noqa: B023
    return gradients(loss, [k])


def list_entry(way: Way) -> list[Tensor | None]:
    k, factors = leaf(0.5), [1.0]
    ys = way.solve(lambda t, y: -k * factors[0] * y, number([1.0]), [0.0, 1.0]).ys
    factors[0] = 3.0
    return gradients(ys[-1].sum(), [k])


def times_in_the_loss(way: Way) -> list[Tensor | None]:
    ts = leaf([1.0, 2.0, 3.0])
    sol = way.solve(lambda t, y: 0 * y, number([1.0]), ts)
    return gradients((sol.ys[:, 0] * sol.ts).sum(), [ts])


def last_time_in_the_loss(way: Way) -> list[Tensor | None]:
    ts = leaf([1.0, 2.0, 3.0])
    sol = way.solve(lambda t, y: 0 * y, number([1.0]), ts, save="last")
    return gradients((sol.ys[:, 0] * sol.ts).sum(), [ts])


def times_in_save(way: Way) -> list[Tensor | None]:
    ts = leaf([1.0, 2.0, 3.0])
    return gradients(way.solve(lambda t, y: 0 * y, number([1.0]), ts, save=lambda t, y: t * y).ys.sum(), [ts])


def weight_made_first(way: Way) -> list[Tensor | None]:
    h, cache = leaf(0.3), {}

    def field(t: Tensor, y: Tensor) -> Tensor:
        if "w" not in cache:
            cache["w"] = h.sin()
        return cache["w"] * y

    return gradients(way.solve(field, number([1.0]), [0.0, 1.0]).ys[-1].sum(), [h])


def weight_made_later(way: Way) -> list[Tensor | None]:
    """In an entry of a dict, in the first evaluation after the jump."""
    h, cache = leaf(0.3), {}

    def field(t: Tensor, y: Tensor) -> Tensor:
        if t < 0.5:
            return h * y
        if "w" not in cache:
            cache["w"] = h.sin()
        return cache["w"] * y

    return gradients(way.solve(field, number([1.0]), [0.0, 1.0], jumps=[0.5]).ys[-1].sum(), [h])


class Late(nn.Module):
    """The same in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Parameter(number(0.3))
        self.w: Tensor | None = None

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        if t < 0.5:
            return self.h * y
        if self.w is None:
            self.w = self.h.sin()
        return self.w * y


def attribute_made_later(way: Way) -> list[Tensor | None]:
    field = Late()
    return gradients(way.solve(field, number([1.0]), [0.0, 1.0], jumps=[0.5]).ys[-1].sum(), [field.h])


class Weighted(nn.Module):
    """A field with a weight for each time."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Parameter(number(0.3))

    def weight(self, t: float) -> Tensor:
        raise NotImplementedError

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.weight(float(t)) * y


class CachedMethod(Weighted):
    """The weights are kept by `functools.cache`, which belongs to the class."""

    @functools.cache  # noqa: B019
    def weight(self, t: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2.0 * t * self.h.sin()


WEIGHTS: dict[float, Tensor] = {}


class CachedInClass(Weighted):
    """The same in a dict of the class."""

    weights: dict[float, Tensor] = {}  # noqa: RUF012

    def weight(self, t: float) -> Tensor:
        if t not in self.weights:
            self.weights[t] = 2.0 * t * self.h.sin()
        return self.weights[t]


class CachedInGlobal(Weighted):
    """The same in a global dict, which only a method names."""

    def weight(self, t: float) -> Tensor:
        if t not in WEIGHTS:
            WEIGHTS[t] = 2.0 * t * self.h.sin()
        return WEIGHTS[t]


def cached_by_time(kind: type[Weighted], way: Way) -> list[Tensor | None]:
    WEIGHTS.clear()
    CachedInClass.weights.clear()
    field = kind()
    return gradients(way.solve(field, number([1.0]), [0.0, 1.0]).ys[-1].sum(), [field.h])


def called_from_a_plain_object(way: Way) -> list[Tensor | None]:
    """A method that caches, of an object that is no module."""
    WEIGHTS.clear()

    class Plain:
        h = leaf(0.3)

        def weight(self, t: float) -> Tensor:
            if t not in WEIGHTS:
                WEIGHTS[t] = 2.0 * t * self.h.sin()
            return WEIGHTS[t]

        def __call__(self, t: Tensor, y: Tensor) -> Tensor:
            return self.weight(float(t)) * y

    return gradients(way.solve(Plain(), number([1.0]), [0.0, 1.0]).ys[-1].sum(), [Plain.h])


def parametrized() -> nn.Module:
    torch.manual_seed(0)
    return parametrizations.weight_norm(nn.Linear(1, 1, bias=False)).double()


def cached_parametrization(way: Way) -> list[Tensor | None]:
    m = parametrized()
    with parametrize.cached():
        sol = way.solve(lambda t, y: m(y), number([[1.0]]), [0.0, 1.0])
        return gradients(sol.ys[-1].sum(), list(m.parameters()))


def of_parametrization() -> list[Any]:
    m = parametrized()
    return gradients(torch.exp(m(number([[1.0]]))).sum(), list(m.parameters()))


def used_in_the_middle(way: Way) -> list[Tensor | None]:
    p, h = leaf(-0.3), leaf(0.8)
    w = h.sin()
    sol = way.solve(lambda t, y: y * (w if 0.3 < t < 0.7 else p), number([1.0]), [0.0, 1.0], jumps=[0.3, 0.7])
    return gradients(sol.ys[-1].sum(), [h, p])


def in_the_middle(way: Way, w: Tensor, p: Tensor) -> Tensor:
    """Where w is nested too deep to be within reach of the field."""
    nested: Any = w
    for _ in range(10):
        nested = [nested]

    def field(t: Tensor, y: Tensor) -> Tensor:
        if not 0.3 < t < 0.7:
            return y * p
        found = nested
        while isinstance(found, list):
            found = found[0]
        return y * found

    return way.solve(field, number([1.0]), [0.0, 1.0], jumps=[0.3, 0.7]).ys[-1].sum()


def hidden_in_the_middle(way: Way) -> list[Tensor | None]:
    p, h = leaf(-0.3), leaf(0.8)
    return gradients(in_the_middle(way, h.sin(), p), [h, p])


def hidden_leaf_in_the_middle(way: Way) -> list[Tensor | None]:
    p, w = leaf(-0.3), leaf(0.8)
    return gradients(in_the_middle(way, w, p), [w, p])


def third_derivative(way: Way) -> list[Tensor | None]:
    w, y = leaf(0.2), leaf([1.0])
    out = way.solve(lambda t, y: -w * y**2, y, [0.0, 1.0]).ys[-1].sum()
    (g,) = torch.autograd.grad(out, y, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), y, create_graph=True)
    return gradients(out**2 + h.square().sum(), [w])


def of_third_derivative() -> list[Any]:
    """y(1) = y₀/(1 + w·y₀)."""
    w, y = leaf(0.2), leaf(1.0)
    out = y / (1 + w * y)
    (g,) = torch.autograd.grad(out, y, create_graph=True)
    (h,) = torch.autograd.grad(g, y, create_graph=True)
    return gradients(out**2 + h.square(), [w])


def curvature_without_residual(way: Way) -> list[Tensor | None]:
    """The loss is zero, and so are its cotangent and its gradient; the second derivative is not."""
    k, y = leaf(0.5), leaf([1.0, 2.0])
    end = way.solve(lambda t, y: -k * y, y, [0.0, 1.0], save="last").ys[-1]
    first = torch.autograd.grad((end - end.detach()).square().sum(), [k, y], create_graph=True)
    return gradients(first[0] + first[1].sum(), [k, y])


def zero_dimensional(way: Way) -> list[Tensor | None]:
    y = leaf(1.0)
    return gradients(way.solve(lambda t, y: -y, y, [0.0, 1.0]).ys[-1], [y])


def batch_of_gradients(way: Way) -> list[Tensor | None]:
    y = leaf([1.0, 2.0])
    end = way.solve(lambda t, y: -y, y, [0.0, 1.0]).ys[-1]
    return list(torch.autograd.grad(end, y, torch.eye(2, dtype=WIDE), is_grads_batched=True))


def attribute_rebound_between_solves(way: Way) -> list[Tensor | None]:
    h, m = leaf(0.3), nn.Module()
    m.w = h.sin()  # pyright: ignore[reportAttributeAccessIssue]
    one = way.solve(lambda t, y: m.w * y, number([1.0]), [0.0, 1.0]).ys[-1]
    m.w = h.cos()  # pyright: ignore[reportAttributeAccessIssue]
    two = way.solve(lambda t, y: m.w * y, number([1.0]), [0.0, 1.0]).ys[-1]
    return gradients((one + two).sum(), [h])


class Holder:
    """A plain object that holds a tensor."""

    def __init__(self, w: Tensor):
        self.w = w

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        return self.w * y


def attribute_rebound_before_backward(way: Way) -> list[Tensor | None]:
    h = leaf(0.3)
    field = Holder(h)
    ys = way.solve(field, number([1.0]), [0.0, 1.0]).ys
    field.w = number(7.0)
    return gradients(ys[-1].sum(), [h])


class Scaled(nn.Module):
    """A module with a tensor that is no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = number([2.0, 2.0])


def constant_rebound_before_backward(way: Way) -> list[Tensor | None]:
    h, m = leaf(0.3), Scaled()
    ys = way.solve(lambda t, y: h * m.scale * y, number([1.0, 1.0]), [0.0, 1.0]).ys
    m.scale = number([5.0, 5.0])
    return gradients(ys[-1].sum(), [h])


def dict_entry_rebound_before_backward(way: Way) -> list[Tensor | None]:
    h, weights = leaf(0.3), {"scale": number([2.0, 2.0])}
    ys = way.solve(lambda t, y: h * weights["scale"] * y, number([1.0, 1.0]), [0.0, 1.0]).ys
    weights["scale"] = number([5.0, 5.0])
    return gradients(ys[-1].sum(), [h])


class Hamiltonian(nn.Module):
    """As published programs write it: leaves are made inside the field."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(number(2.0))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            one = torch.tensor(1.0, dtype=WIDE, requires_grad=True)
            z = one * y
            energy = 0.5 * (self.k * z[0] ** 2 + z[1] ** 2)
            (g,) = torch.autograd.grad(energy, z, create_graph=True)
        return torch.stack([g[1], -g[0]])


def leaves_inside(way: Way) -> list[Tensor | None]:
    field, y = Hamiltonian(), leaf([1.0, 0.0])
    return gradients(way.solve(field, y, [0.0, 1.0]).ys[-1].sum(), [field.k, y])


def of_leaves_inside() -> list[Any]:
    k, y = leaf(2.0), leaf([1.0, 0.0])
    w = k.sqrt()
    end = torch.stack([y[0] * w.cos() + y[1] / w * w.sin(), -w * y[0] * w.sin() + y[1] * w.cos()])
    return gradients(end.sum(), [k, y])


def complex_parameter(way: Way) -> list[Tensor | None]:
    c = torch.tensor(0.3 + 0.5j, dtype=torch.complex128, requires_grad=True)
    (grad,) = gradients(way.solve(lambda t, y: (c * y).imag, number([1.0]), [0.0, 1.0]).ys[-1].sum(), [c])
    return [None if grad is None else torch.view_as_real(grad)]


def solve_inside(way: Way) -> list[Tensor | None]:
    """y′ = −k·z(1), where z′ = −k·z starts from y."""
    k, y = leaf(0.5), leaf([1.0])

    def field(t: Tensor, y: Tensor) -> Tensor:
        return -k * sn.solve(lambda s, z: -k * z, y, [0.0, 1.0], rtol=1e-9, atol=1e-11, save="last").ys[0]

    steps = {"controller": sn.FixedStep(0.25), "solver": way.solver}
    return gradients(way.solve(field, y, [0.0, 1.0], **steps).ys[-1].sum(), [k, y])


def time_as_a_leaf(way: Way) -> list[Tensor | None]:
    k = leaf(0.5)

    def field(t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            s = torch.tensor(float(t), dtype=WIDE).requires_grad_()
            (slope,) = torch.autograd.grad(s.square(), s)  # 2t
        return k * slope * y

    return gradients(way.solve(field, number([1.0]), [0.0, 1.0]).ys[-1].sum(), [k])


def time_copied_as_a_leaf(way: Way) -> list[Tensor | None]:
    k = leaf(0.5)

    def field(t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            s = t.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(s.square(), s)
        return k * slope * y

    return gradients(way.solve(field, number([1.0]), [0.0, 1.0]).ys[-1].sum(), [k])


def mode_of_the_model(way: Way) -> list[Tensor | None]:
    """Dropout with a mask, drawn by hand, that evaluation mode would leave out."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    y = leaf([1.0, -0.5, 0.3])
    ys = way.solve(lambda t, y: model(y), y, [0.0, 1.0]).ys
    model.eval()
    return gradients(ys[-1].sum(), [y, *model.parameters()])


def of_mode_of_the_model() -> list[Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    y = leaf([1.0, -0.5, 0.3])
    ys = WAYS["direct"].solve(lambda t, y: model(y), y, [0.0, 1.0], rtol=1e-9, atol=1e-11).ys
    return gradients(ys[-1].sum(), [y, *model.parameters()])


class Case(NamedTuple):
    """A solve and its gradients; what they are, or a function that computes it; how a refusal must read."""

    run: Callable[[Way], list[Tensor | None]]
    exact: list[Any] | Callable[[], list[Any]]
    remedy: str | None = None


e = math.exp
BOTH_PARTS = 0.5 * (1 + math.cos(0.3)) * e(0.5 * (0.3 + math.sin(0.3)))
MIDDLE = e(0.4 * math.sin(0.8) - 0.18)
CASES = {
    "a tensor passed twice in args": Case(twice_in_args, [-3 * e(-0.25)]),
    "a tensor passed three times in args": Case(thrice_in_args, [-3 * 3 * 0.25 * e(-0.125)]),
    "a tensor in args that is closed over": Case(in_args_and_closed_over, [-3 * e(-0.25)]),
    "a loop variable": Case(loop_variable, [-sum(i * e(-0.5 * i) for i in (1, 2, 3))], CHANGED),
    "a list entry": Case(list_entry, [-e(-0.5)], CHANGED),
    "a loss that reads sol.ts": Case(times_in_the_loss, [[1.0, 1.0, 1.0]]),
    "a loss that reads the last time": Case(last_time_in_the_loss, [[0.0, 0.0, 1.0]]),
    "t inside save": Case(times_in_save, [[1.0, 1.0, 1.0]]),
    "a weight made in the first evaluation": Case(weight_made_first, [math.cos(0.3) * e(math.sin(0.3))]),
    "a weight made in a later evaluation": Case(weight_made_later, [BOTH_PARTS]),
    "an attribute made in a later evaluation": Case(attribute_made_later, [BOTH_PARTS]),
    "a cached method": Case(partial(cached_by_time, CachedMethod), [math.cos(0.3) * e(math.sin(0.3))]),
    "a cache of the class": Case(partial(cached_by_time, CachedInClass), [math.cos(0.3) * e(math.sin(0.3))]),
    "a global cache": Case(partial(cached_by_time, CachedInGlobal), [math.cos(0.3) * e(math.sin(0.3))]),
    "a method that caches": Case(called_from_a_plain_object, [math.cos(0.3) * e(math.sin(0.3))]),
    "parametrize.cached()": Case(cached_parametrization, of_parametrization),
    "a tensor used in the middle only": Case(used_in_the_middle, [0.4 * math.cos(0.8) * MIDDLE, 0.6 * MIDDLE]),
    "a hidden tensor used in the middle only": Case(
        hidden_in_the_middle, [0.4 * math.cos(0.8) * MIDDLE, 0.6 * MIDDLE], UNDETECTED
    ),
    "a hidden leaf used in the middle only": Case(
        hidden_leaf_in_the_middle, [0.4 * e(0.14), 0.6 * e(0.14)], UNDETECTED
    ),
    "a third derivative": Case(third_derivative, of_third_derivative, FIRST_ONLY),
    "a second derivative where the loss is zero": Case(
        curvature_without_residual, [4 * e(-1), [0.0, -2 * e(-1)]], FIRST_ONLY
    ),
    "a 0-d state": Case(zero_dimensional, [e(-1)]),
    "is_grads_batched": Case(batch_of_gradients, [[[e(-1), 0.0], [0.0, e(-1)]]], BATCHED),
    "an attribute rebound between two solves": Case(
        attribute_rebound_between_solves, [math.cos(0.3) * e(math.sin(0.3)) - math.sin(0.3) * e(math.cos(0.3))]
    ),
    "an attribute rebound before backward": Case(attribute_rebound_before_backward, [e(0.3)]),
    "a constant rebound before backward": Case(constant_rebound_before_backward, [4 * e(0.6)]),
    "a dict entry rebound before backward": Case(dict_entry_rebound_before_backward, [4 * e(0.6)]),
    "leaves made inside the field": Case(leaves_inside, of_leaves_inside),
    "a complex parameter of a real field": Case(complex_parameter, [[0.0, e(0.5)]]),
    "a solve inside the field": Case(solve_inside, [(0.5 - 1) * e(-0.5) * e(-0.5 * e(-0.5)), [e(-0.5 * e(-0.5))]]),
    "a leaf made of the time": Case(time_as_a_leaf, [e(0.5)]),
    "a leaf that is a copy of the time": Case(time_copied_as_a_leaf, [e(0.5)]),
    "model.eval() before backward": Case(mode_of_the_model, of_mode_of_the_model),
}


@pytest.mark.parametrize("name", CASES)
def test_right_or_refused(way: Way, name: str) -> None:
    case = CASES[name]
    check(way, case.run, case.exact() if callable(case.exact) else case.exact, case.remedy)


@pytest.mark.filterwarnings("error::seminode.CompileWarning")
@pytest.mark.parametrize("way", [f"{name} compiled" for name in WAYS], indirect=True)
@pytest.mark.parametrize("name", [name for name in CASES if "in args" in name])
def test_tensors_in_args_of_whole_compiled_steps(way: Way, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LARGE", 1000)
    test_right_or_refused(way, name)


def test_times_near_the_resolution_of_the_clock(way: Way) -> None:
    """t0 = 1e13: any answer or any error of a solve will do, but no other error."""
    y = leaf([1.0])
    with contextlib.suppress(sn.SolveError):
        gradients(way.solve(lambda t, y: -y, y, [1e13, 1e13 + 1]).ys[-1].sum(), [y])


def test_a_loss_that_reads_the_times_of_steps(way: Way) -> None:
    """Steps move with the start, with the end, or not at all; so do their times."""
    found = []
    for each in (way, Way(sn.Direct(), way.solver)):
        ts, y = leaf([0.5, 2.0]), leaf([1.0, 0.2])
        sol = each.solve(
            lambda t, y: torch.cos(t) * torch.sin(y), y, ts, jumps=[1.0], save="steps", rtol=1e-6, atol=1e-8
        )
        assert len(sol.ts) == sol.stats.accepted + 1
        weights = torch.cos(torch.arange(len(sol.ts), dtype=WIDE))
        found.append(gradients((weights * sol.ts * sol.ys.sum(1)).sum(), [ts, y]))
    for a, b in zip(*found, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=1e-9 if way.exact else 1e-4, atol=1e-9 if way.exact else 1e-4)


# Changes that only some of the steps read


@pytest.mark.parametrize("t", [1.05, 1.9, 2.0, 2.5])
@pytest.mark.parametrize(
    "adjoint", [*(sn.Replay(every=k) for k in (1, 3, 7)), *map(sn.Checkpointed, (1, 3, 8))], ids=str
)
def test_a_change_in_the_middle_is_noticed_if_the_loss_ends_before_the_solve(
    adjoint: sn.adjoints.Adjoint, t: float
) -> None:
    """The loss reads an output in the middle of a segment, whose other states were not kept."""
    notices_a_change_between_jumps(Way(adjoint), t)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "direct"], indirect=True)
def test_a_change_between_two_jumps_is_noticed(way: Way) -> None:
    notices_a_change_between_jumps(way, 2.5)


def notices_a_change_between_jumps(way: Way, t: float) -> None:
    k, factors = leaf(0.5), [1.0] * 10
    jumps = [float(i) for i in range(1, 10)]
    ys = way.solve(lambda t, y: -k * factors[int(t)] * y, number([1.0]), [0.0, t, 9.5], jumps=jumps).ys
    factors[1] = 3.0
    with pytest.raises(RuntimeError, match=CHANGED):
        gradients(ys[1].sum(), [k])


# Memory that is shared


def test_an_output_that_is_written_into(way: Way) -> None:
    """The last state is the only output. Adjoints that keep the outputs are refused by autograd."""
    k, y = leaf(0.5), leaf([1.0, 2.0])
    ys = way.solve(lambda t, y: -k * y, y, [0.0, 1.0], save="last").ys
    with torch.no_grad():
        ys.mul_(3.0)
    if not way.exact:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(ys.sum(), [k, y])
        return
    for found, expected in zip(gradients(ys.sum(), [k, y]), [-3 * e(-0.5), [e(-0.5)] * 2], strict=True):
        torch.testing.assert_close(found, number(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("wrapped", [True, False], ids=["a tensor per answer", "one tensor"])
def test_answers_in_one_numpy_array(way: Way, wrapped: bool) -> None:
    """A field that writes all its answers into the same array, which changes no version counter."""
    tensor = torch.zeros(2, dtype=WIDE)
    array = tensor.numpy()

    def field(t: Tensor, y: Tensor) -> Tensor:
        np.multiply(-math.cos(float(t)), y.detach().numpy(), out=array)
        return torch.from_numpy(array) if wrapped else tensor

    ys = way.solve(field, number([1.0, 2.0]), [0.0, 0.5, 1.0]).ys
    exact = torch.exp(-torch.sin(number([0.0, 0.5, 1.0]))).outer(number([1.0, 2.0]))
    torch.testing.assert_close(ys, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("way", [name for name in NAMES if name != "direct"], indirect=True)
def test_an_array_that_is_written_into_before_backward(way: Way) -> None:
    """Compiled solves have a copy of it. Eagerly, autograd itself does not notice it."""
    k, array = leaf(0.5), np.array([1.0, 2.0])
    ys = way.solve(lambda t, y: -k * torch.from_numpy(array) * y, number([1.0, 1.0]), [0.0, 1.0]).ys
    array[:] = 5.0
    if not way.compiled or isinstance(way.adjoint, sn.Reversible):
        with pytest.raises(RuntimeError, match=CHANGED):
            gradients(ys[-1].sum(), [k])
        return
    torch.testing.assert_close(gradients(ys[-1].sum(), [k]), [number(-e(-0.5) - 2 * e(-1))], rtol=1e-6, atol=1e-8)


# Random numbers from elsewhere than torch's default generator


def draws(kind: str) -> Callable[[], float]:
    if kind == "torch.Generator":
        generator = torch.Generator().manual_seed(3)
        return lambda: torch.rand((), generator=generator, dtype=WIDE).item()
    if kind == "random":
        random.seed(3)
        return random.random
    np.random.seed(3)
    return lambda: float(np.random.rand())


class Noisy:
    """y′ = −k·x·y, where x is drawn anew in every evaluation."""

    def __init__(self, kind: str):
        self.k = leaf(0.5)
        self._draw = draws(kind)
        self.seen: list[float] = []

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.seen.append(0.5 + self._draw())
        return -self.k * self.seen[-1] * y


each_kind = pytest.mark.parametrize("kind", ["torch.Generator", "random", "numpy"])
EULER: dict[str, Any] = {"solver": "euler", "controller": sn.FixedStep(0.25)}


@pytest.mark.parametrize("way", [name for name in NAMES if name.split()[0] not in ("direct", "budget")], indirect=True)
@each_kind
def test_random_numbers_of_its_own_are_refused(way: Way, kind: str) -> None:
    field = Noisy(kind)
    options = EULER | ({"solver": sn.ReversibleRK("euler")} if isinstance(way.adjoint, sn.Reversible) else {})
    ys = way.solve(field, number([1.0]), [0.0, 1.0], **options).ys
    with pytest.raises(
        RuntimeError, match=r"(?s)a different result.*draw random numbers from torch's default generator"
    ):
        gradients(ys[-1].sum(), [field.k])


@pytest.mark.parametrize("way", ["direct", "direct compiled", "budget"], indirect=True)
@each_kind
def test_random_numbers_of_its_own_are_differentiated_by_direct(way: Way, kind: str) -> None:
    field, k = Noisy(kind), leaf(0.5)
    ys = way.solve(field, number([1.0]), [0.0, 1.0], **EULER).ys
    assert len(set(field.seen)) == len(field.seen)
    exact = torch.stack([1 - 0.25 * k * x for x in field.seen[-4:]]).prod()
    torch.testing.assert_close(gradients(ys[-1].sum(), [field.k]), gradients(exact, [k]))


# Derivatives of higher order


@pytest.mark.parametrize("order", [3, 4])
def test_higher_derivatives_equal_those_of_direct(way: Way, order: int) -> None:
    def derivatives(way: Way) -> list[Tensor | None]:
        w, y, k = leaf([0.2, -0.4]), leaf([1.0, 0.5]), leaf(0.7)
        ys = way.solve(
            lambda t, y, k: w * torch.sin(k * y) * torch.cos(t), y, [0.0, 0.5, 1.0], args=(k,), rtol=1e-4, atol=1e-6
        ).ys
        value = (ys[1:] ** 2).sum()
        for _ in range(order - 1):
            grads = torch.autograd.grad(value, [w, y, k], create_graph=True)
            value = sum((g.square().sum() for g in grads), start=number(0.0)) + value
        return gradients(value, [w, y, k])

    if not way.exact:
        with pytest.raises(RuntimeError, match=FIRST_ONLY):
            derivatives(way)
        return
    for found, expected in zip(derivatives(way), derivatives(Way(sn.Direct(), way.solver)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


# Leaves that cut the gradient


class Cutting(nn.Module):
    """Makes a leaf of its state, of its parameter or of its argument, by one of the ways to copy."""

    def __init__(self, what: str, copy: Callable[[Tensor], Tensor]):
        super().__init__()
        self.k = nn.Parameter(number([0.5, 0.25]))
        self._what, self._copy = what, copy

    def forward(self, t: Tensor, y: Tensor, p: Tensor) -> Tensor:
        with torch.enable_grad():
            y, k, p = (self._copy(x) if name == self._what else x for name, x in (("y", y), ("k", self.k), ("p", p)))
            return -k * p * y.square()


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x.detach().requires_grad_(),
    "detach, clone": lambda x: x.detach().clone().requires_grad_(),
    "data": lambda x: x.data.clone().requires_grad_(),
    "attribute": lambda x: required(x.detach()),
    "tensor": lambda x: torch.tensor(x.tolist(), dtype=WIDE).requires_grad_(),
}


def required(x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


@all_but_direct
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("what", ["y", "k", "p"])
def test_a_leaf_that_cuts_the_gradient_is_refused(way: Way, what: str, copy: str) -> None:
    """By all but Direct, with which autograd itself ends there."""
    field, y, p = Cutting(what, COPIES[copy]), leaf([1.0, 2.0]), leaf([1.0, 1.5])
    with pytest.raises(RuntimeError, match=CUT):
        gradients(way.solve(field, y, [0.0, 1.0], args=(p,)).ys[-1].sum(), [y, p, field.k])


@all_but_direct
def test_a_leaf_made_of_the_time_is_refused_where_times_are_differentiated(way: Way) -> None:
    k, ts = leaf(0.5), leaf([0.0, 1.0])

    def field(t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            return k * t.detach().requires_grad_() * y

    with pytest.raises(RuntimeError, match=CUT):
        gradients(way.solve(field, number([1.0]), ts).ys[-1].sum(), [k])


# Counters


class Counting(nn.Module):
    """Counts its evaluations in a buffer: in place or with a new tensor; `reads` makes the answer depend on it."""

    n: Tensor

    def __init__(self, rebinds: bool = False, reads: bool = False):
        super().__init__()
        self.k = nn.Parameter(number(0.5))
        self.register_buffer("n", torch.zeros((), dtype=WIDE))
        self._rebinds, self._reads = rebinds, reads
        self.calls = 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self._rebinds:
            self.n = self.n + 1
        else:
            self.n += 1
        return -self.k * y * (1 + 1e-3 * self.n if self._reads else 1.0)


@pytest.mark.parametrize("rebinds", [False, True], ids=["in place", "rebound"])
def test_counters_count_every_evaluation(way: Way, rebinds: bool) -> None:
    """Forward and backward, in the first solve with a field and in later ones."""
    field, counted = Counting(rebinds), 0
    for _ in range(2):
        stats = (sol := way.solve(field, number([1.0]), [0.0, 0.5, 1.0])).stats
        counted += stats.nfe
        assert field.n.item() == field.calls == counted
        (grad,) = gradients(sol.ys[-1].sum(), [field.k])
        torch.testing.assert_close(grad, number(-e(-0.5)), rtol=1e-6, atol=1e-8)
        assert stats.backward is not None
        counted += stats.backward.nfe + stats.backward.checks
        assert field.n.item() == field.calls == counted


def test_a_counter_that_the_field_reads_is_warned_of(way: Way) -> None:
    field = Counting(reads=True)
    with pytest.warns(sn.StatefulFieldWarning, match=r"an evaluation changes Counting\.n"):
        way.solve(field, number([1.0]), [0.0, 1.0])
    assert field.n.item() == 1.0

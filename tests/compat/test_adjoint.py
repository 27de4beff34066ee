"""The adjoint of the drop-in for torchdiffeq: norms, callbacks, counters, unused parameters; and the switch."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import torchdiffeq as original
from torch import Tensor, nn

import seminode as sn
import seminode.compat.torchdiffeq as ours
from seminode.compat.torchdiffeq._switch import from_environment

DOUBLE = torch.float64
T = torch.tensor([0.0, 0.4, 1.0], dtype=DOUBLE)


class Field(nn.Module):
    """A field that counts its evaluations, with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(2, 6).double(), nn.Linear(6, 2).double()
        self.net = nn.Sequential(self.first, nn.Tanh(), self.last)
        self.unused = nn.Parameter(torch.ones(3, dtype=DOUBLE))
        self.nfe = 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(y) * torch.cos(3 * t)


class Pair(Field):
    def forward(self, t: Tensor, y: Any) -> Any:
        return super().forward(t, y[0]), -y[1]


def start() -> Tensor:
    return torch.tensor([[1.0, -0.5]], dtype=DOUBLE, requires_grad=True)


def test_counters_count_and_unused_parameters_have_zeros() -> None:
    counts = []
    for library in (original, ours):
        field = Field()
        ys = library.odeint_adjoint(field, start(), T)
        forward = field.nfe
        ys.sum().backward()
        counts.append((forward, field.nfe))
        torch.testing.assert_close(field.unused.grad, torch.zeros(3, dtype=DOUBLE))
    assert counts[0] == counts[1]
    assert counts[1][1] > counts[1][0]


@pytest.mark.parametrize("norm", [None, "seminorm"])
def test_the_norm_is_reachable_and_replaceable_on_the_result(norm: str | None) -> None:
    seen = []
    for library in (original, ours):
        field, shapes = Field(), []
        options = {} if norm is None else {"norm": norm}
        ys = library.odeint_adjoint(field, start(), T, adjoint_options=options)
        own = ys.grad_fn.adjoint_options["norm"]
        ys.grad_fn.adjoint_options["norm"] = lambda parts, own=own, shapes=shapes: (
            shapes.append([x.shape for x in parts]),
            own(parts),
        )[1]
        ys.sum().backward()
        seen.append(shapes)
    assert seen[0] == seen[1]
    assert seen[1][0][:3] == [(), (1, 2), (1, 2)]
    assert len(seen[1][0]) == 3 + 5


def test_norms_of_tuples_see_flat_states_inside_and_leaves_outside() -> None:
    for library in (original, ours):
        outside: list[Any] = []

        def norm(parts: Any, outside: list[Any] = outside) -> Tensor:
            outside.append([x.shape for x in parts])
            return max(x.abs().max() for x in parts)

        y0 = start(), torch.ones(2, 2, dtype=DOUBLE)
        ys = library.odeint_adjoint(Pair(), y0, T, adjoint_options={"norm": norm})
        inside = ys[0].grad_fn.next_functions[0][0].next_functions[0][0].adjoint_options["norm"]
        flat = torch.zeros(6, dtype=DOUBLE)
        assert float(inside((flat[0], flat, flat))) == 0.0
        ys[0].sum().backward()
        assert outside[0] == [(), (1, 2), (2, 2), (1, 2), (2, 2)]
        assert outside[-1][:5] == outside[0]
        assert len(outside[-1]) == 5 + 5


def test_a_norm_that_is_no_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="expected \"seminorm\" or a function, found 'max'"):
        ours.odeint_adjoint(Field(), start(), T, adjoint_options={"norm": "max"})


class Watched(Field):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def _note(self, name: str, t: Tensor, y: Any, dt: Tensor) -> None:
        shapes = [x.shape for x in y] if isinstance(y, tuple) else [y.shape]
        # On the backward pass of a solve with decreasing times, torchdiffeq hands out the negative of the time.
        time = abs(float(t)) if isinstance(y, tuple) else float(t)
        self.log.append((name, round(time, 6), shapes, round(float(dt), 6)))

    def callback_step(self, t: Tensor, y: Any, dt: Tensor) -> None:
        self._note("step", t, y, dt)

    def callback_accept_step(self, t: Tensor, y: Any, dt: Tensor) -> None:
        self._note("accept", t, y, dt)

    def callback_reject_step(self, t: Tensor, y: Any, dt: Tensor) -> None:
        self._note("reject", t, y, dt)

    callback_step_adjoint = callback_step
    callback_accept_step_adjoint = callback_accept_step
    callback_reject_step_adjoint = callback_reject_step


@pytest.mark.parametrize(
    "settings", [{"rtol": 1e-3, "atol": 1e-4}, {"method": "rk4"}, {"options": {"first_step": 2.0}}]
)
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.filterwarnings("ignore:Solver 'rk4' does not support callbacks")
def test_callbacks_see_the_same_steps(settings: dict[str, Any], flipped: bool) -> None:
    logs = []
    for library in (original, ours):
        field = Watched()
        ys = library.odeint_adjoint(field, start(), T.flip(0) if flipped else T, **settings)
        ys.sum().backward()
        logs.append(field.log)
    assert logs[0] == logs[1]
    assert {"step"} <= {name for name, *_ in logs[1]}


def test_only_chosen_parameters_get_gradients() -> None:
    for library in (original, ours):
        field = Field()
        chosen = list(field.net.parameters())[:2]
        ys = library.odeint_adjoint(field, start(), T, adjoint_params=(x for x in chosen))
        ys.sum().backward()
        assert [x.grad is not None for x in field.net.parameters()] == [True, True, False, False]


def test_options_of_the_backward_solve() -> None:
    settings: dict[str, Any] = {
        "adjoint_method": "bosh3",
        "adjoint_rtol": 1e-3,
        "adjoint_atol": 1e-5,
        "adjoint_options": {"max_step": 0.2},
    }
    counts, grads = [], []
    for library in (original, ours):
        field = Field()
        ys = library.odeint_adjoint(field, start(), T, **settings)
        field.nfe = 0
        grads.append(torch.autograd.grad(ys.square().sum(), field.first.weight)[0])
        counts.append(field.nfe)
    assert counts[0] == counts[1]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)


def test_half_a_second_derivative_is_refused() -> None:
    y0 = start()
    ys = ours.odeint_adjoint(Field(), y0, T)
    (grad,) = torch.autograd.grad(ys.sum(), y0, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


def gradients(name: str, **settings: Any) -> list[Tensor]:
    field, y0 = Field(), start()
    ys = getattr(ours, name)(field, y0, T, **settings)
    return list(torch.autograd.grad(ys.square().sum(), [y0, *field.net.parameters()]))


@pytest.mark.parametrize("adjoint", ["replay", "direct", "interpolating", "quadrature", "backsolve"])
@pytest.mark.parametrize("name", ["odeint", "odeint_adjoint"])
def test_the_switch_changes_gradients_by_no_more_than_the_tolerance(name: str, adjoint: Any) -> None:
    expected = gradients("odeint", rtol=1e-10, atol=1e-10)
    with ours.use(adjoint=adjoint):
        found = gradients(name, rtol=1e-6, atol=1e-8)
        for method in ("rk4", "explicit_adams"):
            gradients(name, method=method, options={"step_size": 0.1})
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_the_switch_keeps_zeros_for_unused_parameters() -> None:
    field = Field()
    with ours.use(adjoint="replay"):
        ours.odeint_adjoint(field, start(), T).sum().backward()
        pair = Pair()
        ours.odeint_adjoint(pair, (start(), start()), T)[1].sum().backward()
    torch.testing.assert_close(field.unused.grad, torch.zeros(3, dtype=DOUBLE))
    assert field.first.weight.grad is not None
    assert bool(field.first.weight.grad.abs().sum() > 0)
    torch.testing.assert_close(pair.first.weight.grad, torch.zeros_like(pair.first.weight))


def test_the_switch_is_put_back_and_checked() -> None:
    before = ours.current()
    with ours.use(adjoint=sn.Replay(every=2), compile=True) as settings:
        assert settings == ours.current() == ours.Settings(sn.Replay(every=2), True)
        ours.use(compile=False)
        assert ours.current().compile is False
    assert ours.current() == before
    with pytest.raises(ValueError, match=r"adjoint: expected None, one of .*found 'rewind'"):
        ours.use(adjoint="rewind")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="compile: expected True or False, found 1"):
        ours.use(compile=1)  # pyright: ignore[reportArgumentType]


def test_the_environment_variable() -> None:
    assert from_environment({}) == ours.Settings()
    found = from_environment({"SEMINODE_TORCHDIFFEQ": "adjoint=replay, compile=1"})
    assert found == ours.Settings(sn.Replay(), True)
    for wrong in ("replay", "compile=yes"):
        with pytest.raises(ValueError, match="SEMINODE_TORCHDIFFEQ: expected adjoint=NAME and compile=0 or 1"):
            from_environment({"SEMINODE_TORCHDIFFEQ": wrong})


@pytest.mark.slow
def test_compiled_steps_give_the_same_results() -> None:
    expected = gradients("odeint_adjoint", rtol=1e-6, atol=1e-8)
    with ours.use(adjoint="replay", compile=True), warnings.catch_warnings():
        warnings.simplefilter("error", sn.CompileWarning)
        found = gradients("odeint_adjoint", rtol=1e-6, atol=1e-8)
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


IMPLICIT = [
    "implicit_euler",
    "implicit_midpoint",
    "trapezoid",
    "radauIIA3",
    "gl4",
    "radauIIA5",
    "gl6",
    "sdirk2",
    "trbdf2",
]
ORDERS = {"implicit_euler": 1, "radauIIA3": 3, "gl4": 4, "radauIIA5": 5, "gl6": 6}


def test_all_methods_are_there() -> None:
    assert len(ours.SOLVERS) == 24
    assert set(importlib.import_module("torchdiffeq._impl.odeint").SOLVERS) <= set(ours.SOLVERS)


@pytest.mark.parametrize("method", IMPLICIT)
def test_implicit_methods_have_their_order_and_gradients(method: str) -> None:
    """In the repository of torchdiffeq, `gl4` is of order 1."""
    rate = torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)
    t = torch.tensor([0.0, 1.0], dtype=DOUBLE)
    exact = torch.exp(-torch.sin(t[-1]))
    errors = []
    for step in (0.2, 0.1):
        field = lambda t, y: -rate * torch.cos(t) * y
        y0 = torch.ones(1, dtype=DOUBLE)
        options: dict[str, Any] = {"step_size": step, "max_iters": 100}
        ys = ours.odeint(field, y0, t, method=method, options=options)
        adjoint = ours.odeint_adjoint(field, y0, t, method=method, options=options, adjoint_params=(rate,))
        errors.append(float((ys[-1] - exact).detach().abs()))
        grads = [torch.autograd.grad(each[-1].sum(), rate)[0] for each in (ys, adjoint)]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(grads[0], -torch.sin(t[-1]) * exact, rtol=0.1, atol=0.0)
    assert errors[0] / errors[1] == pytest.approx(2.0 ** ORDERS.get(method, 2), rel=0.35)


class Computed:
    """A field whose weight was computed from a parameter before the solve, with everything that watches it."""

    def __init__(self, watched: str):
        self.raw, self.bias, self.unused = (
            torch.tensor(x, dtype=DOUBLE, requires_grad=True) for x in ([[0.3, -0.8], [0.5, 0.1]], [0.1, 0.2], [1.0])
        )
        self.weight = 2 * self.raw.tanh()
        self.log: list[Any] = []
        if watched == "callbacks":
            self.callback_accept_step_adjoint = self.note

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y @ self.weight + self.bias)

    def note(self, t: Any, parts: Any, dt: Any) -> None:
        self.log.append([x.detach().clone() for x in parts])

    def norm(self, parts: Any) -> Tensor:
        self.note(None, parts, None)
        return max(x.abs().max() for x in parts)

    def adjoint_params(self, named: str) -> tuple[Tensor, ...]:
        return {
            "parameter": (self.raw, self.bias, self.unused),
            "computed": (self.weight, self.bias, self.unused),
            "twice": (self.weight, self.weight, self.bias),
        }[named]


@pytest.mark.parametrize("watched", ["callbacks", "norm"])
@pytest.mark.parametrize("named", ["parameter", "computed", "twice"])
def test_norms_and_callbacks_see_the_parameters_that_were_named(named: str, watched: str) -> None:
    """Also where the field uses tensors that were computed from them, or where one is named twice."""
    logs, grads = [], []
    for library in (original, ours):
        field, y0 = Computed(watched), start()
        ys = library.odeint_adjoint(
            field, y0, T, rtol=1e-8, atol=1e-9, adjoint_params=field.adjoint_params(named),
            adjoint_options={"norm": field.norm if watched == "norm" else "seminorm"},
        )  # fmt: skip
        grads.append(torch.autograd.grad(ys.square().sum(), [y0, field.raw, field.bias]))
        logs.append(field.log)
    assert len(logs[0]) == pytest.approx(len(logs[1]), abs=1)
    for theirs, found in zip(*logs, strict=False):
        assert [x.shape for x in found] == [x.shape for x in theirs]
        if (named, watched) != ("parameter", "norm"):  # the tolerance is that of the computed tensor
            magnitudes = [[x.abs() for x in parts] for parts in (found, theirs)]  # the original solves in reversed time
            torch.testing.assert_close(*magnitudes, rtol=1e-6, atol=1e-8)
    if named == "twice":  # the original counts the gradient of such a tensor twice
        grads[0] = grads[0][0], grads[0][1] / 2, grads[0][2]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-8)

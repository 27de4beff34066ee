"""`Direct(memory=...)`: some steps keep their activations, the others are taken again, and the gradient is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor
from torch.func import grad as func_grad

import seminode as sn
from seminode._stepping import budget

D = torch.float64
BUDGETS = [0, 100, 5000, 20_000, 2**50]
EAGER_OR_COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)).double()
        self.still = torch.eye(2, dtype=D)  # used, but not differentiated

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.layers(y) @ self.still * torch.cos(t)


def start() -> Tensor:
    return torch.linspace(-1, 1, 8, dtype=D).reshape(4, 2).requires_grad_()


def gradients(adjoint: Any, compiled: bool, **options: Any) -> tuple[list[Tensor], sn.Stats, sn.Stats]:
    net, y0 = Net(), start()
    sol = sn.solve(net, y0, adjoint=adjoint, compile=compiled, **options)
    grads = torch.autograd.grad(sol.ys.square().sum(), [y0, *net.parameters()])
    assert sol.stats.backward is not None
    return list(grads), sol.stats, sol.stats.backward


@EAGER_OR_COMPILED
def test_of_the_last_state_bit_by_bit(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled:
        replace_back_end(monkeypatch)
    options: dict[str, Any] = {"ts": [0.0, 5.0], "save": "last"}
    expected, forward, replayed = gradients(sn.Replay(), compiled, **options)
    kept = []
    for memory in BUDGETS:
        found, stats, backward = gradients(sn.Direct(memory=memory), compiled, **options)
        assert all(map(torch.equal, found, expected))
        assert stats.accepted == forward.accepted == backward.accepted
        # Eagerly, the first slope is evaluated a second time, with a graph.
        assert stats.nfe - forward.nfe == (not compiled and memory > 0)
        # A step that was kept is not evaluated again; each of the others costs six evaluations.
        assert backward.nfe == 6 * (backward.accepted - backward.kept)
        assert backward.vjp_y == replayed.vjp_y
        kept.append(backward.kept)
    assert kept[:2] == [0, 0]
    assert 1 <= kept[2] <= 2
    assert 4 <= kept[3] < kept[4] == forward.accepted


@EAGER_OR_COMPILED
@pytest.mark.parametrize(
    ("options", "all_kept"),
    [
        ({"ts": [0.0, 0.1, 0.2, 0.25, 1.0, 1.7, 5.0]}, True),
        ({"ts": [5.0, 4.5, 2.0, 0.0]}, True),
        ({"ts": [0.0, 0.4, 2.2, 5.0], "jumps": [0.3, 1.0, 2.5]}, True),
        ({"ts": [0.0, 0.4, 2.2, 5.0], "solver": "bosh3", "rtol": 1e-3, "atol": 1e-3}, True),
        ({"ts": [0.0, 0.4, 2.2, 5.0], "solver": "adaptive_heun", "rtol": 1e-2, "atol": 1e-2}, False),
        ({"ts": [0.0, 0.1, 0.11, 2.2, 5.0], "solver": "rk4", "controller": sn.FixedStep(0.3)}, False),
        ({"ts": [0.0, 5.0], "save": "steps"}, True),
        ({"ts": [0.0, 0.5, 50.0], "throw": False, "max_steps": 7}, True),
    ],
    ids=["times", "backward", "jumps", "bosh3", "heun", "rk4", "steps", "failed"],
)
def test_of_outputs(monkeypatch: pytest.MonkeyPatch, compiled: bool, options: Any, all_kept: bool) -> None:
    """`all_kept`: compiled steps are kept only if they compute the slopes that outputs inside of them read."""
    if compiled:
        replace_back_end(monkeypatch)
    expected, *_ = gradients(sn.Direct(), False, **options)
    for memory in BUDGETS:
        found, _, backward = gradients(sn.Direct(memory=memory), compiled, **options)
        # Eager and compiled steps differ in the last digits of their sizes.
        rtol = 1e-8 if compiled else 1e-11
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0.1 * rtol)
        last = memory == BUDGETS[-1]
        assert backward.kept == (backward.accepted if last and (all_kept or not compiled) else backward.kept)
        assert backward.kept == 0 or memory > 100


@EAGER_OR_COMPILED
def test_an_output_inside_the_last_step_of_a_solve_that_failed(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """The slope at the end of that step is not the first one of another step."""
    if compiled:
        replace_back_end(monkeypatch)
    options: dict[str, Any] = {"max_steps": 5, "throw": False, "rtol": 1e-5, "atol": 1e-7}
    rate, results = torch.tensor(0.3, dtype=D, requires_grad=True), []
    probe = sn.solve(lambda t, y: -rate * y.sin(), torch.ones(2, dtype=D), [0.0, 1e5], record=True, **options)
    assert probe.record is not None
    last = probe.record.accepted[-1]
    ts = [0.0, 0.3 * last.t0 + 0.7 * last.t1, 1e5]
    for adjoint, compile_it in ((sn.Direct(), False), (sn.Direct(), compiled), (sn.Direct(memory="1GB"), compiled)):
        sol = sn.solve(
            lambda t, y: -rate * y.sin(), torch.ones(2, dtype=D), ts, adjoint=adjoint, compile=compile_it, **options
        )
        assert len(sol.ys) == 2
        results.append(torch.autograd.grad(sol.ys[-1].sum(), rate)[0])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-12, atol=0.0)


@EAGER_OR_COMPILED
@pytest.mark.parametrize("memory", [3000, 2**50])
def test_nested_states_and_args(monkeypatch: pytest.MonkeyPatch, memory: int, compiled: bool) -> None:
    if compiled:
        replace_back_end(monkeypatch)

    def solved(adjoint: Any, compile_it: bool) -> list[Tensor]:
        a, b, rate = (torch.full((n,), 0.5, dtype=D, requires_grad=True) for n in (3, 2, 1))

        def field(t: Tensor, y: Any, rate: Tensor) -> Any:
            return {"a": -rate * y["a"].sin(), "b": (y["b"][0] * y["a"].sum() * rate,)}

        sol = sn.solve(field, {"a": a, "b": (b,)}, [0.0, 0.7, 3.0], args=(rate,), adjoint=adjoint, compile=compile_it)
        total = sol.ys["a"].square().sum() + sol.ys["b"][0].sum()
        return list(torch.autograd.grad(total, [a, b, rate]))

    found, expected = solved(sn.Direct(memory=memory), compiled), solved(sn.Direct(), False)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@EAGER_OR_COMPILED
def test_gradients_for_times_take_all_steps_again(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled:
        replace_back_end(monkeypatch)
    results = []
    for adjoint, compile_it in ((sn.Direct(), False), (sn.Direct(memory="1GB"), compiled)):
        ts = torch.tensor([0.0, 0.7, 2.0], dtype=D, requires_grad=True)
        sol = sn.solve(Net(), start(), ts, adjoint=adjoint, compile=compile_it)
        results.append(torch.autograd.grad(sol.ys.square().sum(), ts)[0])
    assert sol.stats.backward is not None
    assert sol.stats.backward.kept == 0
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)


@EAGER_OR_COMPILED
def test_dense_output(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled:
        replace_back_end(monkeypatch)
    results = []
    for adjoint, compile_it in ((sn.Direct(), False), (sn.Direct(memory="1GB"), compiled)):
        y0 = start()
        sol = sn.solve(Net(), y0, [0.0, 2.0], adjoint=adjoint, compile=compile_it, dense=True)
        assert sol.dense is not None
        results.append(torch.autograd.grad(sol.dense(0.77).square().sum(), y0)[0])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)


@EAGER_OR_COMPILED
@pytest.mark.parametrize("memory", [4000, 2**50])
def test_events_share_the_budget(monkeypatch: pytest.MonkeyPatch, memory: int, compiled: bool) -> None:
    if compiled:
        replace_back_end(monkeypatch)

    def solved(adjoint: Any, compile_it: bool) -> tuple[Tensor, sn.Stats]:
        g = torch.tensor(9.81, dtype=D, requires_grad=True)
        bounce = sn.Event(lambda t, y: y[0], direction=-1, reset=lambda t, y: torch.stack([y[0].abs(), -0.8 * y[1]]))
        sol = sn.solve(
            lambda t, y: torch.stack([y[1], -g * torch.ones_like(y[0])]),
            torch.tensor([1.0, 0.0], dtype=D),
            [0.0, 0.2, 0.6, 1.5],
            event=bounce,
            adjoint=adjoint,
            compile=compile_it,
        )
        (grad,) = torch.autograd.grad(sol.ys.square().sum(), g)
        assert sol.stats.backward is not None
        return grad, sol.stats.backward

    expected, _ = solved(sn.Direct(), False)
    found, stats = solved(sn.Direct(memory=memory), compiled)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)
    assert 0 < stats.kept <= stats.accepted


@EAGER_OR_COMPILED
def test_second_derivatives_and_a_second_backward_pass(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled:
        replace_back_end(monkeypatch)
    seconds, firsts = [], []
    for adjoint, compile_it in ((sn.Direct(), False), (sn.Direct(memory=6000), compiled)):
        y0 = start()
        loss = sn.solve(Net(), y0, [0.0, 2.0], save="last", adjoint=adjoint, compile=compile_it).ys.square().sum()
        firsts += [torch.autograd.grad(loss, y0, retain_graph=True)[0] for _ in range(2)]
        (first,) = torch.autograd.grad(loss, y0, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), y0)[0])
    for first in firsts[1:]:
        torch.testing.assert_close(first, firsts[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(*seconds, rtol=1e-9, atol=1e-10)


def test_parameters_by_name() -> None:
    results = []
    for adjoint in (sn.Direct(), sn.Direct(memory=6000)):
        net = Net()
        first, *others = net.parameters()
        sol = sn.solve(net, start(), [0.0, 2.0], adjoint=adjoint, params=[first])
        sol.ys.sum().backward()
        assert all(x.grad is None for x in others)
        results.append(first.grad)
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


def test_a_weight_that_is_computed_before_the_solve_and_one_within_a_step() -> None:
    """The graphs of steps must not lead to each other, nor be freed with each other."""
    results = []
    for adjoint in (sn.Direct(), sn.Direct(memory="1GB")):
        raw = torch.tensor([0.3, 0.7], dtype=D, requires_grad=True)
        weight = raw.exp()
        y0 = torch.ones(2, dtype=D)
        sol = sn.solve(lambda t, y, w=weight, r=raw: -(w * r * y).sin(), y0, [0.0, 3.0], adjoint=adjoint)
        results.append(torch.autograd.grad(sol.ys.sum(), raw)[0])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


def test_a_dropout_mask_is_that_of_the_solve() -> None:
    def solved(adjoint: Any) -> Tensor:
        torch.manual_seed(1)
        net, y0 = Net(), start()
        sol = sn.solve(lambda t, y: torch.dropout(net(t, y), 0.5, True), y0, [0.0, 2.0], adjoint=adjoint)
        return torch.autograd.grad(sol.ys.sum(), y0)[0]

    torch.testing.assert_close(solved(sn.Direct(memory=6000)), solved(sn.Direct()), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("memory", [6000, 2**50])
def test_a_changed_parameter_is_noticed(memory: int) -> None:
    net = Net()
    sol = sn.solve(net, start(), [0.0, 2.0], adjoint=sn.Direct(memory=memory))
    with torch.no_grad():
        next(net.parameters()).mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sol.ys.sum().backward()


def test_a_changed_constant_is_noticed_where_a_step_is_taken_again() -> None:
    factor = [1.0]
    y0 = start()
    sol = sn.solve(lambda t, y: -factor[0] * y.sin(), y0, [0.0, 2.0], adjoint=sn.Direct(memory=1000))
    factor[0] = 2.0
    with pytest.raises(RuntimeError, match="changed"):
        sol.ys.sum().backward()


def test_an_activation_that_is_overwritten_is_noticed() -> None:
    """As without a budget. With hooks autograd itself would not notice."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        h = y.exp()
        k = -h.sin()
        h.zero_()  # the derivative of the sine reads it
        return k

    for adjoint in (sn.Direct(), sn.Direct(memory="1GB")):
        sol = sn.solve(field, start(), [0.0, 1.0], adjoint=adjoint)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sol.ys.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batched": True}, r"batched=True; pass adjoint=sn\.Replay\(\)"),
        ({"solver": "implicit_midpoint", "controller": sn.FixedStep(0.1)}, r"found solver 'implicit_midpoint'; pass"),
        ({"solver": "reversible_heun", "controller": sn.FixedStep(0.1)}, r"found solver 'reversible_heun'; pass"),
        (
            {"solver": "explicit_adams", "controller": sn.FixedStep(0.1)},
            r"found solver .*; pass adjoint=sn\.Direct\(\) without",
        ),
    ],
    ids=["batched", "implicit", "reversible", "adams"],
)
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sn.solve(lambda t, y: -y, start(), [0.0, 1.0], adjoint=sn.Direct(memory="1GB"), **options)


def test_transforms_and_forward_mode_are_refused() -> None:
    def loss(y0: Tensor) -> Tensor:
        options = {"controller": sn.FixedStep(0.1), "adjoint": sn.Direct(memory="1GB")}
        return sn.solve(lambda t, y: -y, y0, [0.0, 1.0], **options).ys.sum()

    remedy = r"adjoint: Direct\(memory=\.\.\.\) .*pass adjoint=sn\.Direct\(\)"
    with pytest.raises(ValueError, match=remedy):
        func_grad(loss)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match=remedy):
        loss(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))


def test_without_a_gradient_nothing_is_kept_or_refused() -> None:
    with torch.no_grad():
        sol = sn.solve(lambda t, y: -y, start(), [0.0, 1.0], adjoint=sn.Direct(memory=0), batched=True)
    torch.testing.assert_close(sol.ys[-1], start().detach() * torch.exp(-torch.ones((), dtype=D)), rtol=1e-3, atol=1e-4)


def test_the_default_of_compiled_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a part of the free memory."""
    replace_back_end(monkeypatch)
    options: dict[str, Any] = {"ts": [0.0, 5.0], "save": "last"}
    expected, _, everything = gradients(sn.Direct(), True, **options)
    monkeypatch.setattr(budget, "SMALL", 0)
    monkeypatch.setattr(budget, "free_memory", lambda device: 40_000)
    found, _, backward = gradients(sn.Direct(), True, **options)
    assert everything.kept == everything.accepted
    assert 4 <= backward.kept <= 8
    _, _, explicit = gradients(sn.Direct(memory=20_000), True, **options)
    assert explicit.kept == backward.kept
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_field_that_cannot_be_compiled_is_recorded_eagerly() -> None:
    def solved(adjoint: Any, **options: Any) -> tuple[Tensor, Any]:
        y0 = start()
        field: Callable[..., Tensor] = lambda t, y: -y.sin() if y.sum() < 1e9 else y
        sol = sn.solve(field, y0, [0.0, 5.0], adjoint=adjoint, **options)
        return torch.autograd.grad(sol.ys.sum(), y0)[0], sol.stats.backward

    with pytest.warns(sn.CompileWarning):
        found, stats = solved(sn.Direct(memory=5000), compile=True)
    assert 0 < stats.kept < stats.accepted
    torch.testing.assert_close(found, solved(sn.Direct())[0], rtol=1e-11, atol=1e-12)

"""Gradients through events of batched solves: against the frozen map, and against every sample solved alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor

import seminode as sn

F64 = torch.float64
ADJOINTS = {
    "direct": sn.Direct(),
    "replay": sn.Replay(),
    "sparse": sn.Replay(every=3),
    "checkpointed": sn.Checkpointed(2),
}
FIXED: dict[str, Any] = {"controller": sn.FixedStep(0.21)}
PER_SAMPLE = ("y0", "arg")

Inputs = dict[str, Tensor]
Solve = Callable[..., sn.Solution]


def oscillators(inputs: Inputs, events: str = "both", **options: Any) -> sn.Solution:
    """Forced oscillators that are kicked where they pass a level, and whose turning points are recorded.

    Written for a batch and for one sample alike.
    """
    weight, level, kick = inputs["weight"], inputs["level"], inputs["kick"]

    def field(t: Tensor, y: Tensor, arg: Tensor) -> Tensor:
        x, v = y.unbind(-1)
        return torch.stack([v, -weight * torch.sin(x) - 0.1 * v + arg * torch.cos(1.3 * t)], -1)

    def passes(t: Tensor, y: Tensor, arg: Tensor) -> Tensor:
        return y[..., 0] - level * (1.0 + 0.1 * torch.sin(t) * arg)

    def kicked(t: Tensor, y: Tensor, arg: Tensor) -> Tensor:
        return torch.stack([y[..., 0] - 0.01 * kick * t**2, kick * y[..., 1] + 0.1 * arg], -1)

    kicks = sn.Event(passes, direction=-1, reset=kicked, max_count=2 if events == "ending" else None)
    turns = sn.Event(lambda t, y, arg: y[..., 1], terminal=False)
    y0 = inputs["y0"]
    options["batched"] = y0.ndim == 2
    return sn.solve(field, y0, inputs["ts"], args=(inputs["arg"],), event=[kicks, turns], **options)


def oscillator_inputs(own_times: bool = True) -> Inputs:
    ts = torch.tensor([0.2, 1.1, 2.05, 3.3, 5.2], dtype=F64)
    scale = torch.tensor([1.0, 0.9, 1.07, 0.35], dtype=F64)  # the last one ends before the others have kicked twice
    return {
        "y0": torch.tensor([[1.0, 0.3], [1.4, -0.2], [0.4, 1.1], [1.2, 0.1]], dtype=F64),
        "ts": scale[:, None] * ts if own_times else ts,
        "arg": torch.tensor([0.4, 0.2, 0.7, 0.5], dtype=F64),
        "weight": torch.tensor(8.0, dtype=F64),
        "level": torch.tensor(0.3, dtype=F64),
        "kick": torch.tensor(1.2, dtype=F64),
    }


def weighted(x: Tensor, k: int, is_state: bool) -> Tensor:
    """A sum that reads every entry in its own way, NaN aside, and every sample of a batch alike."""
    first = torch.arange(len(x), dtype=F64).reshape(-1, *(1,) * (x.ndim - 1))
    last = torch.arange(x.shape[-1], dtype=F64) if is_state else torch.zeros(1, dtype=F64)
    terms = torch.cos(first + 0.7 * last + k) * x + 0.1 * x**2
    return terms[~x.isnan()].sum()


def loss(sol: sn.Solution) -> Tensor:
    pieces = [sol.ys, *(x for each in sol.events for x in (each.times, each.states))]
    return torch.stack([weighted(x, k, is_state=k % 2 == 0) for k, x in enumerate(pieces)]).sum()


def gradients(solve: Solve, inputs: Inputs, **options: Any) -> tuple[Inputs, sn.Solution]:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    sol = solve(leaves, **options)
    loss(sol).backward()
    return {k: torch.zeros_like(x) if x.grad is None else x.grad for k, x in leaves.items()}, sol


def directions(inputs: Inputs) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(x.shape, dtype=F64, generator=generator) for name, x in inputs.items()}


def differences(solve: Solve, inputs: Inputs, h: float = 1e-5, **options: Any) -> dict[str, float]:
    """Fourth-order central differences of the loss along one direction for each input."""
    found = {}
    for name, direction in directions(inputs).items():

        def at(x: float, name: str = name, direction: Tensor = direction) -> float:
            with torch.no_grad():
                return float(loss(solve(inputs | {name: inputs[name] + x * direction}, **options)))

        found[name] = (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h)
    return found


def assert_close(found: Inputs, expected: dict[str, float], bound: float) -> None:
    for name, direction in directions(found).items():
        derivative = float((found[name] * direction).sum())
        assert abs(derivative - expected[name]) <= bound * max(1.0, abs(expected[name])), name


def joint_difference(solve: Solve, inputs: Inputs, h: float = 1e-5, **options: Any) -> float:
    """The same along one direction of all inputs together."""
    moves = directions(inputs)

    @torch.no_grad()
    def at(x: float) -> float:
        return float(loss(solve({name: value + x * moves[name] for name, value in inputs.items()}, **options)))

    return (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h)


@pytest.fixture(scope="module")
def fixed_differences() -> dict[str, float]:
    return differences(oscillators, oscillator_inputs(), **FIXED)


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_gradients_are_those_of_the_frozen_map(adjoint: str, fixed_differences: dict[str, float]) -> None:
    found, sol = gradients(oscillators, oscillator_inputs(), adjoint=ADJOINTS[adjoint], **FIXED)
    assert len(set(sol.events[0].counts.tolist())) > 1  # not all samples are kicked as often
    assert_close(found, fixed_differences, 1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"save": "last"},
        {"jumps": [1.7, 3.9]},
        {"events": "ending"},
        {"events": "ending", "save": "last"},
        {"own_times": False},
        {"decreasing": True},
    ],
    ids=str,
)
def test_gradients_with_other_outputs_jumps_and_times(options: dict[str, Any]) -> None:
    inputs = oscillator_inputs(options.get("own_times", True))
    if options.get("decreasing"):
        inputs["ts"] = -inputs["ts"]
    options = {k: v for k, v in options.items() if k not in ("own_times", "decreasing")} | FIXED
    found, sol = gradients(oscillators, inputs, **options)
    assert int(sol.events[0].counts.max()) >= 1
    expected = joint_difference(oscillators, inputs, **options)
    derivative = sum(float((found[name] * d).sum()) for name, d in directions(inputs).items())
    assert abs(derivative - expected) <= 1e-7 * max(1.0, abs(expected))


@pytest.mark.parametrize(
    ("adjoint", "own_times"), [("direct", True), ("replay", True), ("replay", False), ("checkpointed", False)]
)
def test_gradients_are_those_of_the_samples_alone(adjoint: str, own_times: bool) -> None:
    inputs, options = oscillator_inputs(own_times), {"adjoint": ADJOINTS[adjoint], "rtol": 1e-6, "atol": 1e-6}
    found, sol = gradients(oscillators, inputs, **options)
    total = {name: torch.zeros_like(x) for name, x in inputs.items()}
    for i in range(4):
        alone = {name: x[i] if name in PER_SAMPLE else x for name, x in inputs.items()}
        alone["ts"] = inputs["ts"][i] if own_times else inputs["ts"]
        grads, single = gradients(oscillators, alone, **options)
        for event, each in zip(sol.events, single.events, strict=True):
            assert int(event.counts[i]) == each.counts
            torch.testing.assert_close(event.times[: each.counts, i], each.times, rtol=0.0, atol=1e-10)
            torch.testing.assert_close(event.states[: each.counts, i], each.states, rtol=0.0, atol=1e-9)
        for name, grad in grads.items():
            if name in PER_SAMPLE or (name == "ts" and own_times):
                total[name][i] = grad
            else:
                total[name] = total[name] + grad
    for name, grad in total.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-8, atol=1e-8, msg=name)


def test_parameters_of_modules_get_gradients() -> None:
    """The parameters of the field, of the event function and of the reset, each in a module of its own."""

    class Net(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, width, dtype=F64)

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return torch.tanh(self.layer(torch.cat([t[:, None], y], 1)))

    torch.manual_seed(3)
    field, event, reset = Net(2), Net(1), Net(2)
    y0 = torch.randn(5, 2, dtype=F64)
    modules = torch.nn.ModuleList([field, event, reset])

    def solve() -> sn.Solution:
        crossing = sn.Event(
            lambda t, y: event(t, y)[:, 0] - 0.4 * torch.sin(3.0 * t),
            direction=1,
            reset=lambda t, y: y + 0.1 * reset(t, y),
        )
        return sn.solve(field, y0, [0.0, 1.0, 3.0], event=crossing, batched=True, controller=sn.FixedStep(0.3))

    sol = solve()
    assert int(sol.events[0].counts.max()) > int(sol.events[0].counts.min())
    loss(sol).backward()
    generator = torch.Generator().manual_seed(2)
    for module in modules:
        moves = [(p, torch.randn(p.shape, dtype=F64, generator=generator)) for p in module.parameters()]

        @torch.no_grad()
        def at(x: float, moves: list[tuple[torch.nn.Parameter, Tensor]] = moves) -> float:
            for p, d in moves:
                p += x * d
            value = float(loss(solve()))
            for p, d in moves:
                p -= x * d
            return value

        h = 1e-5
        expected = (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h)
        found = sum(float((p.grad * d).sum()) for p, d in moves if p.grad is not None)
        assert abs(found - expected) <= 1e-6 * max(1.0, abs(expected))


def test_samples_that_end_or_fail_leave_the_gradients_of_others_alone() -> None:
    """A tank that runs empty, where the derivative of the field is infinite, beside one that does not."""
    rate = torch.tensor(1.0, dtype=F64, requires_grad=True)
    y0 = torch.tensor([[0.25], [9.0]], dtype=F64)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return -rate * torch.sqrt(y.clamp(min=0.0))

    empty = sn.Event(lambda t, y: y[:, 0] - 1e-4, direction=-1)
    full = sn.Event(lambda t, y: y[:, 0] - 2.0, direction=-1, terminal=False)
    sol = sn.solve(field, y0, [0.0, 2.0], event=[empty, full], batched=True, rtol=1e-10, atol=1e-10)
    assert sol.stats.per_sample is not None
    assert sol.stats.per_sample.statuses == [sn.Status.EVENT, sn.Status.SUCCESS]
    assert sol.events[1].counts.tolist() == [0, 0]
    sol.ys[-1, 1].sum().backward()
    assert rate.grad is not None
    torch.testing.assert_close(float(rate.grad), 2 * (3.0 - 1.0) * -1.0, rtol=1e-8, atol=0.0)


def test_event_times_have_closed_forms() -> None:
    height = torch.tensor([1.0, 2.0, 5.0], dtype=F64, requires_grad=True)
    restitution = torch.tensor([0.9, 0.8, 0.7], dtype=F64, requires_grad=True)
    g = 9.81

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[:, 1], torch.full_like(y[:, 1], -g)], 1)

    bounce = sn.Event(
        lambda t, y: y[:, 0], direction=-1, reset=lambda t, y: torch.stack([y[:, 0], -restitution * y[:, 1]], 1)
    )
    y0 = torch.stack([height, torch.zeros_like(height)], 1)
    sol = sn.solve(field, y0, [0.0, 3.0], event=bounce, batched=True, rtol=1e-9, atol=1e-9)
    fall = torch.sqrt(2.0 * height / g)
    second = fall * (1.0 + 2.0 * restitution)
    times = sol.events[0].times
    torch.testing.assert_close(times[:2], torch.stack([fall, second]), rtol=0.0, atol=1e-10)
    expected = torch.autograd.grad(second.sum(), [height, restitution])
    found = torch.autograd.grad(times[1].sum(), [height, restitution])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_a_tangential_event_has_no_derivative() -> None:
    """Only the samples whose time the loss reads count."""
    start = torch.tensor([[-1.0], [-1.0]], dtype=F64, requires_grad=True)
    power = torch.tensor([3.0, 1.0], dtype=F64)

    def solve() -> sn.Solution:
        cubed = sn.Event(lambda t, y: y[:, 0].sign() * y[:, 0].abs() ** power, terminal=False)
        return sn.solve(lambda t, y: torch.ones_like(y), start, [0.0, 2.0], event=cubed, batched=True)

    sol = solve()
    sol.events[0].times[0, 1].backward()
    torch.testing.assert_close(start.grad, torch.tensor([[0.0], [-1.0]], dtype=F64))
    with pytest.raises(RuntimeError, match=r"event\[0\], samples \[0\].*tangential"):
        solve().events[0].times.sum().backward()


def test_events_give_first_derivatives_only() -> None:
    y0 = torch.ones(2, 1, dtype=F64, requires_grad=True)
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 2.0], event=sn.Event(lambda t, y: y[:, 0] - 0.5), batched=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(sol.events[0].times.sum(), y0, create_graph=True)


@pytest.mark.parametrize("adjoint", ["replay", "direct"])
def test_compiled_steps_give_the_same_gradients(adjoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    inputs = oscillator_inputs(own_times=False)
    options = {"adjoint": ADJOINTS[adjoint], "rtol": 1e-6, "atol": 1e-6}
    expected, eager = gradients(oscillators, inputs, **options)
    found, sol = gradients(oscillators, inputs, compile=True, **options)
    assert [x.counts.tolist() for x in sol.events] == [x.counts.tolist() for x in eager.events]
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-8, atol=1e-8, msg=name)


def test_an_event_at_a_jump() -> None:
    """In sample 0 the event is exactly at the jump, in the others before and after it."""
    y0 = torch.tensor([[0.0], [0.1], [-0.1]], dtype=torch.float64, requires_grad=True)
    event = sn.Event(lambda t, y: y[:, 0] - 0.5, direction=1, reset=lambda t, y: y - 3.0)
    sol = sn.solve(
        lambda t, y: torch.where(t < 0.5, 1.0, 2.0)[:, None] * torch.ones_like(y),
        y0,
        [0.0, 1.0],
        jumps=[0.5],
        event=event,
        batched=True,
    )
    (grad,) = torch.autograd.grad(sol.ys[-1].sum(), y0)
    torch.testing.assert_close(grad, torch.ones_like(grad))

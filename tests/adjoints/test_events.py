"""Gradients through events: against central differences of the frozen map, closed forms, and for every adjoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor

import seminode as sn

F64 = torch.float64
DISCRETE = {
    "direct": sn.Direct(),
    "replay": sn.Replay(),
    "sparse": sn.Replay(every=3),
    "checkpointed": sn.Checkpointed(2),
}
CONTINUOUS = {"backsolve": sn.Backsolve(), "interpolating": sn.Interpolating(), "quadrature": sn.Quadrature()}

Inputs = dict[str, Tensor]
Solve = Callable[..., sn.Solution]


def oscillator(inputs: Inputs, **options: Any) -> sn.Solution:
    """A forced oscillator that is kicked where it passes a level, and whose turning points are recorded."""
    weight, level, kick = inputs["weight"], inputs["level"], inputs["kick"]

    def field(t: Tensor, y: Tensor, arg: Tensor) -> Tensor:
        return torch.stack([y[1], -weight * torch.sin(y[0]) - 0.1 * y[1] + arg * torch.cos(1.3 * t)])

    def passes(t: Tensor, y: Tensor, arg: Tensor) -> Tensor:
        return y[0] - level * (1.0 + 0.1 * torch.sin(t) * arg)

    def kicked(t: Tensor, y: Tensor, arg: Tensor) -> Tensor:
        return torch.stack([y[0] - 0.01 * kick * t**2, kick * y[1] + 0.1 * arg])

    events = [sn.Event(passes, direction=-1, reset=kicked), sn.Event(lambda t, y, arg: y[1], terminal=False)]
    return sn.solve(field, inputs["y0"], inputs["ts"], args=(inputs["arg"],), event=events, **options)


def oscillator_inputs(decreasing: bool = False) -> Inputs:
    ts = torch.tensor([0.2, 1.1, 2.05, 3.3, 4.6, 7.0], dtype=F64)
    return {
        "y0": torch.tensor([1.0, 0.3], dtype=F64),
        "ts": -ts if decreasing else ts,
        "arg": torch.tensor(0.4, dtype=F64),
        "weight": torch.tensor(2.0, dtype=F64),
        "level": torch.tensor(0.3, dtype=F64),
        "kick": torch.tensor(1.2, dtype=F64),
    }


def loss(sol: sn.Solution) -> Tensor:
    """Reads every output, every event time and every event state, each in its own way."""
    total = torch.zeros((), dtype=F64)
    for k, x in enumerate([sol.ys, *(x for each in sol.events for x in (each.times, each.states))]):
        weights = torch.cos(torch.arange(x.numel(), dtype=F64) + k).reshape(x.shape)
        total = total + (weights * x).sum() + 0.1 * (x**2).sum()
    return total


def gradients(solve: Solve, inputs: Inputs, **options: Any) -> tuple[Inputs, sn.Solution]:
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    sol = solve(leaves, **options)
    loss(sol).backward()
    return {k: torch.zeros_like(x) if x.grad is None else x.grad for k, x in leaves.items()}, sol


def directions(inputs: Inputs) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(x.shape, dtype=F64, generator=generator) for name, x in inputs.items()}


def differences(solve: Solve, inputs: Inputs, **options: Any) -> dict[str, float]:
    """Fourth-order central differences of the loss along one direction for each input."""
    h, found = 1e-5, {}
    for name, direction in directions(inputs).items():

        def at(x: float, name: str = name, direction: Tensor = direction) -> float:
            with torch.no_grad():
                return float(loss(solve(inputs | {name: inputs[name] + x * direction}, **options)))

        found[name] = (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h)
    return found


def frozen_steps(sol: sn.Solution) -> sn.PrescribedSteps:
    """The proposals of the accepted steps that do not land on events: those are found again."""
    assert sol.record is not None
    times = {float(t) for each in sol.events for t in each.times}
    return sn.PrescribedSteps([plan.proposal for plan in sol.record.accepted if plan.t1 not in times])


def assert_close(found: Inputs, expected: dict[str, float], bound: float) -> None:
    for name, direction in directions(found).items():
        derivative = float((found[name] * direction).sum())
        assert abs(derivative - expected[name]) <= bound * max(1.0, abs(expected[name])), name


def along(grads: Inputs) -> dict[str, float]:
    return {name: float((grads[name] * direction).sum()) for name, direction in directions(grads).items()}


@pytest.fixture(scope="module")
def fixed_differences() -> dict[str, float]:
    return differences(oscillator, oscillator_inputs(), controller=sn.FixedStep(0.11))


@pytest.mark.parametrize("adjoint", DISCRETE)
def test_discrete_gradients_are_those_of_the_frozen_map(adjoint: str, fixed_differences: dict[str, float]) -> None:
    found, sol = gradients(oscillator, oscillator_inputs(), controller=sn.FixedStep(0.11), adjoint=DISCRETE[adjoint])
    assert sol.events[0].counts >= 2
    assert sol.events[1].counts >= 2
    assert_close(found, fixed_differences, 1e-8)


def test_gradients_of_adaptive_steps_are_those_of_the_frozen_map() -> None:
    inputs = oscillator_inputs()
    found, sol = gradients(oscillator, inputs, record=True, rtol=1e-5, atol=1e-5)
    again = oscillator(inputs, controller=frozen_steps(sol))
    assert torch.equal(again.events[0].times, sol.events[0].times.detach())
    assert_close(found, differences(oscillator, inputs, controller=frozen_steps(sol)), 1e-7)


@pytest.mark.parametrize("options", [{"save": "last"}, {"save": "steps"}, {"jumps": [1.7, 3.9]}, {}], ids=str)
def test_gradients_with_other_outputs_jumps_and_decreasing_times(options: dict[str, Any]) -> None:
    inputs = oscillator_inputs(decreasing=not options)
    options = options | {"controller": sn.FixedStep(0.13)}
    found, sol = gradients(oscillator, inputs, **options)
    assert sol.events[0].counts >= 1
    assert_close(found, differences(oscillator, inputs, **options), 1e-7)


def test_gradients_of_dense_output() -> None:
    def dense(inputs: Inputs, **options: Any) -> sn.Solution:
        sol = oscillator(inputs, dense=True, save="last", **options)
        assert sol.dense is not None
        times = torch.linspace(0.25, 5.9, 12, dtype=F64)
        return sn.Solution(times, sol.dense(times), sol.stats, events=sol.events)

    options = {"controller": sn.FixedStep(0.13)}
    found, _ = gradients(dense, oscillator_inputs(), **options)
    assert_close(found, differences(dense, oscillator_inputs(), **options), 1e-7)


@pytest.mark.parametrize("adjoint", CONTINUOUS)
def test_continuous_gradients_are_those_of_the_exact_solution(adjoint: str) -> None:
    inputs = oscillator_inputs()
    options = {"rtol": 1e-10, "atol": 1e-10}
    expected, _ = gradients(oscillator, inputs, adjoint=sn.Direct(), **options)
    found, sol = gradients(oscillator, inputs, adjoint=CONTINUOUS[adjoint], **options)
    assert_close(found, along(expected), 1e-7)
    assert sol.stats.backward is not None
    assert sol.stats.backward.vjp_y > 0


# Three hybrid systems, with every adjoint


def ball(inputs: Inputs, **options: Any) -> sn.Solution:
    """Twenty bounces of a ball with drag, linear for small and quadratic for large speeds."""
    drag, restitution = inputs["drag"], inputs["restitution"]

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[1], -9.81 - drag * y[1] * torch.sqrt(1.0 + y[1] ** 2)])

    def bounce(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[0], -restitution * y[1]])

    touch = sn.Event(lambda t, y: y[0] - inputs["ground"], direction=-1, reset=bounce, max_count=20)
    return sn.solve(field, inputs["y0"], inputs["ts"], event=touch, **options)


def neurons(inputs: Inputs, **options: Any) -> sn.Solution:
    """Eight leaky integrate-and-fire neurons. A spike lifts all other neurons a little."""
    threshold, rest, coupling = inputs["threshold"], inputs["rest"], inputs["coupling"]

    def field(t: Tensor, v: Tensor, current: Tensor) -> Tensor:
        return current - v

    def neuron(i: int) -> sn.Event:
        own = torch.eye(8, dtype=F64)[i]

        def spike(t: Tensor, v: Tensor, current: Tensor) -> Tensor:
            return torch.where(own > 0.0, rest, v + coupling * (threshold - v))

        return sn.Event(lambda t, v, current: v[i] - threshold, direction=1, reset=spike)

    events = [neuron(i) for i in range(8)]
    return sn.solve(field, inputs["y0"], inputs["ts"], args=(inputs["current"],), event=events, **options)


def patient(inputs: Inputs, **options: Any) -> sn.Solution:
    """A drug moves from gut to blood and is eliminated; a dose is taken when the blood falls below a threshold."""
    rates, dose, threshold = inputs["rates"], inputs["dose"], inputs["threshold"]

    def field(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        absorbed = rates[0] * y["gut"]
        return {"gut": -absorbed, "blood": absorbed - rates[1] * y["blood"] / (0.5 + y["blood"])}

    def taken(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"gut": y["gut"] + dose, "blood": y["blood"]}

    def low(t: Tensor, y: dict[str, Tensor]) -> Tensor:
        return y["blood"] - threshold

    start = {"gut": inputs["y0"][0], "blood": inputs["y0"][1]}
    sol = sn.solve(field, start, inputs["ts"], event=sn.Event(low, direction=-1, reset=taken), **options)
    ys = torch.stack([sol.ys["gut"], sol.ys["blood"]], 1)
    (each,) = sol.events
    occurrences = type(each)(each.times, torch.stack([each.states["gut"], each.states["blood"]], 1), each.counts)
    return sn.Solution(sol.ts, ys, sol.stats, sol.status, events=(occurrences,))


def tensors(**values: Any) -> Inputs:
    return {name: torch.as_tensor(value, dtype=F64) for name, value in values.items()}


SYSTEMS: dict[str, tuple[Solve, Inputs, float, int]] = {
    "ball": (
        ball,
        tensors(y0=[3.0, 0.2], ts=torch.linspace(0.0, 30.0, 31), drag=0.02, restitution=0.95, ground=0.1),
        0.05,
        20,
    ),
    "neurons": (
        neurons,
        tensors(
            y0=torch.linspace(0.0, 0.7, 8),
            ts=[0.0, 0.7, 1.6, 2.5],
            current=torch.linspace(1.5, 2.9, 8),
            threshold=1.0,
            rest=0.05,
            coupling=0.03,
        ),
        0.2,
        16,
    ),
    "patient": (
        patient,
        tensors(y0=[1.0, 0.6], ts=torch.linspace(0.0, 12.0, 7), rates=[1.4, 0.5], dose=0.9, threshold=0.5),
        0.1,
        3,
    ),
}


@pytest.fixture(scope="module")
def system_differences() -> dict[str, dict[str, float]]:
    """Of the frozen maps, by system."""
    return {
        name: differences(solve, inputs, controller=sn.FixedStep(dt))
        for name, (solve, inputs, dt, _) in SYSTEMS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", [*DISCRETE, *CONTINUOUS])
@pytest.mark.parametrize("system", SYSTEMS)
def test_gradients_of_hybrid_systems(
    system: str, adjoint: str, system_differences: dict[str, dict[str, float]]
) -> None:
    """Times and states of all events, outputs, parameters of field, event and reset: within 1e-6 of the frozen map."""
    solve, inputs, dt, count = SYSTEMS[system]
    found, sol = gradients(solve, inputs, adjoint=(DISCRETE | CONTINUOUS)[adjoint], controller=sn.FixedStep(dt))
    assert sum(each.counts for each in sol.events) >= count
    assert_close(found, system_differences[system], 1e-6)


# Compiled steps


QUICK = {("direct", True), ("direct", False), ("replay", False), ("backsolve", False)}


@pytest.mark.parametrize(
    ("adjoint", "moving"),
    [
        pytest.param(adjoint, moving, marks=[] if (adjoint, moving) in QUICK else pytest.mark.slow)
        for adjoint in (*DISCRETE, *CONTINUOUS)
        for moving in (True, False)
    ],
)
def test_compiled_gradients_are_those_of_eager_steps(
    adjoint: str, moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_back_end(monkeypatch)

    def solve(inputs: Inputs, **options: Any) -> sn.Solution:
        return oscillator(inputs if moving else inputs | {"ts": inputs["ts"].detach()}, **options)

    options: dict[str, Any] = {"adjoint": (DISCRETE | CONTINUOUS)[adjoint], "rtol": 1e-5, "atol": 1e-5}
    expected, eager = gradients(solve, oscillator_inputs(), **options)
    found, compiled = gradients(solve, oscillator_inputs(), compile=True, **options)
    assert compiled.stats.accepted == eager.stats.accepted
    assert compiled.stats.events == eager.stats.events
    assert_close(found, along(expected), 1e-9)


# What is differentiated, and what is refused


def ramp(level: Tensor, **options: Any) -> sn.Solution:
    """y = t, with an event where y reaches a level."""
    event = sn.Event(lambda t, y: y[0] - level, terminal=False)
    return sn.solve(lambda t, y: torch.ones_like(y), torch.zeros(1, dtype=F64), [0.0, 2.0], event=event, **options)


def test_the_parameter_of_an_event_may_be_all_there_is_to_differentiate() -> None:
    level = torch.tensor(0.7, dtype=F64, requires_grad=True)
    for adjoint in (DISCRETE | CONTINUOUS).values():
        sol = ramp(level, adjoint=adjoint)
        (grad,) = torch.autograd.grad(sol.events[0].times.sum() + 2.0 * sol.events[0].states.sum(), level)
        assert abs(float(grad) - 3.0) < 1e-12
        assert abs(float(torch.autograd.grad(ramp(level, adjoint=adjoint).ys.sum(), level)[0])) < 1e-12
    computed = ramp(2.0 * level / 2.0)  # a tensor with a graph of its own
    assert abs(float(torch.autograd.grad(computed.events[0].times.sum(), level)[0]) - 1.0) < 1e-12
    assert not ramp(level.detach()).events[0].times.requires_grad
    with torch.no_grad():
        assert not ramp(level).events[0].times.requires_grad


def test_params_restrict_what_events_are_differentiated_by() -> None:
    level, other = (torch.tensor(0.7, dtype=F64, requires_grad=True) for _ in range(2))
    sol = ramp(level, params=[other])
    assert not sol.events[0].times.requires_grad or torch.autograd.grad(
        sol.events[0].times.sum(), level, allow_unused=True
    ) == (None,)
    grad = torch.autograd.grad(ramp(level, params=[level]).events[0].times.sum(), level)[0]
    assert abs(float(grad) - 1.0) < 1e-12


def test_a_tangential_event_has_no_derivative() -> None:
    start = torch.zeros(1, dtype=F64, requires_grad=True)
    event = sn.Event(lambda t, y: (y[0] - 1.0) ** 3)
    sol = sn.solve(lambda t, y: torch.ones_like(y), start, [0.0, 3.0], event=event)
    assert abs(float(sol.events[0].times[0]) - 1.0) < 1e-4
    with pytest.raises(RuntimeError, match=r"event\[0\] at t = .*tangential"):
        sol.events[0].times.sum().backward()


def test_second_derivatives_are_refused() -> None:
    level = torch.tensor(0.7, dtype=F64, requires_grad=True)
    for adjoint in (sn.Direct(), sn.Replay()):
        with pytest.raises(RuntimeError, match="first derivatives only"):
            torch.autograd.grad(ramp(level, adjoint=adjoint).events[0].times.sum(), level, create_graph=True)


def test_first_event_as_a_function_of_everything() -> None:
    """The first zero of an event function, as `odeint_event` of torchdiffeq returns it: a time and a state."""
    height = torch.tensor(10.0, dtype=F64, requires_grad=True)
    gravity = torch.tensor(9.81, dtype=F64, requires_grad=True)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y[1], -gravity * torch.ones_like(y[1])])

    y0 = torch.stack([height, torch.zeros_like(height)])
    sol = sn.solve(field, y0, [0.0, 100.0], event=sn.Event(lambda t, y: y[0]), save="last")
    t, y = sol.events[0].times[0], sol.events[0].states[0]
    fall = math.sqrt(20.0 / 9.81)
    found = torch.autograd.grad(t, [height, gravity], retain_graph=True)
    assert torch.allclose(torch.stack(found), torch.tensor([fall / 20.0, -fall / 19.62], dtype=F64))
    assert torch.allclose(
        torch.autograd.grad(y[1], height)[0], -0.5 * torch.tensor(2.0 * 9.81 / 10.0, dtype=F64).sqrt()
    )


@pytest.mark.parametrize("adjoint", [*DISCRETE, *CONTINUOUS])
def test_the_backward_pass_is_counted_over_all_stretches(adjoint: str) -> None:
    _, sol = gradients(oscillator, oscillator_inputs(), adjoint=(DISCRETE | CONTINUOUS)[adjoint], record=True)
    backward, record = sol.stats.backward, sol.record
    assert backward is not None
    assert record is not None
    assert record.backward is not None
    assert backward.accepted == len(record.backward.accepted) > 0
    if adjoint in DISCRETE:  # all steps but those that land on events are taken again one by one
        assert backward.accepted == sol.stats.accepted - sol.stats.events
    landing = 2 * 6 * sol.stats.events
    assert backward.vjp_y > landing
    assert f"vjp_y={backward.vjp_y}" in str(sol.stats)


def test_a_parameter_that_changes_before_the_backward_pass_is_noticed() -> None:
    inputs = {name: x.clone().requires_grad_() for name, x in oscillator_inputs().items()}
    sol = oscillator(inputs)
    with torch.no_grad():
        inputs["weight"].mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss(sol).backward()


@pytest.mark.parametrize("adjoint", ["direct", "replay", "backsolve", "interpolating"])
@pytest.mark.parametrize("reset", [None, lambda t, y: y - 3.0], ids=["recorded", "reset"])
def test_an_event_at_a_jump(adjoint: Any, reset: Any) -> None:
    """The event moves with y0, the jump does not: between them the field before the jump holds."""
    y0 = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    event = sn.Event(lambda t, y: y[0] - 0.5, terminal=False, reset=reset)
    sol = sn.solve(
        lambda t, y: torch.where(t < 0.5, 1.0, 2.0) * torch.ones_like(y),
        y0,
        [0.0, 1.0],
        jumps=[0.5],
        event=event,
        adjoint=adjoint,
    )
    assert sol.events[0].times.tolist() == [0.5]
    (grad,) = torch.autograd.grad(sol.ys[-1].sum(), y0)
    assert grad.item() == pytest.approx(1.0)

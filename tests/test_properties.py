"""What holds for every solve: random small problems, structures, times, tolerances, solvers, adjoints and events.

The ordinary tests draw few examples, the same ones every time. The slow ones draw many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import seminode as sn
from seminode._field.pytree import flatten, unflatten

FEW = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
MANY = settings(FEW, max_examples=200, derandomize=False)

ADAPTIVE = ("dopri5", "tsit5", "bosh3", "dopri8", "adaptive_heun", "fehlberg2")
IMPLICIT = ("kvaerno3", "trbdf2", "radauIIA5")
DISCRETE: dict[str, Callable[[], Any]] = {
    "Direct": sn.Direct,
    "Replay": sn.Replay,
    "Replay(every=3)": lambda: sn.Replay(every=3),
    "Checkpointed": lambda: sn.Checkpointed(2),
    "Direct(memory)": lambda: sn.Direct(memory=2000),
}
CONTINUOUS: dict[str, Callable[[], Any]] = {
    "Backsolve": sn.Backsolve,
    "Interpolating": sn.Interpolating,
    "Quadrature": sn.Quadrature,
}
ADJOINTS = DISCRETE | CONTINUOUS
#: Adjoints that batched solves and some solvers admit; the others admit all.
AVAILABLE = {
    "batch": {"Direct", "Replay"},
    "radauIIA5": {"Direct", "Replay"},
    "kvaerno3": {"Direct", "Replay", "Checkpointed", "Interpolating"},
    "trbdf2": {"Direct", "Replay", "Checkpointed"},
    "dopri8": {*DISCRETE, "Backsolve"},
}


@dataclass(frozen=True)
class Random:
    """y′ = tanh(W y + b cos ωt) − y/4, over a state of some structure, with a count of evaluations."""

    structure: str
    seed: int
    size: int
    ts: tuple[float, ...]
    rtol: float
    solver: str
    batch: int = 0  # samples, if the first axis is one of samples

    def normal(self, *shape: int, stream: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.seed + stream)
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def y0(self) -> Any:
        lead = (self.batch,) if self.batch else ()
        y = self.normal(*lead, self.size)
        rest = self.normal(*lead, 1, 2, stream=1)
        return {"tensor": y, "tuple": (y, rest), "dict": {"q": rest, "p": {"r": y}}}[self.structure]

    def weight(self) -> Tensor:
        size = self.size + (0 if self.structure == "tensor" else 2)
        return self.normal(size, size, stream=2) / math.sqrt(size)

    def field(self, weight: Tensor) -> CountingField:
        return CountingField(weight, self.normal(len(weight), stream=3), bool(self.batch))

    def solve(self, field: Callable[..., Any], y0: Any = None, **options: Any) -> sn.Solution:
        adaptive = getattr(options.get("controller"), "adaptive", True)
        tolerances = {"rtol": self.rtol, "atol": self.rtol} if adaptive else {}
        options = {**tolerances, "solver": self.solver, "batched": bool(self.batch), **options}
        return sn.solve(field, self.y0() if y0 is None else y0, options.pop("ts", self.ts), **options)


class CountingField:
    """The field; the time of the equation passes `speed` times as fast as that of the solve."""

    def __init__(self, weight: Tensor, bias: Tensor, batched: bool, speed: float = 1.0):
        self.weight, self.bias, self.batched, self.speed = weight, bias, batched, speed
        self.calls = 0

    def timed(self, speed: float) -> CountingField:
        return CountingField(self.weight, self.bias, self.batched, speed)

    def __call__(self, t: Tensor, y: Any) -> Any:
        self.calls += 1
        leaves, node = flatten(y)
        lead = leaves[0][1].shape[:1] if self.batched else ()
        flat = torch.cat([leaf.reshape(*lead, -1) for _, leaf in leaves], -1)
        time = self.speed * (t.reshape(*lead, 1) if self.batched else t)
        k = self.speed * (torch.tanh(flat @ self.weight.T + self.bias * torch.cos(1.5 * time)) - 0.25 * flat)
        sizes = [leaf.numel() // (lead[0] if lead else 1) for _, leaf in leaves]
        pieces = k.split(sizes, -1)
        return unflatten(node, iter([p.reshape(leaf.shape) for p, (_, leaf) in zip(pieces, leaves, strict=True)]))


def leaves_of(y: Any) -> list[Tensor]:
    return [leaf for _, leaf in flatten(y)[0]]


def total(ys: Any) -> Tensor:
    """A loss that reads every entry of every output, each in its own way."""
    terms = [
        (leaf * torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape) + i)).sum()
        for i, leaf in enumerate(leaves_of(ys))
    ]
    return torch.stack(terms).sum()


def close(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(leaves_of(found), leaves_of(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@st.composite
def times(draw: st.DrawFn) -> tuple[float, ...]:
    gaps = draw(st.lists(st.floats(0.05, 0.8), min_size=1, max_size=3))
    start, sign = draw(st.floats(-2.0, 2.0)), draw(st.sampled_from([1.0, -1.0]))
    ts = [start]
    for gap in gaps:
        ts.append(ts[-1] + sign * gap)
    return tuple(ts)


@st.composite
def problems(draw: st.DrawFn, solvers: tuple[str, ...] = ADAPTIVE, batch: bool = False) -> Random:
    solver = draw(st.sampled_from(solvers))
    order = sn.solvers.BY_NAME[solver]().order
    return Random(
        structure=draw(st.sampled_from(["tensor", "tuple", "dict"])),
        seed=draw(st.integers(0, 10_000)),
        size=draw(st.integers(1, 3)),
        ts=draw(times()),
        rtol=draw(st.sampled_from([1e-3, 1e-5, 1e-7][: max(1, order - 1)])),  # which takes few steps
        solver=solver,
        batch=draw(st.integers(1, 4)) if batch else 0,
    )


def both(test: Callable[..., None]) -> Callable[..., None]:
    """The test with few examples, and, marked as slow, with many."""

    @pytest.mark.parametrize("amount", ["few", pytest.param("many", marks=pytest.mark.slow)])
    def run(amount: str) -> None:
        (FEW if amount == "few" else MANY)(test)()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@both
@given(st.one_of(problems(ADAPTIVE + IMPLICIT), problems(batch=True)), st.sampled_from(sorted(ADJOINTS)), st.booleans())
def test_reported_evaluations_are_those_that_the_field_saw(problem: Random, name: str, stops: bool) -> None:
    if name not in AVAILABLE.get("batch" if problem.batch else problem.solver, ADJOINTS):
        name = "Replay"
    weight = problem.weight().requires_grad_()
    field = problem.field(weight)
    middle = 0.5 * (problem.ts[0] + problem.ts[-1])
    event = sn.Event(lambda t, y: t - middle, terminal=False) if stops else None
    sol = problem.solve(field, adjoint=ADJOINTS[name](), event=event)
    assert field.calls == sol.stats.nfe + sol.stats.checks
    if stops:
        assert sol.stats.events == max(1, problem.batch)
    field.calls = 0
    total(sol.ys).backward()
    backward = sol.stats.backward
    assert backward is not None
    assert field.calls == backward.nfe + backward.checks


def frozen(sol: sn.Solution) -> sn.PrescribedSteps:
    """The steps of a solve, to be taken again."""
    assert sol.record is not None
    return sn.PrescribedSteps.recorded(sol.record)


@both
@given(problems(), st.sampled_from(sorted(DISCRETE)))
def test_gradients_are_those_of_the_frozen_steps(problem: Random, name: str) -> None:
    weight = problem.weight().requires_grad_()
    y0 = leaves_of(problem.y0())
    node = flatten(problem.y0())[1]
    inputs = [leaf.requires_grad_() for leaf in y0]
    sol = problem.solve(problem.field(weight), unflatten(node, iter(inputs)), adjoint=DISCRETE[name](), record=True)
    grads = torch.autograd.grad(total(sol.ys), [weight, *inputs])
    directions = [torch.cos(torch.arange(x.numel(), dtype=x.dtype) + i).reshape(x.shape) for i, x in enumerate(inputs)]
    directions.insert(0, problem.normal(*weight.shape, stream=4))
    steps = frozen(sol)

    def moved(h: float) -> float:
        with torch.no_grad():
            shifted = [x + h * d for x, d in zip([weight, *inputs], directions, strict=True)]
            y = unflatten(node, iter(shifted[1:]))
            return float(total(problem.solve(problem.field(shifted[0]), y, controller=steps).ys))

    h = 1e-3
    expected = (8.0 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12.0 * h)
    found = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))
    size = sum(float((g * d).abs().sum()) for g, d in zip(grads, directions, strict=True))
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-8 * size)


@both
@given(problems(("dopri5", "tsit5")), st.sampled_from(sorted(CONTINUOUS)))
def test_continuous_adjoints_agree_with_direct(problem: Random, name: str) -> None:
    problem, grads = replace(problem, rtol=1e-7), []
    for adjoint in (CONTINUOUS[name](), sn.Direct()):
        weight = problem.weight().requires_grad_()
        total(problem.solve(problem.field(weight), adjoint=adjoint).ys).backward()
        grads.append(weight.grad)
    close(grads[0], grads[1], 1e-4)


@both
@given(problems(("dopri5", "tsit5", "dopri8", "kvaerno3")))
def test_back_in_time_to_the_start(problem: Random) -> None:
    field = problem.field(problem.weight())
    there = problem.solve(field, save="last").ys
    end = unflatten(flatten(problem.y0())[1], iter([leaf[-1] for leaf in leaves_of(there)]))
    back = problem.solve(field, end, ts=(problem.ts[-1], problem.ts[0]), save="last").ys
    found = unflatten(flatten(problem.y0())[1], iter([leaf[-1] for leaf in leaves_of(back)]))
    close(found, problem.y0(), 300.0 * problem.rtol)


@both
@given(problems(), st.sampled_from([0.5, 2.0, -1.0, -4.0]))
def test_scaling_time_changes_nothing(problem: Random, speed: float) -> None:
    """y(speed·t) solves y′ = speed·f(speed·t, y). Powers of two are exact, so that all steps are the same.

    The size of the first step is given: the usual formula for it depends on the unit of time.
    """
    field = problem.field(problem.weight())
    plain = problem.solve(field, controller=sn.Integral(dt0=0.125))
    ts = tuple(t / speed for t in problem.ts)
    scaled = problem.solve(field.timed(speed), ts=ts, controller=sn.Integral(dt0=0.125 / abs(speed)))
    assert (scaled.stats.accepted, scaled.stats.rejected) == (plain.stats.accepted, plain.stats.rejected)
    close(scaled.ys, plain.ys, 1e-10)


@both
@given(problems(ADAPTIVE[:3]), st.sampled_from(sorted(ADJOINTS)), st.sampled_from([2.0, -0.25, 1024.0]))
def test_a_scaled_loss_has_a_scaled_gradient(problem: Random, name: str, factor: float) -> None:
    """Discrete adjoints are linear in the cotangent; of continuous ones the tolerance is absolute too."""
    grads = []
    for scale in (1.0, factor):
        weight = problem.weight().requires_grad_()
        options: dict[str, Any] = {"controller": sn.FixedStep(0.05)} if name in CONTINUOUS else {}
        (scale * total(problem.solve(problem.field(weight), adjoint=ADJOINTS[name](), **options).ys)).backward()
        assert weight.grad is not None
        grads.append(weight.grad)
    close(grads[1] / factor, grads[0], 1e-10 if name in DISCRETE else 1e-9)


@both
@given(problems(batch=True), st.randoms(use_true_random=False))
def test_samples_of_a_batch_do_not_know_of_each_other(problem: Random, random: Any) -> None:
    """Neither their order nor their company changes a sample."""
    order = list(range(problem.batch))
    random.shuffle(order)
    field, node = problem.field(problem.weight()), flatten(problem.y0())[1]
    whole = problem.solve(field)
    shuffled = problem.solve(field, unflatten(node, iter([leaf[order] for leaf in leaves_of(problem.y0())])))
    close([leaf[:, order] for leaf in leaves_of(whole.ys)], leaves_of(shuffled.ys), 1e-12)
    alone = problem.solve(field, unflatten(node, iter([leaf[order[:1]] for leaf in leaves_of(problem.y0())])))
    close([leaf[:, order[:1]] for leaf in leaves_of(whole.ys)], leaves_of(alone.ys), 1e-12)


@both
@given(problems(), st.sampled_from(["Direct", "Replay"]))
@example(Random("tuple", 0, 2, (0.0, 0.5, 1.0), 1e-5, "dopri5"), "Replay")
def test_splitting_the_interval_at_an_output(problem: Random, name: str) -> None:
    """With the steps of the whole solve, two solves in a chain are the same function, and so are their gradients."""
    middle = 0.5 * (problem.ts[0] + problem.ts[-1])
    results = []
    whole = problem.solve(problem.field(problem.weight()), ts=(problem.ts[0], middle), record=True)
    first = frozen(whole)
    end = unflatten(flatten(problem.y0())[1], iter([leaf[-1] for leaf in leaves_of(whole.ys)]))
    second = frozen(problem.solve(problem.field(problem.weight()), end, ts=(middle, problem.ts[-1]), record=True))
    joined = sn.PrescribedSteps([*first.dts, *second.dts], step_to=[*first.step_to, middle, *second.step_to])
    one = [((problem.ts[0], middle, problem.ts[-1]), joined)]
    two = [((problem.ts[0], middle), first), ((middle, problem.ts[-1]), second)]
    for pieces in (one, two):
        weight, y = problem.weight().requires_grad_(), problem.y0()
        for ts, steps in pieces:
            sol = problem.solve(problem.field(weight), y, ts=ts, controller=steps, adjoint=DISCRETE[name]())
            y = unflatten(flatten(y)[1], iter([leaf[-1] for leaf in leaves_of(sol.ys)]))
        total(y).backward()
        results.append((y, weight.grad))
    close(results[0][0], results[1][0], 1e-13)
    close(results[0][1], results[1][1], 1e-11)


@both
@given(problems(("dopri5", "tsit5", "bosh3")), st.floats(0.1, 0.9))
def test_an_event_at_a_given_time_ends_where_the_solve_to_that_time_ends(problem: Random, fraction: float) -> None:
    field = problem.field(problem.weight())
    stop = problem.ts[0] + fraction * (problem.ts[-1] - problem.ts[0])
    ended = problem.solve(field, save="last", event=sn.Event(lambda t, y: t - stop))
    exact = problem.solve(field, save="last", ts=(problem.ts[0], stop))
    assert float(ended.ts[-1]) == pytest.approx(stop, abs=1e-9)
    close(ended.ys, exact.ys, 100.0 * problem.rtol)

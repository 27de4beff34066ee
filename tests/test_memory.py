"""How much memory the adjoints hold, measured by the allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import seminode as sn


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak of the tensor memory that is allocated while `run` is at work."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run()
    results: Any = measured.profiler.kineto_results  # type: ignore[union-attr]
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    assert events
    live = peak = 0
    for _, size in sorted(events):
        live += size
        peak = max(peak, live)
    return peak


def test_the_measure_itself() -> None:
    def run() -> None:
        a = torch.empty(1000, dtype=torch.float64)
        b = a + 1
        del a
        (b * 2).sum()

    assert 16_000 <= peak_bytes(run) < 25_000


STATE = 4 * 1_000_000


def replay(steps: int, adjoint: Any) -> Callable[[], None]:
    weight = torch.full((), 0.5, requires_grad=True)
    y0 = torch.linspace(-1, 1, 1_000_000, requires_grad=True)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(weight * y) * torch.cos(t)

    def run() -> None:
        sol = sn.solve(field, y0, [0.0, 1.0], save="last", adjoint=adjoint, controller=sn.FixedStep(1.0 / steps))
        assert sol.stats.accepted == steps
        sol.ys.sum().backward()
        y0.grad = weight.grad = None

    return run


def test_replay_holds_the_tape_and_little_else() -> None:
    """200 steps of a state of a million entries."""
    steps = 200
    assert peak_bytes(replay(steps, sn.Replay())) < (steps + 20) * STATE


def test_a_sparse_tape_holds_less() -> None:
    steps, every = 100, 10
    peak = peak_bytes(replay(steps, sn.Replay(every=every)))
    assert peak < (steps // every + every + 20) * STATE


def test_without_gradients_memory_does_not_grow_with_the_steps() -> None:
    y0 = torch.zeros(1_000_000)
    peaks = []
    for steps in (10, 40):
        with torch.no_grad():
            peaks.append(
                peak_bytes(
                    lambda n=steps: sn.solve(lambda t, y: torch.cos(y), y0, [0.0, 1.0], controller=sn.FixedStep(1 / n))
                )
            )
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)
    assert peaks[0] < 20 * STATE


def test_rejected_steps_leave_nothing_in_the_graph() -> None:
    """Direct: the graph of a rejected trial is freed, however many there are."""
    y0 = torch.ones(1_000_000, requires_grad=True)

    def run(dt0: float) -> Callable[[], None]:
        def inner() -> None:
            sol = sn.solve(
                lambda t, y: -30 * y,
                y0,
                [0.0, 0.01],
                adjoint=sn.Direct(),
                rtol=1e-4,
                controller=sn.Integral(dt0=dt0, dt_max=max(dt0, 0.005)),
                save="last",
            )
            assert sol.stats.rejected == (0 if dt0 < 0.01 else sol.stats.rejected)
            sol.ys.sum().backward()
            y0.grad = None

        return inner

    assert peak_bytes(run(0.01)) <= 1.5 * peak_bytes(run(0.005))

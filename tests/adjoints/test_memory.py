"""How much memory the adjoints hold, measured by the allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import replace_back_end
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


STATE = 4 * 250_000


def replay(steps: int, adjoint: Any) -> Callable[[], None]:
    weight = torch.full((), 0.5, requires_grad=True)
    y0 = torch.linspace(-1, 1, 250_000, requires_grad=True)

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(weight * y) * torch.cos(t)

    def run() -> None:
        sol = sn.solve(field, y0, [0.0, 1.0], save="last", adjoint=adjoint, controller=sn.FixedStep(1.0 / steps))
        assert sol.stats.accepted == steps
        sol.ys.sum().backward()
        y0.grad = weight.grad = None

    return run


def test_replay_holds_the_tape_and_little_else() -> None:
    """200 steps of a state of a megabyte."""
    steps = 200
    assert peak_bytes(replay(steps, sn.Replay())) < (steps + 20) * STATE


def test_a_sparse_tape_holds_less() -> None:
    steps, every = 100, 10
    peak = peak_bytes(replay(steps, sn.Replay(every=every)))
    assert peak < (steps // every + every + 20) * STATE


def test_without_gradients_memory_does_not_grow_with_the_steps() -> None:
    y0 = torch.zeros(250_000)
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
    """Direct: the graph of a rejected trial is freed. Five steps, after fifteen rejections or after none."""
    y0 = torch.ones(1_000_000, requires_grad=True)

    def run(dt0: float, rejected: int) -> Callable[[], None]:
        # Rejected steps shrink little, accepted ones hardly grow.
        controller = sn.Integral(dt0=dt0, factor_min=0.9, factor_max=1.001)

        def inner() -> None:
            sol = sn.solve(
                lambda t, y: -30 * y,
                y0,
                [0.0, 0.1],
                adjoint=sn.Direct(),
                rtol=1e-4,
                controller=controller,
                save="last",
            )
            assert (sol.stats.accepted, sol.stats.rejected) == (5, rejected)
            sol.ys.sum().backward()
            y0.grad = None

        return inner

    assert peak_bytes(run(0.1, rejected=15)) <= 1.05 * peak_bytes(run(0.02, rejected=0))


def constant(steps: int, adjoint: Any, solver: Any, size: int = 300_000) -> Callable[[], None]:
    """A solve of many cheap steps over a state of more than a megabyte."""
    weight = torch.full((), 0.5, requires_grad=True)
    y0 = torch.linspace(-1, 1, size, requires_grad=True)

    def run() -> None:
        sol = sn.solve(
            lambda t, y: torch.sin(weight * y),
            y0,
            [0.0, 1.0],
            save="last",
            adjoint=adjoint,
            solver=solver,
            controller=sn.FixedStep(1.0 / steps),
        )
        assert sol.stats.accepted == steps
        sol.ys.sum().backward()
        y0.grad = weight.grad = None

    return run


FLAT = {
    "Backsolve": (sn.Backsolve(), "midpoint"),
    "Quadrature": (sn.Quadrature(), "midpoint"),
    "reversible_heun": (sn.Reversible(), "reversible_heun"),
    "ReversibleRK": (sn.Reversible(), sn.ReversibleRK("midpoint")),
}


@pytest.mark.parametrize("name", FLAT)
def test_memory_that_does_not_grow_with_the_steps(name: str) -> None:
    few, many = (peak_bytes(constant(steps, *FLAT[name])) for steps in (20, 200))
    assert many < 1.05 * few


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FLAT)
def test_memory_that_does_not_grow_with_very_many_steps(name: str) -> None:
    few, many = (peak_bytes(constant(steps, *FLAT[name])) for steps in (500, 5000))
    assert many < 1.05 * few


@pytest.mark.parametrize("n", [2, 10])
def test_checkpoints_hold_no_more_states_than_they_may(n: int) -> None:
    """Against a backward pass that needs no checkpoints but the first: the difference is theirs."""
    state = 4 * 300_000
    least = peak_bytes(constant(2, sn.Checkpointed(1), "midpoint"))
    for steps in (20, 100):
        assert peak_bytes(constant(steps, sn.Checkpointed(n), "midpoint")) <= least + n * state


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_checkpoints_of_very_many_steps() -> None:
    state = 4 * 300_000
    least = peak_bytes(constant(2, sn.Checkpointed(1), "euler"))
    for steps in (500, 5000):
        assert peak_bytes(constant(steps, sn.Checkpointed(20), "euler")) <= least + 20 * state


def test_gradients_of_parameters_are_held_three_times() -> None:
    """Total, trial and first stage, besides the one that autograd has just computed; however many steps there are."""
    weight = torch.zeros(1000, 1000, requires_grad=True)
    bias = torch.zeros(1000, requires_grad=True)
    y0 = torch.ones(1000, requires_grad=True)
    hasty = sn.Backsolve(controller=sn.Integral(dt0=0.5))  # so that a step is rejected

    def run(end: float) -> Callable[[], None]:
        def inner() -> None:
            sol = sn.solve(
                lambda t, y: torch.sin(weight @ y + bias + 20 * t), y0, [0.0, end], save="last", adjoint=hasty
            )
            sol.ys.sum().backward()
            assert sol.stats.backward is not None
            assert sol.stats.backward.rejected > 0
            weight.grad = bias.grad = y0.grad = None

        return inner

    size = 4 * 1_000_000
    few, many = peak_bytes(run(1.0)), peak_bytes(run(4.0))
    assert many < 1.05 * few
    assert many < 4.3 * size


@pytest.mark.parametrize("adjoint", [sn.Interpolating(memory=40), sn.Quadrature(z="dense", memory=40)], ids=repr)
def test_a_bound_on_the_dense_solution(adjoint: Any) -> None:
    state = 4 * 300_000
    few, many = (peak_bytes(constant(steps, adjoint, "midpoint")) for steps in (40, 300))
    assert many <= few + 10 * state
    assert many <= 80 * state


def peak_within(memory: int, compiled: bool) -> tuple[int, int, int]:
    """The peak of a solve and its gradient with `Replay`, that with the budget, and how many steps were kept."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    y0, kept = torch.randn(500, 8), 0

    def run(adjoint: Any) -> Callable[[], None]:
        def solved() -> None:
            nonlocal kept
            options = {"controller": sn.FixedStep(0.05), "solver": "bosh3" if compiled else "dopri5"}
            sol = sn.solve(lambda t, y: net(y), y0, [0.0, 0.33, 1.0], adjoint=adjoint, compile=compiled, **options)
            sol.ys.sum().backward()
            assert sol.stats.backward is not None
            kept = sol.stats.backward.kept
            net.zero_grad()

        return solved

    peaks = []
    for adjoint in (sn.Replay(), sn.Direct(memory=memory)):
        run(adjoint)()  # compiles
        peaks.append(peak_bytes(run(adjoint)))
    return peaks[0], peaks[1], kept


#: Of the 20 steps, each of which has activations of about 0.9 MB.
MEMORIES = {0: (0, 0), 10**6: (0, 1), 5 * 10**6: (3, 6), 10**7: (8, 12), 10**9: (20, 20)}


@pytest.mark.parametrize("memory", MEMORIES)
def test_direct_stays_within_its_budget(memory: int) -> None:
    """Beside what `Replay` needs: the states, and the activations of one step."""
    replayed, peak, kept = peak_within(memory, compiled=False)
    least, most = MEMORIES[memory]
    assert least <= kept <= most
    assert peak <= replayed + memory
    if 0 < kept < 20:
        assert peak >= replayed + 0.5 * memory - 10**6  # and uses it


def test_compiled_direct_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    replayed, peak, kept = peak_within(5 * 10**6, compiled=True)
    assert 5 <= kept <= 15
    assert peak <= replayed + 5 * 10**6


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "least", "most"), [(0, 0, 0), (10**6, 0, 3), (4 * 10**6, 4, 16), (10**9, 20, 20)])
def test_compiled_programs_stay_within_the_budget(memory: int, least: int, most: int) -> None:
    replayed, peak, kept = peak_within(memory, compiled=True)
    assert least <= kept <= most
    assert peak <= replayed + memory

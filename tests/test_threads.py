"""Solves in several threads and processes: right, or refused. The default generators belong to the whole process."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import thread_programs
import torch
from compiled import replace_back_end
from torch import Tensor, nn
from torch.utils.data import DataLoader

import seminode as sn
from seminode._compile.dispatch_mode import DispatchMode
from seminode._compile.stance import tracing, uncompiled
from seminode._compile.torch_private import compiler_loaded, dispatch_flags
from seminode._field import random_numbers
from seminode.adjoints._autograd import FunctionAdjoint as Adjoint

ADJOINTS = [
    *(sn.Direct(), sn.Direct(memory="1MB"), sn.Replay(), sn.Checkpointed(2), sn.Reversible(), sn.Backsolve()),
    *(sn.Interpolating(), sn.Quadrature()),
]


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """The results of work(0), work(1), … from as many threads at a time; an exception is a result too."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = work(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    return results


def in_another_thread(work: Callable[[], Any]) -> Any:
    return in_threads(lambda _: work(), 1)[0]


class Decay(nn.Module):
    """y′ = −rate·m·y with a mask m of zeros and twos, so that y(1) is y(0) or y(0)·e⁻² for a rate of one.

    The mask is drawn in two halves with a pause in between. `during` is called there, with the number of the call.
    """

    def __init__(self, pause: float = 0.0, during: Callable[[int], Any] | None = None):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.calls = 0
        self.pause, self.during = pause, during

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        half = torch.ones(len(y) // 2, dtype=y.dtype)
        first = nn.functional.dropout(half, 0.5)
        call, self.calls = self.calls, self.calls + 1
        if self.during is not None:
            self.during(call)
        time.sleep(self.pause)
        return -self.rate * torch.cat([first, nn.functional.dropout(half, 0.5)]) * y


def solved(field: Decay, adjoint: Adjoint) -> tuple[Tensor, Tensor, Tensor]:
    """y(1), and the gradients of the sum of its entries with respect to y0 and to the rate."""
    y0 = torch.ones(64, dtype=torch.float64, requires_grad=True)
    y1 = forward(field, y0, adjoint).ys[-1]
    y1.sum().backward()
    assert y0.grad is not None
    assert field.rate.grad is not None
    return y1.detach(), y0.grad, field.rate.grad


def forward(field: Decay, y0: Tensor, adjoint: Adjoint) -> sn.Solution:
    solver, dt = ("reversible_heun", 1 / 32) if adjoint.name == "Reversible" else ("dopri5", 1 / 4)
    return sn.solve(field, y0, [0.0, 1.0], adjoint=adjoint, solver=solver, controller=sn.FixedStep(dt), save="last")


def mask_of(result: tuple[Tensor, Tensor, Tensor]) -> tuple[bool, ...]:
    """The mask behind a result, which must be that of one mask."""
    y1, grad_y0, grad_rate = result
    mask = y1 < 0.5
    expected = torch.exp(-2.0 * mask.to(y1))
    accuracy: dict[str, Any] = {"rtol": 0.0, "atol": 1e-3}
    torch.testing.assert_close(y1, expected, **accuracy)
    torch.testing.assert_close(grad_y0, expected, **accuracy)
    torch.testing.assert_close(grad_rate / 64, -2.0 * (mask * expected).mean(), **accuracy)
    return tuple(mask.tolist())


def refused(result: object) -> bool:
    return isinstance(result, RuntimeError) and "draws random numbers from torch's default generator" in str(result)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda adjoint: adjoint.name)
def test_random_fields_in_threads_are_right_or_refused(adjoint: Adjoint) -> None:
    def work(i: int) -> tuple[Tensor, Tensor, Tensor]:
        time.sleep(0.002 * i)
        return solved(Decay(pause=1e-4), adjoint)

    torch.manual_seed(0)
    results = in_threads(work, 8)
    right = [result for result in results if not isinstance(result, Exception)]
    masks = {mask_of(result) for result in right}
    assert len(masks) == len(right)  # no thread got the numbers of another
    assert [result for result in results if isinstance(result, Exception) and not refused(result)] == []
    torch.manual_seed(0)
    assert mask_of(solved(Decay(), adjoint))  # the claims have ended


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Backsolve()], ids=lambda adjoint: adjoint.name)
def test_one_random_solve_after_the_other_in_different_threads(adjoint: Adjoint) -> None:
    torch.manual_seed(3)
    expected = [mask_of(solved(Decay(), adjoint)) for _ in range(3)]
    torch.manual_seed(3)
    found = [mask_of(in_another_thread(lambda: solved(Decay(), adjoint))) for _ in range(3)]
    assert found == expected


@pytest.mark.usefixtures("no_other_threads")
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda adjoint: adjoint.name)
@pytest.mark.parametrize("call", [0, 1, 9, "backward"])
def test_a_thread_that_draws_during_an_evaluation_is_noticed(call: int | str, adjoint: Adjoint) -> None:
    if call == "backward":
        counted = Decay()
        y0 = torch.ones(64, dtype=torch.float64, requires_grad=True)
        sol = forward(counted, y0, adjoint)
        call = counted.calls
        sol.ys.sum().backward()
        if counted.calls == call:
            pytest.skip("its backward pass does not evaluate the field")
    field = Decay(during=lambda i: in_another_thread(lambda: torch.rand(3)) if i == call else None)
    with pytest.raises(RuntimeError, match="another thread has drawn from it"):
        solved(field, adjoint)
    mask_of(solved(Decay(), adjoint))


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda adjoint: adjoint.name)
@pytest.mark.parametrize("call", [0, 1, 2, 9])
def test_beside_an_idle_thread_a_thread_that_draws_does_no_harm(call: int, adjoint: Adjoint) -> None:
    done = threading.Event()
    idle = threading.Thread(target=done.wait, daemon=True)
    idle.start()
    field = Decay(during=lambda i: in_another_thread(lambda: torch.rand(3)) if i == call else None)
    result = in_threads(lambda _: solved(field, adjoint), 1)[0]
    done.set()
    idle.join(60.0)
    assert refused(result) or mask_of(result)


@pytest.mark.usefixtures("no_other_threads")
@pytest.mark.parametrize("call", [0, 1, 9])
def test_a_random_solve_during_another_one(call: int) -> None:
    inner: list[Any] = []
    # Adjoints that detect parameters begin anew after an error in the first evaluation, and succeed.
    adjoint = sn.Direct()

    def during(i: int) -> None:
        if i == call:
            inner.append(in_another_thread(lambda: solved(Decay(), adjoint)))

    with pytest.raises(RuntimeError, match="draws random numbers"):
        solved(Decay(during=during), adjoint)
    # Nobody has claimed the generators before the end of the first evaluation.
    if call == 0:
        mask_of(inner[0])
    else:
        assert "another thread solves or differentiates a random field" in str(inner[0])


def test_a_thread_that_sets_the_numbers_of_the_first_evaluation_back_hides_nothing() -> None:
    """After the first evaluation the generator is where it was before, as if nothing had been drawn."""
    torch.manual_seed(0)
    state = torch.get_rng_state()

    def neighbour() -> None:
        with random_numbers.releasing():
            random_numbers.claim()
            torch.set_rng_state(state)

    class Sneaky(Decay):
        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            k = super().forward(t, y)
            if self.calls == 1:
                in_another_thread(neighbour)
            return k

    with pytest.raises(RuntimeError, match="another thread solves or differentiates"):
        solved(Sneaky(), sn.Direct())


@pytest.mark.parametrize("norm", [None, "auto"])
@pytest.mark.parametrize("compile", [False, True])
def test_a_neighbour_that_draws_is_no_business_of_a_deterministic_field(
    compile: bool, norm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_back_end(monkeypatch)
    numbers: list[float] = []
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            numbers.append(float(torch.rand(())))
            time.sleep(2e-5)  # which lets the solves get on

    def solve() -> tuple[Tensor, sn.Stats]:
        y0 = torch.ones(3, dtype=torch.float64, requires_grad=True), torch.zeros(1, dtype=torch.float64)
        options: dict[str, Any] = {} if norm is None else {"norm": norm}
        sol = sn.solve(lambda t, y: (-y[0], y[0].sum()[None]), y0, [0.0, 1.0], compile=compile, **options)
        return torch.autograd.grad(sol.ys[1][-1].sum(), y0[0])[0], sol.stats

    torch.manual_seed(0)
    alone, stats = solve()
    neighbour = threading.Thread(target=draw, daemon=True)
    neighbour.start()
    for _ in range(5):
        found, beside = solve()
        assert torch.equal(found, alone)
        assert beside.nfe == stats.nfe
    done.set()
    neighbour.join(60.0)
    torch.manual_seed(0)
    # None of the numbers was drawn twice, and none was lost.
    assert numbers == [float(torch.rand(())) for _ in numbers]


def test_a_field_that_draws_at_some_times_only() -> None:
    """Its evaluations leave the generators in different states; each is seen to be its own by evaluating twice."""
    calls = 0

    def field(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        noise = torch.randn(5, dtype=y.dtype)
        return noise * y + (torch.randn(5, dtype=y.dtype) if t > 0.5 else 0.0)

    torch.manual_seed(0)
    state, y0 = torch.get_rng_state(), torch.ones(5, dtype=torch.float64)
    sol = sn.solve(field, y0, [0.0, 1.0], jumps=[0.5], rtol=1e-9, atol=1e-9)
    assert calls == sol.stats.nfe + sol.stats.checks
    torch.set_rng_state(state)
    noise, late = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    half = (0.5 * noise).exp()
    expected = half * half + late / noise * (half - 1.0)
    torch.testing.assert_close(sol.ys[-1], expected, rtol=1e-6, atol=1e-6)


def test_an_interrupt_ends_the_claim() -> None:
    def interrupt(call: int) -> None:
        if call == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solved(Decay(during=interrupt), sn.Replay())
    mask_of(in_another_thread(lambda: solved(Decay(), sn.Replay())))


@pytest.mark.usefixtures("no_other_threads")
def test_a_random_solve_inside_the_field_of_another_one() -> None:
    """In one thread: the inner solve does not end the claim of the outer one."""
    claimed: list[bool] = []

    def outer(t: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn((), dtype=y.dtype)
        inner = sn.solve(lambda t, x: -x * torch.rand(()), y, [0.0, 0.1], controller=sn.FixedStep(0.1)).ys[-1]
        claimed.append("thread" in random_numbers._claim)
        return noise * inner

    sn.solve(outer, torch.ones(2, dtype=torch.float64), [0.0, 1.0], controller=sn.FixedStep(0.5))
    assert claimed[0] is False
    assert all(claimed[1:])
    assert not random_numbers._claim


class Net(nn.Module):
    def __init__(self, seed: int, width: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64))
        self.seed = seed

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y @ self.weight) * torch.cos(t + self.seed) - y


@pytest.mark.parametrize("same", [False, True], ids=["different", "same"])
@pytest.mark.parametrize(
    ("adjoint", "compile"),
    [(sn.Direct(), False), (sn.Replay(), False), (sn.Backsolve(), False), (sn.Replay(), True)],
    ids=["Direct", "Replay", "Backsolve", "compiled"],
)
def test_deterministic_fields_in_threads(
    adjoint: Adjoint, same: bool, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_back_end(monkeypatch)
    nets = [Net(i % 2, 2 + i // 2 % 2) for i in range(16)]
    if same:
        nets = nets[:1] * 16

    def work(i: int) -> tuple[Tensor, Tensor]:
        y0 = torch.linspace(0.1, 1.0, nets[i].weight.shape[0], dtype=torch.float64)
        sol = sn.solve(nets[i], y0, [0.0, 1.0], adjoint=adjoint, compile=compile)
        return sol.ys, torch.autograd.grad(sol.ys[-1].sum(), nets[i].weight)[0]

    results = in_threads(work, 16)
    assert [result for result in results if isinstance(result, Exception)] == []
    for result, expected in zip(results, map(work, range(16)), strict=True):
        for found, wanted in zip(result, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_threads_that_run_compiled_code_eagerly_for_a_while_leave_the_compiler_as_it_was() -> None:
    """One begins before the other and ends before it: the switch is back only when both have ended."""
    seen: list[int] = []

    def back_end(module: Any, examples: Any) -> Any:
        seen.append(1)
        return module.forward

    compiled = torch.compile(lambda x: x + 1.0, backend=back_end)
    torch.compiler.set_stance("default")  # loads the compiler
    assert compiler_loaded()
    first, second = uncompiled(), uncompiled()
    first.__enter__()
    in_another_thread(second.__enter__)
    first.__exit__(None, None, None)
    compiled(torch.ones(2))
    assert seen == []
    with tracing():
        compiled(torch.ones(2))
    assert seen == [1]
    in_another_thread(lambda: second.__exit__(None, None, None))
    compiled(torch.ones(3))
    assert seen == [1, 1]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_threads_in_modes_leave_the_flags_of_torch_as_they_were() -> None:
    """One enters before the other and leaves before it. Torch 2.8 compiles nothing while a flag says that one is in."""
    before = dispatch_flags()
    assert before
    assert not any(before.values())
    entered, leave = threading.Event(), threading.Event()

    def second() -> None:
        with DispatchMode():
            entered.set()
            assert leave.wait(60.0)

    with DispatchMode():
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(60.0)
    leave.set()
    thread.join()
    assert dispatch_flags() == before


def test_a_copy_of_the_process_is_not_bound_by_claims_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    sn.solve(Net(1, 3), torch.ones(3, dtype=torch.float64), [0.0, 1.0], compile=True)
    release = threading.Event()
    claimed = threading.Event()

    def hold() -> None:
        with random_numbers.releasing():
            random_numbers.claim()
            claimed.set()
            release.wait(60.0)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    claimed.wait(60.0)
    try:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=thread_programs.solve_and_send, args=(sender,), daemon=True)
        child.start()
        assert receiver.poll(60.0)
        assert receiver.recv() == pytest.approx(thread_programs.EXPECTED, rel=1e-6)
        child.join(60.0)
    finally:
        release.set()
        holder.join(60.0)


@pytest.mark.slow
def test_a_new_process_solves_after_a_compile_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    sn.solve(Net(1, 3), torch.ones(3, dtype=torch.float64), [0.0, 1.0], compile=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(thread_programs.solve_all) == pytest.approx(thread_programs.EXPECTED, rel=1e-6)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX, if other tests have loaded it
def test_workers_of_a_data_loader_solve() -> None:
    loader = DataLoader(thread_programs.Solves(6), batch_size=3, num_workers=2, multiprocessing_context="fork")
    for ends, rates in loader:
        torch.testing.assert_close(ends, torch.exp(-rates), rtol=1e-5, atol=0.0)
        assert math.isfinite(float(ends.sum()))

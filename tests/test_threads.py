"""Solves in several threads and processes: each is right, whatever the others do."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import seminode as sn
from seminode._field import locks, randomness
from seminode.solvers import SciPy

THREADS = 16


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """The results of `work` in threads that start together; the first error is raised here."""
    found: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        barrier.wait()
        try:
            found[i] = work(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def masked_decay(t: Tensor, y: Tensor) -> Tensor:
    """y' = −m·y with a mask m of zeros and twos: y(1) = y(0) where m is zero, and y(0)·exp(−2) elsewhere."""
    time.sleep(0)  # other threads get their turn between what is saved and what is drawn
    return -functional.dropout(torch.ones_like(y), 0.5) * y


ADJOINTS = [
    sn.Replay(),
    sn.Direct(),
    sn.Checkpointed(4),
    sn.Backsolve(),
    sn.Interpolating(),
    sn.Quadrature(),
]


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda adjoint: type(adjoint).__name__)
def test_random_fields_in_threads(adjoint: Any) -> None:
    """A mask that changed during a solve would leave values between the two."""

    def work(i: int) -> tuple[Tensor, Tensor]:
        y0 = torch.ones(40, dtype=torch.float64, requires_grad=True)
        y1 = sn.solve(masked_decay, y0, [0.0, 1.0], rtol=1e-6, atol=1e-8, adjoint=adjoint).ys[-1]
        (gradient,) = torch.autograd.grad(y1.sum(), y0)
        return y1.detach(), gradient

    found = in_threads(work)
    for y1, gradient in found:
        exact = torch.where(y1 > 0.5, 1.0, torch.exp(torch.tensor(-2.0, dtype=torch.float64)))
        torch.testing.assert_close(y1, exact, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=0.0)
        assert 0 < int((y1 > 0.5).sum()) < 40
    masks = {tuple((y1 > 0.5).tolist()) for y1, _ in found}
    assert len(masks) == THREADS  # every solve draws its own


@pytest.fixture
def another_thread() -> Any:
    """A thread that does nothing, so that a solve is not alone."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.mark.usefixtures("another_thread")
def test_numbers_that_are_drawn_outside_of_solves_are_noticed() -> None:
    """Here the field itself draws what another thread might: more at some times than at others."""
    chances = iter([3, 1, 4, 1, 5] * 100)

    def disturbed_always(t: Tensor, y: Tensor) -> Tensor:
        torch.rand(next(chances))
        return masked_decay(t, y)

    with pytest.raises(RuntimeError, match=r"another thread drew numbers .* Draw numbers in other threads from torch"):
        sn.solve(disturbed_always, torch.ones(3), [0.0, 1.0])

    accidents = {4, 9, 10}
    count = iter(range(1000))

    def disturbed_sometimes(t: Tensor, y: Tensor) -> Tensor:
        if next(count) in accidents:
            torch.rand(1)
        return masked_decay(t, y)

    y0 = torch.ones(40, dtype=torch.float64)
    y1 = sn.solve(disturbed_sometimes, y0, [0.0, 1.0], rtol=1e-6, atol=1e-8).ys[-1]
    exact = torch.where(y1 > 0.5, 1.0, torch.exp(torch.tensor(-2.0, dtype=torch.float64)))
    torch.testing.assert_close(y1, exact, rtol=1e-5, atol=0.0)


@pytest.mark.usefixtures("another_thread")
def test_how_many_numbers_are_drawn_may_depend_on_the_state() -> None:
    def field(t: Tensor, y: Tensor) -> Tensor:
        torch.rand(int(10 * float(t)) + 1)
        return -y

    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y1 = sn.solve(field, y0, [0.0, 1.0], rtol=1e-8, atol=1e-8).ys[-1]
    (gradient,) = torch.autograd.grad(y1.sum(), y0)
    exact = torch.exp(-torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(y1.detach(), exact, rtol=1e-7, atol=0.0)
    torch.testing.assert_close(gradient, exact, rtol=1e-7, atol=0.0)


def test_generators_end_as_without_threads(request: pytest.FixtureRequest) -> None:
    def after() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        y0 = torch.ones(5, requires_grad=True)
        y1 = sn.solve(masked_decay, y0, [0.0, 1.0]).ys[-1]
        y1.sum().backward()
        return y1.detach(), torch.rand(3)

    y1, numbers = after()
    request.getfixturevalue("another_thread")
    again, same_numbers = after()
    assert torch.equal(y1, again)
    assert torch.equal(numbers, same_numbers)


@pytest.mark.usefixtures("another_thread")
def test_a_solve_that_gets_no_turn_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field of one solve waits for another solve, in another thread, whose field is random as well."""
    monkeypatch.setattr(randomness, "WAIT", 0.1)
    monkeypatch.setattr(locks, "PATIENCE", 0.1)

    def waiting(t: Tensor, y: Tensor) -> Tensor:
        torch.rand(1)
        in_threads(lambda i: sn.solve(masked_decay, torch.ones(2), [0.0, 1.0]), count=1)
        return -y

    with pytest.raises(RuntimeError, match=r"Does that field wait for this solve\?"):
        sn.solve(waiting, torch.ones(2), [0.0, 1.0])
    assert len(in_threads(lambda i: sn.solve(masked_decay, torch.ones(2), [0.0, 1.0]), count=2)) == 2


def test_filters_of_warnings_stay_as_they_are() -> None:
    """Filters belong to the process: two threads that change and restore them could leave them changed."""

    def field(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        time.sleep(0)
        return -y[0], y[0]

    def work(i: int) -> Tensor:
        y0 = (torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
        if i % 2:
            return sn.solve(field, y0, [0.0, 1.0], norm="auto", rtol=1e-6, atol=1e-8).ys[1][-1]
        return sn.solve(field, y0, [0.0, 1.0], solver=SciPy("RK45"), rtol=1e-6, atol=1e-8).ys[1][-1]

    for found in in_threads(work, count=8):
        torch.testing.assert_close(found, 1 - torch.exp(-torch.ones(2, dtype=torch.float64)), rtol=1e-5, atol=0.0)
    # What solves set inside, for all categories.
    assert not {("ignore", None, Warning, None, 0), ("always", None, Warning, None, 0)} & set(warnings.filters)


# Compiled solves.


class Network(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def solved(field: nn.Module, size: int, **options: Any) -> list[Tensor]:
    """The final state, and gradients by y0 and the parameters."""
    y0 = torch.linspace(0, 1, 4 * size, dtype=torch.float64).reshape(size, 4).requires_grad_()
    y1 = sn.solve(field, y0, [0.0, 1.0], rtol=1e-6, atol=1e-8, **options).ys[-1]
    return [y1.detach(), *torch.autograd.grad(y1.square().sum(), [y0, *field.parameters()])]


def compare(field: Sequence[nn.Module], sizes: Sequence[int]) -> None:
    expected = [solved(field[i], sizes[i]) for i in range(THREADS)]
    # A solve that runs eagerly because it could not be compiled warns, and warnings are errors.
    found = in_threads(lambda i: [solved(field[i], sizes[i], compile=i % 4 != 3) for _ in range(2)])
    for twice, right in zip(found, expected, strict=True):
        for each in twice:
            torch.testing.assert_close(each, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ("different", "same"),
        pytest.param("same", "same", marks=pytest.mark.slow),
        pytest.param("same", "different", marks=pytest.mark.slow),
        pytest.param("different", "different", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_eager_solves_in_threads(fields: str, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_back_end(monkeypatch)
    networks = [Network(i if fields == "different" else 0) for i in range(THREADS)]
    networks = networks if fields == "different" else [networks[0]] * THREADS
    compare(networks, [2 + i % 3 if sizes == "different" else 3 for i in range(THREADS)])


def test_the_compiler_stays_on() -> None:
    """Eager solves switch it off for their first evaluation, for the whole process."""
    import torch._dynamo.eval_frame as eval_frame

    def field(t: Tensor, y: Tensor) -> Tensor:
        time.sleep(0)
        return -y

    in_threads(lambda i: [sn.solve(field, torch.ones(2, requires_grad=True), [0.0, 1.0]) for _ in range(3)], 8)
    assert eval_frame._stance.stance == "default"


@pytest.mark.slow
def test_programs_of_inductor_in_threads() -> None:
    compare([Network(i % 2) for i in range(THREADS)], [3] * THREADS)


# Processes.


def _solve_in_a_child(connection: Any, seed: int, stub: bool) -> None:
    torch.set_num_threads(1)
    if stub:
        with pytest.MonkeyPatch.context() as patch:
            replace_back_end(patch)
            connection.send([x.numpy() for x in solved(Network(seed), 3, compile=True)])
    else:
        connection.send([x.numpy() for x in solved(Network(seed), 3, compile=True)])
    connection.close()


def _check_child(method: str, stub: bool) -> None:
    expected = solved(Network(1), 3)
    context: Any = multiprocessing.get_context(method)
    mine, theirs = context.Pipe()
    process = context.Process(target=_solve_in_a_child, args=(theirs, 1, stub))
    process.start()
    theirs.close()
    try:
        assert mine.poll(200.0), "the child does not answer"
        found = mine.recv()
    finally:
        process.join(10.0)
        if process.is_alive():
            process.kill()
    for x, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(x), right, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_solves_after_a_compiled_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another thread holds the locks at the fork, which nobody would ever release in the child."""
    replace_back_end(monkeypatch)
    solved(Network(0), 3, compile=True)
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.compiler.turn(), locks.exclusive():
            held.set()
            end.wait(300.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, about forks with threads
            _check_child("fork", stub=True)
    finally:
        end.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_compile_after_a_compiled_solve(method: str) -> None:
    solved(Network(0), 3, compile=True)
    _check_child(method, stub=False)


class Solutions(Dataset[Tensor]):
    """Items that are solved for when they are asked for, with random fields and others."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        y0 = torch.ones(40, dtype=torch.float64)
        field = masked_decay if i % 2 else lambda t, y: -y
        return sn.solve(field, y0, [0.0, 1.0], rtol=1e-6, atol=1e-8).ys[-1]


def test_workers_of_a_data_loader_solve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, about forks with threads
        found = torch.cat(list(DataLoader(Solutions(), batch_size=2, num_workers=2)))
    once, twice = torch.exp(torch.tensor([-1.0, -2.0], dtype=torch.float64))
    for i, y1 in enumerate(found):
        exact = torch.where(y1 > 0.5, 1.0, twice) if i % 2 else once.expand(40)
        torch.testing.assert_close(y1, exact, rtol=1e-5, atol=0.0)

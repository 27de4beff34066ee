"""`compile="background"`: solves are eager until the programs are there, compiled afterwards, and never wait."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import forget_programs, replace_back_end, run_graph
from torch import Tensor, nn

import seminode as sn
from seminode._compile import background
from seminode._compile.front_end import FRONT_ENDS
from seminode._compile.process import BackgroundProcess
from seminode.extending import Observer as StepObserver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs os.fork")

DIRECT, REPLAY = sn.Direct(), sn.Replay()


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.k * y * torch.cos(t)


class BackEnd:
    """Counts the programs made in this process; in a copy of it, waits until it is released."""

    def __init__(self, released: Path):
        self.released, self.calls, self.error = released, 0, False

    def __call__(self, module: Any, examples: list[Any]) -> Any:
        self.calls += 1
        while not self.released.exists():
            time.sleep(0.005)
        if self.error:
            raise RuntimeError("no room on the device")
        return run_graph(module, examples)


@pytest.fixture
def back_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BackEnd]:
    torch._dynamo.reset()
    stub = BackEnd(tmp_path / "released")
    replace_back_end(monkeypatch, stub)
    monkeypatch.setattr(background, "_kinds", OrderedDict())
    monkeypatch.setattr(background, "_processes", [])
    monkeypatch.setattr(background, "AFTER", 0.0)
    yield stub
    for each in background._processes:
        each.end()
    torch._dynamo.reset()


def solve(field: Any, compile: Any = "background", n: int = 3, **options: Any) -> tuple[Tensor, Tensor]:
    """The solution, and its gradient with respect to y0."""
    y0 = torch.linspace(1, 2, n, dtype=torch.float64).requires_grad_()
    ts = options.pop("ts", [0.0, 0.4, 1.0])
    options = {"solver": "bosh3"} | options
    ys = sn.solve(field, y0, ts, compile=compile, **options).ys
    ys.square().sum().backward()
    assert y0.grad is not None
    return ys.detach(), y0.grad


def kind() -> Any:
    (only,) = background._kinds.values()
    return only


def settle() -> None:
    """Until the process in the background has reported. That is noticed by the next solve."""
    process, end = kind()._process, time.monotonic() + 120
    while process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("adjoint", [REPLAY, DIRECT, sn.Backsolve()], ids=lambda x: type(x).__name__)
def test_eager_first_and_compiled_later(adjoint: Any, back_end: BackEnd) -> None:
    field = Field()
    eager = solve(field, False, adjoint=adjoint)
    field.k.grad = None
    for _ in range(4):
        assert all(map(torch.equal, solve(field, adjoint=adjoint), eager))
    assert isinstance(kind()._process, BackgroundProcess)
    assert back_end.calls == 0  # in this process
    expected = field.k.grad / 4  # type: ignore[operator]
    back_end.released.touch()
    settle()
    assert back_end.calls == 0
    for _ in range(2):
        field.k.grad = None
        torch.testing.assert_close(solve(field, adjoint=adjoint), eager, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(field.k.grad, expected, rtol=1e-12, atol=1e-12)
    assert back_end.calls > 0
    made = back_end.calls
    solve(field, adjoint=adjoint)
    assert back_end.calls == made


def test_a_program_that_cannot_be_made_warns_once(back_end: BackEnd) -> None:
    field, back_end.error = Field(), True
    back_end.released.touch()
    eager = solve(field, False)
    solve(field)
    settle()
    with pytest.warns(sn.CompileWarning, match="^compile: the solve runs eagerly, since RuntimeError: no room"):
        solve(field)
    for _ in range(3):  # a second warning would be an error
        assert all(map(torch.equal, solve(field), eager))
    assert back_end.calls == 0


def test_a_field_that_cannot_be_captured_warns_once(back_end: BackEnd) -> None:
    def field(t: Tensor, y: Tensor) -> Tensor:
        return -y if float(y.detach().sum()) > 0 else y

    solve(field)
    settle()
    with pytest.warns(sn.CompileWarning, match="the solve runs eagerly"):
        solve(field)
    solve(field)


def test_a_process_that_dies_is_no_error(back_end: BackEnd) -> None:
    field = Field()
    eager = solve(field)
    os.kill(kind()._process.pid, signal.SIGKILL)
    settle()
    with pytest.warns(sn.CompileWarning, match="ended without a result"):
        again = solve(field)
    assert all(map(torch.equal, again, eager))


def test_what_cannot_be_compiled_starts_no_process(back_end: BackEnd) -> None:
    options: dict[str, Any] = {"solver": "implicit_euler", "controller": sn.FixedStep(0.5)}
    with pytest.warns(sn.CompileWarning, match="not an explicit Runge–Kutta method"):
        solve(Field(), **options)
    solve(Field(), **options)
    assert not background._processes


def test_where_a_process_cannot_be_copied_the_first_solve_waits(
    back_end: BackEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_can_copy", lambda problem: False)
    back_end.released.touch()
    with pytest.warns(sn.CompileWarning, match="needs Linux"):
        solve(Field())
    solve(Field())
    assert back_end.calls > 0


def test_solves_that_take_no_time_are_not_compiled(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AFTER", 1e9)
    for _ in range(5):
        solve(Field())
    assert not background._processes
    assert kind().seconds > 0
    kind().seconds = 2e9
    solve(Field())
    assert len(background._processes) == 1


def test_a_smaller_last_batch_compiles_beside_the_loop(back_end: BackEnd) -> None:
    """It has programs of its own, which are made after those of the other size; no solve waits for either."""
    field = Field()
    for n in (4, 3, 4, 3):
        solve(field, n=n)
    whole, last = background._kinds.values()
    assert whole._process is not None
    assert last._process is None  # one at a time
    back_end.released.touch()
    end = time.monotonic() + 120
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while not (whole._ready and last._ready):
            assert time.monotonic() < end
            solve(field, n=4)
            solve(field, n=3)
            time.sleep(0.05)
    made = back_end.calls
    for n in (4, 3, 4, 3):
        solve(field, n=n)
    assert back_end.calls == made


def test_a_function_made_anew_is_the_same_kind(back_end: BackEnd) -> None:
    net = Field()
    for rate in range(3):
        solve(lambda t, y, rate=rate: net(t, y) * 2)
    assert len(background._kinds) == 1
    solve(lambda t, y: net(t, y) * 2)  # other code
    assert len(background._kinds) == 2


def test_fields_are_not_kept_alive(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    class Callable:
        def __init__(self) -> None:
            self.net = Field()

        def __call__(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(t, y)

        def method(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(t, y)

    monkeypatch.setattr(background, "AFTER", 1e9)

    def run() -> list[Any]:
        net, owner = Field(), Callable()
        for field in (net, owner, owner.method, lambda t, y: net(t, y), functools.partial(owner)):
            solve(field)
        return [weakref.ref(net), weakref.ref(owner)]

    alive = run()
    assert len(background._kinds) == 5
    gc.collect()
    assert [x() for x in alive] == [None, None]


def test_kinds_are_bounded(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AFTER", 1e9)
    monkeypatch.setattr(background, "KINDS", 5)
    for n in range(1, 12):
        solve(Field(), n=n)
    assert len(background._kinds) == 5


def test_more_kinds_than_the_front_end_keeps_stay_eager(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, they would push each other out of the cache and be traced in every solve."""
    monkeypatch.setattr(background, "AFTER", 1e9)
    for n in range(1, FRONT_ENDS + 4):
        solve(Field(), n=n)
    kinds = list(background._kinds.values())
    for each in kinds[:FRONT_ENDS]:
        each._ready = True
    kinds[-1].seconds = 2e9
    solve(Field(), n=FRONT_ENDS + 3)
    assert not background._processes
    kinds[0]._ready = False
    solve(Field(), n=FRONT_ENDS + 3)
    assert len(background._processes) == 1


def test_options_are_kinds_of_their_own(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AFTER", 1e9)
    others: list[dict[str, Any]] = [{}, {"adjoint": DIRECT}, {"solver": "dopri5"}, {"norm": "max"}, {"ts": [0.0, 1.0]}]
    for _ in range(2):
        for options in others:
            solve(Field(), **options)
        with torch.no_grad():
            sn.solve(Field(), torch.ones(3, dtype=torch.float64), [0.0, 0.4, 1.0], solver="bosh3", compile="background")
    assert len(background._kinds) == len(others) + 1


# What the copy does


def rehearsed(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch, field: Any, y0: Tensor, **options: Any) -> Any:
    """Do in this process what a copy of it does."""
    back_end.released.touch()
    outcomes = []

    class Here:
        def __init__(self, work: Any):
            outcomes.append(work())

        def poll(self) -> None: ...

        def end(self) -> None: ...

    monkeypatch.setattr(background, "BackgroundProcess", Here)
    sn.solve(field, y0, options.pop("ts", [0.0, 0.4, 1.0]), compile="background", **options)
    (outcome,) = outcomes
    return outcome


@pytest.mark.parametrize("ts", [[0.0, 1.0], [0.0, 1.0, 59.0, 60.0], [60.0, 0.0]])
@pytest.mark.parametrize("adjoint", [REPLAY, DIRECT, sn.Backsolve()], ids=lambda x: type(x).__name__)
def test_all_programs_are_made(
    adjoint: Any, ts: list[float], back_end: BackEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of solves with many steps, of which the copy takes a few only."""
    field = Field()
    assert rehearsed(back_end, monkeypatch, field, torch.ones(3, dtype=torch.float64), adjoint=adjoint, ts=ts) is None
    made = back_end.calls
    assert made >= 3
    assert field.k.grad is None
    y0 = torch.ones(3, dtype=torch.float64)
    ys = sn.solve(field, y0, ts, adjoint=adjoint, compile=True).ys
    ys.square().sum().backward()
    assert back_end.calls == made


def test_few_steps_are_taken(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    def field(t: Tensor, y: Tensor) -> Tensor:
        times.append(float(t))
        return -y

    y0 = torch.ones(3, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"controller": sn.FixedStep(0.1), "solver": "rk4", "ts": [0.0, 100.0]}
    monkeypatch.setattr(background, "AFTER", 1e9)
    sn.solve(field, y0, compile="background", **options)
    whole = len(times)
    kind().seconds = 2e9
    times.clear()
    rehearsed(back_end, monkeypatch, field, y0, **options)
    assert len(times) < whole + 20 * background.STEPS


def test_no_hooks_before_the_solve_are_called(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may talk to other processes, as those of distributed training do."""
    called: list[str] = []
    field, leaf = Field(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    field.k.register_post_accumulate_grad_hook(lambda x: called.append("parameter"))
    y0 = leaf * 2
    y0.register_hook(lambda g: called.append("state"))
    y0.grad_fn.register_hook(lambda *g: called.append("before"))  # type: ignore[union-attr]
    seen: list[Any] = []
    options: dict[str, Any] = {"observers": [Observer(seen)]}
    monkeypatch.setattr(background, "AFTER", 1e9)
    sn.solve(field, y0, [0.0, 0.4, 1.0], compile="background", **options)
    once = len(seen)
    kind().seconds = 2e9
    rehearsed(back_end, monkeypatch, field, y0, **options)
    assert called == []
    assert len(seen) == 2 * once > 0  # of the two solves themselves
    assert leaf.grad is None
    assert field.k.grad is None


class Observer(StepObserver):
    def __init__(self, seen: list[Any]):
        self._seen = seen

    def accepted(self, step: Any, ratio: float) -> None:
        self._seen.append(ratio)


# The argument


@pytest.mark.parametrize(("value", "error"), [("later", ValueError), (1, TypeError), (None, TypeError)])
def test_other_values_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match='compile: expected True, False or "background", found'):
        sn.solve(lambda t, y: -y, torch.ones(3), [0.0, 1.0], compile=value)


def test_models_take_it(back_end: BackEnd) -> None:
    model = sn.models.NeuralODE(Field(), compile="background")
    for _ in range(2):
        model(torch.ones(2, 3, dtype=torch.float64))
    assert len(background._processes) == 1


def test_inside_a_transform_it_runs_eagerly(back_end: BackEnd) -> None:
    def loss(y0: Tensor) -> Tensor:
        options: dict[str, Any] = {"controller": sn.FixedStep(0.5), "adjoint": DIRECT, "solver": "rk4"}
        return sn.solve(lambda t, y: -y, y0, [0.0, 1.0], compile="background", **options).ys[-1].sum()

    grad = torch.func.grad(loss)(torch.ones(3, dtype=torch.float64))
    assert grad.shape == (3,)
    assert not background._kinds


@pytest.mark.slow
def test_with_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The programs that a copy has stored on disk are found there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(background, "_kinds", OrderedDict())
    monkeypatch.setattr(background, "AFTER", 0.0)
    torch._dynamo.reset()
    forget_programs(monkeypatch)
    field = Field()
    eager = solve(field, False)
    solve(field)
    assert all(map(torch.equal, solve(field), eager))
    settle()
    stored = set(tmp_path.rglob("*.so"))
    assert len(stored) >= 3
    torch.testing.assert_close(solve(field), eager, rtol=1e-12, atol=1e-12)
    assert kind()._ready
    assert set(tmp_path.rglob("*.so")) == stored  # nothing was compiled in this process

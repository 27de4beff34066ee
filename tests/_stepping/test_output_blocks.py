"""Outputs inside of steps that are computed for several steps together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor

import seminode as sn
from seminode._stepping import output_blocks
from seminode._stepping.interpolation import evaluate, weights_at
from seminode._stepping.output_blocks import MANY, STEPS, Block, WaitingOutputs
from seminode.solvers import BY_NAME

D = torch.float64


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step on its own, as where states are large."""
    monkeypatch.setattr(output_blocks, "SMALL", -1)


@pytest.mark.parametrize("name", ["dopri5", "tsit5", "bosh3", "dopri8", "heun"])
def test_weights_of_a_block_are_those_of_its_steps(name: Any) -> None:
    matrix = BY_NAME[name].interpolant
    block = Block()
    block.add(0.5, [0.25, 0.75, 1.0])
    block.add(-2.0, [0.125])
    weights = block.weights(matrix, torch.zeros((), dtype=D))
    expected = torch.zeros(2, 3, len(matrix), dtype=D)
    for i, (dt, xs) in enumerate(zip((0.5, -2.0), block.xs, strict=True)):
        for n, x in enumerate(xs):
            expected[i, n] = dt * torch.tensor(weights_at(matrix, x), dtype=D)
    torch.testing.assert_close(weights, expected, rtol=1e-13, atol=1e-14)
    assert not weights[1, 1:].any()


def test_steps_of_small_states_share_operations() -> None:
    """Up to 1024 entries, in blocks of at most 64 steps and 256 outputs."""
    for shape in ((1024,), (2, 512), ()):
        assert output_blocks.shares(torch.zeros(shape))
    for shape in ((1025,), (2, 513), (10_000,)):
        assert not output_blocks.shares(torch.zeros(shape))
    assert (STEPS, MANY) == (64, 256)


def test_a_block_is_bounded() -> None:
    block = Block()
    assert block.has_room(10 * MANY)  # one step, however many outputs it has
    for _ in range(STEPS):
        assert block.has_room(1)
        block.add(1.0, [0.5])
    assert not block.has_room(1)
    wide = Block()
    wide.add(1.0, [0.5] * (MANY // 2))
    assert wide.has_room(1)
    assert not wide.has_room(MANY // 2 + 1)  # the other step would have as many gaps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_outputs_together_are_those_of_single_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = BY_NAME["dopri5"].interpolant
    waiting, expected = WaitingOutputs(matrix), []
    for place, (dt, xs) in enumerate([(0.5, [0.1]), (-0.3, [0.2, 0.7, 0.9]), (0.25, [0.5, 0.6])]):
        y0, slopes = torch.randn(shape, dtype=dtype), list(torch.randn(len(matrix), *shape, dtype=dtype))
        waiting.add(10 + place + place // 2, y0, dt, slopes, xs)
        expected.append(evaluate(matrix, y0, dt, slopes, xs))
    found = waiting.compute()
    # The first two steps follow each other.
    assert [places for places, _ in found] == [slice(10, 12), slice(13, 14)]
    torch.testing.assert_close(found[0][1], torch.cat(expected[:2]))
    torch.testing.assert_close(found[1][1], expected[2])


def oscillator(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], -(1.0 + 0.1 * torch.cos(t)) * torch.sin(y[0])])


@pytest.mark.parametrize("name", ["dopri5", "tsit5", "bosh3", "dopri8", "heun", "kvaerno3", "leapfrog"])
@pytest.mark.parametrize("end", [40.0, -40.0])
def test_a_long_solve(monkeypatch: pytest.MonkeyPatch, name: Any, end: float) -> None:
    """More steps than a block has, with none, one and many outputs in them, some at their ends."""
    monkeypatch.setattr(output_blocks, "STEPS", 16)
    ts = [0.0, *(end * x for x in (0.001, 0.001, 0.002)), *(end * n / 97 for n in range(1, 97)), end, end]
    options: dict[str, Any] = {"solver": name}
    options |= {"rtol": 1e-5} if BY_NAME[name].error_order else {"controller": sn.FixedStep(0.33)}
    field = oscillator if name != "leapfrog" else lambda t, y: (y[1], -torch.sin(y[0]))
    y0: Any = torch.tensor([1.0, 0.3], dtype=D)
    y0 = y0 if name != "leapfrog" else (y0[:1], y0[1:])
    with torch.no_grad():
        together = sn.solve(field, y0, ts, **options)
        assert together.stats.accepted > 2 * 16
        one_by_one(monkeypatch)
        alone = sn.solve(field, y0, ts, **options)
    torch.testing.assert_close(together.ys, alone.ys, rtol=1e-11, atol=1e-13)
    assert (together.stats.nfe, together.stats.accepted) == (alone.stats.nfe, alone.stats.accepted)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 2)], ids=str)
def test_states_of_any_shape(shape: tuple[int, ...]) -> None:
    y0, ts = torch.ones(shape, dtype=D), torch.linspace(0, 1, 11, dtype=D)
    with torch.no_grad():
        sol = sn.solve(lambda t, y: -y, y0, ts, rtol=1e-9)
    torch.testing.assert_close(sol.ys, torch.exp(-ts).reshape(-1, *[1] * len(shape)) * y0, rtol=1e-7, atol=1e-9)


def test_a_field_that_uses_old_results_again() -> None:
    """It may write into what it returned some steps ago, although the outputs there are computed later."""
    results = [torch.zeros(3, dtype=D) for _ in range(50)]
    count = 0

    def field(t: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return results[count % 50].copy_(-y * y.sin())

    y0, ts = torch.tensor([1.0, 2.0, 0.5], dtype=D), torch.linspace(0, 9, 91, dtype=D)
    with torch.no_grad():
        expected = sn.solve(lambda t, y: -y * y.sin(), y0, ts, rtol=1e-9)
        found = sn.solve(field, y0, ts, rtol=1e-9)
    torch.testing.assert_close(found.ys, expected.ys, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("batched", [False, True])
def test_outputs_are_not_computed_under_autocast(batched: bool) -> None:
    """Which is for the field: a field without matrix products has the same outputs with it and without."""
    y0, ts = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 3, 41)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sn.solve(lambda t, y: -y * y.sin(), y0, ts, batched=batched).ys
    expected = sn.solve(lambda t, y: -y * y.sin(), y0, ts, batched=batched).ys
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_the_slopes_of_few_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the solve: a block that is full is computed."""
    most = 0
    add = WaitingOutputs.add

    def counted(self: WaitingOutputs, *args: Any) -> None:
        nonlocal most
        add(self, *args)
        most = max(most, len(self._places))

    monkeypatch.setattr(WaitingOutputs, "add", counted)
    ts = torch.linspace(0, 100, 1001, dtype=D)
    with torch.no_grad():
        sol = sn.solve(oscillator, torch.tensor([1.0, 0.3], dtype=D), ts, rtol=1e-8)
    assert sol.stats.accepted > 3 * STEPS
    assert 1 < most <= STEPS


def test_a_solve_that_fails_returns_the_outputs_so_far() -> None:
    ts = torch.linspace(0, 10, 201, dtype=D)
    y0 = torch.tensor([1.0, 0.3], dtype=D)
    with torch.no_grad():
        part = sn.solve(oscillator, y0, ts, max_steps=7, throw=False)
        whole = sn.solve(oscillator, y0, ts)
    count = len(part.ys)
    assert 1 < count < 201
    torch.testing.assert_close(part.ys, whole.ys[:count])
    assert torch.equal(part.ts, ts[:count])


@pytest.mark.parametrize(
    ("adjoint", "name", "end"),
    [
        (sn.Direct(), "dopri5", 12.0),
        (sn.Direct(), "bosh3", -12.0),
        (sn.Direct(memory=2000), "dopri5", -12.0),
        (sn.Replay(), "bosh3", 12.0),
    ],
    ids=str,
)
def test_gradients_of_compiled_solves(monkeypatch: pytest.MonkeyPatch, adjoint: Any, name: Any, end: float) -> None:
    """The loss reads some outputs only, the last one not, and there is a jump between two of them."""
    replace_back_end(monkeypatch)
    rate = torch.tensor(0.7, dtype=D, requires_grad=True)
    y0 = torch.tensor([[1.0, 0.3], [0.2, -0.5]], dtype=D, requires_grad=True)
    ts = [end * n / 90 for n in range(91)]
    weights = torch.randn(91, 2, 2, dtype=D)
    weights[::3] = 0.0
    weights[40:60] = 0.0
    weights[-5:] = 0.0

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.sin(rate * y) - 0.2 * y * torch.where(t.abs() < 5.0, 1.0, 2.0)

    def gradients(compiled: bool) -> tuple[Tensor, ...]:
        jumps = [5.0 if end > 0.0 else -5.0]
        sol = sn.solve(field, y0, ts, solver=name, adjoint=adjoint, jumps=jumps, compile=compiled)
        return torch.autograd.grad((weights * sol.ys).sum(), [y0, rate])

    together = gradients(True)
    torch.testing.assert_close(together, gradients(False), rtol=1e-9, atol=1e-11)
    one_by_one(monkeypatch)
    torch.testing.assert_close(together, gradients(True), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [2, output_blocks.SMALL + 1])
@pytest.mark.parametrize("ts", [[0.0, 0.5, 1.0], [0.0, 0.25, 0.5, 1.0]], ids=["one", "two"])
def test_a_slope_that_no_output_reads_may_be_infinite(ts: list[float], size: int) -> None:
    """The second one of dopri5; what follows from it is bounded here."""

    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t == 0.2, torch.inf, -torch.tanh(y))

    with torch.no_grad():
        ys = sn.solve(field, torch.ones(size, dtype=D), ts, controller=sn.FixedStep(1.0)).ys
    assert bool(torch.isfinite(ys).all())

"""What a solve returns: outputs, saving control, dense output, records, progress."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode._stepping.observers import Samples, Selection
from seminode._stepping.problem import Problem
from seminode.solvers import BY_NAME, SolverName


def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


ONE = torch.ones(2, dtype=torch.float64)
TIGHT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=str)
@pytest.mark.parametrize(
    "ts",
    [[0.0, 1.0], [0.0, 0.1, 0.2, 0.9, 1.0], [1.0, 0.4, -1.0], [0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 1.0], [2.0], [3.0, 3.0]],
    ids=str,
)
def test_outputs_at_given_times(ts: list[float], adjoint: Any) -> None:
    y0 = ONE.clone().requires_grad_()
    sol = sn.solve(decay, y0, ts, adjoint=adjoint, **TIGHT)
    expected = torch.exp(-(torch.tensor(ts, dtype=torch.float64) - ts[0]))[:, None].expand(-1, 2)
    assert torch.allclose(sol.ys, expected, rtol=1e-8)
    assert torch.equal(sol.ys[0], y0)
    assert sol.ts.tolist() == ts
    assert sol.status is sn.Status.SUCCESS
    sol.ys.sum().backward()
    assert y0.grad is not None
    assert torch.allclose(y0.grad, expected.sum(0), rtol=1e-8)


def test_single_time_makes_no_evaluation() -> None:
    assert sn.solve(decay, ONE, [2.0]).stats.nfe == 0


def test_last_only() -> None:
    sol = sn.solve(decay, ONE, [0.0, 0.5, 1.0], save="last", **TIGHT)
    assert sol.ys.shape == (1, 2)
    assert sol.ts.tolist() == [1.0]
    assert float(sol.ys[0, 0]) == pytest.approx(math.exp(-1), rel=1e-8)


def test_every_step() -> None:
    sol = sn.solve(decay, ONE, [0.0, 1.0], save="steps", record=True, rtol=1e-4)
    assert sol.record is not None
    assert sol.ts.tolist() == [0.0, *(plan.t1 for plan in sol.record.accepted)]
    assert len(sol.ys) == sol.stats.accepted + 1
    assert torch.allclose(sol.ys[:, 0], torch.exp(-sol.ts), rtol=1e-3)


def test_a_function_of_time_and_state() -> None:
    y0 = {"q": ONE.clone().requires_grad_(), "p": 2 * ONE}

    def field(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"q": y["p"], "p": -y["q"]}

    def energy(t: Tensor, y: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return 0.5 * (y["q"] ** 2 + y["p"] ** 2).sum(), t * 2

    for adjoint in (sn.Direct(), sn.Replay()):
        sol = sn.solve(field, y0, [0.0, 1.0, 2.0], save=energy, adjoint=adjoint, **TIGHT)
        values, times = sol.ys
        assert torch.allclose(values, torch.full((3,), 5.0, dtype=torch.float64), rtol=1e-8)
        assert times.tolist() == [0.0, 2.0, 4.0]
        (grad,) = torch.autograd.grad(values[-1], y0["q"])
        assert torch.allclose(grad, ONE, rtol=1e-7)


def test_nested_structures_come_back_as_they_went_in() -> None:
    y0 = {"a": (torch.ones(2, 3), torch.ones(())), "b": [torch.zeros(1)]}
    sol = sn.solve(lambda t, y: {"a": (-y["a"][0], -y["a"][1]), "b": [y["b"][0]]}, y0, [0.0, 1.0, 2.0])
    assert isinstance(sol.ys["a"], tuple)
    assert isinstance(sol.ys["b"], list)
    assert sol.ys["a"][0].shape == (3, 2, 3)
    assert sol.ys["a"][1].shape == (3,)


@pytest.mark.parametrize("solver", BY_NAME)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dense_output_agrees_with_outputs(solver: SolverName, sign: float) -> None:
    """The function of time, the sampled outputs and the ends of steps are one and the same."""
    adaptive = BY_NAME[solver].error_order is not None or BY_NAME[solver].external
    options: dict[str, Any] = {"rtol": 1e-4} if adaptive else {"controller": sn.FixedStep(0.1)}
    ts = sign * torch.linspace(0, 2, 17, dtype=torch.float64)
    y0 = torch.tensor([1.0, 0.3], dtype=torch.float64)
    field = lambda t, y: torch.stack([y[1], -torch.sin(y[0])]) * sign
    sol = sn.solve(field, y0, ts, solver=solver, dense=True, record=True, **options)
    assert sol.dense is not None
    assert torch.allclose(sol.dense(ts), sol.ys, rtol=1e-12, atol=1e-13)
    assert sol.record is not None
    steps = sn.solve(field, y0, ts, solver=solver, save="steps", **options)
    assert torch.allclose(sol.dense(steps.ts), steps.ys, rtol=1e-12, atol=1e-13)
    assert sol.dense(float(ts[3])).shape == (2,)
    assert sol.dense(ts.reshape(1, 17)).shape == (1, 17, 2)
    assert (sol.dense.t0, sol.dense.t1) == (0.0, 2.0 * sign)
    for outside in (-0.1 * sign, 2.1 * sign):
        with pytest.raises(ValueError, match="t: the solution is known on"):
            sol.dense(outside)


def test_dense_output_of_no_step() -> None:
    sol = sn.solve(decay, ONE, [1.0], dense=True)
    assert sol.dense is not None
    assert torch.equal(sol.dense(1.0), ONE)


def test_dense_output_is_smooth_across_steps() -> None:
    sol = sn.solve(decay, ONE, [0.0, 3.0], dense=True, rtol=1e-3, record=True)
    assert sol.dense is not None
    assert sol.record is not None
    for plan in sol.record.accepted[:-1]:
        slopes = []
        for t in (plan.t1 - 1e-9, plan.t1 + 1e-9):
            time = torch.tensor(t, dtype=torch.float64, requires_grad=True)
            (slope,) = torch.autograd.grad(sol.dense(time)[0], time)
            slopes.append(float(slope))
        assert slopes[0] == pytest.approx(slopes[1], rel=1e-5)


def test_half_precision_is_integrated_in_single() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        y0 = torch.ones(3, dtype=dtype, requires_grad=True)
        seen = set()

        def field(t: Tensor, y: Tensor, seen: set[torch.dtype] = seen) -> Tensor:
            seen.add(y.dtype)
            return -y

        sol = sn.solve(field, y0, [0.0, 0.5, 1.0], dense=True)
        assert sol.ys.dtype == dtype
        assert seen == {dtype}
        assert sol.dense is not None
        assert sol.dense(0.5).dtype == dtype
        assert float(sol.ys[-1, 0].detach()) == pytest.approx(math.exp(-1), rel=2e-2)
        sol.ys[-1].sum().backward()
        assert y0.grad is not None
        assert float(y0.grad[0]) == pytest.approx(math.exp(-1), rel=2e-2)


def test_backward_statistics() -> None:
    net = torch.nn.Linear(2, 2).double()
    for adjoint in (sn.Direct(), sn.Replay()):
        sol = sn.solve(lambda t, y: torch.tanh(net(y)), ONE, [0.0, 1.0], adjoint=adjoint)
        assert sol.stats.backward is None
        assert "backward" not in str(sol.stats)
        sol.ys.sum().backward()
        back = sol.stats.backward
        assert back is not None
        assert back.accepted == sol.stats.accepted
        assert back.vjp_y == back.vjp_params == 6 * back.accepted
        assert back.nfe == (0 if isinstance(adjoint, sn.Direct) else back.vjp_y)
        assert "backward" in str(sol.stats)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, shown = io.StringIO(), Terminal()
    for stream in (quiet, shown):
        monkeypatch.setattr("sys.stderr", stream)
        sn.solve(decay, ONE, [0.0, 5.0], progress=True, rtol=1e-10)
    assert quiet.getvalue() == ""
    assert "solve: 100%" in shown.getvalue()
    assert shown.getvalue().endswith("\n")


def test_the_progress_bar_says_how_many_steps_were_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    sol = sn.solve(lambda t, y: -20.0 * y, ONE, [0.0, 1.0], progress=True, controller=sn.Integral(dt0=1.0))
    assert sol.stats.rejected > 0
    assert f"rejected={sol.stats.rejected}]" in shown.getvalue()


def test_solution_prints_well() -> None:
    sol = sn.solve(decay, ONE, [0.0, 1.0])
    assert repr(sol) == f"Solution(2 outputs, success, {sol.stats})"
    assert str(sol.stats) == f"nfe={sol.stats.nfe}, accepted={sol.stats.accepted}, rejected={sol.stats.rejected}"


def test_what_comes_out_is_frozen() -> None:
    sol = sn.solve(decay, ONE, [0.0, 1.0])
    for thing, name in ((sol, "ys"), (sol.stats, "nfe"), (sn.Replay(), "every"), (sn.FixedStep(0.1), "dt")):
        with pytest.raises(AttributeError):
            setattr(thing, name, 0)


@pytest.mark.parametrize(
    ("offered", "kept"), [(4, [0, 1, 2, 3]), (5, [0, 2, 4]), (8, [0, 2, 4, 6]), (9, [0, 4, 8]), (20, [0, 8, 16])]
)
def test_a_selection_is_spread_evenly(offered: int, kept: list[int]) -> None:
    selection = Selection(4)
    for item in range(offered):
        selection.offer(item)
    assert selection.items == kept


@pytest.mark.parametrize(
    ("times", "options", "inside"),
    [
        ((0.0, 1.0), {}, False),
        ((0.0, 1.0), {"controller": sn.Integral(land=False)}, True),
        ((0.0, 0.5, 1.0), {}, True),
        ((0.0, 0.5, 1.0), {"save": "last"}, False),
        ((0.0, 1.0), {"events": ("an event",)}, True),
    ],
)
def test_outputs_between_the_ends_may_lie_inside_of_steps(times: Any, options: Any, inside: bool) -> None:
    y: Any = None
    options = {"controller": sn.Integral(), **options}
    assert Problem(field=y, y0=y, ts=y, times=times, solver=y, error=y, **options).outputs_inside is inside


@pytest.mark.parametrize("end", [1.0, 1000.0, -1000.0])
def test_dense_output_knows_its_ends_as_far_as_the_dtype_can_name_them(end: float) -> None:
    sol = sn.solve(lambda t, y: 0.0 * y, torch.ones(1, dtype=torch.float64), [0.0, end], dense=True)
    assert sol.dense is not None
    for dtype in (torch.float64, torch.float32):
        known = torch.tensor(end, dtype=dtype)
        assert float(sol.dense(torch.nextafter(known, 2.0 * known))) == 1.0
    for t in (torch.tensor(end * (1.0 + 1e-14), dtype=torch.float64), end * (1.0 + 1e-6)):
        with pytest.raises(ValueError, match="t: the solution is known on"):
            sol.dense(t)


@pytest.mark.parametrize(
    ("steps", "sampled"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2]), (5, [0, 2, 4]), (100, [0, 32, 64])]
)
def test_samples_of_later_steps_are_two_however_many_steps_there_are(steps: int, sampled: list[int]) -> None:
    """The latest whose number is a power of two; the first step is that of the interval."""
    none: Any = SimpleNamespace(claim=lambda plan, cursor: cursor)
    samples = Samples(none, 0)
    for i in range(steps):
        step: Any = SimpleNamespace(sample=lambda i=i: (float(i), None, None), plan=SimpleNamespace(crosses_jump=False))
        samples.accepted(step, 0.0)
    assert samples.times == sampled


@pytest.mark.parametrize(("steps", "sampled"), [(32, list(range(32))), (33, list(range(0, 33, 2)))])
def test_samples_of_intervals_are_thirty_two_at_most(steps: int, sampled: list[int]) -> None:
    """Every step ends an interval here. Of one more, every second is kept."""
    ends: Any = SimpleNamespace(claim=lambda plan, cursor: cursor + 1)
    samples = Samples(ends, 0)
    for i in range(steps):
        step: Any = SimpleNamespace(sample=lambda i=i: (float(i), None, None), plan=SimpleNamespace(crosses_jump=False))
        samples.accepted(step, 0.0)
    assert samples.times == sampled


def test_dense_output_takes_real_times_on_the_interval() -> None:
    dense = sn.solve(decay, ONE, [2.0, 1.0], dense=True, controller=sn.FixedStep(0.25), solver="rk4").dense
    assert dense is not None
    assert repr(dense) == "DenseSolution([2, 1], 4 steps)"
    assert (dense.t0, dense.t1) == (2.0, 1.0)
    for bad in (torch.tensor([True]), torch.tensor([1.5 + 0.0j])):
        with pytest.raises(TypeError, match=rf"^t: expected real times, found dtype {bad.dtype}$"):
            dense(bad)
    for t in (0.99, 2.01, float("nan")):
        with pytest.raises(ValueError, match=rf"^t: the solution is known on \[1, 2\], found {t:g}$"):
            dense(torch.tensor([1.5, t], dtype=torch.float64))
    assert dense(torch.tensor([1, 2])).shape == (2, 2)
    assert dense(2).tolist() == pytest.approx(ONE.tolist())


@pytest.mark.parametrize("ts", [[0.0, 1.0], [1.0, 0.0]])
def test_dense_output_at_the_ends_of_steps_is_the_state_there(ts: list[float]) -> None:
    options: dict[str, Any] = {"controller": sn.FixedStep(0.3), "solver": "rk4"}
    steps = sn.solve(decay, ONE, ts, save="steps", **options)
    dense = sn.solve(decay, ONE, ts, dense=True, **options).dense
    assert dense is not None
    assert len(steps.ts) == 5
    torch.testing.assert_close(dense(steps.ts), steps.ys, rtol=1e-12, atol=1e-12)
    between = 0.5 * (steps.ts[1:] + steps.ts[:-1])
    torch.testing.assert_close(dense(between)[:, 0], torch.exp(ts[0] - between), rtol=1e-3, atol=0.0)

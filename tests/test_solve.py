"""What real programs do around a solve: long clocks, threads, compiled fields, trainers, hooks, pickles."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import seminode as sn

D = torch.float64
ONE = torch.ones(2, dtype=D)


# The clock.


@pytest.mark.parametrize(
    ("start", "span", "dt"), [(1e9, 1e-3, 1e-6), (1.7e9, 10.0, 1e-3), (1.7e9, 1.0, 1e-4), (0.0, 1.0, 1e-3)]
)
def test_the_clock_and_the_steps_agree(start: float, span: float, dt: float) -> None:
    """y' = 1: whatever the resolution of the clock, y moves by what the clock moved by."""
    sol = sn.solve(
        lambda t, y: torch.ones_like(y),
        torch.zeros(1, dtype=D),
        [start, start + span],
        solver="rk4",
        controller=sn.FixedStep(dt),
        save="steps",
    )
    assert torch.allclose(sol.ys[:, 0], sol.ts - sol.ts[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("end", "dt", "n"),
    [(10.0, 0.01, 1000), (10.0, 0.001, 10_000), (1.0, 1e-4, 10_000), (7.0, 7 / 31, 31), (-3.0, 0.1, 30)],
)
def test_fixed_steps_add_up(end: float, dt: float, n: int) -> None:
    sol = sn.solve(
        lambda t, y: -y, ONE, [0.0, end], solver="euler", controller=sn.FixedStep(dt), save="last", record=True
    )
    assert sol.stats.accepted == n
    assert sol.record is not None
    assert min(abs(p.dt) for p in sol.record.accepted) > 0.99 * dt


@pytest.mark.parametrize(("y0", "end"), [(1e6, 1e12), (1e9, 1e9)])
def test_a_fast_start_on_a_long_interval(y0: float, end: float) -> None:
    sol = sn.solve(lambda t, y: -(y**2), torch.full((1,), y0, dtype=D), [0.0, end])
    assert float(sol.ys[-1]) == pytest.approx(1.0 / (1.0 / y0 + end), abs=1e-6)


def test_recorded_steps_land_where_they_landed() -> None:
    field = lambda t, y: torch.sin(5 * t) * y
    first = sn.solve(field, ONE, [0.0, 2.0], controller=sn.Integral(step_to=(0.5, 1.1)), record=True, jumps=[0.8])
    assert first.record is not None
    again = sn.solve(
        field, ONE, [0.0, 2.0], controller=sn.PrescribedSteps.recorded(first.record), record=True, jumps=[0.8]
    )
    assert again.record is not None
    assert again.record.ts == first.record.ts
    assert torch.equal(again.ys, first.ys)


def test_a_record_has_a_ratio_for_every_attempt() -> None:
    def field(t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t > 0.9, torch.nan, -y)

    sol = sn.solve(field, ONE, [0.0, 1.0], controller=sn.Integral(dt0=1.0), record=True, throw=False)
    assert sol.record is not None
    assert len(sol.record.ratios) == len(sol.record.accepted) + len(sol.record.rejected)


# Fields as programs have them.


class Plain(nn.Module):
    """A module without a length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.inner(y))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay()], ids=str)
def test_a_compiled_module(adjoint: Any) -> None:
    field = Plain()
    compiled = torch.compile(field, backend="eager")
    grads = []
    for f in (field, compiled):
        loss = sn.solve(f, ONE, [0.0, 1.0], adjoint=adjoint).ys[-1].sum()
        grads.append(torch.autograd.grad(loss, list(field.parameters())))
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


class Counting:
    """A backend that counts how often compiled code runs."""

    def __init__(self) -> None:
        self.graphs, self.runs = 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_field_runs_compiled() -> None:
    """All evaluations but the first, which is watched."""
    backend = Counting()
    sol = sn.solve(torch.compile(Plain(), backend=backend), ONE, [0.0, 1.0])
    assert backend.runs == sol.stats.nfe - 1


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_steps_over_the_solve() -> None:
    """One graph before it and one after, and the compiler does not look at the solver."""
    torch.manual_seed(0)
    backend = Counting()
    model = Model().eval()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(5, 2, dtype=torch.float64)
    assert torch.equal(compiled(2 * x), model(2 * x))
    assert backend.graphs <= 2


class Model(nn.Module):
    """The usual shape of things: a field and a decoder with running statistics in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2).double()
        self.decoder = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
        self.teacher = nn.Linear(2, 2).double().requires_grad_(False)

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.inner(y))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(sn.solve(self.field, x, [0.0, 1.0]).ys[-1])


def test_a_decoder_beside_the_field() -> None:
    torch.manual_seed(0)
    model = Model().train()
    x = torch.randn(5, 2, dtype=D)
    for _ in range(2):
        out = model(x)
        with torch.no_grad():
            model.teacher.weight.mul_(0.9)  # an average of weights, updated between the passes
            model.decoder[0].bias.add_(0.0)  # pyright: ignore[reportCallIssue, reportArgumentType]
        out.square().sum().backward()
    assert all(p.grad is not None for p in model.inner.parameters())


class Trainer:
    """A plain object that keeps what it computes within the field's reach."""

    def __init__(self) -> None:
        self.weight = torch.tensor(0.3, dtype=D, requires_grad=True)
        self.losses: list[Tensor] = []
        self.solution: Any = None

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.weight * y

    def step(self) -> Tensor:
        self.solution = sn.solve(self.field, ONE, [0.0, 1.0])
        loss = self.solution.ys[-1].sum()
        self.losses.append(loss)
        loss.backward()
        assert self.weight.grad is not None
        grad, self.weight.grad = self.weight.grad, None
        return grad


def test_results_within_reach_are_not_taken_for_parameters() -> None:
    trainer = Trainer()
    assert torch.equal(trainer.step(), trainer.step())


# Around the solve.


def test_a_field_that_draws_nothing_leaves_the_generator_alone() -> None:
    """The generator belongs to the whole process: what others draw meanwhile must not repeat itself."""
    drawn: list[float] = []

    def norm(error: Tensor) -> Tensor:
        drawn.append(float(torch.rand(())))
        return sn.norms.rms(error)

    sn.solve(lambda t, y: -y, ONE, [0.0, 1.0], norm=norm)
    assert len(drawn) > 5
    assert len(set(drawn)) == len(drawn)


def states_alive(size: int) -> int:
    gc.collect()
    return sum(type(x) is Tensor and x.numel() == size for x in gc.get_objects())


def test_the_tape_goes_with_the_backward_pass() -> None:
    y0 = torch.ones(1237, dtype=D, requires_grad=True)
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], controller=sn.FixedStep(0.02), save="last")
    loss = sol.ys.sum()
    assert states_alive(1237) > 45
    loss.backward()
    assert states_alive(1237) < 10
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_hooks_may_move_the_tape() -> None:
    packed: list[torch.Size] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.shape)
        return x

    y0 = torch.ones(1237, dtype=D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], controller=sn.FixedStep(0.02))
    assert sum(shape == (1237,) for shape in packed) >= 50
    sol.ys[-1].sum().backward()
    assert y0.grad is not None


def test_a_failed_solve_goes_at_once() -> None:
    y0 = torch.ones(1237, dtype=D, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        sol = sn.solve(lambda t, y: y**2, y0, [0.0, 2.0], throw=False)
        assert sol.status is not sn.Status.SUCCESS
        gone = weakref.ref(sol.ys)
        del sol
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_of_an_inner_solve_is_not_swallowed() -> None:
    def inner(t: Tensor, y: Tensor) -> Tensor:
        return y**2

    def outer(t: Tensor, y: Tensor) -> Tensor:
        return sn.solve(inner, y, [0.0, 2.0]).ys[-1]

    for adjoint in (sn.Direct(), sn.Replay()):
        with pytest.raises(sn.SolveError):
            sn.solve(outer, ONE, [0.0, 1.0], throw=False, adjoint=adjoint)


@pytest.mark.parametrize("save", ["ts", "last"])
def test_outputs_may_be_changed_in_place(save: Literal["ts", "last"]) -> None:
    y0 = ONE.clone().requires_grad_()
    sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0], save=save)
    sol.ys.mul_(2.0)
    sol.ys[-1].sum().backward()
    assert y0.grad is not None
    assert torch.allclose(y0.grad, 2 * torch.exp(-ONE), rtol=1e-5)


def test_times_may_be_changed_afterwards() -> None:
    y0, ts = ONE.clone().requires_grad_(), torch.tensor([0.0, 1.0], dtype=D)
    sol = sn.solve(lambda t, y: -y, y0, ts)
    ts.mul_(7.0)
    assert sol.ts.tolist() == [0.0, 1.0]
    sol.ys.sum().backward()


def test_dense_output_at_the_ends_in_single_precision() -> None:
    sol = sn.solve(lambda t, y: -y, ONE, [0.0, 0.1], dense=True)
    assert sol.dense is not None
    assert sol.dense(torch.linspace(0, 0.1, 5)).shape == (5, 2)


def test_pickles_and_copies() -> None:
    sol = sn.solve(lambda t, y: {"q": y["p"], "p": -y["q"]}, {"q": ONE, "p": ONE}, [0.0, 1.0], dense=True, record=True)
    back = pickle.loads(pickle.dumps(sol))
    assert torch.equal(back.ys["q"], sol.ys["q"])
    assert torch.equal(back.dense(0.3)["p"], sol.dense(0.3)["p"])  # type: ignore[misc]
    assert back.record == sol.record
    for thing in (sn.Dopri5(), sn.PID(), sn.Integral(step_to=(0.1,)), sn.FixedStep(0.1), sn.Replay(2), sn.Direct()):
        assert pickle.loads(pickle.dumps(thing)) == thing == copy.deepcopy(thing)


def test_checkpointing_around_a_solve() -> None:
    from torch.utils.checkpoint import checkpoint

    net = Plain()
    run = lambda y: sn.solve(net, y, [0.0, 1.0]).ys[-1]
    grads = []
    for f in (run, lambda y: checkpoint(run, y, use_reentrant=False)):
        y0 = ONE.clone().requires_grad_()
        grads.append(torch.autograd.grad(f(y0).sum(), [y0, *net.parameters()]))  # type: ignore[union-attr]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)

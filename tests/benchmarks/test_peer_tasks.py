"""The peers' own problems are what their descriptions say, and the same in every library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import replace_back_end
from torch import Tensor, nn

from benchmarks import limits, minima, panels
from benchmarks.contenders import contenders, named
from benchmarks.field_costs import cost_of, field_costs, solves_of
from benchmarks.peer_contenders import CHECKPOINTS
from benchmarks.peer_tasks import diffrax_task, sampling_task, spiral_data, spiral_task
from benchmarks.references import reference
from benchmarks.settings import step_size
from benchmarks.suite import ENTRIES, numbers, task_of
from benchmarks.tasks import load
from benchmarks.torch_runners import TorchRunner

PEERS = [name for name in ENTRIES if name.startswith(("diffrax", "spiral", "reversible", "sampling"))]
#: Eager settings with the gradient or the outputs of a solver that is accurate enough.
ERRORS = {"diffrax": 1e-4, "spiral": 3e-2, "reversible": 1e-5, "sampling": 2e-2}


def test_sizes_are_those_of_the_descriptions() -> None:
    task = diffrax_task(100)
    assert (task.rtol, task.atol) == (1e-6, 1e-6)
    assert task.data["y0"].shape == (64, 4)
    assert task.data["ts"].tolist()[::50] == [0.0, 50.0, 100.0]
    assert [tuple(p.shape) for p in task.modules.parameters()] == [(32, 4), (32,), (4, 32), (4,)]
    spiral = spiral_task()
    assert spiral.data["y0"].tolist() == [2.0, 0.0]
    assert (len(spiral.data["ts"]), float(spiral.data["ts"][-1])) == (30, 1.5)
    assert [tuple(p.shape) for p in spiral.modules.parameters()] == [(50, 2), (50,), (2, 50), (2,)]
    counts = {each.options["checkpoints"] for each in contenders("reversible") if "checkpoints" in each.options}
    assert counts == set(CHECKPOINTS) == {2, 4, 8, 16, 32, 44}
    large = sum(p.numel() for p in ENTRIES["sampling-large-euler"].build().modules.parameters())
    small = sum(p.numel() for p in sampling_task().modules.parameters())
    assert (small, large) == (9_154, 3_420_288)


def test_the_spiral_decays_at_its_rate() -> None:
    ts = torch.linspace(0.0, 1.5, 30, dtype=torch.float64)
    ys = spiral_data(ts)
    # With A = [[a, b], [−b, a]], x⁴ + y⁴ decays: its derivative is 4a(x⁶ + y⁶).
    energy, power = ys.pow(4).sum(1), ys.pow(6).sum(1)
    slopes = (energy[2:] - energy[:-2]) / (ts[2:] - ts[:-2])
    torch.testing.assert_close(slopes, -0.4 * power[1:-1], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("name", PEERS)
def test_libraries_agree_with_the_reference(name: str, tmp_path: Path) -> None:
    task, found = numbers(name, quick=True)
    good = reference(name, task, found, quick=True, folder=tmp_path)
    assert good.good_to < 1e-3
    seen = set()
    for contender in contenders(name):
        if contender.compiled or contender.library in seen:
            continue
        seen.add(contender.library)
        runner = TorchRunner(load(task_of(name, quick=True), found), contender)
        timing = runner.run()
        assert ("backward" in timing) == task.differentiate
        assert runner.gradient().shape == good.gradient.shape
        assert good.error(runner.gradient()) < ERRORS[name.split("-")[0]], contender.name
    assert "seminode" in seen


def test_a_task_without_gradient_returns_its_outputs() -> None:
    task = diffrax_task(3, differentiate=False, batch=2, width=4, end=1.0)
    runner = TorchRunner(task, named("diffrax-100-forward", "seminode: dopri5"))
    runner.run()
    assert runner.gradient().shape == (3 * 2 * 4,)
    assert runner.needed() == [{"evaluations": runner.counts()["forward_nfe"], "vjps": 0}]


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        ("small", "seminode: Direct"),
        ("small", "seminode: Backsolve"),
        ("small", "torchdiffeq: direct"),
        ("small", "torchode: AutoDiffAdjoint"),
        ("cde", "torchcde: direct"),
        ("cde", "seminode: Direct, bosh3, fixed"),
        ("cde", "torchdiffeq: direct, rk4, fixed"),
        ("sampling-euler", "torchdiffeq: euler"),
        ("reversible", "seminode: Reversible"),
    ],
)
def test_the_factor_reaches_the_library(problem: str, name: str) -> None:
    """A tighter tolerance, or a smaller step, needs more evaluations."""
    task, _ = numbers(problem, quick=True)
    runner = TorchRunner(task, named(problem, name))
    calls = []
    field: nn.Module = solves_of(task)[0][0]
    inner = field.net if problem == "cde" else field  # torchcde calls the network, not the field
    assert isinstance(inner, nn.Module)
    for factor in (10.0, 0.1) if problem in ("sampling-euler", "reversible") else (1000.0, 1e-3):
        count = itertools.count()
        hook = inner.register_forward_hook(lambda *_, count=count: (next(count), None)[1])
        runner.run(factor)
        hook.remove()
        calls.append(next(count))
    assert 0 < calls[0] < calls[1]


def test_backward_tolerances_have_factors_of_their_own() -> None:
    """Over several tolerances: at one of them, both backward passes may need the same few steps."""
    task, _ = numbers("small", quick=True)
    nfe = {}
    for setting in ("Backsolve, compiled", "Backsolve, backward 30, 1000, compiled"):
        contender = named("small", f"seminode: {setting}")
        eager = type(contender)("seminode", setting, {**contender.options, "compile": False})
        runner = TorchRunner(task, eager)
        counts = []
        for factor in (1e-1, 1e-2, 1e-3):
            runner.run(factor)
            counts.append(runner.counts(factor))
        nfe[setting] = counts
    usual, loose = nfe.values()
    assert [x["forward_nfe"] for x in usual] == [x["forward_nfe"] for x in loose]
    assert sum(x["backward_nfe"] for x in usual) > sum(x["backward_nfe"] for x in loose)


def test_fixed_steps_follow_the_order_of_the_method() -> None:
    assert step_size({"fixed": 1 / 50, "order": 1}, 1.0) == 1 / 50
    assert step_size({"fixed": 1 / 50, "order": 1}, 2.0) == 1 / 25
    assert step_size({"fixed": 1 / 50, "order": 2}, 0.25) == 1 / 100
    assert step_size({"fixed": 1 / 3, "order": 3}, 1000.0) == 1.0  # never larger than the distance of the knots


# The limit.


@pytest.fixture
def no_back_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run as they were traced."""
    replace_back_end(monkeypatch)
    monkeypatch.setattr(minima, "SPEND", 0.01)
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_back_end")
def test_costs_of_a_field_are_measured_alone() -> None:
    task, _ = numbers("small", quick=True)
    (cost,) = field_costs(task)
    assert 0.0 < cost["evaluation"] < 0.1
    assert 0.0 < cost["vjp"] < 0.1
    (forward,) = field_costs(task_of("diffrax-1-forward", quick=True))
    assert "vjp" not in forward


def test_costs_are_those_of_programs_like_those_of_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made by the same back end, which computes products as it does for solves: else a limit is none."""
    programs: list[list[str]] = []

    def back_end(module: torch.fx.GraphModule, examples: list[Any]) -> Any:
        programs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return lambda inputs: list(module(*inputs))

    replace_back_end(monkeypatch, back_end)
    monkeypatch.setattr(minima, "SPEND", 0.01)
    field_costs(task_of("small"))  # the small one of tests is too narrow for some rewrites
    assert len(programs) == 3  # an evaluation; one that keeps its activations, and its VJP
    # Rewritten as in solves.
    assert all("aten.mm.default" in ops and "aten.tanh.default" not in ops for ops in programs)
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_back_end")
def test_fields_of_several_tensors_have_costs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.linear(y[1]), -y[0]

    y0 = (torch.ones(3, 2), torch.zeros(3, 2))
    assert set(cost_of(Pair(), y0, torch.tensor([0.0, 1.0]))) == {"evaluation", "vjp"}


def test_the_limit_is_evaluations_and_vjps_times_their_costs() -> None:
    costs = [{"evaluation": 2.0, "vjp": 3.0}, {"evaluation": 10.0, "vjp": 1.0}]
    needed = [{"evaluations": 5, "vjps": 4}, {"evaluations": 1, "vjps": 1}]
    assert limits.limit(costs, needed) == 5 * 2 + 4 * 3 + 10 + 1
    assert limits.limit(costs, needed[:1]) is None
    assert limits.limit(costs, []) is None
    assert limits.f_unit(costs) == 11.0


def test_curves_are_drawn(tmp_path: Path) -> None:
    entries = [{"factor": f, "error": 1e-3 * f, "minimum": f**-0.2, "rounds": []} for f in (10.0, 1.0, 0.1)]
    rows: list[dict[str, Any]] = [
        {"name": f"{library}: a", "library": library, "setting": "a", "compiled": True, "curve": entries}
        for library in ("seminode", "diffrax")
    ]
    panels.draw([{"problem": "small", "rows": rows}], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


# JAX.


@pytest.mark.parametrize(
    "name",
    [
        *("small", "cde", "diffrax-1", "diffrax-100", "diffrax-1-forward", "spiral", "reversible", "sampling-euler"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pendulum", "flow")),
    ],
)
def test_fields_and_losses_are_the_same_in_jax(name: str) -> None:
    """Without a solve: every output is the initial value, in both."""
    pytest.importorskip("diffrax")
    import jax

    from benchmarks.jax_peer_tasks import task_named

    task, found = numbers(name, quick=True)
    parameters: dict[str, Any] = {
        key.removeprefix("parameter:"): x for key, x in found.items() if key.startswith("parameter:")
    }
    data = {key.removeprefix("data:"): x for key, x in found.items() if key.startswith("data:")}
    slopes: dict[str, list[np.ndarray]] = {"torch": [], "jax": []}
    middle = 0.4  # not a knot

    def torch_solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        each = field(torch.tensor(middle), y0)
        slopes["torch"] += [x.numpy() for x in ([each] if isinstance(each, Tensor) else each)]
        constant = lambda y: y.expand(len(ts), *y.shape)
        return constant(y0) if isinstance(y0, Tensor) else tuple(map(constant, y0))

    def jax_solve(field: Any, y0: Any, ts: np.ndarray, args: Any) -> Any:
        slopes["jax"] += [np.asarray(x) for x in jax.tree.leaves(field(np.float32(middle), y0, args))]
        constant = lambda y: y if len(ts) == 2 else np.broadcast_to(y, (len(ts), *y.shape))
        return jax.tree.map(constant, y0)

    with torch.no_grad():
        expected = task.through(task.start(), torch_solve).numpy()
    function, shift = task_named(name, task.differentiate)
    value = function(parameters, data, shift(parameters, data), jax_solve)
    np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-4, atol=1e-6)
    assert len(slopes["jax"]) == len(slopes["torch"]) > 0
    for theirs, ours in zip(slopes["jax"], slopes["torch"], strict=True):
        same = np.moveaxis(theirs, -1, 1) if theirs.ndim == 4 else theirs  # images have their channels last in JAX
        np.testing.assert_allclose(same, ours, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "name"),
    [
        ("diffrax-100", "diffrax: Backsolve, seminorm, Tsit5"),
        ("diffrax-1-forward", "diffrax: Dopri5"),
        ("spiral", "diffrax: RecursiveCheckpoint, all kept, Dopri5"),
        ("reversible", "diffrax: RecursiveCheckpoint(4), Bosh3"),
        ("sampling-euler", "diffrax: euler"),
    ],
)
def test_diffrax_agrees_with_the_reference_at_all_tolerances(problem: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffrax")
    from benchmarks.jax_runners import JaxRunner

    task, found = numbers(problem, quick=True)
    good = reference(problem, task, found, quick=True, folder=tmp_path)
    runner = JaxRunner(problem, found, task.rtol, task.atol, named(problem, name), task.differentiate)
    for factor in (10.0, 1.0):
        runner.run(factor)
        assert good.error(runner.gradient(factor)) < 3 * ERRORS[problem.split("-")[0]]
    if "Backsolve" in name:
        assert len(runner.programs) == 1  # tolerances are arguments
    assert runner.field_costs()[0]["evaluation"] > 0.0

"""Compiled solves: the same results as eager ones, programs that are used again, and fields that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor, nn

import seminode as sn
from seminode._compile import engine, front_end, inductor
from seminode._compile.programs import pieces

DISCRETE = [sn.Replay(), sn.Direct(), sn.Checkpointed(2)]
CONTINUOUS = [
    sn.Backsolve(),
    sn.Backsolve(norm="mixed"),
    sn.Backsolve(restart="fresh"),
    sn.Interpolating(),
    sn.Interpolating(memory=16),
    sn.Quadrature(),
    sn.Quadrature(rule="gauss", z="dense"),
    sn.Quadrature(rule="gauss-kronrod"),
]
ADJOINTS = [*DISCRETE, *CONTINUOUS]
each_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS, ids=repr)


class Programs:
    """Counts the programs that are made, and runs them without the back end, which takes seconds for each."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, module: Any, examples: list[Any]) -> Callable[[list[Any]], Any]:
        self.made += 1

        def run(inputs: list[Any]) -> Any:
            return list(module(*inputs))

        return run


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    made = Programs()
    replace_back_end(monkeypatch, made)
    yield made
    torch._dynamo.reset()


class Field(nn.Module):
    """z′ = W₂ tanh(W₁ z + b)·cos t·gain."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        self.gain = 1.5

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * torch.cos(t) * self.gain


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype).requires_grad_()


def results(field: nn.Module, y0: Tensor, ts: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    """The solution, and the gradients of the state and of the parameters."""
    sol = sn.solve(field, y0, ts, **options)
    weights = torch.arange(1.0, len(sol.ys) + 1, dtype=sol.ys.dtype).reshape(-1, 1, 1)
    grads = torch.autograd.grad((weights * sol.ys.square()).sum(), [y0, *field.parameters()])
    return sol, list(grads)


def compare(field: nn.Module, y0: Tensor, ts: Any, tol: float, **options: Any) -> Any:
    eager, expected = results(field, y0, ts, **options)
    sol, grads = results(field, y0, ts, compile=True, **options)
    torch.testing.assert_close(sol.ys, eager.ys, rtol=tol, atol=tol)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    assert (sol.stats.nfe, sol.stats.accepted, sol.stats.rejected) == (
        eager.stats.nfe,
        eager.stats.accepted,
        eager.stats.rejected,
    )
    return sol


@each_adjoint
@pytest.mark.parametrize("solver", ["dopri5", "bosh3", "tsit5"])
def test_adaptive_solves_are_the_same(programs: Programs, solver: str, adjoint: Any) -> None:
    options = {"solver": solver, "rtol": 1e-5, "atol": 1e-6, "adjoint": adjoint}
    compare(Field(), start(), [0.0, 0.7, 1.5, 3.0], 1e-9, **options)
    compare(Field(), start(), [3.0, 0.0], 1e-9, **options)
    assert programs.made > 0


@each_adjoint
def test_large_fields_are_compiled_in_pieces(programs: Programs, monkeypatch: pytest.MonkeyPatch, adjoint: Any) -> None:
    """One program for an evaluation and one for its VJP, however many stages a step has."""
    monkeypatch.setattr(pieces, "LARGE", 0)
    options = {"rtol": 1e-5, "atol": 1e-6, "adjoint": adjoint}
    compare(Field(), start(), [0.0, 0.7, 1.5, 3.0], 1e-9, **options)
    made = programs.made
    compare(Field(), start(), [3.0, 0.0], 1e-9, solver="tsit5", **options)
    assert programs.made == made
    compare(Field(), start(), [0.0, 2.0], 1e-9, jumps=[1.0], **options)


@pytest.mark.parametrize("adjoint", DISCRETE, ids=repr)
@pytest.mark.parametrize("solver", ["heun", "rk4", "euler"])
def test_fixed_steps_are_the_same(programs: Programs, solver: str, adjoint: Any) -> None:
    options = {"solver": solver, "controller": sn.FixedStep(0.25), "adjoint": adjoint}
    compare(Field(), start(), [0.0, 0.6, 2.0], 1e-11, **options)


@pytest.mark.parametrize("adjoint", [sn.Direct(), sn.Replay(), sn.Backsolve()], ids=repr)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jumps": [1.0]},
        {"solver": "heun", "controller": sn.FixedStep(0.25)},
        {"solver": "adaptive_heun"},
        {"norm": max},
    ],
    ids=["adaptive", "jumps", "fixed", "end slopes not known", "own norm"],
)
def test_no_step_waits_for_a_program_that_was_not_asked_for_before(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, adjoint: Any, options: dict[str, Any]
) -> None:
    made, build = [], engine.Programs.build

    def counted(*args: Any) -> None:
        build(*args)
        made.append(programs.made)

    monkeypatch.setattr(engine.Programs, "build", counted)
    if "norm" in options:
        weight = torch.ones((), dtype=torch.float64)
        options = {"norm": lambda ratio: (ratio * weight).abs().max()}
    sn.solve(Field(), start(), [0.0, 2.0], adjoint=adjoint, compile=True, **options)
    assert made == [programs.made]


@each_adjoint
def test_jumps_are_seen_from_the_right_side(programs: Programs, adjoint: Any) -> None:
    class Jumping(Field):
        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return super().forward(t, y) + torch.where(t > 1.0, 2.0, 0.0)

    sol = compare(Jumping(), start(), [0.0, 0.5, 2.0], 1e-9, jumps=[1.0], rtol=1e-6, adjoint=adjoint)
    assert sol.stats.jumps == 1


def test_float32(programs: Programs) -> None:
    options = {"solver": "rk4", "controller": sn.FixedStep(0.25)}
    compare(Field(torch.float32), start(torch.float32), [0.0, 0.6, 2.0], 1e-5, **options)


def test_structures_arguments_and_closures(programs: Programs) -> None:
    """Gradients for everything that a field uses, wherever it comes from."""
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    grads = []
    for compiled in (False, True):
        y0 = {"z": start(), "c": torch.zeros(5, dtype=torch.float64)}
        rate = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64, requires_grad=True)

        def field(t: Tensor, y: dict[str, Tensor], rate: Tensor) -> dict[str, Tensor]:
            z = -rate * y["z"] * scale.exp()
            return {"z": z, "c": z.square().sum(-1)}

        sol = sn.solve(field, y0, [0.0, 1.0], args=(rate,), compile=compiled, rtol=1e-6)
        loss = sol.ys["z"][-1].square().sum() + sol.ys["c"][-1].sum()
        grads.append(torch.autograd.grad(loss, [y0["z"], rate, scale]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adjoint", DISCRETE, ids=repr)
def test_fields_that_differentiate(programs: Programs, adjoint: Any) -> None:
    torch.manual_seed(0)
    field = sn.models.HamiltonianNet(1, (8,)).double().field
    grads = []
    for compiled in (False, True):
        x0 = torch.randn(4, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
        sol = sn.solve(field, x0, [0.0, 0.5, 1.0], rtol=1e-6, adjoint=adjoint, compile=compiled)
        wanted = [x0, *(p for name, p in field.named_parameters() if not name.endswith("2.bias"))]
        grads.append(torch.autograd.grad(sol.ys.square().sum(), wanted))
    assert programs.made > 0
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_program_that_fails_leaves_no_transform_behind(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        def never(x: Tensor) -> Tensor:
            vars(torch._C)["_functorch"]._vmap_increment_nesting(2, "error")  # and never back
            raise RuntimeError("half-way")

        return never(torch.zeros(2))

    monkeypatch.setattr(inductor, "back_end", broken)
    with pytest.warns(sn.CompileWarning, match="half-way"):
        results(Field(), start(), [0.0, 1.0], compile=True)
    assert not torch._C._are_functorch_transforms_active()


@each_adjoint
def test_a_gradient_of_the_state_alone(programs: Programs, adjoint: Any) -> None:
    """Steps were taken for the parameters' gradients too; nobody asks for those."""
    grads = []
    for compiled in (False, True):
        y0 = start()
        sol = sn.solve(Field(), y0, [0.0, 1.0], rtol=1e-5, adjoint=adjoint, compile=compiled)
        grads += torch.autograd.grad(sol.ys.square().sum(), [y0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-12)


@each_adjoint
def test_nothing_is_compiled_again_while_training(programs: Programs, adjoint: Any) -> None:
    """Neither for other parameters, nor for other times, step sizes and tolerances, nor for another instance."""
    import torch._dynamo.utils as dynamo

    field = Field()
    optimiser = torch.optim.SGD(field.parameters(), lr=0.01)
    seen = []
    for i in range(5):
        ts, rtol = [0.1 * i, 1.0 + 0.2 * i], 10.0 ** -(3 + i % 3)
        sol = sn.solve(field, start(), ts, rtol=rtol, atol=1e-7, adjoint=adjoint, compile=True)
        optimiser.zero_grad()
        sol.ys[-1].square().sum().backward()
        optimiser.step()
        seen.append((programs.made, dynamo.counters["stats"]["unique_graphs"]))
    results(Field(), start(), [0.0, 1.0], adjoint=adjoint, compile=True)
    seen.append((programs.made, dynamo.counters["stats"]["unique_graphs"]))
    assert len(set(seen[1:])) == 1


def test_a_field_that_changes_is_compiled_anew(programs: Programs) -> None:
    field, y0 = Field(), start()
    for gain in (1.5, 0.5, 1.5):
        field.gain = gain
        compare(field, y0, [0.0, 1.0], 1e-9, rtol=1e-5)


class Counting(Field):
    """As many count their evaluations: the front end takes a graph to stand for one value of the counter."""

    count = 0

    def forward(self, t: Tensor, y: Any) -> Any:
        self.count += 1
        return super().forward(t, y)


def test_a_field_that_counts_its_evaluations(programs: Programs) -> None:
    import torch._dynamo.utils as dynamo

    field, seen = Counting(), []
    before = dynamo.counters["stats"]["unique_graphs"]
    for _ in range(front_end.GRAPHS + 5):
        results(field, start(), [0.0, 1.0], compile=True)
        field.count += 1  # as an eager evaluation does; the front end sees another field then
        seen.append(programs.made)
    assert dynamo.counters["stats"]["unique_graphs"] - before >= front_end.GRAPHS  # so the limit was met
    assert len(set(seen)) == 1


def test_graphs_that_differ_in_a_number_are_not_shared(programs: Programs) -> None:
    for factor in (1.0, 2.0, 2.0 + 1e-15):
        sol = sn.solve(
            lambda t, y, factor=factor: factor * y,
            torch.ones(1, dtype=torch.float64),
            [0.0, 1.0],
            solver="euler",
            controller=sn.FixedStep(1.0),
            compile=True,
        )
        assert sol.ys[-1].item() == 1.0 + factor


def decides(t: Tensor, y: Tensor) -> Tensor:
    return -y if float(y.sum()) > 0 else -2 * y


@pytest.mark.parametrize(
    ("field", "options", "reason"),
    [
        (decides, {}, "the solve runs eagerly, since"),
        (lambda t, y: -y * torch.rand(()).to(y), {}, "draws random numbers"),
        (lambda t, y: -y, {"solver": "implicit_midpoint", "controller": sn.FixedStep(0.1)}, "not an explicit"),
    ],
)
def test_what_cannot_be_compiled_runs_op_by_op(programs: Programs, field: Any, options: Any, reason: str) -> None:
    torch.manual_seed(0)
    expected = sn.solve(field, start(), [0.0, 1.0], **options).ys
    torch.manual_seed(0)
    with pytest.warns(sn.CompileWarning, match=reason):
        found = sn.solve(field, start(), [0.0, 1.0], compile=True, **options).ys
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore::seminode.StatefulFieldWarning")
def test_buffers_are_updated_once_a_solve(programs: Programs) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.norm(y)

    eager, field = Normed(), Normed()
    expected = sn.solve(eager, start(), [0.0, 1.0]).ys
    with pytest.warns(sn.CompileWarning, match="changes buffers"):
        found = sn.solve(field, start(), [0.0, 1.0], compile=True).ys
    assert torch.equal(found, expected)
    torch.testing.assert_close(dict(field.named_buffers()), dict(eager.named_buffers()))


@each_adjoint
def test_without_a_compiler(programs: Programs, monkeypatch: pytest.MonkeyPatch, adjoint: Any) -> None:
    def missing(module: Any, examples: Any) -> Any:
        raise RuntimeError("no C++ compiler was found\nand so on")

    expected = results(Field(), start(), [0.0, 0.5, 1.0], adjoint=adjoint)
    monkeypatch.setattr(inductor, "back_end", missing)
    with pytest.warns(sn.CompileWarning, match=r"eagerly, since RuntimeError: no C\+\+ compiler was found$"):
        found = results(Field(), start(), [0.0, 0.5, 1.0], adjoint=adjoint, compile=True)
    # Outputs of several steps may be computed together in one of the two, which rounds differently on some processors.
    torch.testing.assert_close(found[0].ys, expected[0].ys, rtol=1e-14, atol=1e-15)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_an_error_of_the_field_is_its_own(programs: Programs) -> None:
    def wrong(t: Tensor, y: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sn.solve(wrong, start(), [0.0, 1.0], compile=True)


def test_times_and_dense_output_have_gradients(programs: Programs) -> None:
    found = []
    for compiled in (False, True):
        ts = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64, requires_grad=True)
        sol = sn.solve(Field(), start(), ts, compile=compiled, dense=True, rtol=1e-6)
        assert sol.dense is not None
        (grad,) = torch.autograd.grad(sol.ys.square().sum() + sol.dense(0.7).sum(), [ts])
        found.append(grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_one_look_at_the_device_a_step(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    true = Tensor.item

    def item(self: Tensor) -> Any:
        nonlocal looks
        looks += 1
        return true(self)

    def count(steps: int) -> int:
        nonlocal looks
        looks = 0
        with torch.no_grad():
            sn.solve(Field(), start(), [0.0, 0.1 * steps], controller=sn.Integral(dt0=0.1, dt_max=0.1), compile=True)
        return looks

    count(2)
    monkeypatch.setattr(Tensor, "item", item)
    assert count(12) - count(4) == 8


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Direct()], ids=lambda a: type(a).__name__)
def test_with_the_back_end(adjoint: Any) -> None:
    torch._dynamo.reset()
    compare(Field(), start(), [0.0, 0.7, 1.5, 3.0], 1e-9, rtol=1e-5, atol=1e-6, adjoint=adjoint)


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", [sn.Replay(), sn.Direct(), sn.Backsolve(), sn.Quadrature()], ids=repr)
@pytest.mark.parametrize("large", [False, True])
def test_memory_layouts_with_the_back_end(monkeypatch: pytest.MonkeyPatch, adjoint: Any, large: bool) -> None:
    """Layers wider at one end than at the other, a state with gaps in memory, many steps."""
    monkeypatch.setattr(pieces, "LARGE", 0 if large else 1000)
    torch._dynamo.reset()
    torch.manual_seed(0)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y)

    y0 = torch.randn(20, 7, 3)[:, 0].requires_grad_()
    compare(Wide(), y0, [0.0, 1.0, 2.0], 1e-4, solver="rk4", controller=sn.FixedStep(0.2), adjoint=adjoint)

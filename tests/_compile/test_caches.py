"""Programs are kept, but not without bound; of one that could not be made, only the reason is kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from compiled import replace_back_end, run_graph
from torch import Tensor, nn

import seminode as sn
from seminode._compile import front_end, graph, inductor
from seminode._compile.graph import FieldGraph, NotCompiled
from seminode._compile.programs import steps

EULER: dict[str, Any] = {"solver": "euler", "controller": sn.FixedStep(0.5), "compile": True}


@pytest.fixture(autouse=True)
def stub_back_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    replace_back_end(monkeypatch)
    yield
    torch._dynamo.reset()


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -self.k * y


def solve(field: Any, shape: tuple[int, ...] = (3,), **options: Any) -> Tensor:
    y0 = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    ys = sn.solve(field, y0, [0.0, 1.0], **EULER | options).ys
    ys[-1].sum().backward()
    return ys.detach()


# Bounds


@pytest.fixture
def few_front_ends(monkeypatch: pytest.MonkeyPatch) -> int:
    """A smaller bound, since every shape is captured anew."""
    monkeypatch.setattr(front_end, "FRONT_ENDS", 4)
    return front_end.FRONT_ENDS


def test_front_ends_are_bounded(few_front_ends: int) -> None:
    """Ten shapes leave the latest four, and no graphs but theirs."""
    field = Field()
    for n in range(1, 11):
        solve(field, (2, n))
    assert len(front_end._front_ends) == few_front_ends
    kept = [layout.shapes[0][1] for layout, *_ in front_end._front_ends]  # type: ignore[misc]
    assert kept == list(range(11 - few_front_ends, 11))
    gc.collect()
    assert len(front_end._known) <= few_front_ends


@pytest.mark.slow
@pytest.mark.parametrize("batch", [False, True])
def test_memory_of_many_shapes_is_bounded(batch: bool) -> None:
    """1,000 solves with fifty shapes: what the first 500 leave behind, the others replace."""
    field = Field()

    def objects(shapes: range) -> int:
        for n in shapes:
            for _ in range(20):
                solve(field, (n, 2) if batch else (2, n))
        gc.collect()
        counted = Tensor, FieldGraph, torch.fx.Node, torch.fx.GraphModule
        return sum(issubclass(type(x), counted) for x in gc.get_objects())

    first, second = objects(range(1, 26)), objects(range(26, 51))
    assert len(front_end._known) <= (3 if batch else front_end.FRONT_ENDS)  # one size, any size, and one sample
    assert second <= 1.05 * first


def test_a_front_end_that_is_in_use_stays(few_front_ends: int) -> None:
    field = Field()
    solve(field, (2, 1))
    (in_use,) = front_end._front_ends.values()
    for n in range(2, 11):
        solve(field, (2, 1))
        solve(field, (2, n))
    assert any(each is in_use for each in front_end._front_ends.values())  # it was not made again either
    kept = {layout.shapes[0][1] for layout, *_ in front_end._front_ends}  # type: ignore[misc]
    assert 1 in kept
    assert len(kept) == few_front_ends


def test_a_shape_that_was_forgotten_is_compiled_again(few_front_ends: int) -> None:
    field = Field()
    first = solve(field, (2, 3))
    for n in range(4, 4 + few_front_ends):
        solve(field, (2, n))
    assert all(layout.shapes[0][1] != 3 for layout, *_ in front_end._front_ends)  # type: ignore[misc]
    assert torch.equal(solve(field, (2, 3)), first)


def test_programs_of_a_graph_are_bounded() -> None:
    made: list[int] = []
    one = FieldGraph(lambda *inputs: (inputs[0],))

    def find(key: int) -> int:
        return one.program(key, lambda: made.append(key) or key)

    for key in range(graph.PROGRAMS + 40):
        assert find(key) == key
        find(0)  # used all the time
    assert len(one._programs) == graph.PROGRAMS
    assert find(0) == 0
    assert made.count(0) == 1
    find(1)
    assert made.count(1) == 2  # it had made room


def test_programs_of_one_field_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every solver has programs of its own."""
    field, limit = Field(), 6
    monkeypatch.setattr(graph, "PROGRAMS", limit)
    for solver in ("bosh3", "adaptive_heun", "dopri5", "tsit5", "fehlberg2"):
        solve(field, solver=solver, controller=sn.Integral(dt0=0.5), rtol=1e-2)
    assert len(front_end._front_ends) == 1
    (only,) = front_end._known.values()
    assert len(only._programs) == limit


# Programs that cannot be made


class Failing:
    """A back end that fails, with the graph and its inputs in the frames of the error."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: Any, examples: list[Any]) -> Any:
        self.calls += 1
        raise RuntimeError("no room on the device\nand many more lines")


def test_a_failed_program_is_kept_as_a_reason() -> None:
    one, calls = FieldGraph(lambda *inputs: (inputs[0],)), 0
    tensors: list[Any] = []

    def make() -> Any:
        nonlocal calls
        calls += 1
        tensor = torch.ones(1000)
        tensors.append(ref(tensor))
        raise RuntimeError("no room on the device\nand many more lines")

    def failure() -> NotCompiled:
        with pytest.raises(NotCompiled, match=r"^RuntimeError: no room on the device$") as caught:
            one.program("key", make)
        return caught.value

    errors = [failure() for _ in range(3)]
    assert calls == 1
    assert len({id(error) for error in errors}) == 3  # so that no traceback grows
    assert all(error.__context__ is None and error.__cause__ is None for error in errors)
    assert one._programs["key"] == graph.Unavailable("RuntimeError: no room on the device")
    errors.clear()
    assert [tensor() for tensor in tensors] == [None]


def test_a_failure_of_a_program_that_another_is_made_of() -> None:
    one = FieldGraph(lambda *inputs: (inputs[0],))

    def inner() -> Any:
        raise ValueError("inner")

    with pytest.raises(NotCompiled, match=r"^ValueError: inner$"):
        one.program("outer", lambda: one.program("inner", inner))
    assert one._programs["outer"] == one._programs["inner"] == graph.Unavailable("ValueError: inner")


@pytest.mark.parametrize(
    "adjoint", [sn.Direct(), sn.Replay(), sn.Backsolve(), sn.Quadrature()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("fails", ["all", "backward"])
def test_tensors_of_a_failing_solve_die(adjoint: Any, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state, its outputs, its parameters and what the frames of the error held; the field itself lives on."""
    back_end = Failing()
    forward_done, of_vjp = fails == "all", False
    tuned = steps.Tuned.__init__

    def sometimes(module: Any, examples: list[Any]) -> Any:
        return back_end(module, examples) if forward_done or of_vjp else run_graph(module, examples)

    def noted(self: steps.Tuned, *args: Any) -> None:
        """VJPs of steps, which are compiled beside the steps themselves."""
        nonlocal of_vjp
        of_vjp = True
        try:
            tuned(self, *args)
        finally:
            of_vjp = False

    monkeypatch.setattr(inductor, "back_end", sometimes)
    monkeypatch.setattr(steps.Tuned, "__init__", noted)
    fields, alive = [Field()], []

    def run() -> None:
        nonlocal forward_done
        forward_done = fails == "all"
        y0 = torch.ones(3, dtype=torch.float64, requires_grad=True)
        ys = sn.solve(fields[0], y0, [0.0, 1.0], adjoint=adjoint, solver="bosh3", compile=True).ys
        forward_done = True
        ys[-1].sum().backward()
        alive.extend(map(ref, (y0, y0.grad, ys)))

    calls = []
    for _ in range(3):
        with pytest.warns(sn.CompileWarning, match="no room on the device"):
            run()
        calls.append(back_end.calls)
    assert calls[0] == calls[-1] > 0  # it would take as long to fail again
    gc.collect()
    assert [x() for x in alive] == [None] * len(alive)
    parameter = ref(fields.pop().k)
    torch._dynamo.reset()
    gc.collect()
    assert parameter() is None


def test_a_field_that_cannot_be_captured_leaves_nothing_behind() -> None:
    alive: list[Any] = []

    def run() -> None:
        scale = torch.ones(3, dtype=torch.float64)

        def field(t: Tensor, y: Tensor) -> Tensor:
            return -y * scale if float(y.detach().sum()) > 0 else y

        with pytest.warns(sn.CompileWarning):
            solve(field)
        alive.append(ref(scale))

    for _ in range(3):
        run()
    gc.collect()
    assert [x() for x in alive] == [None] * 3

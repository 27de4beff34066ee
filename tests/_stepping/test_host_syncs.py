"""How often the host reads a tensor, for which it waits on an accelerator: per attempted step, forward and backward.

What is counted, in the profiler's events, is every operation whose answer goes to the host: `_local_scalar_dense`
(`.item()`, `float()`, `bool()`), `equal`, and operations whose result has a shape that depends on values; and calls of
`Tensor.tolist`. Two things are done on a CPU only and are taken out: the comparison of a state that was computed again
with the one of the forward pass (an accelerator compares by itself, and the host reads the outcome of all of them once,
at the end), and the comparison of the generators' states, which are always on the host.

Numbers are those of a long solve less those of a shorter one, so that what happens once per solve does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import seminode as sn
from seminode._field.determinism import Determinism, SameAnswers
from seminode.adjoints._continuous import parameter_integral

READS = {
    f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique2")
}


class Counted(NamedTuple):
    """Host reads and attempted steps, forward and backward."""

    forward: int
    steps: int
    backward: int
    backward_steps: int


class Reads:
    """Counts the host reads of what runs under it."""

    def __init__(self) -> None:
        self.lists = 0

    def of(self, run: Callable[[], Any]) -> tuple[Any, int]:
        self.lists = 0
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            result = run()
        results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
        return result, self.lists + sum(event.name() in READS for event in results.events())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counter = Reads()
    tolist = Tensor.tolist
    compared: set[int] = set()

    def counted(self: Tensor) -> Any:
        counter.lists += 1
        return tolist(self)

    def compare(self: SameAnswers, *args: Any) -> None:
        compared.add(id(self))

    def finish(self: SameAnswers, t: float) -> None:
        counter.lists += id(self) in compared
        compared.discard(id(self))

    def first(self: Determinism, evaluate: Callable[[], Tensor], as_check: Any) -> Tensor:
        return evaluate()

    monkeypatch.setattr(Tensor, "tolist", counted)
    monkeypatch.setattr(SameAnswers, "compare", compare)
    monkeypatch.setattr(SameAnswers, "recognise", compare)
    monkeypatch.setattr(SameAnswers, "finish", finish)
    monkeypatch.setattr(Determinism, "first", first)
    return counter


class Field(nn.Module):
    """A network with four tensors of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * torch.cos(t)


def counted(reads: Reads, steps: int, adjoint: Any, options: dict[str, Any]) -> Counted:
    """Of a solve with this many steps of 0.1."""
    field, y0 = Field(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    sol, forward = reads.of(lambda: sn.solve(field, y0, [0.0, 0.1 * steps], adjoint=adjoint, **options))
    _, backward = reads.of(lambda: sol.ys[-1].sum().backward())
    stats, back = sol.stats, sol.stats.backward
    assert back is not None
    assert stats.accepted == steps
    return Counted(forward, stats.accepted + stats.rejected, backward, back.accepted + back.rejected)


ADAPTIVE: dict[str, Any] = {"controller": sn.Integral(dt0=0.1, dt_max=0.1)}
FIXED: dict[str, Any] = {"controller": sn.FixedStep(0.1)}
REVERSIBLE: dict[str, Any] = {"solver": sn.ReversibleRK("dopri5")}
#: Reads of each step of a backward pass, eager and compiled. Quadrature reads the errors of its integral once per many
#: steps; the adaptive rule, at every interval.
BACKWARD = {
    "direct": (sn.Direct(), {}, 0.0, 1.0),
    "replay": (sn.Replay(), {}, 1.0, 1.0),
    "every third": (sn.Replay(every=3), {}, 1.0, 1.0),
    "checkpointed": (sn.Checkpointed(3), {}, 1.0, 1.0),
    "reversible": (sn.Reversible(), REVERSIBLE, 2.0, None),  # both copies of the state are checked; never compiled
    "backsolve": (sn.Backsolve(), {}, 1.0, 1.0),
    "interpolating": (sn.Interpolating(), {}, 1.0, 1.0),
    "quadrature": (sn.Quadrature(), {}, 1.0, 1.0),
    "quadrature, dense": (sn.Quadrature(rule="gauss", z="dense"), {}, 1.0, 1.0),
    "quadrature, adaptive": (sn.Quadrature(rule="gauss-kronrod"), {}, 2.0, 2.0),
}


def per_step(reads: Reads, adjoint: Any, options: dict[str, Any]) -> tuple[float, float]:
    """Reads per step, forward and backward."""
    short, long = (counted(reads, steps, adjoint, options) for steps in (24, 64))
    forward = (long.forward - short.forward) / (long.steps - short.steps)
    return forward, (long.backward - short.backward) / (long.backward_steps - short.backward_steps)


@pytest.mark.parametrize("control", [ADAPTIVE, FIXED], ids=["adaptive", "fixed"])
@pytest.mark.parametrize("name", BACKWARD)
def test_reads_of_eager_steps(reads: Reads, name: str, control: dict[str, Any]) -> None:
    adjoint, options, expected, _ = BACKWARD[name]
    assert per_step(reads, adjoint, options | control) == (1.0, expected)


@pytest.fixture
def stub_back_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replace_back_end(monkeypatch)
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("stub_back_end")
@pytest.mark.parametrize("name", [name for name, row in BACKWARD.items() if row[3] is not None])
def test_reads_of_compiled_steps(reads: Reads, name: str) -> None:
    adjoint, options, _, expected = BACKWARD[name]
    options = options | ADAPTIVE | {"compile": True}
    counted(reads, 24, adjoint, options)  # compiles
    assert per_step(reads, adjoint, options) == (1.0, expected)


#: Besides those of each step: of the forward pass, and of the backward pass.
ONCE = {
    "direct": (4, 0),
    "replay": (4, 6),
    "every third": (4, 6),
    "checkpointed": (4, 6),
    "reversible": (5, 8),
    "backsolve": (5, 21),
    "interpolating": (5, 20),
    "quadrature": (5, 22),
    "quadrature, dense": (5, 22),
    "quadrature, adaptive": (5, 22),
}


@pytest.mark.parametrize("name", ONCE)
def test_reads_of_a_whole_solve(reads: Reads, name: str) -> None:
    adjoint, options, per_step, _ = BACKWARD[name]
    found = counted(reads, 24, adjoint, options | ADAPTIVE)
    forward, backward = ONCE[name]
    assert found.forward <= found.steps + forward
    assert found.backward <= per_step * found.backward_steps + backward


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.usefixtures("stub_back_end")
def test_errors_of_integrals_are_read_together(reads: Reads, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimates do not depend on how many of them are read at a time, and a read takes several."""
    errors, counts = [], []
    for many in (1, 8, 1000):
        monkeypatch.setattr(parameter_integral, "READ", many)
        field, y0 = Field(), torch.ones(3, dtype=torch.float64, requires_grad=True)
        backward, stats = 0, None
        for _ in range(2):  # the first one compiles
            sol = sn.solve(field, y0, [0.0, 6.4], adjoint=sn.Quadrature(), compile=compile, **ADAPTIVE)
            _, backward = reads.of(lambda sol=sol: sol.ys[-1].sum().backward())
            stats = sol.stats.backward
        assert stats is not None
        counts.append(backward)
        errors.append(stats.params_error)
    assert errors[0] is not None
    assert errors == [errors[0]] * 3
    estimates = 64 if compile else 16 + 6
    assert [counts[0] - counts[2], counts[1] - counts[2]] == [estimates - 1, estimates // 8 - (estimates % 8 == 0)]


#: Reads of each output with a cotangent: whether the state has drifted, and how much the cotangent has grown.
OUTPUTS = [(sn.Replay(), 0), (sn.Checkpointed(3), 0), (sn.Backsolve(), 3), (sn.Interpolating(), 2)]


@pytest.mark.parametrize(("adjoint", "expected"), OUTPUTS, ids=lambda x: repr(x))
def test_reads_of_outputs(reads: Reads, adjoint: Any, expected: int) -> None:
    """One output at every tenth step; what the steps themselves read is taken out."""
    beyond = []
    for outputs in (3, 6):
        y0 = torch.ones(3, dtype=torch.float64, requires_grad=True)
        sol = sn.solve(Field(), y0, [float(i) for i in range(outputs + 1)], adjoint=adjoint, **ADAPTIVE)
        _, backward = reads.of(lambda sol=sol: sol.ys.sum().backward())
        stats = sol.stats.backward
        assert stats is not None
        beyond.append(backward - stats.accepted - stats.rejected)
    assert beyond[1] - beyond[0] == 3 * expected


def test_a_rejected_step_is_read_once(reads: Reads) -> None:
    y0, hasty = torch.ones(3, dtype=torch.float64), sn.Integral(dt0=1.0, factor_min=0.9)
    with torch.no_grad():
        sol, found = reads.of(lambda: sn.solve(lambda t, y: -50 * y, y0, [0.0, 1.0], controller=hasty))
    assert sol.stats.rejected > 20
    assert found <= sol.stats.accepted + sol.stats.rejected + 4

"""Every kind of program by the real back end, against eager solves: small fields, few stages, double precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from compiled import forget_programs
from torch import Tensor, nn

import seminode as sn
from seminode._compile import graph, inductor
from seminode._compile.programs import pieces

WIDE = torch.float64


class BackEnd:
    """Notes which kinds of programs are asked for, and how many are compiled."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.compiled = 0


@pytest.fixture(scope="module")
def back_end() -> Iterator[BackEnd]:
    """The real back end, watched, with one thread. Cases share the programs that they have in common, to save time."""
    noted = BackEnd()
    compile_graph, program = inductor.back_end, graph.FieldGraph.program

    def noted_back_end(module: Any, examples: list[Any]) -> Any:
        noted.compiled += 1
        return compile_graph(module, examples)

    def noted_program(self: graph.FieldGraph, key: Any, make: Callable[[], Any]) -> Any:
        parts = (key,) if isinstance(key, str) else key[:2]
        noted.kinds.add(" ".join(part for part in parts if isinstance(part, str)))
        return program(self, key, make)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        forget_programs(monkeypatch)
        monkeypatch.setattr(inductor, "back_end", noted_back_end)
        monkeypatch.setattr(graph.FieldGraph, "program", noted_program)
        yield noted
    torch.set_num_threads(threads)
    torch._dynamo.reset()


class Field(nn.Module):
    """y′ = w·sin(y)·cos(t) − b."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.7, -0.4, 0.2], dtype=WIDE))
        self.b = nn.Parameter(torch.tensor(0.1, dtype=WIDE))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.w * torch.sin(y) * torch.cos(t) - self.b


def results(adjoint: Any, **options: Any) -> list[Tensor]:
    """Outputs and gradients, with an output inside a step, for one parameter that is a number and one that is not."""
    field = Field()
    y0 = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.8]], dtype=WIDE, requires_grad=True)
    sol = sn.solve(field, y0, [0.0, 0.37, 1.0], adjoint=adjoint, **options)
    grads = torch.autograd.grad(sol.ys[1].square().sum() + sol.ys[2].sum(), [y0, *field.parameters()])
    return [sol.ys.detach(), *grads]


class Programs(NamedTuple):
    """An adjoint, the kinds of programs that it takes, and whether steps are compiled in pieces.

    bosh3 has the fewest stages of the methods that all adjoints accept; steps in pieces do not depend on that, and
    another solver does not find the programs for whole steps.
    """

    adjoint: Any
    kinds: set[str]
    in_pieces: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"solver": "dopri5" if self.in_pieces else "bosh3", "rtol": 1e-4, "atol": 1e-6}


CASES = {
    "steps and their VJPs": Programs(sn.Replay(), {"start", "step", "vjp"}),
    "saving steps and their VJPs": Programs(sn.Direct(), {"start", "saving", "saving evaluation", "vjp"}),
    "steps in pieces": Programs(sn.Replay(), {"evaluation", "step", "vjp", "saving evaluation"}, in_pieces=True),
    "saving steps in pieces": Programs(sn.Direct(), {"saving", "compiled saving evaluation", "vjp"}, in_pieces=True),
    "the adjoint equation": Programs(sn.Backsolve(), {"adjoint start", "adjoint step"}),
    "the parameter integral": Programs(sn.Quadrature(), {"adjoint start", "adjoint step", "adjoint integral"}),
    "the adjoint equation in pieces": Programs(sn.Quadrature(), {"adjoint start"}, in_pieces=True),
}


@pytest.mark.filterwarnings("error::seminode.CompileWarning")
@pytest.mark.parametrize("name", CASES)
def test_programs_of_the_back_end_equal_eager_solves(
    name: str, back_end: BackEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setattr(pieces, "LARGE", 0 if case.in_pieces else 1000)
    back_end.kinds.clear()
    found = results(case.adjoint, compile=True, **case.options)
    assert back_end.kinds >= case.kinds
    assert back_end.compiled > 0
    for a, b in zip(found, results(case.adjoint, **case.options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

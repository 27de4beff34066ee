"""Small tensors that are kept for a VJP are joined: fewer are kept, and the gradient is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled import replace_back_end
from torch import Tensor, fx, nn

import seminode as sn
from seminode._compile import packing
from seminode._compile.inductor import Halves, split
from seminode._compile.recompute import VIEWS


def network(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Keeps its inputs, w as a view, several results of the shape of x, and one of another."""
    for _ in range(3):
        x = torch.tanh(x @ w) + v
    return torch.sigmoid(x.sum(1, keepdim=True)) * x


def joint(*tensors: Tensor) -> list[Tensor]:
    value, vjp = torch.func.vjp(network, *tensors[:-1])  # type: ignore[misc]
    return [value, *vjp(tensors[-1])]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (6, 5), (6, 5), (5, 5), (6, 5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def kept(halves: Halves) -> list[fx.Node]:
    (end,) = halves.forward.graph.find_nodes(op="output")
    return list(end.args[0][1:])


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(packing, "SMALL_BYTES", 0)


def test_small_tensors_of_the_same_shape_are_joined(apart: Callable[[], None]) -> None:
    *given, cotangent = inputs()
    together = split(joint, given, [cotangent], 1)
    apart()
    alone = split(joint, given, [cotangent], 1)
    joined = [node for node in kept(together) if node.target is torch.ops.aten.cat.default]
    assert joined
    parts = [part for node in joined for part in node.args[0]]  # type: ignore[union-attr]
    assert len(kept(alone)) == together.kept - len(joined) + len(parts)
    # What is there anyway is not copied.
    assert all(part.op == "call_function" and part.target not in VIEWS for part in parts)
    results = []
    for halves in (together, alone):
        value, *activations = halves.forward(*given)
        assert [x.shape for x in activations] == halves.shapes
        results.append([value, *halves.backward(*activations, cotangent)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_larger_tensors_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    *given, cotangent = inputs()
    for bytes_of_largest, joins in ((6 * 5 * 8, True), (6 * 5 * 8 - 1, False)):
        monkeypatch.setattr(packing, "SMALL_BYTES", bytes_of_largest)
        halves = split(joint, given, [cotangent], 1)
        assert joins == any(node.target is torch.ops.aten.cat.default for node in kept(halves))


class Field(nn.Module):
    """With the same values in both forms, but different graphs, so that they share no programs."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        net, other = torch.relu(self.net(y)), -torch.sin(3.0 * t) * y
        return other + net if self.swapped else net + other


@pytest.mark.parametrize("memory", [None, 20_000])
def test_gradients_and_counts_are_those_with_tensors_apart(
    memory: int | None, apart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_back_end(monkeypatch)
    ts, y0 = torch.linspace(0.0, 2.0, 21), torch.randn(5, 3, generator=torch.Generator().manual_seed(1))

    def solved() -> tuple[list[Tensor], object, object]:
        field, start = Field(packing.SMALL_BYTES == 0), y0.clone().requires_grad_()
        options = {"adjoint": sn.Direct(memory=memory), "rtol": 1e-5, "atol": 1e-5, "compile": True}
        sol = sn.solve(field, start, ts, **options)  # type: ignore[arg-type]
        grads = torch.autograd.grad(sol.ys.square().sum(), [start, *field.parameters()])
        return [sol.ys.detach(), *grads], sol.stats, sol.stats.backward

    together, *counts = solved()
    apart()
    alone, *expected = solved()
    assert counts == expected
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b)

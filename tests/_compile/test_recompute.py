"""Large activations that are computed again: fewer are kept, and the gradient is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compiled import replace_back_end, run_graph
from torch import Tensor, fx, nn
from torch.nn import functional

import seminode as sn
from seminode._compile import packing, recompute
from seminode._compile.inductor import split

WIDE = torch.float64


def joint(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """(*inputs, cotangent) ↦ the value and the gradients of all inputs."""

    def both(*tensors: Tensor) -> list[Tensor]:
        value, vjp = torch.func.vjp(function, *tensors[:-1])  # type: ignore[misc]
        return [value, *vjp(tensors[-1])]

    return both


def network(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """A layer with softplus, and its VJP: second derivatives need both and their products."""
    value, vjp = torch.func.vjp(lambda x: functional.softplus(x @ w) @ w, x)  # type: ignore[misc]
    return value + vjp(v)[0]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=WIDE) for shape in ((6, 5), (6, 5), (5, 5), (6, 5))]


def test_results_of_cheap_operations_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALL_BYTES", 0)
    *given, cotangent = inputs()
    expected = joint(network)(*given, cotangent)
    kept = {}
    for smallest in (1 << 20, 6 * 5 * 8):
        monkeypatch.setattr(recompute, "LARGE_BYTES", smallest)
        halves = split(joint(network), given, [cotangent], 1)
        (end,) = halves.forward.graph.find_nodes(op="output")
        kept[smallest] = [node for node in end.args[0][1:] if node.target in recompute.CHEAP]
        value, *activations = halves.forward(*given)
        assert len(activations) == halves.kept
        found = [value, *halves.backward(*activations, cotangent)]
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    before, after = kept.values()
    assert before
    assert not after


def test_what_another_one_is_computed_from_stays() -> None:
    """b = a + a and c = b·a are large: c is computed from b and a, so b is not dropped as well."""
    forward, backward = fx.Graph(), fx.Graph()
    x, y = forward.placeholder("x"), forward.placeholder("y")
    a = forward.create_node("call_function", torch.ops.aten.mm.default, (x, y), name="a")
    b = forward.create_node("call_function", torch.ops.aten.add.Tensor, (a, a), name="b")
    c = forward.create_node("call_function", torch.ops.aten.mul.Tensor, (b, a), name="c")
    for node in (x, y, a, b, c):
        node.meta["val"] = torch.empty(512, 512)
    forward.output([c, a, b, c])
    ins = [backward.placeholder(name) for name in ("a", "b", "c", "tangents_1")]
    total = ins[0]
    for each in ins[1:]:
        total = backward.call_function(torch.ops.aten.add.Tensor, (total, each))
    backward.output([total])
    halves = [fx.GraphModule(nn.Module(), graph) for graph in (forward, backward)]
    given = [torch.randn(512, 512), torch.randn(512, 512)]
    value, *activations = halves[0](*given)
    expected = halves[1](*activations, value)
    recompute.keep_less(halves[0], halves[1], 1)
    value, *fewer = halves[0](*given)
    assert [node.name for node in halves[1].graph.find_nodes(op="placeholder")] == ["a", "b", "tangents_1"]
    assert len(fewer) == 2
    torch.testing.assert_close(halves[1](*fewer, value), expected)


def gradient(net: nn.Module, y0: Tensor, **options: bool) -> list[Tensor]:
    y0 = y0.clone().requires_grad_()
    sol = sn.solve(lambda t, y: net(y), y0, [0.0, 1.0], adjoint=sn.Direct(), **options)  # type: ignore[arg-type]
    return list(torch.autograd.grad(sol.ys[-1].square().sum(), [y0, *net.parameters()]))


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6, 9)], ids=["one size", "any size"])
def test_solves(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    replace_back_end(monkeypatch)
    monkeypatch.setattr(recompute, "LARGE_BYTES", 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 3)).to(WIDE)

    for n in sizes:
        y0 = torch.randn(n, 3, dtype=WIDE)
        torch.testing.assert_close(gradient(net, y0, compile=True), gradient(net, y0), rtol=1e-10, atol=1e-12)


def test_views_by_a_size_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer on samples of several rows views them as one matrix: programs for any size can still be made."""
    programs: list[fx.GraphModule] = []

    def back_end(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., list[Tensor]]:
        programs.append(module)
        return run_graph(module, examples)

    replace_back_end(monkeypatch, back_end)
    monkeypatch.setattr(recompute, "LARGE_BYTES", 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 3)).to(WIDE)

    made = []
    for n in (4, 6, 9):
        y0 = torch.randn(n, 5, 3, dtype=WIDE)
        torch.testing.assert_close(gradient(net, y0, compile=True), gradient(net, y0), rtol=1e-10, atol=1e-12)
        made.append(len(programs))
    assert made[0] < made[1] == made[2]


def test_what_is_kept_may_have_another_layout() -> None:
    """The back end chooses it, and what was a view of a tensor in the trace may then need a copy."""

    def layers(x: Tensor, w: Tensor) -> Tensor:
        h = functional.softplus(x @ w)
        return functional.softplus((h * x).permute(1, 0, 2) @ w) @ w

    x, w = torch.randn(4, 5, 3, dtype=WIDE), torch.randn(3, 3, dtype=WIDE)
    cotangent = torch.randn(5, 4, 3, dtype=WIDE)
    expected = joint(layers)(x, w, cotangent)
    halves = split(joint(layers), [x, w], [cotangent], 1)
    value, *kept = halves.forward(x, w)
    turned = [each.transpose(0, 1).contiguous().transpose(0, 1) if each.ndim == 3 else each for each in kept]
    assert any(a.stride() != b.stride() for a, b in zip(kept, turned, strict=True))
    found = [value, *halves.backward(*turned, cotangent)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

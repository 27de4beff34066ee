"""Fields on their way to graphs, and the tensors that the programs of a graph are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import replace_back_end, run_graph
from torch import Tensor

import seminode as sn


def run_in_layout(module: Any, examples: list[Any]) -> Any:
    """A back end whose programs, like those of Inductor, are right for one memory layout only."""
    expected = [x.stride() for x in examples]

    def run(inputs: list[Any]) -> Any:
        assert [x.stride() for x in inputs] == expected
        return run_graph(module, examples)(inputs)

    return run


def scaled(t: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    return -factor * y


@pytest.mark.parametrize(
    "pick",
    [lambda x: x[:, ::2], lambda x: x[:, :1].expand(6, 4), lambda x: x.T[:4].T],
    ids=["gaps", "expanded", "part of rows"],
)
def test_arrays_are_copied_in_their_memory_layout(
    pick: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied since others may write into them; the programs are those for any tensor in their layout."""
    replace_back_end(monkeypatch, run_in_layout)
    own = torch.rand(6, 8, dtype=torch.float64)
    shared = torch.from_numpy(own.clone().numpy())
    y0 = torch.ones(6, 4, dtype=torch.float64)
    for factor in (pick(own), pick(shared)):
        compiled, eager = (
            sn.solve(scaled, y0, [0.0, 1.0], args=(factor,), solver="adaptive_heun", compile=each).ys
            for each in (True, False)
        )
        torch.testing.assert_close(compiled, eager, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "answer",
    [lambda y: (-y,), lambda y: (-y, y), lambda y: [-y], lambda y: {"a": -y}],
    ids=["one", "two", "list", "dict"],
)
def test_answers_of_another_nesting_are_refused_as_in_eager_solves(answer: Any) -> None:
    for compile in (False, True):
        with pytest.raises(TypeError, match="field: expected the nesting of y0, tensor, found"):
            sn.solve(lambda t, y: answer(y), torch.ones(3, 2), [0.0, 1.0], compile=compile)


def read_in_memory(module: Any, examples: list[Any]) -> Any:
    """A back end whose programs, like those of Inductor, read numbers as they are in memory."""
    run = run_graph(module, examples)
    return lambda inputs: run([torch.ops.aten._neg_view(x) if x.is_neg() else x for x in inputs])


@pytest.mark.parametrize("which", ["the state", "an argument", "a parameter"])
def test_signs_that_are_not_in_memory(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The imaginary part of a conjugate is a view with the other sign."""
    replace_back_end(monkeypatch, read_in_memory)
    plain = torch.rand(4, 3, dtype=torch.float64)
    turned = torch.complex(plain, -plain).conj().imag
    assert turned.is_neg()
    y0, factor = (turned, plain) if which == "the state" else (plain, turned)
    factor = factor.detach().requires_grad_(which == "a parameter")
    solved = lambda x, **options: sn.solve(scaled, y0, [0.0, 1.0], args=(x,), **options).ys
    expected = solved(factor)
    with pytest.warns(sn.CompileWarning, match="resolve_neg"):
        torch.testing.assert_close(solved(factor, compile=True), expected)
    y0, factor = y0.resolve_neg(), factor.detach().resolve_neg().requires_grad_(factor.requires_grad)
    torch.testing.assert_close(solved(factor, compile=True), expected)


def test_hooks_that_modules_get_between_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph from before is that of another field."""
    replace_back_end(monkeypatch)
    torch.manual_seed(0)
    field = Autonomous()
    y0 = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)

    def agree() -> None:
        found, expected = (
            sn.solve(field, y0, [0.0, 1.0], solver="adaptive_heun", compile=each).ys for each in (True, False)
        )
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        grads = [torch.autograd.grad(ys.square().sum(), [y0, *field.parameters()]) for ys in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)

    agree()
    cases: list[tuple[Any, Any]] = [
        (field.net.register_forward_pre_hook, lambda module, inputs: (inputs[0] * 2.0,)),
        (field.net.register_forward_hook, lambda module, inputs, output: output * 0.5),
        (field.register_forward_hook, lambda module, inputs, output: -output),
    ]
    for register, hook in cases:
        handle = register(hook)
        agree()
        handle.remove()
        agree()
    field.net.register_full_backward_hook(lambda module, grads, _: (grads[0] * 3.0,))
    with pytest.warns(sn.CompileWarning, match="hooks"):
        agree()


class Autonomous(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y).tanh()

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

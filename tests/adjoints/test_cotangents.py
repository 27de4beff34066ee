"""What the backward pass reads of the cotangents of the outputs."""

from __future__ import annotations

import math

import pytest
import torch

from seminode.adjoints import _autograd


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("small", [0, 2**16], ids=["by a norm", "by a copy"])
def test_largest_magnitudes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, small: int) -> None:
    monkeypatch.setattr(_autograd, "SMALL", small)
    grad = torch.tensor([[[1.0, -3.0]], [[0.0, -0.0]], [[math.inf, 1.0]], [[math.nan, 1.0]]], dtype=dtype)
    one, none, infinite, nan = _autograd.row_sizes(grad)
    assert (one, none, infinite) == (3.0, 0.0, math.inf)
    assert math.isnan(nan)


def test_nothing_to_read() -> None:
    assert _autograd.row_sizes(None) == []
    assert _autograd.row_sizes(torch.zeros(0, 3)) == []
    assert _autograd.row_sizes(torch.zeros(2, 0)) == [0.0, 0.0]

"""Operations on numbers and on tensors with one entry per sample."""

from __future__ import annotations

import math

import pytest
import torch

from seminode._stepping import elementwise


def test_constants_are_kept_but_not_while_a_compiler_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = elementwise._constant(0.2)
    assert elementwise._constant(0.2) is kept
    monkeypatch.setattr(elementwise, "transforms_active", lambda: True)
    made = elementwise._constant(0.2)
    assert made is not kept
    assert elementwise._constant(0.2) is not made
    assert (float(made), made.dtype) == (0.2, torch.float64)


def test_a_number_that_is_none_gives_way() -> None:
    x = torch.tensor([math.nan, 0.1, 0.3, math.inf], dtype=torch.float64)
    assert elementwise.number_or(0.2, x).tolist() == [0.2, 0.2, 0.3, math.inf]
    assert [elementwise.number_or(0.2, v) for v in x.tolist()] == [0.2, 0.2, 0.3, math.inf]

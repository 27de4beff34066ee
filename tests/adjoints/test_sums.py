"""Weighted sums of gradients, some of which may be missing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from seminode.adjoints._sums import Sums


def values_of(sums: Sums) -> list[float | None]:
    return [None if x is None else x.item() for x in sums.values]


def number(x: float | None, dtype: torch.dtype = torch.float64) -> Tensor | None:
    return None if x is None else torch.tensor(x, dtype=dtype)


@pytest.mark.parametrize("pattern", list(itertools.product([True, False], repeat=6)), ids=str)
def test_every_contribution_has_its_weight(pattern: tuple[bool, ...]) -> None:
    """Three contributions for two tensors, each of which may be missing."""
    sums = Sums(2)
    expected: list[float | None] = [None, None]
    for row, weight in enumerate((0.5, -2.0, 3.0)):
        grads = [10.0 ** (2 * row + i) if pattern[2 * row + i] else None for i in range(2)]
        sums.add([number(x) for x in grads], weight)
        expected = [e if g is None else (e or 0.0) + weight * g for e, g in zip(expected, grads, strict=True)]
    assert values_of(sums) == expected


def test_a_weight_of_zero_adds_nothing() -> None:
    sums = Sums(1)
    sums.add([number(float("nan"))], 0.0)
    assert values_of(sums) == [None]


def test_the_first_contribution_is_not_written_to() -> None:
    first = torch.ones(1, dtype=torch.float64).expand(3)  # one number in memory
    sums = Sums(1)
    sums.add([first])
    sums.add([torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)])
    assert sums.values[0] is not None
    assert sums.values[0].tolist() == [2.0, 3.0, 4.0]
    assert first.tolist() == [1.0, 1.0, 1.0]


def test_half_precision_is_summed_in_single() -> None:
    sums = Sums(1)
    for _ in range(3000):
        sums.add([number(1.0, torch.bfloat16)])
    assert values_of(sums) == [3000.0]


@pytest.mark.parametrize("own", [(None, None), (1.0, None), (1.0, 2.0)])
@pytest.mark.parametrize("other", [(None, None), (None, 20.0), (10.0, 20.0)])
def test_a_sum_absorbs_another(own: tuple[float | None, ...], other: tuple[float | None, ...]) -> None:
    sums, second = Sums(2), Sums.of([number(x) for x in other])
    sums.add([number(x) for x in own])
    sums.absorb(second)
    pairs = zip(own, other, strict=True)
    assert values_of(sums) == [None if a is None and b is None else (a or 0.0) + (b or 0.0) for a, b in pairs]
    assert values_of(second) == [None, None]


def test_adopted_gradients_become_the_sum() -> None:
    a, b = torch.ones(2), torch.full((3,), 2.0)
    sums = Sums(2)
    sums.adopt([a, b])
    assert sums.values[0] is a
    sums.adopt([torch.ones(2), None])
    assert [None if x is None else x.tolist() for x in sums.values] == [[2.0, 2.0], [2.0, 2.0, 2.0]]


def test_one_gradient_in_two_places_is_not_added_to_twice() -> None:
    shared = torch.ones(2)
    sums = Sums(2)
    sums.adopt([shared, shared])
    sums.add([torch.ones(2), torch.ones(2)])
    assert [x.tolist() for x in sums.values if x is not None] == [[2.0, 2.0]] * 2


def test_adopted_half_precision_gradients_are_summed_in_single_precision() -> None:
    sums = Sums(1)
    sums.adopt([torch.ones(1, dtype=torch.float16)])
    assert sums.values[0] is not None
    assert sums.values[0].dtype == torch.float32

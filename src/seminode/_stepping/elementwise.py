"""Arithmetic that works on a number and, sample by sample, on a tensor with one number per sample.

Step-size control is written with these functions, so that the same formulas serve a solve with one step size and a
solve in which every sample has its own. A condition on numbers is a `bool`; one on tensors is a tensor of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._compile.torch_private import transforms_active


def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """yes() where the condition holds and no() elsewhere. Of numbers, only one of the two is computed.

    >>> choose(True, lambda: 1.0, lambda: 1.0 / 0.0)
    1.0
    """
    if not isinstance(condition, Tensor):
        return yes() if condition else no()
    return select(condition, yes(), no())


def select(condition: Any, yes: Any, no: Any) -> Any:
    """The same for values that are known."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    if not isinstance(yes, Tensor) and not isinstance(no, Tensor):
        yes = _constant(yes)  # two numbers would become float32
    return torch.where(condition, yes, no)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of the two; at least one tensor makes the result a tensor."""
    if not isinstance(a, Tensor):
        return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)
    return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of the two."""
    if not isinstance(a, Tensor):
        return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)
    return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)


def number_or(least: float, x: Any) -> Any:
    """The larger of the two; the first if the second is not a number."""
    return torch.fmax(x, _constant(least)) if isinstance(x, Tensor) else max(least, x)


def isfinite(x: Any) -> Any:
    return x.abs() < math.inf if isinstance(x, Tensor) else math.isfinite(x)  # torch.isfinite is four operations


def _constant(x: float) -> Tensor:
    # One that is made while a compiler traces has no value, and must not be kept.
    return torch.tensor(x, dtype=torch.float64) if transforms_active() else _known_constant(x)


@lru_cache(maxsize=16)
def _known_constant(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)

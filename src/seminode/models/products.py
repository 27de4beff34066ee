"""Products with Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def vjp(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Callable[[Any], tuple[Tensor, ...]]]:
    """The value of a function and u ↦ uᵀJ: `torch.func.vjp` without its auxiliary output, and with a type."""
    return torch.func.vjp(function, *inputs)  # type: ignore[return-value]

"""Vector–Jacobian products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def vjp(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Callable[[Any], tuple[Tensor, ...]]]:
    """The value of a function, and the function u ↦ uᵀJ: a typed `torch.func.vjp` without auxiliary output."""
    return torch.func.vjp(function, *inputs)  # type: ignore[return-value]

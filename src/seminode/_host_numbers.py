"""Tensors made from a few numbers that are known on the host: times, weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

TYPE_CODES = {torch.float32: "f", torch.float64: "d"}


def as_tensor(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor of one dimension."""
    if device.type == "cpu" and dtype in TYPE_CODES and values:  # the same in a third of the time
        return torch.frombuffer(array(TYPE_CODES[dtype], values), dtype=dtype)
    return torch.tensor(values, dtype=dtype, device=device)

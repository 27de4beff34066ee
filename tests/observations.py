"""Random series with gaps and irregular times, for the tests of paths."""

from __future__ import annotations

import torch
from torch import Tensor


def series(*shape: int, gaps: float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random values (batch..., K, channels), each missing with a probability, but never a whole channel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    missing = torch.rand(*shape, generator=generator) < gaps
    missing[..., shape[-2] // 2, :] = False
    return x.masked_fill(missing, torch.nan).to(dtype)


def irregular(*shape: int, seed: int = 1) -> Tensor:
    """Random times, strictly increasing along the last axis."""
    generator = torch.Generator().manual_seed(seed)
    return (0.1 + torch.rand(*shape, generator=generator, dtype=torch.float64)).cumsum(-1)

"""Functions for which torch has no type annotations, with annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
eigh: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.eigh
#: The solution comes first.
lstsq: Callable[[Tensor, Tensor], tuple[Tensor, ...]] = torch.linalg.lstsq


solve_linear: Callable[[Tensor, Tensor], Tensor] = torch.linalg.solve
#: The solution, and whether the factorisation failed.
solve_ex: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = torch.linalg.solve_ex
#: The factors, the pivots, and which factorisations failed.
lu_factor_ex: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] = torch.linalg.lu_factor_ex
lu_solve: Callable[..., Tensor] = torch.linalg.lu_solve
block_diag: Callable[..., Tensor] = torch.block_diag
norm: Callable[..., Tensor] = torch.norm
tensordot: Callable[..., Tensor] = torch.tensordot
unique: Callable[[Tensor], Tensor] = torch.unique
device_properties: Callable[[torch.device], Any] = torch.cuda.get_device_properties
#: The value and the tangent of a tensor under forward-mode differentiation.
unpack_dual: Callable[[Tensor], tuple[Tensor, Tensor | None]] = torch.autograd.forward_ad.unpack_dual


def numbers(x: Tensor) -> list[float]:
    """The entries of a tensor of one dimension, on the host."""
    try:
        return x.tolist()
    except RuntimeError:  # torch 2.8 inside of a transform
        return [each.item() for each in x.unbind()]


def integers(x: Tensor) -> list[int]:
    """The entries of an integer tensor of one dimension, on the host."""
    return x.tolist()


def register_hook(x: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient of a tensor when it is computed."""
    x.register_hook(hook)

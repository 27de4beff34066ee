"""STEER: random end times as a regulariser."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._field.checks import check_number


def steer(ts: Tensor | Sequence[float], width: float, generator: torch.Generator | None = None) -> Tensor:
    r"""Perturb all times but the first: each t becomes a sample from U(t − b, t + b).

    If every training iteration samples new end times, the network learns dynamics that change slowly around the true
    end, and the solver takes fewer steps. Use the true times for testing.

    Reference: Ghosh et al., *STEER: Simple temporal regularization for neural ODEs*, NeurIPS 2020.

    Arguments:
        ts: increasing or decreasing times, at least two.
        width: b, less than the first interval between times and less than half of each other one, so that the times
            stay in order.
        generator: random number generator; by default the global one of torch.

    Example:
        >>> import torch
        >>> from seminode.models import steer
        >>> steer([0.0, 1.0], 0.5, torch.Generator().manual_seed(0))
        tensor([0.0000, 1.4701], dtype=torch.float64)
    """
    width = check_number("width", width)
    times = ts if isinstance(ts, Tensor) else torch.tensor([float(t) for t in ts], dtype=torch.float64)
    times = times if times.is_floating_point() else times.double()
    if times.ndim != 1 or len(times) < 2:
        raise ValueError(f"ts: expected shape (n,) with n >= 2, found {tuple(times.shape)}")
    gaps = times.detach().diff().abs()
    gaps[1:] /= 2
    if width >= float(gaps.min()) and width > 0.0:
        raise ValueError(
            f"width: expected below {float(gaps.min()):g}, the first interval of ts or half of a later one, "
            f"found {width:g}"
        )
    draws = torch.rand(len(times) - 1, generator=generator, dtype=times.dtype, device=times.device)
    return torch.cat([times[:1], times[1:] + width * (2 * draws - 1)])

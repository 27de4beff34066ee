"""STEER: random end times as a regulariser."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._field.checks import check_number


def steer(ts: Tensor | Sequence[float], width: float, generator: torch.Generator | None = None) -> Tensor:
    r"""Times with all but the first moved at random, each t to a draw from U(t − b, t + b).

    A network that is trained on ends drawn anew at every iteration learns dynamics that do not change fast around
    the true end, and takes the solver fewer steps. Test with the true times.

    Reference: Ghosh et al., *STEER: Simple temporal regularization for neural ODEs*, NeurIPS 2020.

    Arguments:
        ts: increasing or decreasing times, at least two.
        width: b, below the first gap between times and below half of the others, so that they stay in order.
        generator: of the random numbers; by default torch's own.

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
            f"width: expected below {float(gaps.min()):g} (the first gap of ts, half of the others), found {width:g}"
        )
    draws = torch.rand(len(times) - 1, generator=generator, dtype=times.dtype, device=times.device)
    return torch.cat([times[:1], times[1:] + width * (2 * draws - 1)])

"""Channels that tell a controlled differential equation what the values alone do not: time, and what was observed.

Kidger, Morrill, Foster and Lyons, "Neural Controlled Differential Equations for Irregular Time Series" (NeurIPS 2020,
arXiv:2005.08926).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .knots import Times, check_lengths, check_times, check_values


def append_time(x: Tensor, times: Times = None, *, lengths: Any = None) -> Tensor:
    """x with time as its channel 0: (batch..., K, 1 + channels).

    A CDE is blind to the pace at which its control is traversed; with time among the channels it can tell.

    Arguments:
        x: (batch..., K, channels).
        times: (K,) for all series or (batch..., K), strictly increasing; by default 0, 1, …, K − 1.
        lengths: (batch...), the number of knots of each series; beyond them its last time is repeated.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> paths.append_time(torch.tensor([[5.0], [7.0]]), [0.0, 0.5])
        tensor([[0.0000, 5.0000],
                [0.5000, 7.0000]])
    """
    batch, count = check_values(x)
    own = None if lengths is None else check_lengths(lengths, batch, count, x.device)
    times = check_times(times, x, own).to(x.dtype).expand(*batch, count)
    if own is not None:
        times = times.gather(-1, torch.minimum(torch.arange(count, device=x.device), own.unsqueeze(-1) - 1))
    return torch.cat((times.unsqueeze(-1), x), -1)


def append_intensity(x: Tensor) -> Tensor:
    """x with the observational intensity of each channel behind: (batch..., K, 2·channels).

    Channel channels + c counts how often channel c has been observed (is not NaN) up to each knot. Its increments are
    the mask of observations, so that a CDE knows what was measured and what was filled in. To be called before gaps
    are filled, and before `append_time`, whose channel is always there.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> paths.append_intensity(torch.tensor([[5.0], [torch.nan], [7.0]]))
        tensor([[5., 1.],
                [nan, 1.],
                [7., 2.]])
    """
    check_values(x)
    return torch.cat((x, x.isnan().logical_not().to(x.dtype).cumsum(-2)), -1)

"""Additional channels for a controlled differential equation: time, and which values were observed.

Kidger, Morrill, Foster and Lyons, "Neural Controlled Differential Equations for Irregular Time Series" (NeurIPS 2020,
arXiv:2005.08926).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .knots import Lengths, Times, check_lengths, check_times, check_values


def append_time(x: Tensor, times: Times = None, *, lengths: Lengths = None) -> Tensor:
    """Insert time as channel 0: (batch..., K, 1 + channels).

    The solution of a CDE does not depend on the parametrisation of its control. It depends on time only if time is a
    channel.

    Reference: Kidger, Morrill, Foster and Lyons, *Neural Controlled Differential Equations for Irregular Time Series*,
    NeurIPS 2020, arXiv:2005.08926.

    Arguments:
        x: (batch..., K, channels).
        times: (K,) for all series or (batch..., K), strictly increasing; by default 0, 1, …, K − 1.
        lengths: (batch...), the number of knots of each series; after them its last time is repeated.

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
    """Append the observational intensity of each channel: (batch..., K, 2·channels).

    Channel channels + c counts the observations (values that are not NaN) of channel c up to each knot. Its increments
    are the mask of the observations, so a CDE can tell measured values from filled ones. Call this function before gaps
    are filled, and before `append_time`, whose channel has no gaps.

    Reference: as for [`append_time`][seminode.paths.append_time].

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed.

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

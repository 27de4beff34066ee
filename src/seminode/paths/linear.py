"""Piecewise linear paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import warn
from .base import Path
from .knots import Knots, Lengths, Times, check_knots
from .missing import check_observed, filled_forward, filled_linearly


def linear(x: Tensor, times: Times = None, *, lengths: Lengths = None) -> Path:
    """The path along straight lines through the observations.

    dX/dt is constant between knots and discontinuous at the knots. Where a channel is missing (NaN), it follows the
    straight line between the observations before and after. Before its first and after its last observation, it is
    constant.

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed.
        times: (K,) for all series or (batch..., K), strictly increasing; by default 0, 1, …, K − 1.
        lengths: (batch...), the number of knots of each series, by default K. Later entries of x and times are ignored,
            and the path is constant there.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> x = torch.tensor([[0.0], [2.0], [torch.nan], [8.0]])
        >>> path = paths.linear(x, [0.0, 1.0, 2.0, 4.0])
        >>> path.evaluate(2.0), path.derivative(0.5)
        (tensor([4.]), tensor([2.]))
        >>> path.jumps
        tensor([1., 2.], dtype=torch.float64)
    """
    knots = check_knots(x, times, lengths)
    check_observed(knots)
    return _through(Knots(knots.times, filled_linearly(knots), knots.lengths), "linear")


def rectilinear(x: Tensor, times: Times = None, time_channel: int = 0, *, lengths: Lengths = None) -> Path:
    """The path parallel to the axes through the observations: first the time channel changes, then the values.

    Between two observations a knot is added. There the time channel has the new value and the other channels still have
    the old ones. So X(t) at the time of an observation does not depend on later observations, and neither does the
    solution of a CDE. A channel that is missing (NaN) keeps its latest value (Morrill, Kidger, Yang and Lyons, "Neural
    Controlled Differential Equations for Online Prediction Tasks", 2021, arXiv:2106.11028).

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed. One of the channels is time.
        times: (K,) or (batch..., K), the times at which the path reaches each observation, by default 0, 2, …, 2K − 2.
            The added knots are halfway between. These times are arbitrary: a CDE only sees the time channel.
        time_channel: the index of the channel of x that is time.
        lengths: as in [`linear`][seminode.paths.linear].

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> x = torch.tensor([[0.0, 5.0], [1.0, 7.0]])
        >>> paths.rectilinear(x).evaluate(torch.tensor([0.0, 1.0, 2.0]))
        tensor([[0., 5.],
                [1., 5.],
                [1., 7.]])
    """
    knots = check_knots(x, times, lengths)
    values = _rectilinear_values(knots, time_channel)
    more = None if knots.lengths is None else 2 * knots.lengths - 1
    return _through(Knots(_halved(knots.times, times is None), values, more), "rectilinear")


def rectilinear_knots(x: Tensor, time_channel: int = 0, *, lengths: Lengths = None) -> Tensor:
    """The values at the knots of [`rectilinear`][seminode.paths.rectilinear]: (batch..., 2K − 1, channels).

    Arguments:
        x, time_channel, lengths: as in `rectilinear`.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> paths.rectilinear_knots(torch.tensor([[0.0, 5.0], [1.0, 7.0]]))
        tensor([[0., 5.],
                [1., 5.],
                [1., 7.]])
    """
    return _rectilinear_values(check_knots(x, None, lengths), time_channel).movedim(0, -2)


def linear_fill(x: Tensor, times: Times = None, *, lengths: Lengths = None) -> Tensor:
    """The values at the knots of [`linear`][seminode.paths.linear], without gaps: (batch..., K, channels).

    Arguments:
        x, times, lengths: as in `linear`.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> paths.linear_fill(torch.tensor([[0.0], [torch.nan], [4.0]]), [0.0, 1.0, 2.0]).squeeze(-1)
        tensor([0., 2., 4.])
    """
    knots = check_knots(x, times, lengths)
    check_observed(knots)
    return filled_linearly(knots).movedim(0, -2)


def _rectilinear_values(knots: Knots, time_channel: int) -> Tensor:
    """(2K − 1, batch..., channels), with a knot added between each two observations."""
    channels = knots.values.shape[-1]
    _check_channel(time_channel, channels)
    check_observed(knots)
    unknown = knots.values[..., time_channel].isnan()
    inside = knots.inside()
    if bool((unknown if inside is None else unknown & inside.squeeze(-1)).any()):
        raise ValueError(f"x[..., {time_channel}]: expected times without gaps in the time channel, found NaN")
    if bool(knots.values[0].isnan().any()):
        warn(
            "x: some channels are not observed at the first knot. They start with their first observed value, which is "
            "not causal. For a causal path, fill the first knot with a constant, such as the mean of the channel.",
            UserWarning,
        )
    values = filled_forward(knots)
    is_time = torch.arange(channels, device=values.device) == time_channel % channels
    moved = torch.where(is_time, values[1:], values[:-1])
    both = torch.stack((values[:-1], moved), 1).flatten(0, 1)
    return torch.cat((both, values[-1:]))


def _check_channel(index: Any, channels: int) -> None:
    if not isinstance(index, int) or isinstance(index, bool) or not -channels <= index < channels:
        raise ValueError(f"time_channel: expected the index of one of {channels} channels, found {index!r}")


def _halved(times: Tensor, doubled: bool) -> Tensor:
    """The times with the midpoints between them; 0, 1, …, 2K − 2 if the times are only the indices of the knots."""
    if doubled:
        return torch.arange(2 * times.shape[-1] - 1, dtype=times.dtype, device=times.device)
    halfway = times[..., :-1] + 0.5 * times.diff()
    return torch.cat((torch.stack((times[..., :-1], halfway), -1).flatten(-2), times[..., -1:]), -1)


def _through(knots: Knots, kind: str) -> Path:
    """Straight lines through values without gaps. After the end of a series the values are equal, so slopes are 0."""
    values = knots.values
    powers = values[:-1], values.diff(dim=0) / knots.widths
    return Path(knots.times, powers, lengths=knots.lengths, kind=kind)

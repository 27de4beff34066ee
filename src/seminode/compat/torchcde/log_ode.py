"""The log-ODE method: log-signatures of windows of a path."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import paths
from .misc import validate_input_path


def logsig_windows(x: Tensor, depth: int, window_length: float, t: Tensor | None = None) -> Tensor:
    """The knots of the path whose increments are the log-signatures of windows: (batch..., W + 1, channels′).

    Arguments:
        x: (batch..., K, channels), NaN where nothing was observed. A channel without any observation is 0.
        depth: of the log-signatures, in the basis of Lyndon words.
        window_length: in units of time.
        t: (K,), strictly increasing; by default 0, 1, …, K − 1.
    """
    t = validate_input_path(x, t)
    return paths.logsignature_windows(paths.fill_unobserved(x), depth, window_length, t)


def logsignature_windows(x: Tensor, depth: int, window_length: float, t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The older form of `logsig_windows`: increments times the length of their window, and the times of the knots."""
    t = validate_input_path(x, t)
    knots = logsig_windows(x, depth, window_length, t)
    edges = paths.window_edges(t, window_length)
    scaled = knots.diff(dim=-2) * edges.diff().to(knots.dtype).unsqueeze(-1)
    return torch.cat((knots[..., :1, :], scaled), -2).cumsum(-2), edges

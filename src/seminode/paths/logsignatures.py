"""Log-signatures of piecewise linear paths, and the log-ODE method.

The signature of a path is an element of the tensor algebra, truncated at some depth. Here an element is the list of its
levels 1, 2, …, depth. Level k has shape (..., channelsᵏ). Level 0, a number, is a separate argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .._field.checks import check_count, check_number
from .._untyped import numbers
from .base import Path
from .knots import Lengths, Times, check_values
from .linear import linear
from .lyndon import bracket_terms, lyndon_words

Levels = list[Tensor]

#: Bases of the free Lie algebra.
Basis = Literal["words", "brackets"]


def logsignature(x: Tensor, depth: int, basis: Basis = "words") -> Tensor:
    """The log-signature of the piecewise linear path through x: (batch..., logsignature_channels).

    With increments Δᵢ, this is log(exp Δ₁ ⊗ exp Δ₂ ⊗ …) in the tensor algebra truncated at `depth`. The first level is
    the total increment, the second the signed area of each pair of channels. The log-signature does not depend on the
    parametrisation of the path (Lyons, Caruana and Lévy, "Differential Equations Driven by Rough Paths", 2007).

    Arguments:
        x: (batch..., K, channels), without gaps.
        depth: the highest level, at least 1.
        basis: `"words"` for the coefficients of the Lyndon words in the tensor algebra, which is faster; `"brackets"`
            for the coefficients of their Lie brackets. Shorter words come first, words of equal length are in
            alphabetical order. Each form is an invertible linear function of the other.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
        >>> paths.logsignature(square, 2)  # a closed path around an area of 1
        tensor([0., 0., 1.])
    """
    check_values(x)
    if not bool(x.isfinite().all()):
        raise ValueError("x: expected finite values, found NaN or infinite values; fill gaps with paths.linear first")
    return _of_increments(x.diff(dim=-2), check_count("depth", depth), basis)


def logsignature_windows(
    x: Tensor, depth: int, window_length: float, times: Times = None, *, lengths: Lengths = None, basis: Basis = "words"
) -> Tensor:
    """The cumulative sums of the log-signatures of windows: the knots of a control, (batch..., W + 1, channels′).

    This is the log-ODE method. The straight lines through these knots, one window per unit of time, replace the long
    and rough x as the control. Each increment is the log-signature of one window. The first knot is the start of x,
    padded with zeros (Morrill, Salvi, Kidger, Foster and Lyons, "Neural Rough Differential Equations for Long Time
    Series", ICML 2021, arXiv:2009.08295).

    Arguments:
        x, times, lengths: as in [`linear`][seminode.paths.linear]; gaps are filled along straight lines.
        depth, basis: as in [`logsignature`][seminode.paths.logsignature].
        window_length: in units of time. The first window starts at the first knot of all series. The last one may be
            shorter. A series adds nothing before its first and after its last knot.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> x = torch.randn(32, 1001, 3)
        >>> knots = paths.logsignature_windows(x, depth=2, window_length=50.0)
        >>> paths.linear(knots)
        Path(linear, 21 knots on [0, 20], batch_shape=(32,), channels=6, torch.float32)
    """
    check_count("depth", depth)
    path = linear(x, times, lengths=lengths)
    points = _points(path, window_edges(path.times, window_length))  # (W, S) or (W, S, batch...)
    values = torch.unflatten(path.evaluate(points.flatten(0, 1)), 0, points.shape[:2])
    steps = values.diff(dim=1).movedim((0, 1), (-3, -2))  # (batch..., W, S − 1, channels)
    windows = _of_increments(steps, depth, basis)
    start = values[0, 0].unsqueeze(-2)
    rest = start.new_zeros((*start.shape[:-1], windows.shape[-1] - start.shape[-1]))
    return torch.cat((torch.cat((start, rest), -1), windows), -2).cumsum(-2)


def window_edges(times: Tensor, window_length: float) -> Tensor:
    """The W + 1 times between which the windows of `logsignature_windows` lie. The last window may be shorter.

    Arguments:
        times: the knots of all series.
        window_length: in units of time.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> paths.window_edges(torch.tensor([0.0, 1.0, 5.0]), 2.0)
        tensor([0., 2., 4., 5.])
    """
    if check_number("window_length", window_length) == 0.0:
        raise ValueError("window_length: expected a number above 0, found 0")
    start, end = times.min(), times.max()
    t0, t1 = numbers(torch.stack((start, end)).detach())
    rounding = 8.0 * torch.finfo(times.dtype).eps * max(abs(t0), abs(t1))
    count = max(1, math.ceil((t1 - t0 - rounding) / window_length))  # no additional window because of rounding
    begins = start + window_length * torch.arange(count, dtype=times.dtype, device=times.device)
    return torch.cat((begins, end.reshape(1)))


def _points(path: Path, edges: Tensor) -> Tensor:
    """The ends of each window and the knots inside it, padded with its end, which adds nothing."""
    times = path.times
    places = times.detach()
    if path.lengths is not None and not path.shared:  # without padding
        inside = torch.arange(times.shape[-1], device=times.device) < path.lengths.unsqueeze(-1)
        places = torch.where(inside, places, torch.inf)
    wanted = edges.detach().expand(*times.shape[:-1], -1)
    first = torch.searchsorted(places, wanted[..., :-1].contiguous(), right=True)
    beyond = torch.searchsorted(places, wanted[..., 1:].contiguous())
    most = int((beyond - first).max().clamp(min=0))
    index = first.unsqueeze(-1) + torch.arange(most, device=times.device)  # (batch..., W, S − 2)
    flat = times.gather(-1, index.clamp(max=times.shape[-1] - 1).flatten(-2))
    knots = torch.unflatten(flat, -1, index.shape[-2:])
    start, end = (edge.unsqueeze(-1).expand(*knots.shape[:-1], 1) for edge in (edges[:-1], edges[1:]))
    points = torch.cat((start, torch.where(index < beyond.unsqueeze(-1), knots, end), end), -1)
    return points.movedim((-2, -1), (0, 1))


def _of_increments(steps: Tensor, depth: int, basis: Basis) -> Tensor:
    """The log-signature of increments (..., n, channels)."""
    if basis not in ("words", "brackets"):
        raise ValueError(f"basis: expected 'words' or 'brackets', found {basis!r}")
    channels = steps.shape[-1]
    levels = _log(_signature(steps, depth))
    words = lyndon_words(channels, depth)
    chosen: list[Tensor] = []
    for k, level in enumerate(levels, 1):
        letters = torch.tensor([w for w in words if len(w) == k], dtype=torch.int64, device=steps.device)
        if len(letters) > 0:  # a single channel has only one Lyndon word
            place = channels ** torch.arange(k - 1, -1, -1, device=steps.device)
            chosen.append(level.index_select(-1, (letters * place).sum(-1)))
    coefficients = torch.cat(chosen, -1)
    if basis == "words":
        return coefficients
    rows, columns, factors = torch.tensor(bracket_terms(channels, depth), device=steps.device).unbind(-1)
    terms = coefficients.index_select(-1, columns) * factors.to(coefficients.dtype)
    return torch.zeros_like(coefficients).index_add(-1, rows, terms)


def _signature(steps: Tensor, depth: int) -> Levels:
    """exp Δ₁ ⊗ exp Δ₂ ⊗ … (Chen's identity)."""
    first, *more = steps.unbind(-2)
    levels = [first]
    for k in range(2, depth + 1):
        levels.append(_outer(levels[-1], first / k))
    for step in more:
        levels = _times_exponential(levels, step)
    return levels


def _times_exponential(levels: Levels, step: Tensor) -> Levels:
    """S ⊗ exp Δ, level by level: Σᵢ Sᵢ ⊗ Δᵏ⁻ⁱ/(k − i)!, by Horner's rule."""
    product: Levels = []
    for k in range(1, len(levels) + 1):
        total = step / k
        for i in range(1, k):
            total = _outer(total + levels[i - 1], step / (k - i))
        product.append(total + levels[k - 1])
    return product


def _log(levels: Levels) -> Levels:
    """log(1 + x) = x ⊗ (1 − x ⊗ (1/2 − x ⊗ (1/3 − …)))."""
    depth = len(levels)
    inner = [torch.zeros_like(level) for level in levels]
    for n in range(depth, 1, -1):
        inner = [-level for level in _product(levels, 1.0 / n, inner)]
    return _product(levels, 1.0, inner)


def _product(x: Sequence[Tensor], number: float, y: Sequence[Tensor]) -> Levels:
    """x ⊗ (number + y), truncated."""
    product: Levels = []
    for k in range(1, len(x) + 1):
        total = number * x[k - 1]
        for i in range(1, k):
            total = total + _outer(x[i - 1], y[k - i - 1])
        product.append(total)
    return product


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)

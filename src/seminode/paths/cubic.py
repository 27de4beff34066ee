"""Cubic splines: paths with a continuous derivative.

On a piece of width h, the values x and the derivatives k at both ends define a cubic. With s = (x₁ − x₀)/h it is
X = x₀ + k₀·u + (3s − 2k₀ − k₁)/h·u² + (k₀ + k₁ − 2s)/h²·u³, where u is the time since the start of the piece.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .base import Path
from .knots import Knots, Lengths, Times, check_knots
from .missing import check_observed, filled_forward, filled_linearly, neighbours
from .tridiagonal import tridiagonal_solution

#: What the spline of a channel goes through before its first and after its last observation.
Ends = Literal["held", "loose"]


def natural_cubic(x: Tensor, times: Times = None, *, lengths: Lengths = None, ends: Ends = "held") -> Path:
    """The natural cubic spline through the observations: twice continuously differentiable, with X″ = 0 at both ends.

    Every value depends on all observations, including later ones, so do not use it for online predictions.
    Where a channel is missing (NaN), its spline goes through the observed values only.

    Reference: as a control, Kidger, Morrill, Foster and Lyons, *Neural Controlled Differential Equations for Irregular
    Time Series*, NeurIPS 2020, arXiv:2005.08926.

    Arguments:
        x, times, lengths: as in [`linear`][seminode.paths.linear].
        ends: what the spline of a channel goes through before its first and after its last observation. With `"held"`,
            it has the value of that observation at every knot. It is not constant there: between the knots it
            oscillates. With `"loose"`, it has this value only at the first or the last knot of the series, so it may
            swing far away from it on the way.

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> path = paths.natural_cubic(torch.tensor([[0.0], [1.0], [0.0]]))
        >>> path.evaluate(0.5), path.derivative(1.0), path.jumps
        (tensor([0.6875]), tensor([0.]), tensor([]))
    """
    knots = check_knots(x, times, lengths)
    check_observed(knots)
    if ends not in ("held", "loose"):
        raise ValueError(f"ends: expected 'held' or 'loose', found {ends!r}")
    if knots.complete:
        return _through(knots, _natural_derivatives(knots.clock, knots.values), "natural cubic")
    anchored = knots.observed | (_outside_observations(knots) if ends == "held" else _outer_knots(knots))
    held = Knots(knots.times, filled_forward(knots), knots.lengths)
    values, derivatives = _natural_through(held, anchored)
    return _through(Knots(knots.times, values, knots.lengths), derivatives, "natural cubic")


def hermite_cubic(x: Tensor, times: Times = None, *, lengths: Lengths = None) -> Path:
    """The cubic spline whose derivative at a knot is the slope of the straight line from the previous knot.

    This is the cubic Hermite spline with backward differences. It is continuously differentiable. Each piece depends on
    the knots at its two ends and the one before (Morrill, Kidger, Yang and Lyons, "Neural Controlled Differential
    Equations for Online Prediction Tasks", 2021, arXiv:2106.11028). Missing values (NaN) are first
    filled in as in [`linear`][seminode.paths.linear]. So a channel is constant before its first observation. After its
    last one it is constant from the next knot on: on the piece between, its slope goes from that of the last line to 0.

    Arguments:
        x, times, lengths: as in [`linear`][seminode.paths.linear].

    Example:
        >>> import torch
        >>> from seminode import paths
        >>> path = paths.hermite_cubic(torch.tensor([[0.0], [1.0], [0.0]]))
        >>> path.derivative(torch.tensor([0.0, 1.0, 2.0])).squeeze(-1)
        tensor([ 1.,  1., -1.])
    """
    knots = check_knots(x, times, lengths)
    check_observed(knots)
    filled = Knots(knots.times, filled_linearly(knots), knots.lengths)
    slopes = filled.values.diff(dim=0) / filled.widths
    return _through(filled, torch.cat((slopes[:1], slopes)), "Hermite cubic")


def _outside_observations(knots: Knots) -> Tensor:
    """The knots before the first and after the last observation of a channel, up to the end of the series."""
    before, after = neighbours(knots.observed)
    inside = knots.inside()
    last = after == len(after)
    return (before < 0) | (last if inside is None else last & inside)


def _outer_knots(knots: Knots) -> Tensor:
    """The first and the last knot of a series."""
    count = len(knots.values)
    index = torch.arange(count, device=knots.values.device).reshape(-1, *(1 for _ in knots.values.shape[1:]))
    last = count - 1 if knots.lengths is None else knots.lengths.unsqueeze(-1) - 1
    return (index == 0) | (index == last)


def _through(knots: Knots, derivatives: Tensor, kind: str) -> Path:
    """The spline with these values and derivatives at its knots; constant after the end of a series."""
    c, d = _curvature(knots.values[:-1], knots.values[1:], derivatives[:-1], derivatives[1:], knots.widths)
    slopes = derivatives[:-1], c, d
    inside = knots.inside(offset=1)
    if inside is not None:
        slopes = [torch.where(inside, coefficient, 0.0) for coefficient in slopes]
    return Path(knots.times, (knots.values[:-1], *slopes), smooth=True, lengths=knots.lengths, kind=kind)


def _curvature(x0: Tensor, x1: Tensor, k0: Tensor, k1: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients of u² and u³."""
    s = (x1 - x0) / width
    return (3.0 * s - 2.0 * k0 - k1) / width, (k0 + k1 - 2.0 * s) / width**2


def _natural_through(knots: Knots, anchored: Tensor) -> tuple[Tensor, Tensor]:
    """Values and derivatives at all knots of the splines through the anchored knots, which differ between channels."""
    clock = knots.clock.expand_as(knots.values)
    order = anchored.logical_not().to(torch.int8).argsort(dim=0, stable=True)  # the anchored ones first
    count = anchored.sum(0)
    t, x = clock.gather(0, order), knots.values.gather(0, order)
    k = _natural_derivatives(t, x, count)
    left = anchored.cumsum(0) - 1  # the latest anchored knot, counted among the anchored ones
    right = torch.minimum(left + 1, count - 1)
    since = clock - t.gather(0, left)
    inside = knots.inside()
    since = (since if inside is None else torch.where(inside, since, 0.0)).to(x.dtype)
    width = (t.gather(0, right) - t.gather(0, left)).to(x.dtype)
    width = torch.where(right > left, width, 1.0)
    x0, k0 = x.gather(0, left), k.gather(0, left)
    c, d = _curvature(x0, x.gather(0, right), k0, k.gather(0, right), width)
    return x0 + since * (k0 + since * (c + since * d)), k0 + since * (2.0 * c + since * (3.0 * d))


def _natural_derivatives(clock: Tensor, x: Tensor, count: Tensor | None = None) -> Tensor:
    """X′ at the knots, such that X″ is continuous and 0 at both ends. Only the first `count` knots exist.

    kᵢ₋₁/hᵢ₋₁ + 2(1/hᵢ₋₁ + 1/hᵢ)·kᵢ + kᵢ₊₁/hᵢ = 3(sᵢ₋₁/hᵢ₋₁ + sᵢ/hᵢ), without the terms of pieces that do not exist.
    """
    width = clock.diff(dim=0).to(x.dtype)
    there = None
    if count is not None:
        there = torch.arange(1, len(x), device=x.device).reshape(-1, *(1 for _ in count.shape)) < count
        width = torch.where(there, width, 1.0)
    inverse = width.reciprocal()
    if there is not None:
        inverse = torch.where(there, inverse, 0.0)
    pull = 3.0 * x.diff(dim=0) * inverse**2
    none, nothing = torch.zeros_like(inverse[:1]), torch.zeros_like(pull[:1])
    diagonal = 2.0 * (torch.cat((none, inverse)) + torch.cat((inverse, none)))
    if there is not None:
        diagonal = torch.where(diagonal > 0.0, diagonal, 1.0)
    right = torch.cat((nothing, pull)) + torch.cat((pull, nothing))
    return tridiagonal_solution(right, inverse, diagonal, inverse)

"""Checks of the arguments of a batched solve, in which every sample has its own steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..solvers.base import Solver
from .checks import check_times
from .pytree import Layout, flatten


def check_batch(y0: Any, layout: Layout) -> Layout:
    """The layout of y0 with the batch axis kept; all leaves must have the same one."""
    sizes: dict[str, int] = {}
    for name, leaf in flatten(y0, "y0")[0]:
        if leaf.ndim == 0:
            raise ValueError(f"{name}: with batched=True expected a batch axis in front, found a 0-d tensor")
        sizes[name] = leaf.shape[0]
    first, count = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != count:
            raise ValueError(
                f"y0: with batched=True expected the same size of the first axis in all leaves, found {count} in "
                f"{first} and {size} in {name}"
            )
    return Layout(layout.node, layout.names, layout.shapes, axis=1)


def check_lane_times(ts: Any, like: Tensor) -> tuple[Tensor, tuple[float, float], Tensor]:
    """ts as a tensor; the ends of an interval that holds all times; and the times of every sample on the host."""
    count = len(like)
    if not isinstance(ts, Tensor) or ts.ndim != 2:
        if isinstance(ts, Tensor) and ts.ndim != 1:
            raise ValueError(
                f"ts: with batched=True expected shape (T,) or (B, T) with B = {count}, found {tuple(ts.shape)}"
            )
        tensor, times = check_times(ts, like)
        host = torch.tensor(times, dtype=torch.float64).expand(count, -1)
        return tensor, (times[0], times[-1]), host
    if ts.shape[0] != count or ts.shape[1] == 0:
        hint = "; transpose it" if ts.shape[1] == count else ""
        raise ValueError(
            f"ts: with batched=True expected shape (T,) or (B, T) with B = {count}, found {tuple(ts.shape)}{hint}"
        )
    if ts.is_complex() or ts.dtype == torch.bool:
        raise TypeError(f"ts: expected real times, found {ts.dtype}")
    ts = ts.clone() if ts.is_floating_point() else ts.to(torch.float64)
    host = ts.detach().to("cpu", torch.float64)
    _check_order(host)
    if ts.requires_grad and ts.shape[1] > 1 and bool((host[:, 0] == host[:, -1]).any()):
        i = int((host[:, 0] == host[:, -1]).nonzero()[0])
        raise ValueError(
            f"ts[{i}]: all times are the same, so no step is taken and ts has no gradient there; pass ts.detach()"
        )
    falling = bool((host[:, -1] < host[:, 0]).any())
    first, last = (host.max(), host.min()) if falling else (host.min(), host.max())
    return ts, (float(first), float(last)), host


def _check_order(times: Tensor) -> None:
    finite = torch.isfinite(times)
    if not bool(finite.all()):
        i, j = (~finite).nonzero()[0].tolist()
        raise ValueError(f"ts[{i}, {j}]: expected a finite time, found {float(times[i, j])}")
    spans = times[:, -1] - times[:, 0]
    if bool((spans > 0).any()) and bool((spans < 0).any()):
        up, down = int((spans > 0).nonzero()[0]), int((spans < 0).nonzero()[0])
        raise ValueError(
            f"ts: expected one direction of time for all samples; sample {up} goes forward and sample {down} backward. "
            "Solve them in two batches"
        )
    rising = not bool((spans < 0).any())
    gaps = times.diff(dim=1)
    wrong = gaps < 0 if rising else gaps > 0
    if bool(wrong.any()):
        i, j = wrong.nonzero()[0].tolist()
        way = "increasing" if rising else "decreasing"
        raise ValueError(
            f"ts: expected monotone times; they are {way}, but ts[{i}, {j + 1}] = {float(times[i, j + 1])} "
            f"after {float(times[i, j])}"
        )


def check_batchable(
    solver: Solver, adjoint: Any, norm: Any, save: Any, *, dense: bool, record: bool, transformed: bool
) -> None:
    """Refuse what has no meaning, or no implementation, if every sample has its own steps."""
    if transformed:
        raise ValueError(
            "batched: cannot be used inside a torch.func transform, since every sample's steps depend on values"
        )
    if not solver.batches:
        raise ValueError(
            f"solver: {solver.name!r} has no step size per sample; with batched=True use an explicit Runge–Kutta "
            "method such as 'dopri5'"
        )
    if not adjoint.batches:
        raise ValueError(
            f"adjoint: {type(adjoint).__name__} has one backward clock for the whole state; with batched=True use "
            "sn.Replay(), sn.Checkpointed(n) or sn.Direct()"
        )
    if isinstance(norm, str) and norm == "auto":
        raise ValueError(
            "norm: 'auto' looks for integrals in the state as a whole; with batched=True declare them by "
            "sn.norms.Without(...)"
        )
    if save == "steps":
        raise ValueError(
            "save: 'steps' has no common shape, since samples take different numbers of steps; with batched=True pass "
            "output times in ts"
        )
    for name, flag, remedy in (
        ("dense", dense, "pass output times in ts, which may differ between samples"),
        ("record", record, "look at sol.stats.per_sample, or solve one sample alone"),
    ):
        if flag:
            raise ValueError(f"{name}: is not available with batched=True, since samples have different steps; {remedy}")

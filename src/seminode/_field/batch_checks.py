"""Checks of the arguments of a batched solve, in which every sample has its own steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import norms
from .._stepping.problem import Problem
from ..errors import SolveError
from ..grids import Grid
from .checks import check_state, check_times
from .pytree import Layout, flatten


def check_batch(y0: Any) -> Layout:
    """The layout of y0 with the batch axis kept; all leaves must have the same one."""
    layout = check_state(y0)
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


def check_batchable(problem: Problem, adjoint: Any, norm: Any, transformed: bool) -> None:
    """Refuse what has no meaning, or no implementation, if every sample has its own steps."""
    if problem.lanes is None:
        return
    solver = problem.solver
    if transformed:
        raise ValueError(
            "batched: cannot be used inside a torch.func transform, since every sample's steps depend on values"
        )
    if isinstance(problem.controller, Grid) or not problem.controller.land:
        raise ValueError(
            "controller: a grid, or land=False, has no meaning per sample; with batched=True use sn.Integral() or "
            "sn.FixedStep(dt)"
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
    if isinstance(norm, norms.Distributed):
        raise ValueError(
            "norm: distributed() makes ranks take common steps, but with batched=True every sample has its own, on "
            "whatever rank it is; leave out distributed()"
        )
    if norms.is_auto(norm):
        raise ValueError(
            "norm: 'auto' looks for integrals in the state as a whole; with batched=True declare them by "
            "sn.norms.Without(...)"
        )
    if problem.save == "steps":
        raise ValueError(
            "save: 'steps' has no common shape, since samples take different numbers of steps; with batched=True pass "
            "output times in ts"
        )
    for name, flag, remedy in (
        ("dense", problem.dense, "pass output times in ts, which may differ between samples"),
        ("record", problem.record, "look at sol.stats.per_sample, or solve one sample alone"),
    ):
        if flag:
            raise ValueError(
                f"{name}: is not available with batched=True, since samples have different steps; {remedy}"
            )


#: What torch says where a field takes t for a number.
SHAPE_ERRORS = ("more than one value", "must match the size", "expected shape", "only one element", "not broadcastable")


def explain_shape(error: Exception, count: int) -> str | None:
    """Why a field may fail in a batched solve: its t is not a number."""
    if isinstance(error, SolveError) or not any(text in str(error) for text in SHAPE_ERRORS):
        return None
    return (
        f"field: failed with batched=True, where t has shape ({count},), one time for each sample: {error}. Write "
        "t[:, None] where it meets a state of shape (B, d), and torch.where(t < 1, a, b) in the place of an if"
    )


def check_separable(k: Tensor, again: Tensor, changed: int, name: str = "field", what: str = "derivative") -> None:
    """Refuse a function, of this name, in which one sample changes the result of others.

    `again` is the function where the time and the state of sample `changed` are others than those of `k`.
    """
    rows, others = k.reshape(len(k), -1), again.reshape(len(again), -1)
    # Rounding aside; samples that are not finite are reported elsewhere.
    moved = ((rows - others).abs() > 1e-5 * (rows.abs() + rows.abs().nan_to_num(0.0, 0.0).amax())).any(1)
    moved[changed] = False
    if bool(moved.any()):
        i = int(moved.nonzero()[0])
        raise ValueError(
            f"{name}: the {what} of sample {i} depends on the time or the state of sample {changed}; with "
            f"batched=True samples must not depend on each other. t has shape ({len(k)},): write t[:, None] where it "
            "meets a state of shape (B, d). Batch normalisation in training mode couples samples, too"
        )

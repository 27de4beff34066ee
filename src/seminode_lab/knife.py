"""The knife edge of the pendulum: on what the saving of the published code depends.

Each of the seven backward solves of a window takes one step or two. The published slice makes the first step a little
longer, and with the published settings that is just enough for one step instead of two. Here the interval between two
points, the tolerance, the scale of the loss and the number of points are varied, one at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import seminode as sn
from seminode.models import SymplecticODENet

from .data import pendulum as windows_of
from .models import pendulum
from .modes import WINDOW, oversized_seminorm
from .provenance import circumstances
from .running import Root
from .store import read_json, write_json
from .training import drifts

FILE = "knife.json"
NORMS = ("mixed", "seminorm", "published")
BATCH, FITTED = 32, 200


@dataclass(frozen=True)
class Edge:
    """A setting. The default is the published one."""

    varied: str = "interval"
    interval: float = pendulum.DT
    tolerance: float = 1e-4  # rtol and atol
    scale: float = 1.0  # of the loss
    points: int = WINDOW

    @property
    def value(self) -> float:
        return getattr(self, self.varied)


def edges() -> Iterator[Edge]:
    """The settings of the figure."""
    values: dict[str, Any] = {
        "interval": [round(float(x), 4) for x in np.geomspace(0.0125, 0.2, 13)],
        "tolerance": [float(f"{x:.2e}") for x in np.geomspace(1e-6, 1e-2, 13)],
        "scale": [float(f"{x:.2e}") for x in np.geomspace(1e-3, 1e3, 13)],
        "points": list(range(2, WINDOW + 1)),
    }
    for name, found in values.items():
        yield from (dataclasses.replace(Edge(), varied=name, **{name: value}) for value in found)


@dataclass
class Problem:
    """A network that has been fitted to accelerations, windows of data, and the gradient of the loss at all outputs."""

    net: SymplecticODENet
    windows: Tensor
    cotangents: Tensor


def problem(root: Root = None, batch: int = BATCH, fitted: int = FITTED) -> Problem:
    torch.manual_seed(0)
    net = SymplecticODENet(rtol=1e-6, atol=1e-6)
    pendulum.fit_accelerations(net.field, fitted, seed=0)
    train = windows_of(root)[0]
    windows = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:batch]]
    with torch.no_grad():
        found = net(windows[:, 0], pendulum.DT * torch.arange(WINDOW, dtype=torch.float64))
    # The gradient of the mean squared error. It is kept when the interval changes, so that nothing else does.
    return Problem(net, windows, 2 * (found - windows.transpose(0, 1)) / found.numel())


def evaluations(own: Problem, edge: Edge, norm: str) -> int:
    """Backward evaluations of a window."""
    norms: dict[str, Any] = {"published": partial(oversized_seminorm, window=edge.points)}
    adjoint = sn.Backsolve(norm=norms.get(norm, norm), restart="fresh")
    ts = edge.interval * torch.arange(edge.points, dtype=torch.float64)
    options: dict[str, Any] = {"rtol": edge.tolerance, "atol": edge.tolerance, "adjoint": adjoint}
    found = sn.solve(own.net.field, own.windows[:, 0], ts, **options)
    with drifts():
        (edge.scale * (found.ys * own.cotangents[: edge.points]).sum()).backward()
    own.net.zero_grad()
    assert found.stats.backward is not None
    return found.stats.backward.nfe


def measure(out: Path, root: Root = None, progress: Callable[[str], None] | None = None) -> Path:
    """Measure all settings and write `out/knife.json`, unless that file exists with the same settings."""
    path, chosen = out / FILE, list(edges())
    asked = [dataclasses.asdict(edge) for edge in chosen]
    if path.exists() and read_json(path).get("edges") == asked:
        return path
    if progress is not None:
        progress(f"the knife edge of the pendulum: {len(chosen)} settings")
    own = problem(root)
    counts = {norm: [evaluations(own, edge, norm) for edge in chosen] for norm in NORMS}
    about = {"circumstances": circumstances(), "batch": BATCH, "fitted": FITTED}
    write_json(path, {"edges": asked, "counts": counts, **about})
    return path

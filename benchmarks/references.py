"""The gradient that all are measured against: float64, far finer than theirs, computed once and kept in out/bench.

Where a ReLU switches inside a step the gradient is wrong by the order of the step, whatever the order of the method;
so fields with kinks get many equal steps, and others an eighth-order method with a tight tolerance. A second one, with
steps twice or a tolerance a hundred times as large, tells what the first is good to: at least to what they agree to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import seminode as sn

from .suite import CACHE, ENTRIES, task_of
from .tasks import Task, digest, load


@dataclass(frozen=True, eq=False)
class Reference:
    """A gradient, how it was computed, and its relative distance to a coarser one."""

    gradient: np.ndarray
    how: str
    good_to: float

    def error(self, gradient: np.ndarray) -> float:
        """‖g − g_ref‖ / ‖g_ref‖."""
        found = gradient.astype(np.float64)
        return float(np.linalg.norm(found - self.gradient) / np.linalg.norm(self.gradient))


def gradient_of(task: Task, **options: Any) -> np.ndarray:
    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        return sn.solve(field, y0, ts, adjoint=sn.Replay(), jumps=task.jumps, **options).ys

    y0, leaves = task.leaves()
    inputs = [*task.modules.parameters(), *leaves]
    grads = torch.autograd.grad(task.through(y0, solve), inputs, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads]).numpy()


def ways(kinks: float | None) -> tuple[str, Callable[[Task], np.ndarray], Callable[[Task], np.ndarray]]:
    """How, and the fine and the coarse gradient."""
    if kinks is not None:
        fine, coarse = (partial(gradient_of, solver="rk4", controller=sn.FixedStep(dt)) for dt in (kinks, 2.0 * kinks))
        return f"float64, Replay of rk4 with steps of 1/{round(1 / kinks)}", fine, coarse
    # No tighter: PyTorch's softplus is the identity above 20, which is a jump of 2e-9.
    fine, coarse = (partial(gradient_of, solver="dopri8", rtol=rtol, atol=rtol) for rtol in (1e-7, 1e-5))
    return "float64, Replay of dopri8 with rtol = atol = 1e-7", fine, coarse


def computed(name: str, task: Task, found: dict[str, np.ndarray], quick: bool) -> Reference:
    """With the parameters of the task, which are float32, in float64."""
    how, fine, coarse = ways(ENTRIES[name].kinks)
    double = load(task_of(name, quick, torch.float64), found)
    gradient = fine(double)
    distance = np.linalg.norm(coarse(double) - gradient) / np.linalg.norm(gradient)
    return Reference(gradient, how, float(distance))


def reference(
    name: str, task: Task, found: dict[str, np.ndarray], quick: bool = False, folder: Path = CACHE
) -> Reference:
    """The kept one, or a new one that is then kept."""
    how = ways(ENTRIES[name].kinks)[0]
    kept = folder / f"reference-{name}-{digest(task)}.npz"
    if kept.exists():
        with np.load(kept) as file:
            about = json.loads(str(file["about"]))
            if about["how"] == how:
                return Reference(file["gradient"], how, about["good_to"])
    new = computed(name, task, found, quick)
    kept.parent.mkdir(parents=True, exist_ok=True)
    np.savez(kept, gradient=new.gradient, about=json.dumps({"how": new.how, "good_to": new.good_to}))
    return new

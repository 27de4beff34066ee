"""Reference gradients: accurate float64 gradients, computed once and cached in out/bench.

If a ReLU switches inside a step, the error of the gradient is of the order of the step size, for a method of any order.
So fields with kinks use many fixed steps, and other fields use a method of order eight with a tight tolerance. The
distance to a second gradient, with twice the step or a hundred times the tolerance, estimates the accuracy.
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
from .tasks import Task, digest, gradient, load


@dataclass(frozen=True, eq=False)
class Reference:
    """A gradient, how it was computed, and its relative distance to a coarser one."""

    gradient: np.ndarray
    how: str
    good_to: float

    def error(self, gradient: np.ndarray) -> float:
        """‖g − g_ref‖ / ‖g_ref‖."""
        double = gradient.astype(np.float64)
        return float(np.linalg.norm(double - self.gradient) / np.linalg.norm(self.gradient))


def gradient_of(task: Task, **options: Any) -> np.ndarray:
    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        return sn.solve(field, y0, ts, adjoint=sn.Replay(), jumps=task.jumps, **options).ys

    return gradient(task, solve).numpy()


def methods(kinks: float | None) -> tuple[str, Callable[[Task], np.ndarray], Callable[[Task], np.ndarray]]:
    """A description of the method, and the functions that compute the fine and the coarse gradient."""
    if kinks is not None:
        fine, coarse = (partial(gradient_of, solver="rk4", controller=sn.FixedStep(dt)) for dt in (kinks, 2.0 * kinks))
        return f"float64, Replay of rk4 with steps of 1/{round(1 / kinks)}", fine, coarse
    # Not tighter: PyTorch's softplus is the identity above 20, which is a discontinuity of 2e-9.
    fine, coarse = (partial(gradient_of, solver="dopri8", rtol=rtol, atol=rtol) for rtol in (1e-7, 1e-5))
    return "float64, Replay of dopri8 with rtol = atol = 1e-7", fine, coarse


def compute(name: str, task: Task, arrays: dict[str, np.ndarray], quick: bool) -> Reference:
    """Compute the reference in float64, with the float32 parameters of the task."""
    how, fine, coarse = methods(ENTRIES[name].kinks)
    double = load(task_of(name, quick, torch.float64), arrays)
    exact = fine(double)
    distance = np.linalg.norm(coarse(double) - exact) / np.linalg.norm(exact)
    return Reference(exact, how, float(distance))


def reference(
    name: str, task: Task, arrays: dict[str, np.ndarray], quick: bool = False, folder: Path = CACHE
) -> Reference:
    """The cached reference, or a new one that is then cached."""
    how = methods(ENTRIES[name].kinks)[0]
    path = folder / f"reference-{name}-{digest(task)}.npz"
    if path.exists():
        with np.load(path) as file:
            about = json.loads(str(file["about"]))
            if about["how"] == how:
                return Reference(file["gradient"], how, about["good_to"])
    new = compute(name, task, arrays, quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, gradient=new.gradient, about=json.dumps({"how": new.how, "good_to": new.good_to}))
    return new

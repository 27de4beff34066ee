"""The problems of the race by name: their full and their tiny size, their reference, and how often they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from .image_flow import flow_task
from .problems import fitted_pendulum
from .tasks import Task, arrays, cde_task, load, pendulum_task, small_task

#: What is worth keeping from one run to the next, but not in the repository.
CACHE = Path("out/bench")


@dataclass(frozen=True)
class Entry:
    """A problem of the race.

    Attributes:
        build, tiny: make its task, in a dtype.
        rounds: at most, and what they may take of one contender in seconds.
        fitted: iterations of fitting before the race, for the pendulum.
        together: so many contenders at a time, since each holds on to the memory that it took.
        cold: contenders start with empty caches, so that their first pass compiles everything.
        kinks: the field has kinks, so that the reference takes many equal steps instead of few good ones; their size.
    """

    title: str
    build: Callable[..., Task]
    tiny: Callable[..., Task]
    rounds: int
    budget: float
    fitted: int = 0
    together: int = 100
    cold: bool = False
    kinks: float | None = None


TINY_CDE = partial(cde_task, batch=4, knots=6, channels=3, hidden=8, width=8)
TINY_PENDULUM = partial(pendulum_task, batch=8, trials=1, widths=(16, 16))
ENTRIES: dict[str, Entry] = {
    "small": Entry(
        "Small neural ODE: 256 × 4, tanh MLP of two hidden layers of 32, t from 0 to 10",
        small_task,
        partial(small_task, batch=4, width=8, end=1.0),
        rounds=30,
        budget=30.0,
        cold=True,
    ),
    "cde": Entry(
        "Neural CDE of the paper, batch 256",
        cde_task,
        TINY_CDE,
        rounds=5,
        budget=20.0,
        together=5,
        kinks=1 / 16,
    ),
    "cde-1024": Entry(
        "Neural CDE of the paper, batch 1,024",
        partial(cde_task, batch=1024),
        partial(TINY_CDE, batch=8),
        rounds=2,
        budget=30.0,
        together=2,
        kinks=1 / 16,
    ),
    "pendulum": Entry(
        "Symplectic ODE-Net of the paper, batch 256, as initialised",
        pendulum_task,
        TINY_PENDULUM,
        rounds=8,
        budget=10.0,
        together=8,
    ),
    "pendulum-fitted": Entry(
        "Symplectic ODE-Net of the paper, batch 256, after fitting",
        pendulum_task,
        TINY_PENDULUM,
        rounds=8,
        budget=10.0,
        together=8,
        fitted=800,
    ),
    "flow": Entry(
        "Flow on images 28 × 28, one block of 32 hidden channels at each of three scales, batch 32",
        flow_task,
        partial(flow_task, batch=2, hidden=4, side=8),
        rounds=5,
        budget=30.0,
        together=4,
    ),
}


def task_of(name: str, quick: bool = False, dtype: torch.dtype = torch.float32) -> Task:
    """The task as it is built; a fitted one still needs its parameters, from `numbers`."""
    entry = ENTRIES[name]
    return (entry.tiny if quick else entry.build)(dtype=dtype)


def numbers(name: str, quick: bool = False) -> tuple[Task, dict[str, np.ndarray]]:
    """The task with its final parameters, and its arrays."""
    task = task_of(name, quick)
    fitted = ENTRIES[name].fitted
    if fitted and not quick:
        kept = CACHE / f"fitted-{fitted}.npz"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            field = fitted_pendulum(fitted)
            weights = {f"parameter:0.{key}": x.detach().numpy() for key, x in field.named_parameters()}
            np.savez(kept, **weights)  # type: ignore[arg-type]
        with np.load(kept) as found:
            load(task, found)
    return task, arrays(task)

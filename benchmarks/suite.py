"""The problems of the race by name: full and tiny size, reference method, and number of rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from .image_flow import flow_task
from .peer_tasks import diffrax_task, reversible_task, sampling_task, spiral_task
from .problems import fitted_pendulum
from .tasks import Task, arrays, cde_task, load, pendulum_task, small_task

#: Cache for fitted parameters, references and logs, outside the repository.
CACHE = Path("out/bench")


@dataclass(frozen=True)
class Entry:
    """A problem of the race.

    Attributes:
        title: a description for the report.
        build, tiny: functions from a dtype to the task, in full and in tiny size.
        rounds: maximum number of rounds.
        budget: seconds for the rounds of one contender.
        fitted: number of iterations of fitting before the race, for the pendulum.
        together: maximum number of contenders that run at the same time, since each keeps its memory.
        cold: whether contenders start with empty caches, so that their first pass compiles everything.
        kinks: step size of the reference if the field has kinks; `None` for smooth fields.
        factors: by which the tolerances of the problem are multiplied, one after the other; 1 is among them. Settings
            with fixed steps change their step size as a method of their order must for that (`contenders.step_size`).
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
    factors: tuple[float, ...] = (10.0, 1.0, 0.1, 0.01)


TINY_CDE = partial(cde_task, batch=4, knots=6, channels=3, hidden=8, width=8)
TINY_PENDULUM = partial(pendulum_task, batch=8, trials=1, widths=(16, 16))
#: Names, descriptions and sizes of the networks that are sampled.
SAMPLERS = (
    ("", "batch 256 × 2, three layers of 64", {}),
    ("-large", "batch 256 × 128, four layers of 1,024", {"size": 128, "width": 1024, "depth": 4}),
)
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
        factors=(10.0, 1.0, 0.1),
    ),
    "cde-1024": Entry(
        "Neural CDE of the paper, batch 1,024",
        partial(cde_task, batch=1024),
        partial(TINY_CDE, batch=8),
        rounds=2,
        budget=30.0,
        together=2,
        kinks=1 / 16,
        factors=(4.0, 1.0, 0.25),
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
        factors=(10.0, 1.0, 0.1),
    ),
    **{
        f"diffrax-{outputs}{'' if differentiate else '-forward'}": Entry(
            f"diffrax's small neural ODE, {outputs} output{'s' if outputs > 1 else ''}, "
            f"{'with' if differentiate else 'without'} gradient",
            partial(diffrax_task, outputs, differentiate),
            partial(diffrax_task, min(outputs, 3), differentiate, batch=4, width=8, end=2.0),
            rounds=20,
            budget=20.0,
            factors=(100.0, 10.0, 1.0, 0.1),
        )
        for differentiate in (True, False)
        for outputs in (1, 100)
    },
    "spiral": Entry(
        "SciMLSensitivity's spiral: one trajectory, 30 outputs",
        spiral_task,
        partial(spiral_task, width=8, outputs=4),
        rounds=30,
        budget=20.0,
    ),
    "reversible": Entry(
        "Double pendulum with 1,000 steps of bosh3, as in the comparison of reversible solvers with checkpointing",
        reversible_task,
        partial(reversible_task, batch=2, width=8, outputs=2, end=0.5),
        rounds=10,
        budget=20.0,
        together=20,
        factors=(8.0, 1.0, 0.125),
    ),
    **{
        f"sampling{size}-{method}": Entry(
            f"Sampling of a flow-matching network, 50 steps of {method}, {about}",
            partial(sampling_task, **sizes),
            partial(sampling_task, batch=4, width=8, depth=2),
            rounds=30,
            budget=20.0,
            factors=(2.0, 1.0, 0.5),
        )
        for size, about, sizes in SAMPLERS
        for method in ("euler", "midpoint")
    },
}


def task_of(name: str, quick: bool = False, dtype: torch.dtype = torch.float32) -> Task:
    """The task with its initial parameters; `numbers` loads the parameters of a fitted task."""
    entry = ENTRIES[name]
    return (entry.tiny if quick else entry.build)(dtype=dtype)


def numbers(name: str, quick: bool = False) -> tuple[Task, dict[str, np.ndarray]]:
    """The task with its parameters, fitted if the entry says so, and its arrays."""
    task = task_of(name, quick)
    fitted = ENTRIES[name].fitted
    if fitted and not quick:
        path = CACHE / f"fitted-{fitted}.npz"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            field = fitted_pendulum(fitted)
            weights = {f"parameter:0.{key}": x.detach().numpy() for key, x in field.named_parameters()}
            np.savez(path, **weights)  # type: ignore[arg-type]
        with np.load(path) as weights:
            load(task, weights)
    return task, arrays(task)

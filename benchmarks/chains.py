"""Several compiled steps by one call against one call per step, in milliseconds per solve.

    python -m benchmarks.chains [--repeats 300]

Forward solves of the small fields of the race: both ways take turns, and the fastest solve of each is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from unittest import mock

import torch

import seminode as sn
from seminode._compile import ahead

from .detest import table
from .overhead import seconds
from .peer_tasks import diffrax_task, sampling_task
from .tasks import Task

#: A controller without tolerances, or the default one with those of the problem.
PROBLEMS: dict[str, Callable[[], tuple[Task, dict[str, object]]]] = {
    "sampling, 50 steps of Euler": lambda: (sampling_task(), {"solver": "euler", "controller": sn.FixedStep(0.02)}),
    "sampling, 50 midpoint steps": lambda: (sampling_task(), {"solver": "midpoint", "controller": sn.FixedStep(0.02)}),
    "diffrax-1-forward": lambda: (diffrax_task(1, differentiate=False), {"solver": "tsit5"}),
    "diffrax-100-forward": lambda: (diffrax_task(100, differentiate=False), {"solver": "tsit5"}),
}


def solve(task: Task, options: dict[str, object]) -> None:
    with torch.no_grad():
        field, data = task.modules[0], task.data
        tolerances = {} if "controller" in options else {"rtol": task.rtol, "atol": task.atol}
        sn.solve(field, data["y0"], data["ts"], compile=True, **tolerances, **options)  # type: ignore[arg-type]


def measured(task: Task, options: dict[str, object], repeats: int) -> tuple[float, float]:
    """Seconds one by one and several at a time, of the fastest solve each."""
    best = [float("inf")] * 2
    for _ in range(repeats):
        for i, largest in enumerate((-1, ahead.LARGEST)):
            with mock.patch.object(ahead, "LARGEST", largest):
                best[i] = min(best[i], seconds(lambda: solve(task, options)))
    return best[0], best[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300, help="solves per problem and way")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for name, make in PROBLEMS.items():
        task, options = make()
        solve(task, options)
        alone, together = measured(task, options, args.repeats)
        rows.append([name, f"{1e3 * alone:.2f}", f"{1e3 * together:.2f}", f"{alone / together:.2f}"])
    print(table(["problem", "one step per call", "up to 16", "ratio"], rows))


if __name__ == "__main__":
    main()

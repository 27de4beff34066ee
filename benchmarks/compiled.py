"""Eager against compiled passes of the same problem, adjoint by adjoint.

    python -m benchmarks.compiled [--problems flow pendulum] [--adjoints Direct Replay] [--repeats 5] [--longer 1]

A pass is a forward and a backward pass. Contenders run in turn, in one thread; times are minima of processor time,
which does not count interruptions by other processes. F is the cost of one evaluation of the field, as in
`benchmarks.adjoints`: a pass costs nfe + vjp_y + vjp_params F. Page faults are those of the last compiled pass: memory
that the operating system had to provide. `--longer` multiplies the times of a solve, so that what a solve costs besides
its steps weighs less.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import seminode as sn
from seminode import diagnostics

from .detest import table
from .suite import task_of
from .tasks import Task

#: Options of `solve` by name.
ADJOINTS: dict[str, dict[str, Any]] = {
    "Direct": {"adjoint": sn.Direct()},
    "Replay": {"adjoint": sn.Replay()},
    "Checkpointed": {"adjoint": sn.Checkpointed(4)},
    "Interpolating": {"adjoint": sn.Interpolating()},
    "Backsolve": {"adjoint": sn.Backsolve()},
    "Reversible": {"adjoint": sn.Reversible(), "solver": sn.ReversibleRK("dopri5")},
    "Reversible, Heun": {"adjoint": sn.Reversible(), "solver": "reversible_heun"},
}
MODES = ("eager", "compiled")


@dataclass
class Passes:
    """Passes of a task with one adjoint in one mode: minimal seconds; of the last, cost, page faults, gradient."""

    task: Task
    options: dict[str, Any]
    longer: float = 1.0
    seconds: float = float("inf")
    backward: float = float("inf")  # seconds of the backward pass alone
    cost: int = 0
    backward_cost: int = 0
    faults: int = 0
    gradient: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        statistics: list[sn.Stats] = []

        def solve(field: Any, y0: Any, ts: Tensor) -> Any:
            sol = sn.solve(field, y0, ts * self.longer, **self.options)
            statistics.append(sol.stats)
            return sol.ys

        begin, faults = time.process_time(), _faults()
        y0, leaves = self.task.leaves()
        loss = self.task.through(y0, solve)
        inputs = [*self.task.modules.parameters(), *leaves]
        solved = time.process_time()
        self.gradient = list(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))
        end = time.process_time()
        self.seconds, self.backward = min(self.seconds, end - begin), min(self.backward, end - solved)
        self.faults = _faults() - faults
        self.cost = sum(diagnostics.cost(each, each.backward or sn.Stats()) for each in statistics)
        self.backward_cost = self.cost - sum(diagnostics.cost(each, sn.Stats()) for each in statistics)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def compare(
    problem: str, adjoints: Sequence[str], repeats: int, quick: bool = False, longer: float = 1.0
) -> dict[str, dict[str, Passes]]:
    """Passes by adjoint and mode. The first pass of each, which compiles, does not count."""
    task = task_of(problem, quick)
    tolerances = {"rtol": task.rtol, "atol": task.atol, "jumps": task.jumps}
    passes = {
        name: {
            mode: Passes(task, {**tolerances, **ADJOINTS[name], "compile": mode == "compiled"}, longer)
            for mode in MODES
        }
        for name in adjoints
    }
    runs: list[Callable[[], None]] = [each.run for by_mode in passes.values() for each in by_mode.values()]
    for run in runs:
        run()
    for by_mode in passes.values():
        for each in by_mode.values():
            each.seconds = each.backward = float("inf")
    for _ in range(repeats):
        for run in runs:
            run()
    return passes


def difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The relative difference of two gradients, each as one vector."""
    first, second = (torch.cat([x.flatten().double() for x in each]) for each in (a, b))
    return float((first - second).norm() / first.norm())


HEADER = (
    *("problem", "adjoint", "eager, ms", "compiled, ms", "eager/compiled", "F", "compiled, µs per F", "backward"),
    *("page faults", "difference"),
)


def rows(problem: str, passes: dict[str, dict[str, Passes]]) -> list[list[str]]:
    lines = []
    for name, by_mode in passes.items():
        eager, compiled = (by_mode[mode] for mode in MODES)
        times = [f"{1e3 * each.seconds:.1f}" for each in (eager, compiled)]
        counts = [f"{compiled.cost}", f"{1e6 * compiled.seconds / compiled.cost:.0f}"]
        # With Direct, autograd's own work on kept graphs is no evaluation.
        counts += [f"{1e6 * compiled.backward / max(1, compiled.backward_cost):.0f}", f"{compiled.faults}"]
        error = f"{difference(eager.gradient, compiled.gradient):.1e}"
        lines.append([problem, name, *times, f"{eager.seconds / compiled.seconds:.2f}", *counts, error])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=["flow", "pendulum"])
    parser.add_argument("--adjoints", nargs="+", choices=ADJOINTS, default=["Direct", "Replay"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longer", type=float, default=1.0, help="factor on the times of the solve")
    parser.add_argument("--quick", action="store_true", help="tiny problems")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = []
    for problem in options.problems:
        lines += rows(problem, compare(problem, options.adjoints, options.repeats, options.quick, options.longer))
    print(f"one thread, torch {torch.__version__}\n")
    print(table(HEADER, lines))


if __name__ == "__main__":
    main()

"""What the first compiled call spends its time on, with an empty cache on disk and with a full one.

    python -m benchmarks.cold [--adjoint Direct] [--batch 256] [--problem small]
    python -m benchmarks.cold --background [--iterations 3000]

One training iteration of the small network of `benchmarks.overhead`, or one gradient of a problem of the race, in a new
process for each cache. An empty cache has no precompiled headers either. Reports processor time, which hardly depends
on what else runs on the machine, the time by the clock, and how many eager iterations take as long.

With `--background`, a training loop with `compile="background"`: how much longer its first ten iterations take than
eager ones, which iteration is the first that is compiled, and how long that one takes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import seminode as sn
from seminode._compile import inductor
from seminode._compile.collector import collector_paused
from seminode.adjoints import AdjointName

from .detest import table
from .overhead import BATCH, CHANNELS, Network
from .suite import ENTRIES, task_of
from .tasks import gradient

ITERATIONS = 10
#: The small network of `benchmarks.overhead`; others are problems of the race.
SMALL = "small"


def used(children: bool = False) -> float:
    """Seconds of processor time of this process, or of those that it has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class BackEndClock:
    """Replaces the back end by one that is timed. Its C++ compiler works on when it returns."""

    def __init__(self) -> None:
        self.python = 0.0
        self.programs = 0
        self._original, inductor.back_end = inductor.back_end, self._compile

    def _compile(self, module: Any, examples: list[Any]) -> Any:
        begin = time.thread_time()
        program = self._original(module, examples)
        self.python += time.thread_time() - begin
        self.programs += 1
        return program


def iteration(problem: str, adjoint: AdjointName, batch: int) -> Callable[[Any], object]:
    """One solve with its backward pass, as a function of the option `compile`."""
    torch.manual_seed(0)
    if problem != SMALL:
        task = task_of(problem)

        def solve(compile: Any, field: Any, y0: Any, ts: Any) -> Any:
            options: dict[str, Any] = {"rtol": task.rtol, "atol": task.atol, "jumps": task.jumps}
            return sn.solve(field, y0, ts, adjoint=adjoint, compile=compile, **options).ys

        return lambda compile: gradient(task, lambda *problem: solve(compile, *problem))
    field, y0 = Network(), torch.randn(batch, CHANNELS)

    def iterate(compile: Any) -> None:
        ys = sn.solve(field, y0, [0.0, 1.0], adjoint=adjoint, compile=compile).ys
        ys[-1].square().mean().backward()

    return iterate


def measure(adjoint: AdjointName, batch: int, problem: str = SMALL) -> dict[str, float]:
    """Seconds of each part of the first compiled iteration in this process."""
    iterate = iteration(problem, adjoint, batch)

    def seconds(compile: bool, count: int) -> float:
        begin = used()
        for _ in range(count):
            iterate(compile)
        return (used() - begin) / count

    iterate(False)
    eager = seconds(False, ITERATIONS)
    begin, clock_begin = used(), time.perf_counter()
    with collector_paused():  # as a solve imports it
        importlib.import_module("torch._inductor.compile_fx")
    imports = used() - begin
    clock = BackEndClock()
    before = used(children=True)
    first = seconds(True, 1)
    wall, cpp = time.perf_counter() - clock_begin, used(children=True) - before
    return {
        "imports of the compiler": imports,
        "tracing": first - clock.python,
        "Inductor": clock.python,
        "C++ compiler": cpp,
        "clock": wall,
        "programs": clock.programs,
        "eager": eager,
        "compiled": seconds(True, ITERATIONS),
    }


def train(adjoint: AdjointName, batch: int, problem: str, iterations: int) -> dict[str, float]:
    """A training loop with `compile="background"`, in seconds by the clock; it ends 20 iterations after it switched."""
    iterate = iteration(problem, adjoint, batch)

    def seconds(compile: Any) -> float:
        begin = time.perf_counter()
        iterate(compile)
        return time.perf_counter() - begin

    seconds(False)
    eager = [seconds(False) for _ in range(ITERATIONS)]
    clock, times, switched = BackEndClock(), [], -1
    while len(times) < (iterations if switched < 0 else switched + 20):
        times.append(seconds("background"))
        if switched < 0 and clock.programs:  # in this process: the copy has its own clock
            switched = len(times)
    after = times[switched:] if switched > 0 else []
    return {
        "eager": sum(eager) / len(eager),
        "first ten": sum(times[:ITERATIONS]) / sum(eager),
        "switched": switched,
        "after": sum(times[: max(switched - 1, 0)]),
        "stall": times[switched - 1] if switched > 0 else 0.0,
        "compiled": min(after, default=0.0),
    }


def in_new_process(options: list[str], cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.cold", "--measure", *options]
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(Path(cache) / "programs"), "TMPDIR": cache}  # headers are in the latter
    environment = os.environ | folders | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def report(empty: dict[str, float], full: dict[str, float]) -> str:
    """A table of the parts, and the sums in eager iterations."""
    parts = ["imports of the compiler", "tracing", "Inductor", "C++ compiler"]
    rows = [[part, *(f"{times[part]:.1f}" for times in (empty, full))] for part in parts]
    sums = [sum(times[part] for part in parts) for times in (empty, full)]
    rows.append(["sum", *(f"{total:.1f}" for total in sums)])
    rows.append(["by the clock", *(f"{times['clock']:.1f}" for times in (empty, full))])
    rows.append(["in eager iterations", *(f"{total / empty['eager']:.0f}" for total in sums)])
    iterations = f"An iteration takes {1e3 * full['eager']:.1f} ms eagerly and {1e3 * full['compiled']:.1f} ms compiled"
    lines = table(["seconds", "empty cache", "full cache"], rows)
    return "\n".join([lines, "", f"{iterations}; {empty['programs']:.0f} programs."])


def background_report(found: dict[str, float]) -> str:
    switched = f"{found['switched']:.0f}, after {found['after']:.1f} s" if found["switched"] > 0 else "none"
    rows = [
        ["an eager iteration, ms", f"{1e3 * found['eager']:.1f}"],
        ["first ten iterations, times eager", f"{found['first ten']:.2f}"],
        ["first compiled iteration", switched],
        ["its time, s", f"{found['stall']:.2f}"],
        ["a compiled iteration, ms", f"{1e3 * found['compiled']:.1f}"],
    ]
    return table(["background", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adjoint", default="Direct")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--problem", default=SMALL, choices=[SMALL, *(name for name in ENTRIES if name != SMALL)])
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    adjoint = options.adjoint.lower()
    if options.measure:
        torch.set_num_threads(1)
        size = options.batch, options.problem
        found = train(adjoint, *size, options.iterations) if options.background else measure(adjoint, *size)
        print(json.dumps(found))
        return
    arguments = ["--adjoint", options.adjoint, "--batch", str(options.batch), "--problem", options.problem]
    with tempfile.TemporaryDirectory() as cache:
        if options.background:
            arguments += ["--background", "--iterations", str(options.iterations)]
            print(background_report(in_new_process(arguments, cache)))
        else:
            print(report(*(in_new_process(arguments, cache) for _ in range(2))))


if __name__ == "__main__":
    main()

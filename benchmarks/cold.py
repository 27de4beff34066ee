"""What the first compiled call spends its time on, with an empty cache on disk and with a full one.

    python -m benchmarks.cold [--adjoint Direct] [--batch 256]

One training iteration of the small network of `benchmarks.overhead`, in a new process for each cache. Reports processor
time, which hardly depends on what else runs on the machine, and how many eager iterations take as long.
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
from typing import Any

import torch

import seminode as sn
from seminode._compile import inductor
from seminode.adjoints import AdjointName

from .detest import table
from .overhead import BATCH, CHANNELS, Network

ITERATIONS = 10


def used(children: bool = False) -> float:
    """Seconds of processor time of this process, or of those that it has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class BackEndClock:
    """Replaces the back end by one that is timed, its C++ compiler separately."""

    def __init__(self) -> None:
        self.python = self.cpp = 0.0
        self.programs = 0
        self._original, inductor.back_end = inductor.back_end, self._compile

    def _compile(self, module: Any, examples: list[Any]) -> Any:
        python, cpp = used(), used(children=True)
        program = self._original(module, examples)
        self.python += used() - python
        self.cpp += used(children=True) - cpp
        self.programs += 1
        return program


def measure(adjoint: AdjointName, batch: int) -> dict[str, float]:
    """Seconds of each part of the first compiled iteration in this process."""
    torch.manual_seed(0)
    field, y0 = Network(), torch.randn(batch, CHANNELS)

    def iterate(compile: bool) -> None:
        ys = sn.solve(field, y0, [0.0, 1.0], adjoint=adjoint, compile=compile).ys
        ys[-1].square().mean().backward()

    def seconds(compile: bool, count: int) -> float:
        begin = used()
        for _ in range(count):
            iterate(compile)
        return (used() - begin) / count

    iterate(False)
    eager = seconds(False, ITERATIONS)
    begin = used()
    importlib.import_module("torch._inductor.compile_fx")
    imports = used() - begin
    clock = BackEndClock()
    first = seconds(True, 1)
    return {
        "imports of the compiler": imports,
        "tracing": first - clock.python,
        "Inductor": clock.python,
        "C++ compiler": clock.cpp,
        "programs": clock.programs,
        "eager": eager,
        "compiled": seconds(True, ITERATIONS),
    }


def in_new_process(options: list[str], cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.cold", "--measure", *options]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def report(empty: dict[str, float], full: dict[str, float]) -> str:
    """A table of the parts, and the sums in eager iterations."""
    parts = ["imports of the compiler", "tracing", "Inductor", "C++ compiler"]
    rows = [[part, *(f"{times[part]:.1f}" for times in (empty, full))] for part in parts]
    sums = [sum(times[part] for part in parts) for times in (empty, full)]
    rows.append(["sum", *(f"{total:.1f}" for total in sums)])
    rows.append(["in eager iterations", *(f"{total / empty['eager']:.0f}" for total in sums)])
    iterations = f"An iteration takes {1e3 * full['eager']:.1f} ms eagerly and {1e3 * full['compiled']:.1f} ms compiled"
    lines = table(["seconds", "empty cache", "full cache"], rows)
    return "\n".join([lines, "", f"{iterations}; {empty['programs']:.0f} programs."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adjoint", default="Direct")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        torch.set_num_threads(1)
        print(json.dumps(measure(options.adjoint.lower(), options.batch)))
        return
    arguments = ["--adjoint", options.adjoint, "--batch", str(options.batch)]
    with tempfile.TemporaryDirectory() as cache:
        print(report(*(in_new_process(arguments, cache) for _ in range(2))))


if __name__ == "__main__":
    main()

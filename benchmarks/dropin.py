"""Ten typical programs under torchdiffeq or torchcde and under the drop-ins, beside each other.

    python -m benchmarks.dropin [--rounds 5] [--iterations 10] [--programs spiral FFJORD] [--quick]

Each program runs with the original, with the drop-in as it is, and with the drop-in switched to the setting that suits
the program best. The runs take turns, in one thread; the shortest time of each counts. The first run of each is not
among them: it compiles, and its time is shown in a column of its own. Evaluations are those that the field counts; a
compiled field does not count. The difference is that of all results, losses and parameters after training, relative to
their size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torchcde
import torchdiffeq
from torch import Tensor

import seminode as sn
import seminode.compat.torchcde as torchcde_dropin
import seminode.compat.torchdiffeq as dropin

from .detest import table
from .dropin_cde import PROGRAMS as CDE_PROGRAMS
from .dropin_programs import PROGRAMS as ODE_PROGRAMS
from .dropin_programs import Outcome, Program
from .race import RESULTS, circumstances

#: Series of a CDE program, all in one batch, and their observations: an iteration is one training step.
CDE_SIZES = {"count": 32, "length": 20, "batch": 32}


def _cde(name: str, library: Any, iterations: int) -> Outcome:
    outcome = CDE_PROGRAMS[name](library, iterations, **CDE_SIZES)
    return Outcome(outcome.values, outcome.evaluations)


#: All programs by name.
PROGRAMS: dict[str, Program] = {**ODE_PROGRAMS, **{name: partial(_cde, name) for name in CDE_PROGRAMS}}

#: The switch that suits each program best. Sampling without gradients differentiates nothing.
SWITCHES: dict[str, Mapping[str, Any]] = {
    "spiral": {"adjoint": sn.Direct(), "compile": True},
    "latent ODE": {"adjoint": sn.Direct(), "compile": True},
    "ODE-Net": {"adjoint": sn.Direct(), "compile": True},
    "FFJORD": {"adjoint": sn.Direct()},
    "bouncing ball": {"adjoint": sn.Replay(), "compile": True},
    "learned physics": {"adjoint": sn.Direct(), "compile": True},
    "Symplectic ODE-Net": {"adjoint": sn.Direct()},
    "flow matching": {"compile": True},
    "CDE classification, regular": {"adjoint": sn.Replay(), "compile": True},
    "CDE classification, irregular": {"adjoint": sn.Replay(), "compile": True},
}


class Contender(NamedTuple):
    """A library, and the context in which it runs."""

    library: Any
    context: Callable[[], AbstractContextManager[Any]]


class Measured(NamedTuple):
    """What one contender needed for a program."""

    first: float  # seconds of the first run, which compiles
    seconds: float
    evaluations: int
    difference: float  # to the original

    def row(self, reference: Measured, counted: bool) -> list[str]:
        speed, evaluations = reference.seconds / self.seconds, str(self.evaluations) if counted else "–"
        return [f"{self.first:.1f}", f"{self.seconds:.3f}", f"{speed:.2f}", evaluations, f"{self.difference:.1e}"]


def contenders(name: str) -> dict[str, Contender]:
    """The original, the drop-in and the switched drop-in. The switch of torchdiffeq's holds for torchcde's too."""
    original, ours = (torchcde, torchcde_dropin) if name in CDE_PROGRAMS else (torchdiffeq, dropin)
    return {
        "original": Contender(original, nullcontext),
        "drop-in": Contender(ours, nullcontext),
        "switched": Contender(ours, lambda: dropin.use(**SWITCHES[name])),
    }


def run(program: Program, contender: Contender, iterations: int) -> tuple[float, Outcome]:
    with contender.context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        outcome = program(contender.library, iterations)
        return time.perf_counter() - start, outcome


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return (apart / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def measure(name: str, rounds: int, iterations: int) -> dict[str, Measured]:
    """Each contender in turn, after a first run that compiles and warms up."""
    program, each = PROGRAMS[name], contenders(name)
    first = {who: run(program, contender, iterations) for who, contender in each.items()}
    seconds: dict[str, list[float]] = {who: [] for who in each}
    for _ in range(rounds):
        for who, contender in each.items():
            seconds[who].append(run(program, contender, iterations)[0])
    expected = first["original"][1].values
    return {
        who: Measured(begun, min(seconds[who]), outcome.evaluations, difference(outcome.values, expected))
        for who, (begun, outcome) in first.items()
    }


def report(results: Mapping[str, Mapping[str, Measured]]) -> str:
    rows, speeds = [], {}
    for name, found in results.items():
        reference = found["original"]
        rows.append([name, f"{reference.seconds:.3f}", str(reference.evaluations)])
        for who in ("drop-in", "switched"):
            counted = who != "switched" or not SWITCHES[name].get("compile")
            rows[-1] += found[who].row(reference, counted)
            speeds.setdefault(who, []).append(reference.seconds / found[who].seconds)
    columns = [
        f"{who}: {what}"
        for who in ("drop-in", "switched")
        for what in ("first s", "s", "speed-up", "evaluations", "diff.")
    ]
    text = table(("program", "original: s", "evaluations", *columns), rows)
    medians = ", ".join(
        f"{who} median {statistics.median(each):.2f}, least {min(each):.2f}" for who, each in speeds.items()
    )
    return f"{text}\n\nSpeed-up: {medians}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10, help="of training or sampling")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--quick", action="store_true", help="one short round; results are not written")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rounds, iterations = (1, 2) if options.quick else (options.rounds, options.iterations)
    results = {name: measure(name, rounds, iterations) for name in options.programs}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchdiffeq", "torchcde"))
    print(f"one thread; {versions}; {iterations} iterations, best of {rounds}\n")
    print(report(results))
    if not options.quick:
        written = {name: {who: each._asdict() for who, each in found.items()} for name, found in results.items()}
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "dropin.json").write_text(json.dumps({**circumstances(1), "programs": written}, indent=1) + "\n")


if __name__ == "__main__":
    main()

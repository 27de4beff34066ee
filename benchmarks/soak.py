"""Endurance: long solves, long training and many shapes, with an eye on memory, the clock and caches.

    python -m benchmarks.soak [--parts steps training shapes adjoints] [--steps 1000000] [--iterations 100000]
                              [--shapes 10000] [--compiled-shapes 300] [--out FILE]

Each line of the table is a measurement, its bound and whether it is kept; the exit status is 1 if one is not. Growth is
the increase of the resident memory of the process after the first tenth of a part. Compiled solves run their graphs
without Inductor, which would take seconds for every shape: what is bounded is what seminode and the front end keep.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import seminode as sn
from seminode._compile import front_end, inductor
from seminode.adjoints import Adjoint
from seminode.extending import Observer

from .detest import table
from .race import RESULTS, circumstances

#: Megabytes by which a process may grow; the allocator of the C library keeps some.
GROWTH = 30.0
#: How many states a solve holds beside those that the formula of an adjoint counts.
WORKING = 35
STATE = 100_000
PARTS = ("steps", "training", "shapes", "adjoints")


class Line(NamedTuple):
    """A measurement and the most that it may be."""

    what: str
    found: float
    bound: float
    unit: str

    @property
    def good(self) -> bool:
        return self.found <= self.bound


def resident() -> float:
    """The resident memory of this process in megabytes."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Growth:
    """Memory and live tensors after the first tenth of a loop and at its end."""

    def __init__(self, count: int):
        self._first = max(1, count // 10)
        self._memory = 0.0
        self._tensors = 0

    def at(self, i: int) -> None:
        if i + 1 == self._first:
            self._memory, self._tensors = resident(), tensors()

    def lines(self, what: str, cached: float = 0.0) -> Iterator[Line]:
        """`cached` is by which part of it the number of tensors may grow: full caches do not always hold as many."""
        yield Line(f"{what}: growth of memory", resident() - self._memory, GROWTH, "MB")
        yield Line(f"{what}: tensors left over", tensors() - self._tensors, cached * self._tensors, "")


def tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        # One of the objects belongs to torch, and warns when it is looked at.
        warnings.simplefilter("ignore", FutureWarning)
        return sum(isinstance(x, Tensor) for x in gc.get_objects())


class Clock(Observer):
    """Every step starts where the one before it ended, and none has drifted from k·dt by more than rounding."""

    def __init__(self, dt: float, growth: Growth):
        self._dt, self._growth = dt, growth
        self.steps, self.end, self.gaps, self.drift = 0, 0.0, 0, 0.0

    def accepted(self, step: Any, ratio: float) -> None:
        plan = step.plan
        self.gaps += plan.t0 != self.end
        self._growth.at(self.steps)
        self.steps, self.end = self.steps + 1, plan.t1
        self.drift = max(self.drift, abs(plan.t1 / (self.steps * self._dt) - 1.0))


def long_solve(steps: int) -> Iterator[Line]:
    """One solve of a rotation, by very many steps of a fixed size."""
    dt, growth = 1e-3, Growth(steps)
    clock = Clock(dt, growth)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    with torch.no_grad():
        sol = sn.solve(
            lambda t, y: turn @ y,
            torch.tensor([1.0, 0.0]),
            [0.0, steps * dt],
            solver="midpoint",
            controller=sn.FixedStep(dt),
            save="last",
            max_steps=steps + 1,
            observers=[clock],
        )
    what = f"{steps:,} steps"
    yield Line(f"{what}: steps missing", abs(sol.stats.accepted - steps), 0, "")
    yield Line(f"{what}: steps that do not start where the last one ended", clock.gaps, 0, "")
    yield Line(f"{what}: relative drift of the clock", clock.drift, 1e-12, "")
    yield Line(f"{what}: distance of the last time from the end", abs(float(sol.ts[-1]) - steps * dt), 0, "")
    yield from growth.lines(what)


def training(iterations: int, compiled: bool) -> Iterator[Line]:
    """A tiny neural ODE, trained to be a rotation by a right angle."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    points, growth = torch.randn(16, 2), Growth(iterations)
    target = points @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])

    def iterate() -> float:
        # Coarse tolerances: what is looked for is what a solve leaves behind, and a step costs more than a solve.
        options: dict[str, Any] = {"solver": "bosh3", "rtol": 1e-2, "atol": 1e-2, "save": "last", "compile": compiled}
        sol = sn.solve(lambda t, y: net(y), points, [0.0, 1.0], **options)
        loss = (sol.ys[-1] - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.item()

    first = last = iterate()
    graphs = unique_graphs()
    for i in range(1, iterations):
        last = iterate()
        growth.at(i)
    what = f"{iterations:,} training iterations{', compiled' if compiled else ''}"
    yield Line(f"{what}: last loss over first", last / first, 0.5, "")
    if compiled:
        yield Line(f"{what}: graphs traced after the first iteration", unique_graphs() - graphs, 0, "")
    yield from growth.lines(what)


def unique_graphs() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return counters["stats"]["unique_graphs"] if counters else 0


def shapes(count: int, compiled: bool) -> Iterator[Line]:
    """Solves whose states have changing shapes, in no order."""
    net, growth = nn.Linear(3, 3), Growth(count)
    draw = random.Random(0)

    def error(size: int) -> float:
        y0 = torch.ones(size, 3, requires_grad=True)
        sol = sn.solve(lambda t, y: net(y), y0, [0.0, 0.5], solver="bosh3", save="last", compile=compiled)
        (grad,) = torch.autograd.grad(sol.ys.sum(), y0)
        return float((grad - grad[:1]).abs().max())  # all samples are alike

    # Sizes for which there are programs of their own come first: what is compiled later belongs to all sizes.
    wrong = max(map(error, (1, 2, 3)))
    for i in range(count):
        wrong = max(wrong, error(draw.randint(1, 200)))
        growth.at(i)
    what = f"{count:,} solves of changing shapes{', compiled' if compiled else ''}"
    yield Line(f"{what}: largest error of a gradient", wrong, 1e-5, "")
    if compiled:
        yield Line(f"{what}: front ends kept", len(front_end._front_ends), front_end.FRONT_ENDS, "")
    yield from growth.lines(what, cached=0.1 if compiled else 0.0)


def peak_states(adjoint: Adjoint, steps: int, solver: str = "dopri5") -> float:
    """The most memory that tensors take at a time in a solve and its backward pass, in states."""
    y0 = torch.linspace(-1.0, 1.0, STATE, requires_grad=True)

    def run() -> None:
        options: dict[str, Any] = {"controller": sn.FixedStep(1.0 / steps), "save": "last", "solver": solver}
        sol = sn.solve(lambda t, y: torch.tanh(y) * torch.cos(t), y0, [0.0, 1.0], adjoint=adjoint, **options)
        sol.ys.sum().backward()
        y0.grad = None

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run()
    results: Any = measured.profiler.kineto_results  # type: ignore[union-attr]
    live = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    return peak / (y0.numel() * y0.element_size())


def adjoints(steps: int = 100) -> Iterator[Line]:
    """Peak memory in states, against the formulas on the page about adjoints; and how it grows with the steps."""
    dense = sn.Quadrature(rule="gauss", z="dense")
    #: Of each adjoint, how many states it keeps of so many steps.
    kept: list[tuple[Adjoint, Callable[[int], float], str]] = [
        # Of each of the six stages, autograd keeps tanh(y).
        (sn.Direct(), lambda n: 6 * n, "dopri5"),
        (sn.Replay(), lambda n: n, "dopri5"),
        (sn.Replay(every=10), lambda n: n // 10 + 10, "dopri5"),
        (sn.Checkpointed(10), lambda n: 10, "dopri5"),
        (sn.Interpolating(), lambda n: 5 * n, "dopri5"),
        (sn.Interpolating(memory=50), lambda n: 50, "dopri5"),
        (sn.Backsolve(check=False), lambda n: 0, "dopri5"),
        (sn.Quadrature(), lambda n: 0, "dopri5"),
        (dense, lambda n: 5 * n, "dopri5"),
        (sn.Reversible(), lambda n: 2, "reversible_heun"),
    ]
    for adjoint, states, solver in kept:
        peaks = [peak_states(adjoint, n, solver) for n in (steps, 2 * steps)]
        yield Line(f"{adjoint!r}, {steps} steps: peak memory", peaks[0], states(steps) + WORKING, "states")
        yield Line(
            f"{adjoint!r}, {steps} more steps: more memory",
            peaks[1] - peaks[0],
            states(2 * steps) - states(steps) + 1,
            "states",
        )


def without_inductor() -> None:
    """Have compiled solves run their graphs as they are."""
    inductor.back_end = lambda module, examples: lambda inputs: list(module(*inputs))  # type: ignore[assignment]


def parts(options: argparse.Namespace) -> dict[str, list[Callable[[], Iterator[Line]]]]:
    return {
        "steps": [lambda: long_solve(options.steps)],
        "training": [lambda c=c: training(options.iterations, c) for c in (False, True)],
        "shapes": [lambda: shapes(options.shapes, False), lambda: shapes(options.compiled_shapes, True)],
        "adjoints": [adjoints],
    }


def soak_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row per measurement."""
    rows = [
        [x["what"], f"{x['found']:.3g} {x['unit']}".strip(), f"{x['bound']:.3g}", "yes" if x["good"] else "no"]
        for x in lines
    ]
    return table(["what", "found", "at most", "kept"], rows)


def save(path: Path, lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Put the lines of these parts in the place of the earlier ones; those of other parts are kept."""
    now = circumstances(1)
    before = json.loads(path.read_text())["lines"] if path.exists() else []
    kept = [line for line in before if line["part"] not in names]
    every = [*kept, *({**line, "date": now["date"]} for line in lines)]
    every.sort(key=lambda line: PARTS.index(line["part"]))
    path.write_text(json.dumps({"circumstances": now, "lines": every}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Run long solves and trainings.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--shapes", type=int, default=10_000)
    parser.add_argument("--compiled-shapes", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(1)
    without_inductor()
    warnings.simplefilter("error", sn.CompileWarning)
    found: list[dict[str, Any]] = []
    for name in options.parts:
        for part in parts(options)[name]:
            for line in part():
                found.append({"part": name, **line._asdict(), "good": line.good})
                print(f"{'ok' if line.good else 'NOT KEPT':>8}  {line.what}: {line.found:.3g} {line.unit}", flush=True)
    print("\n" + soak_table(found))
    save(options.out, found, options.parts)
    raise SystemExit(not all(line["good"] for line in found))


if __name__ == "__main__":
    main()

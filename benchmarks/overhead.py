"""What a solver adds to the evaluations that it must make.

    python -m benchmarks.overhead [--repeats 40] [--only steps] [--problems cde flow] [--quick]

Time per step beside torchdiffeq's, on fields so small that the solver itself shows; and, on problems of the race, the
time of compiled solves divided by that of their evaluations alone: one compiled evaluation of the field for each in the
forward pass, and one together with its VJP for each in the backward pass. Contenders take turns, in one thread; minimum
and median of many rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
import torchdiffeq
from torch import Tensor, nn

import seminode as sn
from seminode.adjoints import Adjoint

from .detest import table
from .race import RESULTS, circumstances
from .suite import task_of
from .tasks import Task

BATCH, CHANNELS, WIDTH = 256, 4, 32
RTOL, ATOL = 1e-5, 1e-7


class Network(nn.Module):
    """Two hidden layers of 32 and tanh, as small neural ODEs have."""

    end = 200.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(CHANNELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CHANNELS)
        )

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


class Oscillator(nn.Module):
    """Nothing but a product: what is left is the solver."""

    end = 20.0

    def __init__(self) -> None:
        super().__init__()
        turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        self.turn = nn.Parameter(torch.block_diag(turn, turn))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return y @ self.turn


FIELDS: dict[str, type[Network] | type[Oscillator]] = {"tanh network": Network, "trivial": Oscillator}


def steps_of(field: nn.Module, run: Callable[[], object]) -> int:
    """Attempted dopri5 steps of one run, by the identity nfe = 2 + 6·steps."""
    calls: list[None] = []
    counter = field.register_forward_hook(lambda *_: calls.append(None))
    run()
    counter.remove()
    return (len(calls) - 2) // 6


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(repeats: int, kind: str = "tanh network", compiled: bool = True) -> dict[str, list[float]]:
    """Microseconds per step of each contender, round by round."""
    torch.manual_seed(0)
    field, y0 = FIELDS[kind](), torch.randn(BATCH, CHANNELS)
    ts = torch.tensor([0.0, field.end])
    runs: dict[str, Callable[[], object]] = {
        "seminode": lambda: sn.solve(field, y0, ts, rtol=RTOL, atol=ATOL),
        "torchdiffeq": lambda: torchdiffeq.odeint(field, y0, ts, rtol=RTOL, atol=ATOL),
    }
    with torch.no_grad():
        steps = {name: steps_of(field, run) for name, run in runs.items()}
        n = steps["seminode"]
        if compiled:
            # A compiled field is not called as one; the steps are the same.
            runs["seminode, compiled"] = lambda: sn.solve(field, y0, ts, rtol=RTOL, atol=ATOL, compile=True)
            runs["seminode, compiled"]()
        runs["field"] = lambda: [field(ts[0], y0) for _ in range(6 * n)]
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                found[name].append(1e6 * seconds(run) / steps.get(name, n))
    return found


def report(found: dict[str, list[float]]) -> str:
    lines = [f"{'':18} {'min':>8} {'median':>8}   µs per step"]
    for name, times in found.items():
        lines.append(f"{name:18} {min(times):8.0f} {statistics.median(times):8.0f}")
    for ours in ("seminode", "seminode, compiled"):
        if ours in found:
            ratios = [min(found["torchdiffeq"]) / min(found[ours])]
            ratios.append(statistics.median(b / a for a, b in zip(found[ours], found["torchdiffeq"], strict=True)))
            lines.append(f"torchdiffeq / {ours}: {ratios[0]:.2f} (minima), {ratios[1]:.2f} (median of rounds)")
    overhead = [min(found[name]) - min(found["field"]) for name in ("torchdiffeq", "seminode")]
    lines.append(f"solver's own time per step: torchdiffeq {overhead[0]:.0f} µs, seminode {overhead[1]:.0f} µs")
    return "\n".join(lines)


# Over the evaluations alone.


def solves_of(task: Task) -> list[tuple[nn.Module, Any, Tensor]]:
    """The field, the start and the times of every solve that a task makes, as it makes them."""
    found: list[tuple[nn.Module, Any, Tensor]] = []

    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        found.append((field, y0, ts))
        return sn.solve(field, y0, ts, rtol=task.rtol, atol=task.atol, jumps=task.jumps).ys

    with torch.no_grad():
        task.through(task.start(), solve)
    return found


def tensors(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else list(y)


def fresh(y: Any) -> Any:
    """With gradients of its own."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors(y)]
    return leaves[0] if isinstance(y, Tensor) else tuple(leaves)


class Bare:
    """One compiled evaluation of a field, alone and with its product."""

    def __init__(self, field: nn.Module, y0: Any, ts: Tensor):
        self.field: Any = torch.compile(field)
        self.parameters = list(field.parameters())
        self.y0 = fresh(y0)
        self.t = ts.mean().to(tensors(y0)[0])

    def evaluation(self) -> None:
        with torch.no_grad():
            self.field(self.t, self.y0)

    def product(self) -> None:
        slopes = tensors(self.field(self.t, self.y0))
        inputs = [*tensors(self.y0), *self.parameters]
        torch.autograd.grad(slopes, inputs, [torch.ones_like(k) for k in slopes], allow_unused=True)


def passes(task: Task, solve: tuple[nn.Module, Any, Tensor], adjoint: Adjoint) -> tuple[list[float], list[int]]:
    """Seconds of one compiled solve forth and back, and the evaluations that each made."""
    field, y0, ts = solve
    y0 = fresh(y0)
    begin = time.perf_counter()
    options: dict[str, Any] = {"rtol": task.rtol, "atol": task.atol, "jumps": task.jumps}
    sol = sn.solve(field, y0, ts, adjoint=adjoint, compile=True, **options)
    turn = time.perf_counter()
    ends = [ys[-1] for ys in tensors(sol.ys)]
    inputs = [*tensors(y0), *field.parameters()]
    torch.autograd.grad(ends, inputs, [torch.ones_like(y) for y in ends], allow_unused=True)
    end = time.perf_counter()
    backward = sol.stats.backward or sn.Stats()
    return [turn - begin, end - turn], [sol.stats.nfe, max(backward.nfe, backward.vjp_y)]


def ratios(task: Task, repeats: int, adjoints: dict[str, Adjoint]) -> dict[str, dict[str, float]]:
    """For each adjoint the two ratios, over all solves of the task together, from the minima of the rounds."""
    solves = solves_of(task)
    bare = [Bare(*solve) for solve in solves]
    kinds = ("evaluation", "product")
    for each in bare:
        for kind in kinds:
            getattr(each, kind)()
    for adjoint in adjoints.values():
        for solve in solves:
            passes(task, solve, adjoint)
    alone = {(i, kind): float("inf") for i in range(len(solves)) for kind in kinds}
    whole = {(name, i, way): float("inf") for name in adjoints for i in range(len(solves)) for way in range(2)}
    counts: dict[tuple[str, int], list[int]] = {}
    for _ in range(repeats):
        for i, solve in enumerate(solves):
            for kind in kinds:
                alone[i, kind] = min(alone[i, kind], *(seconds(getattr(bare[i], kind)) for _ in range(5)))
            for name, adjoint in adjoints.items():
                taken, counts[name, i] = passes(task, solve, adjoint)
                for way in range(2):
                    whole[name, i, way] = min(whole[name, i, way], taken[way])
    found: dict[str, dict[str, float]] = {}
    for name in adjoints:
        found[name] = {}
        for way, (label, kind) in enumerate(zip(("forward", "backward"), kinds, strict=True)):
            time_whole = sum(whole[name, i, way] for i in range(len(solves)))
            time_alone = sum(counts[name, i][way] * alone[i, kind] for i in range(len(solves)))
            found[name] |= {f"{label}_seconds": time_whole, f"{label}_alone": time_alone}
            found[name] |= {f"{label}_evaluations": sum(counts[name, i][way] for i in range(len(solves)))}
    return found


OVER: dict[str, Adjoint] = {
    "Direct": sn.Direct(),
    "Replay": sn.Replay(),
    "Backsolve": sn.Backsolve(),
    "Quadrature": sn.Quadrature(),
    "Interpolating": sn.Interpolating(),
}


def ratio_table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = []
    for problem, by_adjoint in found.items():
        for name, each in by_adjoint.items():
            row = [problem, name]
            for label in ("forward", "backward"):
                whole, alone = each[f"{label}_seconds"], each[f"{label}_alone"]
                row += [f"{each[f'{label}_evaluations']:.0f}", f"{whole:.4f}", f"{alone:.4f}", f"{whole / alone:.2f}"]
            rows.append(row)
    halves = [
        f"{half}: {what}" for half in ("forward", "backward") for what in ("evaluations", "solve", "alone", "ratio")
    ]
    return table(("problem", "adjoint", *halves), rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40, help="rounds of the small fields; a tenth for the problems")
    parser.add_argument("--only", choices=("steps", "evaluations"))
    parser.add_argument("--problems", nargs="+", default=["cde", "flow"])
    parser.add_argument("--quick", action="store_true", help="tiny problems, nothing written")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"dopri5, one thread; torch {torch.__version__}, torchdiffeq {version('torchdiffeq')}")
    written: dict[str, Any] = circumstances(1)
    if options.only != "evaluations":
        for kind in FIELDS:
            print(f"\nState {BATCH}×{CHANNELS}, {kind} field", flush=True)
            written[kind] = measure(options.repeats, kind)
            print(report(written[kind]), flush=True)
    if options.only != "steps":
        rounds = max(1, options.repeats // 10)
        written["evaluations"] = {name: ratios(task_of(name, options.quick), rounds, OVER) for name in options.problems}
        print("\nSeconds of compiled solves, and of the same number of field evaluations (with their VJPs) alone\n")
        print(ratio_table(written["evaluations"]))
    if not options.quick:
        kept = RESULTS / "overhead.json"
        earlier = json.loads(kept.read_text()) if kept.exists() else {}
        RESULTS.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(earlier | written, indent=1) + "\n")


if __name__ == "__main__":
    main()

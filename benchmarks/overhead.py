"""The overhead of a solver beyond the evaluations of the field.

    python -m benchmarks.overhead [--repeats 40] [--only steps] [--problems cde flow] [--quick]

Two measurements. First, the time per step of seminode and torchdiffeq, on fields so small that the solver dominates.
Second, on problems of the race, the ratio of the time of a compiled solve to the time of its evaluations alone: one
compiled evaluation of the field for each evaluation of the forward pass, and one with its vector-Jacobian product for
each of the backward pass. All contenders run in turn, in one thread; minimum and median of many rounds are reported.
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
from .field_costs import solves_of
from .race import RESULTS, circumstances
from .suite import task_of
from .tasks import Task

BATCH, CHANNELS, WIDTH = 256, 4, 32
RTOL, ATOL = 1e-5, 1e-7


class Network(nn.Module):
    """A typical small neural ODE: two hidden layers of width 32 and tanh."""

    end = 200.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(CHANNELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CHANNELS)
        )

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


class Oscillator(nn.Module):
    """A single matrix product, so that the time is that of the solver."""

    end = 20.0

    def __init__(self) -> None:
        super().__init__()
        rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        self.matrix = nn.Parameter(torch.block_diag(rotation, rotation))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return y @ self.matrix


FIELDS: dict[str, type[Network] | type[Oscillator]] = {"tanh network": Network, "trivial": Oscillator}


def steps_of(field: nn.Module, run: Callable[[], object]) -> int:
    """Attempted steps of dopri5 in one run, from nfe = 2 + 6·steps."""
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
    """Microseconds per step of each contender in every round."""
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
            # A compiled solve does not call the module, so its steps cannot be counted; they are the same.
            runs["seminode, compiled"] = lambda: sn.solve(field, y0, ts, rtol=RTOL, atol=ATOL, compile=True)
            runs["seminode, compiled"]()
        runs["field"] = lambda: [field(ts[0], y0) for _ in range(6 * n)]
        microseconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                microseconds[name].append(1e6 * seconds(run) / steps.get(name, n))
    return microseconds


def report(microseconds: dict[str, list[float]]) -> str:
    lines = [f"{'':18} {'min':>8} {'median':>8}   µs per step"]
    for name, times in microseconds.items():
        lines.append(f"{name:18} {min(times):8.0f} {statistics.median(times):8.0f}")
    for ours in ("seminode", "seminode, compiled"):
        if ours in microseconds:
            own_times, peer_times = microseconds[ours], microseconds["torchdiffeq"]
            ratios = [min(peer_times) / min(own_times)]
            ratios.append(statistics.median(b / a for a, b in zip(own_times, peer_times, strict=True)))
            lines.append(f"torchdiffeq / {ours}: {ratios[0]:.2f} (minima), {ratios[1]:.2f} (median of rounds)")
    overhead = [min(microseconds[name]) - min(microseconds["field"]) for name in ("torchdiffeq", "seminode")]
    lines.append(f"time per step without the field: torchdiffeq {overhead[0]:.0f} µs, seminode {overhead[1]:.0f} µs")
    return "\n".join(lines)


# Compiled solves compared with their evaluations alone.


def tensors(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else list(y)


def fresh(y: Any) -> Any:
    """A detached copy that requires gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors(y)]
    return leaves[0] if isinstance(y, Tensor) else tuple(leaves)


class BareField:
    """One compiled evaluation of a field, alone and with its VJP."""

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
    """Seconds and number of evaluations of the forward and the backward pass of one compiled solve."""
    field, y0, ts = solve
    y0 = fresh(y0)
    begin = time.perf_counter()
    options: dict[str, Any] = {"rtol": task.rtol, "atol": task.atol, "jumps": task.jumps}
    sol = sn.solve(field, y0, ts, adjoint=adjoint, compile=True, **options)
    middle = time.perf_counter()
    ends = [ys[-1] for ys in tensors(sol.ys)]
    inputs = [*tensors(y0), *field.parameters()]
    torch.autograd.grad(ends, inputs, [torch.ones_like(y) for y in ends], allow_unused=True)
    end = time.perf_counter()
    backward = sol.stats.backward or sn.Stats()
    return [middle - begin, end - middle], [sol.stats.nfe, max(backward.nfe, backward.vjp_y)]


def ratios(task: Task, repeats: int, adjoints: dict[str, Adjoint]) -> dict[str, dict[str, float]]:
    """For each adjoint, the minimal seconds of both passes and of their evaluations, summed over all solves."""
    solves = solves_of(task)
    bare = [BareField(*solve) for solve in solves]
    kinds = ("evaluation", "product")
    for each in bare:
        for kind in kinds:
            getattr(each, kind)()
    for adjoint in adjoints.values():
        for solve in solves:
            passes(task, solve, adjoint)
    alone = {(i, kind): float("inf") for i in range(len(solves)) for kind in kinds}
    whole = {(name, i, p): float("inf") for name in adjoints for i in range(len(solves)) for p in range(2)}
    counts: dict[tuple[str, int], list[int]] = {}
    for _ in range(repeats):
        for i, solve in enumerate(solves):
            for kind in kinds:
                alone[i, kind] = min(alone[i, kind], *(seconds(getattr(bare[i], kind)) for _ in range(5)))
            for name, adjoint in adjoints.items():
                pass_seconds, counts[name, i] = passes(task, solve, adjoint)
                for p in range(2):
                    whole[name, i, p] = min(whole[name, i, p], pass_seconds[p])
    results: dict[str, dict[str, float]] = {}
    for name in adjoints:
        results[name] = {}
        for p, (label, kind) in enumerate(zip(("forward", "backward"), kinds, strict=True)):
            time_whole = sum(whole[name, i, p] for i in range(len(solves)))
            time_alone = sum(counts[name, i][p] * alone[i, kind] for i in range(len(solves)))
            results[name] |= {f"{label}_seconds": time_whole, f"{label}_alone": time_alone}
            results[name] |= {f"{label}_evaluations": sum(counts[name, i][p] for i in range(len(solves)))}
    return results


ADJOINTS: dict[str, Adjoint] = {
    "Direct": sn.Direct(),
    "Replay": sn.Replay(),
    "Backsolve": sn.Backsolve(),
    "Quadrature": sn.Quadrature(),
    "Interpolating": sn.Interpolating(),
}


def ratio_table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = []
    for problem, by_adjoint in results.items():
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
    parser.add_argument("--repeats", type=int, default=40, help="rounds on the small fields; a tenth on the problems")
    parser.add_argument("--only", choices=("steps", "evaluations"))
    parser.add_argument("--problems", nargs="+", default=["cde", "flow"])
    parser.add_argument("--quick", action="store_true", help="tiny problems; results are not written")
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
        written["evaluations"] = {
            name: ratios(task_of(name, options.quick), rounds, ADJOINTS) for name in options.problems
        }
        print("\nSeconds of compiled solves, and of the same number of field evaluations (with their VJPs) alone\n")
        print(ratio_table(written["evaluations"]))
    if not options.quick:
        path = RESULTS / "overhead.json"
        earlier = json.loads(path.read_text()) if path.exists() else {}
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(earlier | written, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A step size for every sample: seminode's `batched=True` against torchode, on van der Pol oscillators.

    python -m benchmarks.batched [--parts loop oscillators drop] [--repeats 7] [--quick] [--draw PNG]

`loop`: μ = 2, batch 256, rtol = atol = 1e-5, 200 outputs, as in the torchode paper (Lienen and Günnemann 2022); CPU
time per step of the forward solve, eager against eager and compiled against compiled. torchode is compiled by
torch.compile(solver.solve): `torch.compile(solver).solve`, as in its README, runs eagerly.
`oscillators`: 1,024 oscillators with μ from 0.1 to 100, forward and backward pass; errors of every sample; steps with a
step size for each and for all.
`drop`: what an evaluation of an eighth of the batch costs, relative to one of the whole batch.
All contenders run in turn, in one thread; times are CPU times, and ratios those of minima.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import seminode as sn

from .bars import TORCHODE_LOOP

PARTS = ("loop", "oscillators", "drop")


def van_der_pol(t: Tensor, y: Tensor, mu: Any) -> Tensor:
    x, v = y[..., 0], y[..., 1]
    return torch.stack([v, mu * (1 - x**2) * v - x], -1)


def torchode_solver(mu: Any, tolerance: float) -> Any:
    torchode: Any = import_module("torchode")
    term = torchode.ODETerm(lambda t, y: van_der_pol(t, y, mu))
    controller = torchode.IntegralController(atol=tolerance, rtol=tolerance, term=term)
    # The gradient of the steps that were taken, as ours.
    return torchode.AutoDiffAdjoint(torchode.Dopri5(term=term), controller, backprop_through_step_size_control=False)


def torchode_problem(y0: Tensor, ts: Tensor) -> Any:
    torchode: Any = import_module("torchode")
    return torchode.InitialValueProblem(y0=y0, t_eval=ts.expand(len(y0), -1))


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def fastest(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, Any]]:
    """The smallest time of each, and its result; the first round is a warm-up."""
    best: dict[str, tuple[float, Any]] = {}
    for i in range(repeats + 1):
        for name, run in contenders.items():
            taken, result = seconds(run)
            if i == 1 or (i > 1 and taken < best[name][0]):
                best[name] = taken, result
    return best


def our_steps(sol: sn.Solution[Tensor]) -> int:
    return sol.stats.accepted + sol.stats.rejected


def loop_times(
    repeats: int, batch: int = 256, outputs: int = 200, compiled: bool = True
) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds per step and steps of both libraries, by the kind of solve."""
    y0 = torch.randn(batch, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ts = torch.linspace(0.0, 7.63, outputs, dtype=torch.float64)  # one period
    problem = torchode_problem(y0, ts)

    def ours(compile: bool) -> sn.Solution[Tensor]:
        with torch.no_grad():
            return sn.solve(van_der_pol, y0, ts, args=(2.0,), rtol=1e-5, atol=1e-5, batched=True, compile=compile)

    def theirs(solve: Callable[[Any], Any]) -> Any:
        with torch.no_grad():
            return solve(problem)

    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind in ("eager", "compiled") if compiled else ("eager",):
        solve = torchode_solver(2.0, 1e-5).solve
        solve = torch.compile(solve) if kind == "compiled" else solve
        contenders = {
            "torchode": lambda solve=solve: theirs(solve),
            "seminode": lambda kind=kind: ours(kind == "compiled"),
        }
        best = fastest(contenders, repeats)
        steps = {
            "torchode": int(best["torchode"][1].stats["n_steps"].max()),
            "seminode": our_steps(best["seminode"][1]),
        }
        found[kind] = {
            name: {"micros": 1e6 * taken / steps[name], "steps": steps[name]} for name, (taken, _) in best.items()
        }
    return found


def loop_text(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A line per kind, with the speed-up and whether it meets the target."""
    lines = []
    for kind, times in found.items():
        shown = [f"{name} {times[name]['micros']:7.0f} ({times[name]['steps']} steps)" for name in times]
        ratio = times["torchode"]["micros"] / times["seminode"]["micros"]
        says = "met" if ratio >= TORCHODE_LOOP else "missed"
        lines.append(f"{kind:9} {'   '.join(shown)}   speed-up {ratio:.2f} (target {TORCHODE_LOOP:g}: {says})")
    return "\n".join(lines)


def loop(repeats: int, batch: int = 256, outputs: int = 200, compiled: bool = True) -> str:
    title = f"VdP loop, μ = 2, batch {batch}, {outputs} outputs: CPU µs per step"
    return f"{title}\n{loop_text(loop_times(repeats, batch, outputs, compiled))}"


def oscillators(
    repeats: int, count: int = 1024, end: float = 2.0, tolerance: float = 1e-6, compiled: bool = True
) -> str:
    mu = torch.logspace(-1, 2, count, dtype=torch.float64)
    y0 = torch.tensor([2.0, 0.0], dtype=torch.float64).repeat(count, 1)
    ts = torch.linspace(0.0, end, 5, dtype=torch.float64)
    options: dict[str, Any] = {"args": (mu,), "rtol": tolerance, "atol": tolerance}
    sol = sn.solve(van_der_pol, y0, ts, batched=True, **options)
    shared = sn.solve(van_der_pol, y0, ts, norm="max", **options)
    exact = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True, solver="dopri8", rtol=1e-12, atol=1e-12).ys

    def error_of(ys: Tensor) -> str:
        error = ((ys - exact) / (tolerance + tolerance * exact.abs())).square().mean(2).sqrt().amax(0)
        return f"median {error.median():.2f}, largest {error.max():.2f}"

    assert sol.stats.per_sample is not None
    own = sol.stats.per_sample.accepted
    easy = own[: count // 2].double().mean()

    def ours(adjoint: Any, compile: bool = False) -> Any:
        start = y0.clone().requires_grad_()
        result = sn.solve(van_der_pol, start, ts, batched=True, adjoint=adjoint, compile=compile, **options)
        result.ys.square().sum().backward()
        return start.grad

    def theirs(solve: Callable[[Any], Any]) -> Any:
        start = y0.clone().requires_grad_()
        solve(torchode_problem(start, ts)).ys.square().sum().backward()
        return start.grad

    eager = torchode_solver(mu, tolerance).solve
    contenders: dict[str, Callable[[], Any]] = {
        "torchode": lambda: theirs(eager),
        "Direct": lambda: ours(sn.Direct()),
        "Replay": lambda: ours(sn.Replay()),
    }
    if compiled:
        program = torch.compile(torchode_solver(mu, tolerance).solve)
        contenders["torchode compiled"] = lambda: theirs(program)
        contenders["Replay compiled"] = lambda: ours(sn.Replay(), True)
    best = fastest(contenders, repeats)
    rivals = eager(torchode_problem(y0, ts)).ys.transpose(0, 1)
    lines = [
        f"{count} oscillators, μ from 0.1 to 100, t from 0 to {end:g}, rtol = atol = {tolerance:g}",
        f"largest error of a sample at any output, in tolerances (RMS): {error_of(sol.ys)}; "
        f"torchode {error_of(rivals)}",
        f"steps: {own.min()} to {own.max()}, easy half {easy:.1f} on average; shared step {shared.stats.accepted}; "
        f"easy half {shared.stats.accepted / easy:.1f} times fewer",
    ]
    for name, (taken, grad) in best.items():
        rival = "torchode compiled" if "compiled" in name else "torchode"
        distance = float((grad - best["Direct"][1]).norm() / best["Direct"][1].norm())
        lines.append(
            f"forward + backward, {name:17} {1e3 * taken:8.1f} ms   ratio to {rival} {taken / best[rival][0]:.2f}   "
            f"gradient differs from Direct's by {distance:.0e}"
        )
    return "\n".join(lines)


def drop(repeats: int, widths: Sequence[int] = (2, 32, 512)) -> str:
    """What dropping finished samples could save: evaluations of 1,024 samples and of 128."""
    lines = ["an evaluation of 128 samples, relative to one of 1,024"]
    for width in widths:
        net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
        whole = torch.randn(1024, width)
        contenders = {
            "1024": lambda net=net, whole=whole: [net(whole) for _ in range(20)],
            "128": lambda net=net, whole=whole: [net(whole[:128]) for _ in range(20)],
        }
        with torch.no_grad():
            best = fastest(contenders, repeats)
        lines.append(f"state of {width:4} entries: {best['128'][0] / best['1024'][0]:.2f}")
    return "\n".join(lines)


def draw(out: Path, count: int = 1024, end: float = 2.0) -> None:
    from matplotlib import pyplot

    mu = torch.logspace(-1, 2, count, dtype=torch.float64)
    y0 = torch.tensor([2.0, 0.0], dtype=torch.float64).repeat(count, 1)
    ts = torch.linspace(0.0, end, 400, dtype=torch.float64)
    sol = sn.solve(van_der_pol, y0, ts, args=(mu,), batched=True)
    shared = sn.solve(van_der_pol, y0, ts, args=(mu,), norm="max", save="last")
    assert sol.stats.per_sample is not None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.loglog(mu, sol.stats.per_sample.accepted, label="own step sizes")
    left.axhline(shared.stats.accepted, color="tab:red", label="one step size for all")
    left.set(xlabel="μ", ylabel="accepted steps", title=f"{count} van der Pol oscillators")
    left.legend()
    for i in (0, count // 2, 3 * count // 4, count - 1):
        alone = sn.solve(van_der_pol, y0[i], [0.0, end], args=(mu[i],), record=True)
        assert alone.record is not None
        times, lengths = [p.t0 for p in alone.record.accepted], [p.dt for p in alone.record.accepted]
        right.semilogy(times, lengths, ".-", markersize=3, label=f"μ = {float(mu[i]):.3g}")
    right.set(xlabel="t", ylabel="step size", title="step sizes of four of them")
    right.legend()
    figure.savefig(out, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing compiled: does it run?")
    parser.add_argument("--draw", type=Path, help="draw the picture of the page and do nothing else")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    if options.draw is not None:
        draw(options.draw, 32 if options.quick else 1024)
        return
    print(f"one thread; torch {torch.__version__}")
    quick = options.quick
    runs: dict[str, Callable[[], str]] = {
        "loop": lambda: loop(1, 8, 5, compiled=False) if quick else loop(options.repeats),
        "oscillators": lambda: oscillators(1, 8, 0.2, compiled=False) if quick else oscillators(options.repeats),
        "drop": lambda: drop(1, (2,)) if quick else drop(options.repeats),
    }
    for part in options.parts:
        print(f"\n{runs[part]()}", flush=True)


if __name__ == "__main__":
    main()

"""Time per step of an eager solve beside torchdiffeq's, on a field so small that the solver itself shows.

    python -m benchmarks.overhead [--repeats 40]

The contenders take turns, in one thread; the minimum and the median of many rounds are reported. `field` is the time of
the six evaluations alone that a dopri5 step must make: what no solver can avoid.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
import torchdiffeq
from torch import Tensor, nn

import seminode as sn

BATCH, CHANNELS, WIDTH, END = 256, 4, 32, 200.0
RTOL, ATOL = 1e-5, 1e-7


class Field(nn.Module):
    """Two hidden layers of 32 and tanh, as small neural ODEs have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(CHANNELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CHANNELS)
        )

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def steps_of(field: Field, run: Callable[[], object]) -> int:
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


def measure(repeats: int) -> dict[str, list[float]]:
    """Microseconds per step of each contender, round by round."""
    torch.manual_seed(0)
    field, y0, ts = Field(), torch.randn(BATCH, CHANNELS), torch.tensor([0.0, END])
    runs: dict[str, Callable[[], object]] = {
        "seminode": lambda: sn.solve(field, y0, ts, rtol=RTOL, atol=ATOL),
        "torchdiffeq": lambda: torchdiffeq.odeint(field, y0, ts, rtol=RTOL, atol=ATOL),
    }
    with torch.no_grad():
        steps = {name: steps_of(field, run) for name, run in runs.items()}
        n = steps["seminode"]
        runs["field"] = lambda: [field(ts[0], y0) for _ in range(6 * n)]
        steps["field"] = n
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                found[name].append(1e6 * seconds(run) / steps[name])
    return found


def report(found: dict[str, list[float]]) -> str:
    lines = [f"{'':12} {'min':>8} {'median':>8}   µs per step"]
    for name, times in found.items():
        lines.append(f"{name:12} {min(times):8.0f} {statistics.median(times):8.0f}")
    ratios = [min(found["torchdiffeq"]) / min(found["seminode"])]
    ratios.append(statistics.median(b / a for a, b in zip(found["seminode"], found["torchdiffeq"], strict=True)))
    lines.append(f"torchdiffeq / seminode: {ratios[0]:.2f} (minima), {ratios[1]:.2f} (median of rounds)")
    overhead = [min(found[name]) - min(found["field"]) for name in ("torchdiffeq", "seminode")]
    lines.append(f"solver's own time per step: torchdiffeq {overhead[0]:.0f} µs, seminode {overhead[1]:.0f} µs")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(
        f"Eager dopri5, state {BATCH}×{CHANNELS}, tanh MLP of width {WIDTH}, one thread; "
        f"torch {torch.__version__}, torchdiffeq {version('torchdiffeq')}"
    )
    print(report(measure(repeats)))


if __name__ == "__main__":
    main()

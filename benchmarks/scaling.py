"""How time and memory of a gradient scale with the number of steps, the state, the parameters and the batch.

    python -m benchmarks.scaling [--along steps batch] [--adjoints Replay] [--repeats 3] [--quick]

Fixed steps of dopri5 through a tanh network, so that only the size changes. Time should be linear in the number of
steps: the cost of an additional step between 1,000 and 10,000 steps is compared with that between 100 and 1,000. Memory
is the peak of the resident memory of the process above its value before the pass; a few megabytes are noise.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import seminode as sn

from .detest import table
from .problems import mlp, normal
from .race import RESULTS, circumstances
from .worker import reason

LINEAR_WITHIN = 0.1
ADJOINTS = {
    "Direct": sn.Direct(),
    "Replay": sn.Replay(),
    "Checkpointed": sn.Checkpointed(32),
    "Backsolve": sn.Backsolve(),
    "Quadrature": sn.Quadrature(),
    "Interpolating": sn.Interpolating(),
}


@dataclass(frozen=True)
class Size:
    """The size of a problem: number of steps, shape (batch, channels) of the state, and width of the hidden layer."""

    steps: int = 100
    batch: int = 16
    channels: int = 16
    width: int = 16


ALONG: dict[str, Sequence[Size]] = {
    "steps": [Size(steps=n) for n in (100, 1_000, 10_000)],
    "channels": [Size(channels=n) for n in (16, 64, 256, 1_024)],
    "width": [Size(width=n) for n in (16, 64, 256, 1_024, 4_096)],
    "batch": [Size(batch=n) for n in (16, 128, 1_024, 8_192)],
}


class Field(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.net = mlp((size.channels, size.width, size.channels), nn.Tanh, generator).float()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def resident(name: str) -> float:
    """Resident megabytes of this process: VmRSS now, VmHWM at the peak; 0 if the system does not report them."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


def forget_peak() -> None:
    """Return free memory to the system, and reset the peak to the current value."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak is then that of the lifetime of the process


def one_pass(field: Field, y0: Tensor, size: Size, adjoint: str, compiled: bool) -> dict[str, float]:
    gc.collect()
    forget_peak()
    before = resident("VmRSS")
    begin = time.perf_counter()
    controller = sn.FixedStep(1.0 / size.steps)
    sol = sn.solve(field, y0, [0.0, 1.0], controller=controller, adjoint=ADJOINTS[adjoint], compile=compiled)
    middle = time.perf_counter()
    torch.autograd.grad(sol.ys[-1].square().mean(), [y0, *field.parameters()])
    end = time.perf_counter()
    assert sol.stats.accepted == size.steps
    return {"forward": middle - begin, "backward": end - middle, "mb": max(0.0, resident("VmHWM") - before)}


def measure(size: Size, adjoint: str, compiled: bool, repeats: int) -> dict[str, Any]:
    """The minimal seconds and the peak memory, or the reason of a failure."""
    torch.manual_seed(0)
    field = Field(size)
    y0 = normal((size.batch, size.channels), torch.Generator().manual_seed(1)).float().requires_grad_()
    about = {**asdict(size), "adjoint": adjoint, "compiled": compiled}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", sn.CompileWarning)
            if compiled:
                one_pass(field, y0, replace(size, steps=10), adjoint, compiled)
            passes = [one_pass(field, y0, size, adjoint, compiled) for _ in range(repeats)]
    except (RuntimeError, ValueError, TypeError, sn.CompileWarning) as error:
        return {**about, "failed": reason(error)}
    quickest = {name: min(each[name] for each in passes) for name in ("forward", "backward")}
    return {**about, **quickest, "seconds": sum(quickest.values()), "mb": max(each["mb"] for each in passes)}


def growth(measurements: Sequence[Mapping[str, Any]]) -> float | None:
    """The cost of an additional step at the largest sizes relative to that at the smallest; 1 if time is linear."""
    if len(measurements) < 3 or any("failed" in each for each in measurements):
        return None
    rate = lambda a, b: (b["seconds"] - a["seconds"]) / (b["steps"] - a["steps"])
    return rate(measurements[-2], measurements[-1]) / rate(measurements[0], measurements[1])


def scaling_table(axis: str, measurements: Sequence[Mapping[str, Any]]) -> str:
    """A row for every adjoint, eager and compiled, with seconds and megabytes at every size."""
    sizes = sorted({each[axis] for each in measurements})
    rows = []
    for adjoint, compiled in dict.fromkeys((each["adjoint"], each["compiled"]) for each in measurements):
        of_adjoint = [each for each in measurements if each["adjoint"] == adjoint and each["compiled"] == compiled]
        cells = [
            "–" if "failed" in each else f"{each['seconds']:.3f} s, {each['mb']:.0f} MB"
            for each in sorted(of_adjoint, key=lambda each: each[axis])
        ]
        row = [f"{adjoint}{', compiled' if compiled else ''}", *cells]
        if axis == "steps":
            row.append(linear(growth(of_adjoint)))
        rows.append(row)
    extra = ["growth per step"] if axis == "steps" else []
    return table((axis, *(f"{size:,}" for size in sizes), *extra), rows)


def linear(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:.2f} ({'linear' if ratio <= 1.0 + LINEAR_WITHIN else 'not linear'})"


def run(along: Sequence[str], adjoints: Sequence[str], repeats: int, quick: bool = False) -> dict[str, Any]:
    """All measurements by the name of the axis along which the size varies."""
    measurements: dict[str, Any] = {}
    for axis in along:
        sizes = [replace(size, steps=size.steps // 10) for size in ALONG[axis][:2]] if quick else ALONG[axis]
        modes = (False,) if quick else (False, True)
        measurements[axis] = [
            measure(size, adjoint, compiled, repeats) for adjoint in adjoints for compiled in modes for size in sizes
        ]
        print(f"\n{scaling_table(axis, measurements[axis])}", flush=True)
        for each in measurements[axis]:
            if "failed" in each:
                print(f"{each['adjoint']}, {axis} {each[axis]}: {each['failed']}")
    return measurements


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--along", nargs="+", choices=ALONG, default=list(ALONG))
    parser.add_argument("--adjoints", nargs="+", choices=ADJOINTS, default=list(ADJOINTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the two smallest sizes, eager; results are not written")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"dopri5, float32, one thread; torch {torch.__version__}")
    measurements = run(options.along, options.adjoints, options.repeats, options.quick)
    if not options.quick:
        path = RESULTS / "scaling.json"
        earlier = json.loads(path.read_text())["along"] if path.exists() else {}
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**circumstances(1), "along": earlier | measurements}, indent=1) + "\n")


if __name__ == "__main__":
    main()

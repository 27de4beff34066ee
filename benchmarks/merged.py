"""What it would buy to merge the compiled programs of neighbouring steps.

    python -m benchmarks.merged [--repeats 1500]

Takes the programs of `Direct, tsit5, compiled` on the small problem and compiles merged ones besides: the first slope
with the first step; two attempted steps, the second of the length that the controller proposes inside the program; the
VJPs of two neighbouring steps. Programs are timed alone, without what Python does between them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from seminode import Integral
from seminode._compile.inductor import compile_graph
from seminode._compile.programs import saving, start, steps

from .contenders import named
from .detest import table
from .suite import numbers
from .torch_runners import TorchRunner

SETTING = "seminode: Direct, tsit5, compiled"
Function = Callable[..., list[Tensor]]


class Recorded:
    """A compiled program, the function that it was made of, and the inputs of its calls."""

    def __init__(self, function: Function, run: Any):
        self.function, self.run = function, run
        self.calls: list[list[Tensor]] = []

    def __call__(self, inputs: list[Tensor]) -> Any:
        self.calls.append(list(inputs))
        return self.run(list(inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)


@contextmanager
def recording(found: dict[str, Recorded]) -> Iterator[None]:
    """Keep the programs that are compiled, by the names of their functions."""

    def recorded(function: Function, *args: Any) -> Recorded:
        return found.setdefault(function.__name__, Recorded(function, compile_graph(function, *args)))

    with ExitStack() as stack:
        for module in (saving, start, steps):
            stack.enter_context(mock.patch.object(module, "compile_graph", recorded))
        yield


class Merged:
    """Functions of two programs each, from those of one pass."""

    def __init__(self, found: dict[str, Recorded]):
        self._start, self._step, self._vjp = (found[name] for name in ("start", "step", "_vjp"))
        method: Any = self._vjp.function  # of the object that makes the programs
        programs = method.__self__
        self._nodes, self._order = programs.nodes, programs._solver.error_order
        self._kept = programs.kept + programs.at.kept
        self.dtype = self._step.calls[0][1].dtype

    def _clock(self, t: Tensor, dt: Tensor) -> Tensor:
        times = [dt, *(t + c * dt for c in self._nodes._index)]
        times += [t + dt] * (self._nodes._size - len(times))
        return torch.stack(times).to(self.dtype)

    def start_and_step(self, clock: Tensor, t: Tensor, y: Tensor, *others: Tensor) -> list[Tensor]:
        numbers, k1, *kept = self._start.function(clock, y, *others)
        return [numbers, k1, *kept, *self._step.function(self._clock(t, numbers[0].double()), y, k1, *others)]

    def two_steps(self, clock: Tensor, t: Tensor, y: Tensor, k1: Tensor, *others: Tensor) -> list[Tensor]:
        first = self._step.function(clock, y, k1, *others)
        y1, ratio, k_end = first[:3]
        growth = Integral().growth(ratio.double(), self._order, ())
        dt = clock[0].double()
        ahead = self._clock(t + dt, dt * torch.clamp(growth, max=10.0))
        return [*first, ahead, *self._step.function(ahead, y1, k_end, *others)]

    def two_vjps(self, *tensors: Tensor) -> list[Tensor]:
        n = self._kept
        later, earlier, (adj_y, *sums) = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        adj_y, alive, *sums = self._vjp.function(*later, adj_y, *sums)
        adj_y, also_alive, *sums = self._vjp.function(*earlier, adj_y, *sums)
        return [adj_y, alive + also_alive, *sums]


def compiled(function: Function, inputs: Sequence[Tensor]) -> tuple[Any, float]:
    """A program, and the seconds until it has run once."""
    begin = time.perf_counter()
    run = compile_graph(function, [x.detach() for x in inputs], None)
    run(list(inputs))
    return run, time.perf_counter() - begin


def fastest(calls: Sequence[tuple[Any, Sequence[Tensor]]], repeats: int) -> float:
    """Microseconds for these calls in turn, the smallest of many."""
    times, kept = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        kept = [run(list(inputs)) for run, inputs in calls]
        times.append(time.perf_counter() - begin)
    del kept
    return 1e6 * min(times)


def measure(repeats: int, quick: bool = False) -> list[list[str]]:
    """A row for each way of merging: microseconds one by one and merged, and seconds to compile the merged program."""
    found: dict[str, Recorded] = {}
    with recording(found):
        runner = TorchRunner(numbers("small", quick)[0], named("small", SETTING))
        for _ in range(3):
            runner.run()
    for program in found.values():
        program.calls.clear()
    runner.run()
    begin, step, vjp = (found[name] for name in ("start", "step", "_vjp"))
    merged = Merged(found)
    n = merged._kept
    zero = torch.zeros((), dtype=torch.float64)
    count = len(step.calls) // 2 * 2
    (clock, y, *others), taken, pulled = begin.calls[0], step.calls[:count], vjp.calls[:count]
    together = [clock, zero, y, *others]
    pairs = [[each[0], zero, *each[1:]] for each in taken[::2]]
    doubled = [[*a[:n], *b[:n], *a[n:]] for a, b in zip(pulled[::2], pulled[1::2], strict=True)]
    cases = [
        (
            "first slope and first step",
            [(begin.run, begin.calls[0]), (step.run, taken[0])],
            merged.start_and_step,
            [together],
        ),
        (f"{count} steps, two by two", [(step.run, each) for each in taken], merged.two_steps, pairs),
        (f"{count} VJPs, two by two", [(vjp.run, each) for each in pulled], merged.two_vjps, doubled),
    ]
    rows = []
    for name, alone, function, inputs in cases:
        run, seconds = compiled(function, inputs[0])
        both = [(run, each) for each in inputs]
        if function == merged.two_vjps:  # the only one whose parts are certain to be those of the pass
            expected, obtained = vjp.run(list(pulled[1])), run(list(inputs[0]))
            torch.testing.assert_close(obtained[:1] + obtained[2:], expected[:1] + expected[2:])
        separate, joined = (min(fastest(calls, repeats) for _ in range(2)) for calls in (alone, both))
        rows.append([name, f"{separate:.0f}", f"{joined:.0f}", f"{seconds:.1f}"])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merged", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=1500)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with torch.enable_grad():
        rows = measure(options.repeats)
    print(table(["programs", "one by one, µs", "merged, µs", "to compile, s"], rows))


if __name__ == "__main__":
    main()

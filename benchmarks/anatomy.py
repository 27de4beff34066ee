"""Break down the time of a compiled pass: matrix products and convolutions, the rest of the programs, and overhead.

    python -m benchmarks.anatomy [--problems small cde] [--setting "Direct, tsit5, compiled"] [--repeats 30] [--quick]

Compiled programs are timed where they are called. The products in them are timed one by one, on tensors of the same
shapes and layouts that are in the cache. The sum of these times is a lower bound for the programs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from seminode._compile import inductor

from .contenders import named
from .detest import table
from .overhead import seconds
from .suite import numbers
from .torch_runners import TorchRunner

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
PRODUCTS |= {aten.convolution.default, aten.convolution_backward.default}
if torch.backends.mkldnn.is_available():  # large products
    PRODUCTS.add(torch.ops.mkldnn._linear_pointwise.default)


class ProductRecorder(fx.Interpreter):
    """Runs a graph and records its products with their arguments."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.products: list[Callable[[], object]] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and n.target in PRODUCTS:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.products.append(lambda target=n.target, args=args, kwargs=kwargs: target(*args, **kwargs))
        return super().run_node(n)


@dataclass
class Program:
    """A compiled program, its products, and the number and time of its calls."""

    products: list[Callable[[], object]]
    run: Callable[..., Any]
    calls: int = 0
    seconds: float = 0.0

    def __call__(self, inputs: list[Any]) -> Any:
        start = time.perf_counter()
        outputs = self.run(inputs)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return outputs

    def product_seconds(self, repeats: int = 20) -> float:
        """Seconds of the products of one call, timed one by one."""
        with torch.no_grad():
            return sum(min(seconds(product) for _ in range(repeats)) for product in self.products)


@dataclass
class ProgramTimer:
    """Replaces the compiler back end and times the calls of every program."""

    programs: list[Program] = field(default_factory=list)

    def __enter__(self) -> ProgramTimer:
        self._original = inductor.back_end
        inductor.back_end = self._compile
        return self

    def __exit__(self, *_: object) -> None:
        inductor.back_end = self._original

    def _compile(self, module: fx.GraphModule, examples: list[Any]) -> Program:
        recorder = ProductRecorder(module)
        with torch.no_grad():
            recorder.run(*[torch.rand_like(x) for x in examples])
        self.programs.append(Program(recorder.products, self._original(module, examples)))
        return self.programs[-1]

    def clear(self) -> None:
        for program in self.programs:
            program.calls, program.seconds = 0, 0.0


@dataclass(frozen=True)
class Parts:
    """Seconds of one pass, of the programs in it, and of the products in those, which were timed separately."""

    whole: float
    programs: float
    products: float
    calls: int


def anatomy(problem: str, setting: str, repeats: int, quick: bool = False) -> Parts:
    """The breakdown of the fastest of many passes."""
    contender = named(problem, f"seminode: {setting}")
    with ProgramTimer() as timer:
        runner = TorchRunner(numbers(problem, quick)[0], contender)
        for _ in range(3):
            runner.run()
        best, calls = Parts(float("inf"), 0.0, 0.0, 0), [0] * len(timer.programs)
        for _ in range(repeats):
            timer.clear()
            whole = runner.run()["seconds"]
            if whole < best.whole:
                programs = sum(each.seconds for each in timer.programs)
                best = Parts(whole, programs, 0.0, sum(each.calls for each in timer.programs))
                calls = [each.calls for each in timer.programs]
        products = sum(n * each.product_seconds() for n, each in zip(calls, timer.programs, strict=True) if n)
    return Parts(best.whole, best.programs, products, best.calls)


def row(problem: str, setting: str, parts: Parts) -> list[str]:
    milliseconds = [parts.whole, parts.products, parts.programs - parts.products, parts.whole - parts.programs]
    return [problem, setting, *(f"{1e3 * x:.3g}" for x in milliseconds), f"{parts.calls}"]


HEADER = ("problem", "setting", "total, ms", "products", "rest of programs", "overhead", "program calls")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.anatomy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=["small", "pendulum", "flow"])
    parser.add_argument("--setting", default="Direct, tsit5, compiled", help="a setting of seminode in the race")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="tiny problems")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for problem in options.problems:
        rows.append(row(problem, options.setting, anatomy(problem, options.setting, options.repeats, options.quick)))
        print("  ".join(rows[-1]), flush=True)
    print("\n" + table(HEADER, rows))


if __name__ == "__main__":
    main()

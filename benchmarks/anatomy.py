"""Break down the time of a compiled pass: matrix products and convolutions, the rest of the programs, and overhead.

    python -m benchmarks.anatomy [--problems small cde] [--setting "Direct, tsit5, compiled"] [--repeats 30] [--quick]

Compiled programs are timed where they are called. For the products in each of them, another program is compiled that
consists of them alone, so that they are computed in the same way (by seminode's own code where that is faster), on
tensors of the same shapes and layouts. Its time is a lower bound for the program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from seminode._compile import inductor

from .contenders import named
from .detest import table
from .overhead import seconds
from .suite import numbers
from .torch_runners import TorchRunner

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
PRODUCTS |= {aten.convolution.default, aten.convolution_backward.default}


class Product(NamedTuple):
    """An operation and its arguments; tensors are among the positional ones only."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [x for x in self.args if isinstance(x, Tensor)]

    def of(self, tensors: Iterator[Tensor]) -> list[Tensor]:
        """The results for other tensors."""
        args = [next(tensors) if isinstance(x, Tensor) else x for x in self.args]
        found = self.target(*args, **self.kwargs)
        return [found] if isinstance(found, Tensor) else [x for x in found if x is not None]


class ProductRecorder(fx.Interpreter):
    """Runs a graph and records its products with their arguments."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.products: list[Product] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and n.target in PRODUCTS:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.products.append(Product(n.target, args, dict(kwargs)))
        return super().run_node(n)


@dataclass
class Program:
    """A compiled program, its products, and the number and time of its calls."""

    products: list[Product]
    run: Callable[..., Any]
    compile: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
    calls: int = 0
    seconds: float = 0.0

    def __call__(self, inputs: list[Any]) -> Any:
        start = time.perf_counter()
        outputs = self.run(inputs)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return outputs

    def product_seconds(self, repeats: int = 20) -> float:
        """Seconds of the products of one call, computed by a program that consists of them."""
        given = [x.detach() for product in self.products for x in product.tensors()]
        if not given:
            return 0.0

        def function(*tensors: Tensor) -> list[Tensor]:
            remaining = iter(tensors)
            return [x for product in self.products for x in product.of(remaining)]

        with torch.no_grad():
            run = self.compile(inductor.traced(function, given, rewritten=False), given)
            run(list(given))  # waits for the compiler
            return min(seconds(lambda: run(list(given))) for _ in range(repeats))


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
        self.programs.append(Program(recorder.products, self._original(module, examples), self._original))
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

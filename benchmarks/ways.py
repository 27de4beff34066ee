"""The time of a step and of its VJP, for several ways to compile them.

    python -m benchmarks.ways [--repeats 200] [--only AOT]

One dopri5 step of a small network with its error norm, and the VJP of that step with respect to the state and all
parameters, on one thread. The ways take turns. Reports minima, and the seconds to compile with empty caches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import seminode as sn
from seminode._compile.front_end import capture
from seminode._compile.graph import Capture
from seminode._compile.inductor import traced
from seminode._compile.programs import no_sums, saving_programs, step_program, tolerances, vjp_program, whole_step
from seminode._field import checks
from seminode._field.determinism import Determinism
from seminode._field.pytree import Layout
from seminode._field.reach import reachable
from seminode._stepping.schedule import Schedule

from .detest import table
from .overhead import BATCH, CHANNELS, Network, seconds

SOLVER = sn.Dopri5()
DT = 0.1


class Setting(NamedTuple):
    """The inputs of a step and of its VJP."""

    field: nn.Module
    y: Tensor
    k1: Tensor
    adj: Tensor

    @property
    def parameters(self) -> list[Tensor]:
        return [x.detach() for x in self.field.parameters()]

    @property
    def error(self) -> Any:
        return checks.check_error_norm(None, 1e-3, 1e-6, self.y, Layout.of(self.y, "y"), self.y, sn.Integral())


class Way(NamedTuple):
    """Functions that run one step and the VJP of one step."""

    step: Callable[[], Any]
    vjp: Callable[[], Any]


def setting() -> Setting:
    torch.manual_seed(0)
    field, y = Network(), torch.randn(BATCH, CHANNELS)
    return Setting(field, y, field(torch.zeros(()), y).detach(), torch.randn(BATCH, CHANNELS))


def functions(given: Setting) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The step and its VJP as functions of tensors only."""
    names = [name for name, _ in given.field.named_parameters()]
    error, field = given.error, given.field
    allowed = tolerances(error, given.y)

    def evaluator(dt: Tensor, params: Sequence[Tensor]) -> Callable[..., Tensor]:
        def evaluate(c: float, z: Tensor, *, stage: int) -> Tensor:
            return torch.func.functional_call(field, dict(zip(names, params, strict=True)), (c * dt, z))

        return evaluate

    def step(dt: Tensor, y: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        return tuple(whole_step(SOLVER, error, evaluator(dt, params), dt, y, None, allowed)[:3])

    def step_vjp(dt: Tensor, y: Tensor, adj: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        def end(y: Tensor, *params: Tensor) -> Tensor:
            return SOLVER.step(evaluator(dt, params), dt, y, None).y1

        _, vjp_fn = torch.func.vjp(end, y, *params)  # type: ignore[misc]
        return vjp_fn(adj)

    return step, step_vjp


def inputs(given: Setting) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    dt, params = torch.tensor(DT), given.parameters
    return (dt, given.y, *params), (dt, given.y, given.adj, *params)


def eager(given: Setting) -> Way:
    (step, vjp), (for_step, for_vjp) = functions(given), inputs(given)
    return Way(lambda: step(*for_step), lambda: vjp(*for_vjp))


def with_torch_compile(given: Setting, **options: Any) -> Way:
    step, vjp = (torch.compile(f, dynamic=False, options=options) for f in functions(given))
    for_step, for_vjp = inputs(given)
    return Way(lambda: step(*for_step), lambda: vjp(*for_vjp))


def ahead_of_time(given: Setting, rewritten: bool) -> Way:
    """AOTInductor: a compiled library whose calls do not go through Python code."""

    class Whole(nn.Module):
        def __init__(self, function: Callable[..., Any]):
            super().__init__()
            self.function = function

        def forward(self, *tensors: Tensor) -> Any:
            return self.function(*tensors)

    def packed(function: Callable[..., Any], examples: tuple[Tensor, ...]) -> Callable[..., Any]:
        # Traced first, because export does not support torch.func.vjp.
        program = torch.export.export(Whole(traced(function, examples, rewritten)), examples)
        with tempfile.TemporaryDirectory() as folder:
            path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "step.pt2"))
            return torch._inductor.aoti_load_package(path)

    both = [packed(f, examples) for f, examples in zip(functions(given), inputs(given), strict=True)]
    for_step, for_vjp = inputs(given)
    return Way(lambda: both[0](*for_step), lambda: both[1](*for_vjp))


def captured(given: Setting) -> Capture:
    layout = Layout.of(given.y, "y")
    return capture(
        given.field,
        layout,
        torch.zeros(()),
        layout.pack(given.y),
        (),
        Determinism(given.y.device, reachable(given.field)).trial,
    )


def programs(given: Setting) -> Way:
    """The programs of `Replay`."""
    graph, plan = captured(given), _plan()
    wanted, rest, error, y = tuple(True for _ in graph.rest), graph.rest, given.error, given.y
    allowed, sums = tolerances(error, y), no_sums(rest, wanted)
    step = step_program(graph, SOLVER, error, y, given.k1)
    vjp = vjp_program(graph, SOLVER, wanted, y, False)
    return Way(
        lambda: step(plan, y, given.k1, allowed, rest),
        lambda: vjp(plan, y, [given.adj], rest, sums),
    )


def saving(given: Setting) -> Way:
    """The programs of `Direct`, which save activations."""
    graph, plan = captured(given), _plan()
    wanted, rest, error, y = tuple(True for _ in graph.rest), graph.rest, given.error, given.y
    allowed, sums = tolerances(error, y), no_sums(rest, wanted)
    both = saving_programs(graph, SOLVER, error, wanted, False, y)
    k1, *first_saved = both.at(0.0, y, rest)
    outputs = both.step(plan, y, k1, allowed, rest)
    count = 2 + SOLVER.stages
    kept = [*outputs[count : count + both.kept], *first_saved]
    return Way(
        lambda: both.step(plan, y, k1, allowed, rest),
        lambda: both.vjp(plan, kept, [given.adj], sums),
    )


def _plan() -> Any:
    return Schedule(sn.Integral(), SOLVER.order, (0.0, 10.0), (), torch.float32).plan(DT)


WAYS: dict[str, Callable[[Setting], Way]] = {
    "eager": eager,
    "torch.compile of a step, and of its torch.func.vjp": with_torch_compile,
    "the same with Inductor's C++ wrapper": lambda given: with_torch_compile(given, cpp_wrapper=True),
    "AOTInductor": lambda given: ahead_of_time(given, rewritten=False),
    "AOTInductor with rewritten formulas": lambda given: ahead_of_time(given, rewritten=True),
    "programs of Replay": programs,
    "programs of Direct, which store activations": saving,
}


@contextmanager
def empty_caches() -> Iterator[None]:
    from torch._inductor.utils import fresh_inductor_cache

    with tempfile.TemporaryDirectory() as folder, fresh_inductor_cache(dir=folder):
        yield


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ways", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--only", default="", help="only ways whose names contain this")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    given, ready, made = setting(), {}, {}
    with torch.no_grad():
        for name, make in WAYS.items():
            if options.only.lower() not in name.lower():
                continue
            start = time.perf_counter()
            with empty_caches():
                ready[name] = way = make(given)
                for run in way:
                    run()
            made[name] = time.perf_counter() - start
            print(f"{name}: {made[name]:.1f} s", flush=True)
        best = {name: [float("inf"), float("inf")] for name in ready}
        for _ in range(options.repeats):
            for name, way in ready.items():
                for i, run in enumerate(way):
                    best[name][i] = min(best[name][i], *(seconds(run) for _ in range(5)))
    rows = [[name, *(f"{1e6 * x:.0f}" for x in best[name]), f"{made[name]:.1f}"] for name in ready]
    print("\n" + table(("way", "step, µs", "VJP, µs", "seconds to compile"), rows))


if __name__ == "__main__":
    main()

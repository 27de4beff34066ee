"""What every adjoint costs and how good its gradient is, on one problem, beside torchdiffeq's.

    python -m benchmarks.adjoints [--problem cde|pendulum|flow|linear] [--small] [--repeats 2]

F is the price of an evaluation; pulling one back costs about F more for the state and again for the parameters, so that
a pass costs nfe + vjp_y + vjp_params F. The error is that of the gradients of all parameters and of y0 together,
relative to a float64 reference. The contenders take turns, in one thread; seconds are the minimum.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torchdiffeq
from torch import Tensor, nn

import seminode as sn
from seminode import diagnostics
from seminode.adjoints import Adjoint
from seminode.solvers import Solver

from .problems import (
    GradientProblem,
    cde_problem,
    fitted_pendulum,
    flow_problem,
    linear_problem,
    pendulum_batch,
    pendulum_problem,
)

#: What takes more seconds is timed once only: the noise of the clock is small beside it.
LONG = 20.0

Counted = Callable[[], tuple[sn.Stats, sn.Stats]]


def pendulum(iterations: int, batch: int, dtype: torch.dtype = torch.float32) -> GradientProblem:
    return pendulum_problem(fitted_pendulum(iterations, dtype=dtype), pendulum_batch(batch, trials=4, dtype=dtype))


#: For each problem its full and its small size; both take a dtype, and have one of their own.
PROBLEMS: dict[str, tuple[Callable[..., GradientProblem], Callable[..., GradientProblem]]] = {
    "cde": (cde_problem, partial(cde_problem, batch=4, knots=21, channels=4, hidden=16, width=16)),
    "pendulum": (partial(pendulum, 800, 256), partial(pendulum, 30, 8)),
    "flow": (flow_problem, partial(flow_problem, batch=8, width=8)),
    "linear": (linear_problem, partial(linear_problem, batch=2, size=4, stiffness=5.0)),
}


@dataclass(frozen=True)
class Ours:
    """One of seminode's adjoints."""

    name: str
    adjoint: Adjoint
    solver: str | Solver = "dopri5"
    dt: float | None = None  # fixed steps of this size, instead of tolerances
    max_steps: int = 100_000

    def run(self, problem: GradientProblem, y0: Any) -> tuple[Any, Counted]:
        """The outputs, and what was counted once their gradient has been taken."""
        options: dict[str, Any] = {"rtol": problem.rtol, "atol": problem.atol}
        if self.dt is not None:
            options = {"controller": sn.FixedStep(self.dt)}
        options |= {"solver": self.solver, "adjoint": self.adjoint, "jumps": problem.jumps, "max_steps": self.max_steps}
        sol = sn.solve(problem.field, y0, problem.ts, **options)
        return sol.ys, lambda: (sol.stats, sol.stats.backward or sn.Stats())


class TupleField(nn.Module):
    """A field of dicts as torchdiffeq wants it, of tuples."""

    def __init__(self, field: nn.Module, names: Sequence[str]):
        super().__init__()
        self.field, self.names = field, tuple(names)

    def forward(self, t: Tensor, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dy = self.field(t, dict(zip(self.names, y, strict=True)))
        return tuple(dy[name] for name in self.names)


@dataclass(frozen=True)
class Torchdiffeq:
    """torchdiffeq's odeint_adjoint, told of the problem's jumps in both directions or not at all.

    Version 0.2.5 misses a jump that a step happens to end on exactly, and with it all later ones.
    """

    norm: str | None = None
    jumps: bool = True

    @property
    def name(self) -> str:
        details = [self.norm] if self.norm else []
        return ", ".join(["torchdiffeq", *details, *([] if self.jumps else ["without jumps"])])

    def run(self, problem: GradientProblem, y0: Any) -> tuple[Any, Counted]:
        """The outputs, and what was counted once their gradient has been taken."""
        names = list(y0) if isinstance(y0, dict) else None
        field = problem.field if names is None else TupleField(problem.field, names)
        start = y0 if names is None else tuple(y0.values())
        # Its jumps must lie inside the interval.
        options = {"jump_t": problem.jumps[1:-1]} if self.jumps and problem.jumps is not None else {}
        backward = {**options, "norm": self.norm} if self.norm else options
        calls: list[None] = []
        counter = problem.field.register_forward_hook(lambda *_: calls.append(None))
        tolerances = {"rtol": problem.rtol, "atol": problem.atol}
        ys = torchdiffeq.odeint_adjoint(
            field, start, problem.ts, **tolerances, method="dopri5", options=options, adjoint_options=backward
        )
        forward = len(calls)

        def counted() -> tuple[sn.Stats, sn.Stats]:
            counter.remove()
            nfe = len(calls) - forward
            return sn.Stats(nfe=forward), sn.Stats(nfe=nfe, vjp_y=nfe, vjp_params=nfe)

        return ys if names is None else dict(zip(names, ys, strict=True)), counted


Contender = Ours | Torchdiffeq


def backsolve(norm: str, restart: str) -> Ours:
    return Ours(f"Backsolve, {norm}, {restart}", sn.Backsolve(norm=norm, restart=restart))


def quadrature(rule: str, z: str) -> Ours:
    return Ours(f"Quadrature, {rule}, {z}", sn.Quadrature(rule=rule, z=z))


def contenders(problem: GradientProblem) -> list[Contender]:
    ours = [
        Ours("Direct", sn.Direct()),
        Ours("Replay", sn.Replay()),
        Ours("Checkpointed(10)", sn.Checkpointed(10)),
        *(backsolve(norm, "fresh") for norm in ("mixed_per_tensor", "mixed", "seminorm", "seminorm_rms")),
        *(backsolve(norm, "carry") for norm in ("mixed_per_tensor", "mixed", "seminorm")),
        Ours("Interpolating", sn.Interpolating()),
        Ours("Interpolating(memory=64)", sn.Interpolating(memory=64)),
        *(quadrature(rule, "dense") for rule in ("lobatto", "gauss", "gauss-kronrod")),
        quadrature("lobatto", "solve"),
        Ours("Reversible, dopri5", sn.Reversible(), sn.ReversibleRK("dopri5")),
    ]
    # A method of order 2 takes tens of thousands of steps to tight tolerances.
    if problem.rtol > 1e-6:
        ours.append(Ours("Reversible, heun", sn.Reversible(), "reversible_heun"))
    told = (True,) if problem.jumps is None else (True, False)
    return [*ours, *(Torchdiffeq(norm, jumps) for jumps in told for norm in (None, "seminorm"))]


@dataclass(frozen=True, eq=False)
class Measurement:
    """One forward and backward pass: what was counted, the gradient as one vector, seconds, and kinds of warnings."""

    forward: sn.Stats
    backward: sn.Stats
    gradient: Tensor
    forward_seconds: float
    backward_seconds: float
    warned: tuple[str, ...] = ()

    @property
    def backward_cost(self) -> int:
        """In F."""
        return diagnostics.backward_cost(self.backward)

    @property
    def cost(self) -> int:
        """Of both passes, in F."""
        return diagnostics.cost(self.forward, self.backward)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def error(self, reference: Tensor) -> float:
        return float((self.gradient.to(reference) - reference).norm() / reference.norm())


def starting_point(problem: GradientProblem) -> tuple[Any, list[Tensor]]:
    """y0 and its leaves, which get gradients even where the problem's start is constant."""
    y0 = problem.start()
    tensors = y0 if isinstance(y0, dict) else {"": y0}
    tensors = {name: x if x.requires_grad else x.detach().requires_grad_() for name, x in tensors.items()}
    return (tensors if isinstance(y0, dict) else tensors[""]), list(tensors.values())


def measure(problem: GradientProblem, contender: Contender) -> Measurement:
    y0, leaves = starting_point(problem)
    inputs = [*problem.modules.parameters(), *leaves]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin = time.perf_counter()
        ys, counted = contender.run(problem, y0)
        turn = time.perf_counter()
        grads = torch.autograd.grad(problem.loss(ys), inputs, allow_unused=True)
        end = time.perf_counter()
    pairs = zip(inputs, grads, strict=True)
    gradient = torch.cat([torch.zeros_like(x).flatten() if g is None else g.flatten() for x, g in pairs])
    warned = tuple(each.category.__name__ for each in caught)
    return Measurement(*counted(), gradient, turn - begin, end - turn, warned)


def reference_gradient(problem: GradientProblem, rtol: float = 1e-10) -> Tensor:
    """By Replay through a solve so accurate that its own error is nothing beside theirs."""
    return measure(replace(problem, rtol=rtol, atol=0.01 * rtol), Ours("reference", sn.Replay(), "dopri8")).gradient


def reference_through_kinks(problem: GradientProblem) -> Tensor:
    """With equal steps, for fields of many ReLUs: good to about 2e-4 on the full neural CDE.

    Where a ReLU switches inside a step its gradient is wrong by the order of the step, which the error of the solution,
    of second order there, does not tell: tolerances as tight would need several times the steps.
    """
    return measure(problem, Ours("reference", sn.Replay(), "rk4", dt=1 / 32)).gradient


def quickest(found: Iterable[Measurement]) -> Measurement:
    """The counts are always the same; the noise of the clock is only ever added."""
    found = list(found)
    return replace(
        found[0],
        forward_seconds=min(each.forward_seconds for each in found),
        backward_seconds=min(each.backward_seconds for each in found),
    )


def compare(
    problem: GradientProblem, contenders: Iterable[Contender], repeats: int
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """By name, the measurements and, for those that could not be measured, the reason."""
    found: dict[str, list[Measurement]] = {}
    reasons: dict[str, str] = {}
    contenders = list(contenders)
    for _ in range(repeats):
        for contender in contenders:
            rounds = found.setdefault(contender.name, [])
            if contender.name in reasons or (rounds and rounds[0].seconds > LONG):
                continue
            try:
                rounds.append(measure(problem, contender))
            except (RuntimeError, ValueError, AssertionError) as error:
                reasons[contender.name] = " ".join(str(error).split())
    return {name: quickest(each) for name, each in found.items() if each}, reasons


HEADER = ("adjoint", "nfe", "nfe", "accepted", "rejected", "vjp_y", "vjp_params", "F", "error", "seconds")


def row(name: str, found: Measurement, reference: Tensor) -> tuple[str, ...]:
    forward, backward = found.forward, found.backward
    # torchdiffeq does not tell of its steps.
    steps = [str(backward.accepted), str(backward.rejected)] if backward.accepted else ["-", "-"]
    counts = [backward.vjp_y, backward.vjp_params, found.backward_cost]
    numbers = [f"{found.error(reference):.1e}", f"{found.backward_seconds:.3f}"]
    return (name, str(forward.nfe), str(backward.nfe), *steps, *map(str, counts), *numbers)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[x.rjust(width) for x, width in zip(each, widths, strict=True)] for each in rows]
    return ["  ".join((each[0].ljust(widths[0]), *cell[1:])) for each, cell in zip(rows, cells, strict=True)]


def report(found: dict[str, Measurement], reasons: dict[str, str], reference: Tensor) -> str:
    lines = aligned([HEADER, *(row(name, each, reference) for name, each in found.items())])
    # The forward pass has one column; everything after it is the backward pass.
    first = lines[0].index("nfe")
    lines.insert(0, "forward".rjust(first + len("nfe")) + "  backward")
    lines += [f"{name}: {reason}" for name, reason in reasons.items()]
    for kind in sorted({kind for each in found.values() for kind in each.warned}):
        lines.append(f"{kind}: {'; '.join(name for name, each in found.items() if kind in each.warned)}")
    return "\n".join(lines)


def ordering(found: dict[str, Measurement]) -> str:
    """Whether the norms come in the order that the paper on seminorms found."""
    norms = ("seminorm", "mixed", "mixed_per_tensor")
    names = {norm: backsolve(norm, "fresh").name for norm in norms}
    missing = [norm for norm, name in names.items() if name not in found]
    if missing:
        return f"Order of the norms (restart='fresh'): unknown without {', '.join(missing)}"
    nfe = [found[name].backward.nfe for name in names.values()]
    verdict = "holds" if nfe[0] < nfe[1] < nfe[2] else "does not hold"
    counts = ", ".join(map(str, nfe))
    return f"Backward NFE, restart='fresh': seminorm < mixed < mixed_per_tensor {verdict} ({counts})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", choices=PROBLEMS, default="cde")
    parser.add_argument("--small", action="store_true", help="a problem that takes seconds")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    build = PROBLEMS[options.problem][options.small]
    problem, exact = build(), build(dtype=torch.float64)
    parameters = list(problem.field.parameters())
    size, dtype = sum(parameter.numel() for parameter in parameters), str(parameters[0].dtype).removeprefix("torch.")
    print(
        f"{options.problem}{', small' if options.small else ''}: {size} parameters, rtol {problem.rtol:g}, "
        f"atol {problem.atol:g}, {dtype}, one thread; torch {torch.__version__}, torchdiffeq {version('torchdiffeq')}"
    )
    found, reasons = compare(problem, contenders(problem), options.repeats)
    reference = reference_through_kinks(exact) if options.problem == "cde" else reference_gradient(exact)
    print(report(found, reasons, reference))
    if options.problem == "cde":
        print(ordering(found))


if __name__ == "__main__":
    main()

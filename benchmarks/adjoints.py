"""Cost and gradient error of every adjoint on one problem, compared with torchdiffeq.

    python -m benchmarks.adjoints [--problem cde|pendulum|flow|linear] [--small] [--repeats 2]

F is the cost of one evaluation of the field. A VJP costs about F with respect to the state and about F with respect to
the parameters, so a pass costs nfe + vjp_y + vjp_params F. The error is the relative error of the gradients of all
parameters and of y0, as one vector, compared with a float64 reference. All contenders run in turn, in one thread;
seconds are the minimum.
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
from seminode.adjoints import Adjoint, BackwardNorm, Restart, RuleName, StateSource
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

#: Passes that take more seconds than this are timed only once, because the timing noise is relatively small.
LONG = 20.0

Counted = Callable[[], tuple[sn.Stats, sn.Stats]]


def pendulum(iterations: int, batch: int, dtype: torch.dtype = torch.float32) -> GradientProblem:
    return pendulum_problem(fitted_pendulum(iterations, dtype=dtype), pendulum_batch(batch, trials=4, dtype=dtype))


#: For each problem, functions that build it in full size and in small size; both have a default dtype.
PROBLEMS: dict[str, tuple[Callable[..., GradientProblem], Callable[..., GradientProblem]]] = {
    "cde": (cde_problem, partial(cde_problem, batch=4, knots=21, channels=4, hidden=16, width=16)),
    "pendulum": (partial(pendulum, 800, 256), partial(pendulum, 30, 8)),
    "flow": (flow_problem, partial(flow_problem, batch=8, width=8)),
    "linear": (linear_problem, partial(linear_problem, batch=2, size=4, stiffness=5.0)),
}


@dataclass(frozen=True)
class Ours:
    """An adjoint of seminode."""

    name: str
    adjoint: Adjoint
    solver: str | Solver = "dopri5"
    dt: float | None = None  # fixed steps of this size instead of tolerances
    max_steps: int = 100_000

    def run(self, problem: GradientProblem, y0: Any) -> tuple[Any, Counted]:
        """The outputs, and a function that returns the statistics after the backward pass."""
        options: dict[str, Any] = {"rtol": problem.rtol, "atol": problem.atol}
        if self.dt is not None:
            options = {"controller": sn.FixedStep(self.dt)}
        options |= {"solver": self.solver, "adjoint": self.adjoint, "jumps": problem.jumps, "max_steps": self.max_steps}
        sol = sn.solve(problem.field, y0, problem.ts, **options)
        return sol.ys, lambda: (sol.stats, sol.stats.backward or sn.Stats())


class TupleField(nn.Module):
    """Wraps a field of dicts as a field of tuples, which torchdiffeq needs."""

    def __init__(self, field: nn.Module, names: Sequence[str]):
        super().__init__()
        self.field, self.names = field, tuple(names)

    def forward(self, t: Tensor, y: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dy = self.field(t, dict(zip(self.names, y, strict=True)))
        return tuple(dy[name] for name in self.names)


@dataclass(frozen=True)
class Torchdiffeq:
    """torchdiffeq's odeint_adjoint, with the jumps of the problem in both passes or in neither.

    Version 0.2.5 misses a jump if a step ends exactly on it, and then also misses all later jumps.
    """

    norm: str | None = None
    jumps: bool = True

    @property
    def name(self) -> str:
        details = [self.norm] if self.norm else []
        return ", ".join(["torchdiffeq", *details, *([] if self.jumps else ["without jumps"])])

    def run(self, problem: GradientProblem, y0: Any) -> tuple[Any, Counted]:
        """The outputs, and a function that returns the statistics after the backward pass."""
        names = list(y0) if isinstance(y0, dict) else None
        field = problem.field if names is None else TupleField(problem.field, names)
        start = y0 if names is None else tuple(y0.values())
        # torchdiffeq requires jumps inside the interval.
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


def backsolve(norm: BackwardNorm, restart: Restart) -> Ours:
    return Ours(f"Backsolve, {norm}, {restart}", sn.Backsolve(norm=norm, restart=restart))


def quadrature(rule: RuleName, z: StateSource) -> Ours:
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
    # A method of order 2 needs tens of thousands of steps at tight tolerances.
    if problem.rtol > 1e-6:
        ours.append(Ours("Reversible, heun", sn.Reversible(), "reversible_heun"))
    with_jumps = (True,) if problem.jumps is None else (True, False)
    return [*ours, *(Torchdiffeq(norm, jumps) for jumps in with_jumps for norm in (None, "seminorm"))]


@dataclass(frozen=True, eq=False)
class Measurement:
    """One forward and backward pass: statistics, the gradient as one vector, seconds, and categories of warnings."""

    forward: sn.Stats
    backward: sn.Stats
    gradient: Tensor
    forward_seconds: float
    backward_seconds: float
    warned: tuple[str, ...] = ()

    @property
    def backward_cost(self) -> int:
        """Cost of the backward pass in F."""
        return diagnostics.backward_cost(self.backward)

    @property
    def cost(self) -> int:
        """Cost of both passes in F."""
        return diagnostics.cost(self.forward, self.backward)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def error(self, reference: Tensor) -> float:
        return float((self.gradient.to(reference) - reference).norm() / reference.norm())


def starting_point(problem: GradientProblem) -> tuple[Any, list[Tensor]]:
    """y0 and its leaves, which require gradients even if the start of the problem is constant."""
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
        middle = time.perf_counter()
        grads = torch.autograd.grad(problem.loss(ys), inputs, allow_unused=True)
        end = time.perf_counter()
    pairs = zip(inputs, grads, strict=True)
    gradient = torch.cat([torch.zeros_like(x).flatten() if g is None else g.flatten() for x, g in pairs])
    warned = tuple(each.category.__name__ for each in caught)
    return Measurement(*counted(), gradient, middle - begin, end - middle, warned)


def reference_gradient(problem: GradientProblem, rtol: float = 1e-10) -> Tensor:
    """The gradient by Replay at a tolerance so tight that its error is negligible."""
    return measure(replace(problem, rtol=rtol, atol=0.01 * rtol), Ours("reference", sn.Replay(), "dopri8")).gradient


def reference_through_kinks(problem: GradientProblem) -> Tensor:
    """The gradient with fixed steps, for fields with many ReLUs: accurate to about 2e-4 on the full neural CDE.

    If a ReLU switches inside a step, the error of the gradient is of the order of the step size. Error control does not
    detect this, because there the error of the solution is of second order. An adaptive solve of the same accuracy
    would need several times as many steps.
    """
    return measure(problem, Ours("reference", sn.Replay(), "rk4", dt=1 / 32)).gradient


def quickest(measurements: Iterable[Measurement]) -> Measurement:
    """The minimum of the times. The counts are equal, and timing noise is never negative."""
    measurements = list(measurements)
    return replace(
        measurements[0],
        forward_seconds=min(each.forward_seconds for each in measurements),
        backward_seconds=min(each.backward_seconds for each in measurements),
    )


def compare(
    problem: GradientProblem, contenders: Iterable[Contender], repeats: int
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """The measurements by name and, for contenders that failed, the reasons by name."""
    measurements: dict[str, list[Measurement]] = {}
    reasons: dict[str, str] = {}
    contenders = list(contenders)
    for _ in range(repeats):
        for contender in contenders:
            rounds = measurements.setdefault(contender.name, [])
            if contender.name in reasons or (rounds and rounds[0].seconds > LONG):
                continue
            try:
                rounds.append(measure(problem, contender))
            except (RuntimeError, ValueError, AssertionError) as error:
                reasons[contender.name] = " ".join(str(error).split())
    return {name: quickest(each) for name, each in measurements.items() if each}, reasons


HEADER = ("adjoint", "nfe", "nfe", "accepted", "rejected", "vjp_y", "vjp_params", "F", "error", "seconds")


def row(name: str, measurement: Measurement, reference: Tensor) -> tuple[str, ...]:
    forward, backward = measurement.forward, measurement.backward
    # torchdiffeq does not report its steps.
    steps = [str(backward.accepted), str(backward.rejected)] if backward.accepted else ["-", "-"]
    counts = [backward.vjp_y, backward.vjp_params, measurement.backward_cost]
    numbers = [f"{measurement.error(reference):.1e}", f"{measurement.backward_seconds:.3f}"]
    return (name, str(forward.nfe), str(backward.nfe), *steps, *map(str, counts), *numbers)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[x.rjust(width) for x, width in zip(each, widths, strict=True)] for each in rows]
    return ["  ".join((each[0].ljust(widths[0]), *cell[1:])) for each, cell in zip(rows, cells, strict=True)]


def report(measurements: dict[str, Measurement], reasons: dict[str, str], reference: Tensor) -> str:
    lines = aligned([HEADER, *(row(name, each, reference) for name, each in measurements.items())])
    # The first nfe column is the forward pass; the columns after it are the backward pass.
    first = lines[0].index("nfe")
    lines.insert(0, "forward".rjust(first + len("nfe")) + "  backward")
    lines += [f"{name}: {reason}" for name, reason in reasons.items()]
    for kind in sorted({kind for each in measurements.values() for kind in each.warned}):
        lines.append(f"{kind}: {'; '.join(name for name, each in measurements.items() if kind in each.warned)}")
    return "\n".join(lines)


def ordering(measurements: dict[str, Measurement]) -> str:
    """Whether the norms are in the order of backward NFE that Kidger, Chen and Lyons (2021) report."""
    norms: tuple[BackwardNorm, ...] = ("seminorm", "mixed", "mixed_per_tensor")
    names = {norm: backsolve(norm, "fresh").name for norm in norms}
    missing = [norm for norm, name in names.items() if name not in measurements]
    if missing:
        return f"Order of the norms (restart='fresh'): unknown without {', '.join(missing)}"
    nfe = [measurements[name].backward.nfe for name in names.values()]
    verdict = "holds" if nfe[0] < nfe[1] < nfe[2] else "does not hold"
    counts = ", ".join(map(str, nfe))
    return f"Backward NFE, restart='fresh': seminorm < mixed < mixed_per_tensor {verdict} ({counts})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", choices=PROBLEMS, default="cde")
    parser.add_argument("--small", action="store_true", help="use a small problem, which takes seconds")
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
    measurements, reasons = compare(problem, contenders(problem), options.repeats)
    reference = reference_through_kinks(exact) if options.problem == "cde" else reference_gradient(exact)
    print(report(measurements, reasons, reference))
    if options.problem == "cde":
        print(ordering(measurements))


if __name__ == "__main__":
    main()

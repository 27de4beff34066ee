"""Runs the PyTorch libraries: for each, a function from the options of a contender to its `Solve` at a tolerance.

Tolerances are those of the task times a factor. Settings with fixed steps change the step size instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import seminode as sn

from .problems import ControlledField
from .settings import Contender, step_size
from .tasks import Solve, Task

Counts = dict[str, int]
#: From a factor on the tolerances to the function that solves.
SolveAt = Callable[[float], Solve]


class TorchRunner:
    """Runs and times passes of a task: forward and backward, or forward only if the task has no gradient.

    `synchronise` waits for the device before the clock is read.
    """

    def __init__(self, task: Task, contender: Contender, synchronise: Callable[[], None] = lambda: None):
        self.task, self.synchronise = task, synchronise
        self.libraries = ("torch", contender.library)
        self.costs_known = contender.library == "seminode" and contender.compiled
        self.counted: list[sn.Stats] = []
        self.solve_at = SOLVES[contender.library](task, contender.options, self.counted)
        self.solves: dict[float, Solve] = {}
        self.vectors: dict[float, list[Tensor]] = {}
        self.stats: dict[float, list[sn.Stats]] = {}

    def run(self, factor: float = 1.0) -> dict[str, float]:
        if factor not in self.solves:
            self.solves[factor] = self.solve_at(factor)
        self.counted.clear()
        timing, self.vectors[factor] = (self.training if self.task.differentiate else self.inference)(
            self.solves[factor]
        )
        self.stats[factor] = list(self.counted)
        return timing

    def clock(self) -> float:
        self.synchronise()
        return time.perf_counter()

    def training(self, solve: Solve) -> tuple[dict[str, float], list[Tensor]]:
        begin = self.clock()
        y0, leaves = self.task.leaves()
        loss = self.task.through(y0, solve)
        middle = self.clock()
        inputs = [*self.task.modules.parameters(), *leaves]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        end = self.clock()
        halves = {"seconds": end - begin, "forward": middle - begin, "backward": end - middle}
        return {**halves, "loss": loss.item()}, list(grads)

    def inference(self, solve: Solve) -> tuple[dict[str, float], list[Tensor]]:
        begin = self.clock()
        with torch.no_grad():
            outputs = self.task.through(self.task.start(), solve)
        return {"seconds": self.clock() - begin}, [outputs]

    def gradient(self, factor: float = 1.0) -> np.ndarray:
        """The gradient of the last pass at this factor, or its outputs."""
        return torch.cat([each.flatten() for each in self.vectors[factor]]).cpu().numpy()

    def counts(self, factor: float = 1.0) -> Counts:
        """Counts of all solves together, if the library reports them."""
        totals: Counts = {}
        for stats in self.stats[factor]:
            for direction, each in (("forward", stats), ("backward", stats.backward)):
                for name in ("nfe", "accepted", "rejected"):
                    if each is not None:
                        totals[f"{direction}_{name}"] = totals.get(f"{direction}_{name}", 0) + getattr(each, name)
        return totals

    def needed(self, factor: float = 1.0) -> list[dict[str, int]]:
        """Evaluations and VJPs of every solve; empty if the library does not report them."""
        found = []
        for stats in self.stats[factor]:
            backward = stats.backward
            if backward is None and self.task.differentiate:
                return []
            evaluations = stats.nfe + (0 if backward is None else backward.nfe)
            found.append({"evaluations": evaluations, "vjps": 0 if backward is None else backward.vjp_y})
        return found

    def field_costs(self) -> list[dict[str, float]]:
        """Seconds of one compiled evaluation and of one VJP of every solve's field; empty if not measured here."""
        from .field_costs import field_costs

        return field_costs(self.task) if self.costs_known else []

    def versions(self) -> dict[str, str]:
        return {library: installed(library) for library in self.libraries}


def installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # imported from a source tree
        return "not installed"


def seminode_adjoint(task: Task, options: Mapping[str, Any], factor: float) -> Any:
    if "adjoint" not in options:
        return sn.Direct()  # of a task without a gradient
    extra = dict(options.get("adjoint_options", {}))
    if "backward" in options:
        rtol, atol = options["backward"]
        extra |= {"rtol": rtol * factor * task.rtol, "atol": atol * factor * task.atol}
    return getattr(sn, options["adjoint"])(**extra)


def with_seminode(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> SolveAt:
    def solve_at(factor: float) -> Solve:
        settings: dict[str, Any] = {"rtol": factor * task.rtol, "atol": factor * task.atol}
        if "fixed" in options:
            settings = {"controller": sn.FixedStep(step_size(options, factor))}
        if "reversible" in options:
            settings["solver"] = sn.ReversibleRK(options["reversible"])
        settings |= {"jumps": task.jumps, "compile": options.get("compile", False), **options.get("solve", {})}
        adjoint = seminode_adjoint(task, options, factor)

        def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
            solution = sn.solve(field, y0, ts, adjoint=adjoint, **settings)
            counted.append(solution.stats)
            return solution.ys

        return solve

    return solve_at


class Compiled:
    """Compiles every field once with torch.compile, if active."""

    def __init__(self, active: bool):
        self.active = active
        self.fields: dict[int, nn.Module] = {}

    def __call__(self, field: nn.Module) -> nn.Module:
        if not self.active:
            return field
        if id(field) not in self.fields:
            self.fields[id(field)] = torch.compile(field)  # type: ignore[assignment]
        return self.fields[id(field)]


def with_torchdiffeq(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> SolveAt:
    import torchdiffeq

    # torchdiffeq requires jumps inside the interval.
    with_jumps = options.get("jumps", True)
    jumps: dict[str, Any] = {"jump_t": task.jumps[1:-1]} if with_jumps and task.jumps is not None else {}
    backward = {**jumps, **({"norm": options["norm"]} if "norm" in options else {})}
    compiled = Compiled(options.get("compile", False))

    def solve_at(factor: float) -> Solve:
        tolerances = {"rtol": factor * task.rtol, "atol": factor * task.atol}
        common = {**tolerances, "method": options.get("method", "dopri5")}
        forward = jumps
        if "fixed" in options:
            # The steps end on the jumps. `perturb` evaluates the field on the correct side of a jump.
            forward = {"step_size": step_size(options, factor), "perturb": task.jumps is not None}

        def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
            if not options["adjoint"]:
                return torchdiffeq.odeint(compiled(field), y0, ts, options={**forward}, **common)
            both = {"options": {**forward}, "adjoint_options": {**backward}}
            return torchdiffeq.odeint_adjoint(compiled(field), y0, ts, **both, **common)

        return solve

    return solve_at


def with_torchode(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> SolveAt:
    """For losses of the end only, which is faster. Each sample has its own steps, except in a joint adjoint."""
    import torchode

    def solver_of(field: nn.Module, factor: float) -> Callable[[Any], Any]:
        term = torchode.ODETerm(field)  # type: ignore[arg-type]
        method = torchode.Dopri5(term=term)
        controller = torchode.IntegralController(atol=factor * task.atol, rtol=factor * task.rtol, term=term)
        kind = getattr(torchode, options["adjoint"])
        arguments = (method, controller) if options["adjoint"] == "AutoDiffAdjoint" else (term, method, controller)
        solve = kind(*arguments).solve
        return torch.compile(solve) if options.get("compile", False) else solve

    def solve_at(factor: float) -> Solve:
        solvers: dict[int, Any] = {}

        def solve(field: nn.Module, y0: Any, ts: Tensor) -> Tensor:
            if id(field) not in solvers:
                solvers[id(field)] = solver_of(field, factor)
            begin, end = (t.to(y0).expand(len(y0)) for t in (ts[0], ts[-1]))
            problem = torchode.InitialValueProblem(y0=y0, t_start=begin, t_end=end)  # type: ignore[arg-type]
            return solvers[id(field)](problem).ys.transpose(0, 1)

        return solve

    return solve_at


class MatrixOnly(nn.Module):
    """F of a `ControlledField`, of shape (batch, hidden, channels), which torchcde needs."""

    def __init__(self, field: ControlledField):
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.field.net(z).tanh().unflatten(-1, self.field.shape)


def with_torchcde(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> SolveAt:
    """With the linear interpolation of torchcde, and the jumps as in its documentation."""
    import torchcde

    paths: dict[int, tuple[Any, nn.Module]] = {}

    def solve_at(factor: float) -> Solve:
        def solve(field: nn.Module, y0: Any, ts: Tensor) -> Tensor:
            assert isinstance(field, ControlledField)
            if id(field) not in paths:
                coefficients = torchcde.linear_interpolation_coeffs(field.control.values)
                paths[id(field)] = torchcde.LinearInterpolation(coefficients), MatrixOnly(field)
            path, function = paths[id(field)]
            cde_options: dict[str, Any] = {
                "rtol": factor * task.rtol,
                "atol": factor * task.atol,
                "method": "dopri5",
                "adjoint": options["adjoint"],
            }
            jumps = {"jump_t": path.grid_points[1:-1]}
            if options["adjoint"]:
                cde_options |= {"adjoint_options": {**jumps}, "adjoint_params": tuple(function.parameters())}
            zs = torchcde.cdeint(X=path, func=function, z0=y0, t=ts.to(y0), options={**jumps}, **cde_options)
            assert isinstance(zs, Tensor)
            return zs.movedim(-2, 0)

        return solve

    return solve_at


SOLVES: dict[str, Callable[[Task, Mapping[str, Any], list[sn.Stats]], SolveAt]] = {
    "seminode": with_seminode,
    "torchdiffeq": with_torchdiffeq,
    "torchode": with_torchode,
    "torchcde": with_torchcde,
}

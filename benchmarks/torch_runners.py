"""Runs the PyTorch libraries: for each, a function that makes a `Solve` from the options of a contender."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import seminode as sn

from .contenders import Contender
from .problems import ControlledField
from .tasks import Solve, Task

Counts = dict[str, int]


class TorchRunner:
    """Runs and times forward and backward passes of a task."""

    def __init__(self, task: Task, contender: Contender):
        self.task = task
        self.libraries = ("torch", contender.library)
        self.counted: list[sn.Stats] = []
        self.solve = SOLVES[contender.library](task, contender.options, self.counted)
        self.grads: list[Tensor] = []

    def run(self) -> dict[str, float]:
        self.counted.clear()
        begin = time.perf_counter()
        y0, leaves = self.task.leaves()
        loss = self.task.through(y0, self.solve)
        middle = time.perf_counter()
        inputs = [*self.task.modules.parameters(), *leaves]
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        end = time.perf_counter()
        self.grads = list(grads)
        return {"seconds": end - begin, "forward": middle - begin, "backward": end - middle, "loss": loss.item()}

    def gradient(self) -> np.ndarray:
        return torch.cat([grad.flatten() for grad in self.grads]).numpy()

    def counts(self) -> Counts:
        """Counts of all solves together, if the library reports them."""
        totals: Counts = {}
        for stats in self.counted:
            for direction, each in (("forward", stats), ("backward", stats.backward)):
                for name in ("nfe", "accepted", "rejected"):
                    if each is not None:
                        totals[f"{direction}_{name}"] = totals.get(f"{direction}_{name}", 0) + getattr(each, name)
        return totals

    def versions(self) -> dict[str, str]:
        return {library: installed(library) for library in self.libraries}


def installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # imported from a source tree
        return "not installed"


def with_seminode(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> Solve:
    adjoint = getattr(sn, options["adjoint"])(**options.get("adjoint_options", {}))
    factor = options.get("tighter", 1.0)
    tolerances = {"rtol": factor * task.rtol, "atol": factor * task.atol}
    fixed = {"controller": sn.FixedStep(options["fixed"])} if "fixed" in options else tolerances
    solve_options = {**fixed, "jumps": task.jumps, **options.get("solve", {})}

    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        solution = sn.solve(field, y0, ts, adjoint=adjoint, compile=options.get("compile", False), **solve_options)
        counted.append(solution.stats)
        return solution.ys

    return solve


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


def with_torchdiffeq(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> Solve:
    import torchdiffeq

    # torchdiffeq requires jumps inside the interval.
    with_jumps = options.get("jumps", True)
    forward: dict[str, Any] = {"jump_t": task.jumps[1:-1]} if with_jumps and task.jumps is not None else {}
    backward = {**forward, **({"norm": options["norm"]} if "norm" in options else {})}
    compiled = Compiled(options.get("compile", False))
    common = {"rtol": task.rtol, "atol": task.atol, "method": options.get("method", "dopri5")}
    if "fixed" in options:
        # The steps end on the jumps. `perturb` evaluates the field on the correct side of a jump.
        forward = {"step_size": options["fixed"], "perturb": True}

    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        if not options["adjoint"]:
            return torchdiffeq.odeint(compiled(field), y0, ts, options={**forward}, **common)
        both = {"options": {**forward}, "adjoint_options": {**backward}}
        return torchdiffeq.odeint_adjoint(compiled(field), y0, ts, **both, **common)

    return solve


def with_torchode(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> Solve:
    """For losses of the end only, which is faster. Each sample has its own steps, except in a joint adjoint."""
    import torchode

    solvers: dict[int, Any] = {}

    def solver_of(field: nn.Module) -> Callable[[Any], Any]:
        term = torchode.ODETerm(field)  # type: ignore[arg-type]
        method = torchode.Dopri5(term=term)
        controller = torchode.IntegralController(atol=task.atol, rtol=task.rtol, term=term)
        kind = getattr(torchode, options["adjoint"])
        arguments = (method, controller) if options["adjoint"] == "AutoDiffAdjoint" else (term, method, controller)
        solve = kind(*arguments).solve
        return torch.compile(solve) if options.get("compile", False) else solve

    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Tensor:
        if id(field) not in solvers:
            solvers[id(field)] = solver_of(field)
        begin, end = (t.to(y0).expand(len(y0)) for t in (ts[0], ts[-1]))
        problem = torchode.InitialValueProblem(y0=y0, t_start=begin, t_end=end)  # type: ignore[arg-type]
        return solvers[id(field)](problem).ys.transpose(0, 1)

    return solve


class MatrixOnly(nn.Module):
    """F of a `ControlledField`, of shape (batch, hidden, channels), which torchcde needs."""

    def __init__(self, field: ControlledField):
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.field.net(z).tanh().unflatten(-1, self.field.shape)


def with_torchcde(task: Task, options: Mapping[str, Any], counted: list[sn.Stats]) -> Solve:
    """With the linear interpolation of torchcde, and the jumps as in its documentation."""
    import torchcde

    paths: dict[int, tuple[Any, nn.Module]] = {}

    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Tensor:
        assert isinstance(field, ControlledField)
        if id(field) not in paths:
            coefficients = torchcde.linear_interpolation_coeffs(field.control.values)
            paths[id(field)] = torchcde.LinearInterpolation(coefficients), MatrixOnly(field)
        path, function = paths[id(field)]
        cde_options: dict[str, Any] = {
            "rtol": task.rtol,
            "atol": task.atol,
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


SOLVES: dict[str, Callable[[Task, Mapping[str, Any], list[sn.Stats]], Solve]] = {
    "seminode": with_seminode,
    "torchdiffeq": with_torchdiffeq,
    "torchode": with_torchode,
    "torchcde": with_torchcde,
}

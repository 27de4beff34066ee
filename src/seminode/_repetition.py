"""Repeats a solve, for `Solution.verify`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._field.reach import reachable
from ._stepping.problem import Problem
from ._verification import FINER, Repeated, Rerun
from .adjoints.base import ForwardResult
from .controllers import Adaptive, Controller, FixedStep
from .solution import Solution

Solved = Callable[[Problem], tuple[ForwardResult, Solution[Any]]]


def repetition(problem: Problem, solved: Solved, measured: bool) -> Callable[[], Rerun | None]:
    """How to solve a problem again, worked out when it is asked for; nothing is kept of the graphs that it is part of.

    `measured`: whether the outputs are states, which the norm of the solve can measure.
    """
    if not all(x.is_leaf for x in problem.params or ()):
        return lambda: None
    tensors = problem.field.arg_tensors
    field = problem.field.bind([x.detach() for x in tensors]) if tensors else problem.field
    kept = {**vars(problem), "y0": problem.y0.detach(), "ts": problem.ts.detach(), "field": field}
    return lambda: _rerun(Problem(**kept), solved, measured)


def _finer(problem: Problem) -> Controller:
    """A controller whose steps are shorter, also where they are limited by something else than their error."""
    controller = problem.controller
    if not isinstance(controller, FixedStep | Adaptive) or problem.solver.external or problem.trivial:
        return controller
    low, high = min(problem.times), max(problem.times)
    inside = (t for t in (*problem.jumps, *controller.step_to) if low < t < high)
    # Half of a step that was shortened to this length must not be the same step again.
    longest = max(b - a for a, b in itertools.pairwise(sorted([low, *inside, high])))
    if isinstance(controller, FixedStep):
        return replace(controller, dt=0.5 * min(controller.dt, longest))
    dt_max = 0.5 * min(controller.dt_max, longest)
    dt_min = min(0.5 * controller.dt_min, dt_max)
    dt0 = None if controller.dt0 is None else min(max(controller.dt0, dt_min), dt_max)
    return replace(controller, dt0=dt0, dt_min=dt_min, dt_max=dt_max)


def _rerun(problem: Problem, solved: Solved, measured: bool) -> Rerun | None:
    params, controller, error = problem.params, problem.controller, problem.error
    if error is None and not isinstance(controller, FixedStep):
        return None
    kept: dict[str, Any] = {"dense": False, "record": False, "progress": False, "throw": True, "observers": ()}
    kept["save"] = "last" if problem.save == "steps" else problem.save
    frozen = replace(problem, **kept)

    def run(finer: bool, grad: bool) -> Repeated:
        again = frozen if not finer else replace(frozen, controller=_finer(problem))
        if error is not None:
            again = replace(again, error=error.scaled(FINER if finer else 1.0))
        inputs: list[Tensor] = []
        if grad:
            args = [x.detach().requires_grad_() if x.is_floating_point() else x for x in frozen.field.arg_tensors]
            y0 = frozen.y0.detach().requires_grad_()
            again = replace(again, y0=y0, field=frozen.field.bind(args))
            leaves = reachable(frozen.field.reach).leaves() if params is None else params
            inputs = list({id(x): x for x in (y0, *(x for x in args if x.requires_grad), *leaves)}.values())
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            result, solution = solved(again)
        states = result.ys if result.arrange is None else result.arrange(result.ys)
        return Repeated(solution.ys, result.stats.nfe, states.detach(), inputs)

    if error is None:
        return Rerun(run, None, None, None, problem.save == "steps")

    def size(x: Tensor, y: Tensor) -> float:
        return float(torch.as_tensor(error.size(x, y)).max())

    return Rerun(run, error.rtol, error.atol, size if measured else None, problem.save == "steps")

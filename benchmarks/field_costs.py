"""The limit of a solve: its evaluations and VJPs times the compiled cost of one.

The field of every solve of a task is compiled by itself at the shapes of the problem: an evaluation as one program, and
its VJP, with respect to the state and the parameters, as another, which gets the activations that it needs. Costs are
minima of many calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import seminode as sn
from seminode._compile.front_end import capture
from seminode._compile.programs import evaluation_program, no_sums
from seminode._compile.programs.pieces import saving_evaluation
from seminode._field.determinism import Determinism
from seminode._field.pytree import Layout
from seminode._field.reach import reachable

from .minima import fastest
from .tasks import Task


def solves_of(task: Task) -> list[tuple[nn.Module, Any, Tensor]]:
    """The field, the initial value and the times of every solve of a task, in order."""
    solves: list[tuple[nn.Module, Any, Tensor]] = []

    def solve(field: nn.Module, y0: Any, ts: Tensor) -> Any:
        solves.append((field, y0, ts))
        return sn.solve(field, y0, ts, rtol=task.rtol, atol=task.atol, jumps=task.jumps).ys

    with torch.no_grad():
        task.through(task.start(), solve)
    return solves


def cost_of(field: nn.Module, y0: Any, ts: Tensor, differentiate: bool = True) -> dict[str, float]:
    """Seconds of one compiled evaluation of a field, and of its VJP alone."""
    layout = Layout.of(y0, "y0")
    y = layout.pack(y0).detach()
    t = ts.mean().to(y)
    with torch.no_grad():
        graph = capture(field, layout, t, y, (), Determinism(y.device, reachable(field)).trial)
        rest = graph.rest
        evaluation = evaluation_program(graph, y)
        found = {"evaluation": fastest(lambda: evaluation(t, y, rest))}
        if differentiate:
            parameters = {x.data_ptr() for x in field.parameters()}
            wanted = tuple(x.data_ptr() in parameters for x in rest)
            saving, sums, adj = saving_evaluation(graph, wanted, y), no_sums(rest, wanted), torch.ones_like(y)
            _, *kept = saving(t, y, rest)
            found["vjp"] = fastest(lambda: saving.vjp(kept, adj, sums))
    return found


def field_costs(task: Task) -> list[dict[str, float]]:
    """The costs of the field of every solve of a task, in order."""
    return [cost_of(*solve, differentiate=task.differentiate) for solve in solves_of(task)]

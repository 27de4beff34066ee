"""The step that lands on an event, as a graph: it defines the event time, which is differentiated.

Let Φ(τ) be the end of a step from the state before the event to the time τ. The event time tₑ is the root of
r(τ) = g(τ, Φ(τ)), so that

    dtₑ = −dr / (dr/dτ),    yₑ = Φ(tₑ)

where dr is the derivative at a fixed τ. The gradient is thus that of the steps that were taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._field.capture import restricted
from .._field.event_function import EventFunction
from .._field.pytree import real_dtype
from .._stepping.engine import Engine, eager_engine
from .._stepping.event_search import Landing
from .._stepping.schedule import Plan
from .._stepping.step import Step
from ..solvers.base import Solver
from .base import ForwardPass


class LandingShifts:
    """Shifts of the two ends of a landing step."""

    def __init__(self, start: Tensor, end: Tensor):
        self._ends = start, end

    def of(self, plan: Plan) -> tuple[Tensor, Tensor]:
        return self._ends

    def outputs(self, low: int, high: int) -> Tensor:
        raise NotImplementedError  # outputs of a landing step move with `ts` itself


class EventTime(Function):
    """Zero, with the derivative of an event time: dtₑ = −dr / (dr/dτ)."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, slope: float, tangential: bool, where: str) -> Tensor:
        ctx.event = slope, tangential, where
        return torch.zeros_like(r)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slope, tangential, where = ctx.event
        if torch.is_grad_enabled():
            raise RuntimeError(f"{where}: events give first derivatives only; leave out create_graph=True")
        if tangential:
            raise RuntimeError(
                f"{where}: the event function is tangential to zero along the solution (its slope in time is "
                f"{slope:.3g}), so that the event time has no derivative. Use an event function that crosses zero, or "
                "detach what follows from this event."
            )
        return -grads[0] / slope, None, None, None


def differentiable_landing(
    forward: ForwardPass, landing: Landing, function: EventFunction, y: Tensor, start: Tensor
) -> tuple[Tensor, Step]:
    """Take the landing step twice: to a fixed time, which defines the event time, and to the event time.

    `start` carries the derivative of the time at which the step starts. Returns what carries that of the event time,
    and the step.
    """
    plan, solver = landing.step.plan, forward.problem.solver
    _refuse_carried(solver, y)
    end = torch.zeros_like(start, requires_grad=True)
    engine = landing_engine(forward, y, LandingShifts(start, end))
    k1 = engine.start_slope(plan, y, None)
    memory = solver.with_slope(solver.start(y), k1)
    fixed = engine.step(plan, y, memory)
    time = torch.full((), plan.t1, dtype=real_dtype(y), device=y.device)
    r = function(time + end, fixed.y1).to(start.dtype)
    if forward.problem.ranks.several and _depends_on(r, fixed.y1):
        raise ValueError(
            f"event: the time of {function.name} depends on the states of all ranks, and with norms.distributed() its "
            "gradient is not available. Use an event function of t alone, solve under torch.no_grad(), detach the "
            "state inside the function to treat the time as a constant, or use batched=True, which needs no such norm"
        )
    slope = torch.autograd.grad(r, end, retain_graph=True, allow_unused=True)[0] if r.requires_grad else None
    size = 0.0 if slope is None else slope.item()
    tangential = not abs(size) > torch.finfo(start.dtype).eps ** 0.4 * landing.slope_scale
    shift: Tensor = EventTime.apply(r, size, tangential, f"{function.name} at t = {plan.t1:g}")  # type: ignore[misc]
    return shift, landing_engine(forward, y, LandingShifts(start, shift)).step(plan, y, memory)


def _depends_on(r: Tensor, y: Tensor) -> bool:
    if not (r.requires_grad and y.requires_grad):
        return False
    grad = torch.autograd.grad(r, y, retain_graph=True, allow_unused=True)[0]
    return grad is not None and bool(grad.any())


def landing_engine(forward: ForwardPass, y: Tensor, shifts: Any) -> Engine:
    """What takes landing steps: eagerly, with a graph where there is something to differentiate."""
    problem = forward.problem
    field = problem.field
    if problem.params is not None:
        field = field.bind(func=restricted(field.func, problem.params))
    return eager_engine(field, problem.solver, y, forward.determinism, forward.log, shifts=shifts)


def _refuse_carried(solver: Solver, y: Tensor) -> None:
    if solver.carried(solver.start(y)):
        raise ValueError(
            f"event: gradients through events need a solver whose steps start from y alone, but {solver.name!r} "
            "carries more from step to step; pass solver='dopri5', or solve under torch.no_grad()"
        )

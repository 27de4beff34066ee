"""The compiled engine: evaluations, steps and what they keep come out of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._field.determinism import Purity
from .._field.field import Field
from .._field.pytree import real_dtype
from .._stepping.engine import Eager, Step
from .._stepping.observers import Tally
from .._stepping.problem import Plan, Problem
from ..errors import CompileWarning, warn
from ..norms import ErrorNorm
from ..solvers import ExplicitRungeKutta, Solver
from .graph import Capture, NotCompiled, capture, described
from .programs import Wanted, evaluation_program, saving_programs, step_program, tolerances


class Fused(Eager):
    """Runs steps as compiled programs, or op by op where there is no graph of the field.

    `norm` is that of the error control, which is part of a step.
    """

    def __init__(
        self,
        field: Field,
        solver: Solver,
        like: Tensor,
        purity: Purity,
        tally: Tally,
        log: list[float] | None,
        captured: Capture | None,
        norm: ErrorNorm | None,
    ):
        super().__init__(field, solver, like, purity, tally, None, log)
        self.capture = captured
        self.norm = norm
        self._ready: dict[Callable[..., Any], Any] = {}
        if captured is not None:
            self._rest = captured.rest
            self._allowed = tolerances(norm, like)

    def _made(self, program: Callable[..., Any], *args: Any) -> Any:
        """A program, looked up once a solve; `None`, and from here on op by op, if it cannot be made."""
        if self.capture is None:
            return None
        if program not in self._ready:
            try:
                self._ready[program] = program(self.capture, *args)
            except NotCompiled as reason:
                warn_of(reason)
                self.capture = None
                return None
        return self._ready[program]

    def _count_nodes(self, plan: Plan, nodes: Sequence[float]) -> None:
        self.tally.nfe += len(nodes)
        if self._log is not None:
            self._log.extend(map(plan.stage_time, nodes))

    def _evaluate(self, t: float, y: Tensor, shift: Tensor | None) -> Tensor:
        program = self._made(evaluation_program, y)
        return super()._evaluate(t, y, shift) if program is None else program(t, y, self._rest)[0]

    def first_slope(self, plan: Plan, y: Tensor) -> Tensor:
        # What could be compiled draws no random numbers and changes no buffers.
        return super().first_slope(plan, y) if self.capture is None else self.start_slope(plan, y)

    def step(self, plan: Plan, y0: Tensor, k1: Tensor | None) -> Step:
        if k1 is None:
            k1 = self.start_slope(plan, y0)
        program = self._made(step_program, self.solver, self.norm, y0, k1)
        if program is None:
            return super().step(plan, y0, k1)
        self._count_nodes(plan, program.nodes.evaluated)
        y1, ratio, *slopes = program(plan, y0, k1, self._allowed, self._rest)
        return FusedStep(self, plan, y0, y1, k1, slopes, ratio)


class Saving(Fused):
    """Like `Fused`; steps also keep what their pull-backs need.

    `wanted` says for which tensors that the field uses there will be a gradient to compute, `slopes` whether outputs
    may lie inside of steps.
    """

    def __init__(self, *args: Any, wanted: Wanted, slopes: bool):
        super().__init__(*args)
        self._wanted, self._slopes = wanted, slopes
        self._known: list[tuple[Tensor, list[Tensor]]] = []  # the latest first slopes, with what was kept of them

    def _programs(self, y: Tensor) -> Any:
        return self._made(saving_programs, self.solver, self.norm, self._wanted, self._slopes, y)

    def _evaluate(self, t: float, y: Tensor, shift: Tensor | None) -> Tensor:
        # One program less than if there were another for evaluations of which nothing is kept.
        programs = self._programs(y)
        return super()._evaluate(t, y, shift) if programs is None else programs.at(t, y, self._rest)[0]

    def start_slope(self, plan: Plan, y: Tensor) -> Tensor:
        programs = self._programs(y)
        if programs is None:
            return super().start_slope(plan, y)
        t = plan.stage_time(0.0)
        self._count([t], prepare=False)
        k, *kept = programs.at(t, y, self._rest)
        self._known = [(k, kept)]
        return k

    def step(self, plan: Plan, y0: Tensor, k1: Tensor | None) -> Step:
        if k1 is None:
            k1 = self.start_slope(plan, y0)
        programs = self._programs(y0)
        if programs is None:
            return super().step(plan, y0, k1)
        own = next(kept for k, kept in self._known if k is k1)
        self._count_nodes(plan, programs.nodes.evaluated)
        found = programs.step(plan, y0, k1, self._allowed, self._rest)
        count = 2 + self.solver.error_needs_end_slope + self.solver.stages - 1
        (y1, ratio, *slopes), kept = found[:count], list(found[count:])
        step = FusedStep(self, plan, y0, y1, k1, slopes, ratio)
        step.kept, step.kept_at_end = [*kept[: programs.kept], *own], kept[programs.kept :]
        # A rejected step starts again from k1, an accepted one is followed by one from its end.
        self._known = [(k1, own)]
        if step.known_end_slope is not None:
            self._known.append((step.known_end_slope, step.kept_at_end))
        return step


class FusedStep(Step):
    """A step that came out of a program, all of it at once."""

    __slots__ = ("_ratio", "kept", "kept_at_end")

    def __init__(
        self, engine: Eager, plan: Plan, y0: Tensor, y1: Tensor, k1: Tensor, slopes: Sequence[Tensor], ratio: Tensor
    ):
        ends = slopes[:1] if engine.solver.error_needs_end_slope else []
        super().__init__(engine, plan, None, plan.dt, y0, y1, [k1, *slopes[len(ends) :]], [])
        self._end_slope = ends[0] if ends else None
        self._ratio = ratio
        #: For the pull-back: of the step and the evaluation at its start, and of the evaluation at its end.
        self.kept: list[Tensor] = []
        self.kept_at_end: list[Tensor] = []

    def ratio(self, error: ErrorNorm) -> float:
        return self._ratio.item()

    def is_finite(self) -> bool:
        return torch.isfinite(self._ratio).item() is True or super().is_finite()


def captured(problem: Problem, t: float, purity: Purity) -> Capture | None:
    """The field of a problem as a graph; `None`, with a warning, if it cannot be compiled."""
    field, y = problem.field, problem.y0.detach()
    reason = None
    if not isinstance(problem.solver, ExplicitRungeKutta):
        reason = f"solver {problem.solver.name!r} is not an explicit Runge–Kutta method"
    elif field.autocast is not None or field.dtype != y.dtype:
        reason = "the field runs in lower precision than the solver"
    elif y.is_complex():
        reason = "the compiler does not do complex numbers"
    if reason is None:
        time = torch.full((), t, dtype=real_dtype(y), device=y.device)
        try:
            return capture(field.func, field.layout, time, y, field.args, purity.trial)
        except NotCompiled as error:
            reason = str(error)
        except Exception as error:
            reason = described(error)
            impure = purity.trial()
            with torch.no_grad():
                field(time, y)  # what is wrong with the field itself is raised here
            impure()
    warn_of(reason)
    return None


def warn_of(reason: object) -> None:
    warn(f"compile: the solve runs op by op, since {reason}", CompileWarning)

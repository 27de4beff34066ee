"""The compiled engine: a step is one program, and so is the pull-back of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .engine import Eager, Step
from .errors import CompileWarning, warn
from .graphs import Capture, NotCompiled, capture, compile_graph, compile_joint, described
from .norms import ErrorNorm
from .problem import Plan, Problem
from .purity import Purity
from .solvers import ExplicitRungeKutta, Solver
from .state import real_dtype


class Nodes:
    """At which nodes of a step a program evaluates the field, in which order; found out while it is traced.

    The clock is one tensor: dt, then the time at each node. On the host it is made from a plan, so that times are
    exactly those of an eager step: on the right side of a jump, and t1 itself at the end.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self.evaluated: list[float] = []
        self._index: dict[float, int] = {}

    def time(self, clock: Tensor, c: float) -> Tensor:
        self.evaluated.append(c)
        return clock[1 + self._index.setdefault(c, len(self._index))]

    def clock(self, plan: Plan, like: Tensor) -> Tensor:
        times = [plan.dt, *(plan.stage_time(c) for c in self._index)]
        times += [plan.t1] * (1 + self._capacity - len(times))
        return torch.tensor(times, dtype=real_dtype(like), device=like.device)


class StepProgram:
    """(y, k1) ↦ (y1, error ratio, k_end, k2, …), compiled. Without error control the ratio is the sum of y1."""

    def __init__(self, capture: Capture, solver: Solver, error: ErrorNorm | None, y: Tensor, k1: Tensor):
        self._solver, self._error = solver, error
        self.nodes = Nodes(solver.evaluations + 1)
        self._strides = [x.stride() for x in (y, k1)]
        example = torch.zeros(2 + solver.evaluations, dtype=real_dtype(y), device=y.device)
        inputs = [example, y, k1, *tolerances(error, y), *capture.rest]
        self._compile(capture, inputs)

    def _compile(self, capture: Capture, inputs: list[Tensor]) -> None:
        self._run = compile_graph(self._function(capture), inputs)

    def _function(self, capture: Capture) -> Callable[..., list[Tensor]]:
        solver, error, nodes = self._solver, self._error, self.nodes

        def step(clock: Tensor, y: Tensor, k1: Tensor, rtol: Tensor, atol: Tensor, *rest: Tensor) -> list[Tensor]:
            def slope(c: float, z: Tensor) -> Tensor:
                return capture.evaluate(nodes.time(clock, c), z, rest)

            dt = clock[0]
            y1, stages = solver.step(slope, dt, y, k1)
            ends = [slope(1.0, y1)] if solver.error_needs_end_slope else []
            if error is None:
                ratio = y1.sum()
            else:
                allowed = atol + rtol * torch.maximum(y.abs(), y1.abs())
                ratio = error.norm(error.layout.unpack(solver.error(dt, [*stages, *ends]) / allowed))
            return [y1, ratio, *ends, *stages[1:]]

        return step

    def __call__(self, clock: Tensor, y: Tensor, k1: Tensor, allowed: Sequence[Tensor], rest: list[Tensor]) -> Any:
        return self._run([clock, *self._as_traced(y, k1), *allowed, *rest])

    def _as_traced(self, y: Tensor, k1: Tensor) -> list[Tensor]:
        """In the memory layout for which the program was compiled."""
        return [_with_strides(x, strides) for x, strides in zip((y, k1), self._strides, strict=True)]


class SavingProgram(StepProgram):
    """A step that also keeps what its pull-back needs, and that pull-back: two programs.

    The pull-back takes what was kept and the cotangents of y1, of k_end where there is one, and with `slopes` of
    k2, k3, … It returns those of y, of k1 and of the wanted tensors.
    """

    def __init__(
        self,
        capture: Capture,
        solver: Solver,
        error: ErrorNorm | None,
        y: Tensor,
        k1: Tensor,
        wanted: tuple[bool, ...],
        slopes: bool,
    ):
        self._wanted, self._slopes = wanted, slopes
        super().__init__(capture, solver, error, y, k1)

    def _compile(self, capture: Capture, inputs: list[Tensor]) -> None:
        step, wanted, solver = self._function(capture), self._wanted, self._solver
        ends = int(solver.error_needs_end_slope)
        self.outputs = 1 + ends + solver.stages  # y1, ratio, k_end, k2, …
        pulled = 1 + ends + (solver.stages - 1 if self._slopes else 0)

        def joint(*tensors: Tensor) -> list[Tensor]:
            (clock, y, k1, rtol, atol, *rest), cotangents = tensors[: len(inputs)], tensors[len(inputs) :]

            def forward(y: Tensor, k1: Tensor, *chosen: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
                found = step(clock, y, k1, rtol, atol, *_replaced(rest, wanted, chosen))
                return (found[0], *found[2 : 1 + pulled]), found

            chosen = _chosen(rest, wanted)
            _, back, found = torch.func.vjp(forward, y, k1, *chosen, has_aux=True)  # type: ignore[misc]
            return [*found, *back(cotangents)]

        # One tensor each: by their identity a tracer tells its inputs apart.
        cotangents = [torch.zeros_like(inputs[1]) for _ in range(pulled)]
        self._run, self._back = compile_joint(joint, inputs, cotangents, self.outputs)
        self._adj_stride = cotangents[0].stride()

    def pull(self, kept: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Any:
        return self._back([*kept, *(_with_strides(c, self._adj_stride) for c in cotangents)])


class PullProgram:
    """The pull-back of a step, which is taken again: cotangents of y1, and maybe of the slopes, to those of the inputs.

    `wanted` says for which of the tensors that the field uses, besides y, there is a gradient to compute.
    """

    def __init__(self, capture: Capture, solver: Solver, wanted: tuple[bool, ...], y: Tensor, slopes: bool):
        self._solver, self._wanted, self._slopes = solver, wanted, slopes
        self.nodes = Nodes(solver.evaluations + 1)
        self._strides = y.stride()
        clock = torch.zeros(2 + solver.evaluations, dtype=real_dtype(y), device=y.device)
        cotangents = [torch.zeros_like(y)]
        if slopes:
            cotangents.append(y.new_zeros((len(solver.interpolant), *y.shape)))
        self._adj_strides = [c.stride() for c in cotangents]
        self._run = compile_graph(self._function(capture), [clock, y, *cotangents, *capture.rest])

    def _function(self, capture: Capture) -> Callable[..., list[Tensor]]:
        solver, nodes, wanted, count = self._solver, self.nodes, self._wanted, 1 + self._slopes

        def pull(clock: Tensor, y: Tensor, *others: Tensor) -> list[Tensor]:
            cotangents, rest = others[:count], others[count:]

            def forward(y: Tensor, *chosen: Tensor) -> tuple[Tensor, ...]:
                inputs = _replaced(rest, wanted, chosen)

                def slope(c: float, z: Tensor) -> Tensor:
                    return capture.evaluate(nodes.time(clock, c), z, inputs)

                y1, stages = solver.step(slope, clock[0], y, slope(0.0, y))
                if count == 1:
                    return (y1,)
                reads_end = len(solver.interpolant) > len(stages)
                return y1, torch.stack([*stages, slope(1.0, y1)] if reads_end else stages)

            _, back = torch.func.vjp(forward, y, *_chosen(rest, wanted))  # type: ignore[misc]
            return list(back(cotangents))

        return pull

    def __call__(self, plan: Plan, y: Tensor, cotangents: Sequence[Tensor], rest: list[Tensor]) -> Any:
        adj = [_with_strides(c, strides) for c, strides in zip(cotangents, self._adj_strides, strict=True)]
        return self._run([self.nodes.clock(plan, y), _with_strides(y, self._strides), *adj, *rest])


class EvaluationProgram:
    """The pull-back of one evaluation of the field: cotangents of y and of the wanted tensors from that of k."""

    def __init__(self, capture: Capture, wanted: tuple[bool, ...], t: Tensor, y: Tensor):
        def pull(t: Tensor, y: Tensor, adj: Tensor, *rest: Tensor) -> list[Tensor]:
            def forward(y: Tensor, *chosen: Tensor) -> Tensor:
                return capture.evaluate(t, y, _replaced(rest, wanted, chosen))

            _, back = torch.func.vjp(forward, y, *_chosen(rest, wanted))  # type: ignore[misc]
            return list(back(adj))

        adj = torch.zeros_like(y)
        self._strides = y.stride(), adj.stride()
        self._run = compile_graph(pull, [t, y, adj, *capture.rest])

    def __call__(self, t: Tensor, y: Tensor, adj: Tensor, rest: list[Tensor]) -> Any:
        return self._run([t, *map(_with_strides, (y, adj), self._strides), *rest])


def evaluation_program(capture: Capture, wanted: tuple[bool, ...], t: Tensor, y: Tensor) -> EvaluationProgram:
    return capture.graph.program(("evaluation", wanted), lambda: EvaluationProgram(capture, wanted, t, y))


def pull_program(capture: Capture, solver: Solver, wanted: tuple[bool, ...], y: Tensor, slopes: bool) -> PullProgram:
    key = ("pull", solver, wanted, slopes)
    return capture.graph.program(key, lambda: PullProgram(capture, solver, wanted, y, slopes))


def tolerances(error: ErrorNorm | None, like: Tensor) -> list[Tensor]:
    """rtol and atol as tensors, so that another tolerance is no other program."""
    dtype = real_dtype(like)
    if error is None:
        return [torch.zeros((), dtype=dtype, device=like.device) for _ in range(2)]
    rtol = error.rtol
    return [rtol if isinstance(rtol, Tensor) else torch.full((), rtol, dtype=dtype, device=like.device), error.atol]


def _chosen(rest: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [x for x, want in zip(rest, wanted, strict=True) if want]


def _replaced(rest: Sequence[Tensor], wanted: Sequence[bool], chosen: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with others in place of the wanted ones."""
    own = iter(chosen)
    return [next(own) if want else x for x, want in zip(rest, wanted, strict=True)]


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


class Fused(Eager):
    """Runs steps as compiled programs; single evaluations op by op, and everything where the field is no graph."""

    #: Gives the graph of the field, if it has one. Asked at the first step, when it is known what the field does.
    capture: Callable[[], Capture | None]
    #: Of the error control that is part of a step.
    norm: ErrorNorm | None

    @cached_property
    def _given(self) -> tuple[Capture, list[Tensor], list[Tensor]] | None:
        """The graph, the tolerances, and what the field uses."""
        capture = self.capture()
        return None if capture is None else (capture, tolerances(self.norm, capture.k), capture.rest)

    def step(self, plan: Plan, y0: Tensor, k1: Tensor | None) -> Step:
        if k1 is None:
            k1 = self.start_slope(plan, y0)
        if self._given is None:
            return super().step(plan, y0, k1)
        capture, allowed, rest = self._given
        try:
            program = self._program(capture, y0, k1)
        except NotCompiled as reason:
            warn_of(reason)
            self._given = None  # from here on, op by op
            return super().step(plan, y0, k1)
        nodes = program.nodes
        self._count([plan.stage_time(c) for c in nodes.evaluated], prepare=False)
        y1, ratio, *more = program(nodes.clock(plan, y0), y0, k1, allowed, rest)
        slopes = self.solver.stages - 1 + self.solver.error_needs_end_slope
        return FusedStep(self, plan, y0, y1, k1, more[:slopes], ratio, more[slopes:])

    def _program(self, capture: Capture, y: Tensor, k1: Tensor) -> StepProgram:
        error, solver = self.norm, self.solver
        key = ("step", solver, None if error is None else (error.norm, error.layout))
        return capture.graph.program(key, lambda: StepProgram(capture, solver, error, y, k1))


class Saving(Fused):
    """Like `Fused`; steps also keep what their pull-backs need."""

    #: For which tensors that the field uses there will be a gradient to compute.
    choose: Callable[[], tuple[bool, ...]]
    #: Whether outputs may lie inside of steps.
    slopes: bool

    @cached_property
    def _wanted(self) -> tuple[bool, ...]:
        return self.choose()

    def _program(self, capture: Capture, y: Tensor, k1: Tensor) -> SavingProgram:
        return saving_program(capture, self.solver, self.norm, self._wanted, self.slopes, y, k1)


def saving_program(
    capture: Capture,
    solver: Solver,
    error: ErrorNorm | None,
    wanted: tuple[bool, ...],
    slopes: bool,
    y: Tensor,
    k1: Tensor,
) -> SavingProgram:
    key = ("saving", solver, None if error is None else (error.norm, error.layout), wanted, slopes)
    return capture.graph.program(key, lambda: SavingProgram(capture, solver, error, y, k1, wanted, slopes))


class FusedStep(Step):
    """A step that came out of a program, all of it at once."""

    __slots__ = ("_ratio", "kept")

    def __init__(
        self,
        engine: Fused,
        plan: Plan,
        y0: Tensor,
        y1: Tensor,
        k1: Tensor,
        slopes: list[Tensor],
        ratio: Tensor,
        kept: list[Tensor],
    ):
        ends = slopes[:1] if engine.solver.error_needs_end_slope else []
        super().__init__(engine, plan, None, plan.dt, y0, y1, [k1, *slopes[len(ends) :]], [])
        self._end_slope = ends[0] if ends else None
        self._ratio = ratio
        self.kept = kept  # for the pull-back

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
        impure = purity.trial()
        try:
            found = capture(field.func, field.layout, time, y, field.args)
            if not impure():
                return found
            reason = "the field draws random numbers or changes buffers"
        except Exception as error:
            reason = described(error)
            with torch.no_grad():
                field(time, y)  # what is wrong with the field itself is raised here
            impure()
    warn_of(reason)
    return None


def warn_of(reason: object) -> None:
    warn(f"compile: the solve runs op by op, since {reason}", CompileWarning)

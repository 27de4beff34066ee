"""solve(): check the arguments once, flatten, hand the problem to the adjoint, unflatten."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import torch
from torch import Tensor, nn

from ._compile.background import in_background
from ._compile.torch_private import transforms_active, untraced
from ._field import batch_checks, checks
from ._field.capture import chosen
from ._field.determinism import present_autocast
from ._field.field import Field
from ._field.pytree import HALF, Layout, flatten, leaves_of, mapped, unflatten
from ._field.random_numbers import releasing
from ._field.rank_checks import check_ranks, check_same_problem
from ._field.sharding import reason_to_refuse, refusing_sharded
from ._integrals.auto_norm import ignoring_integrals
from ._integrals.separability import separable
from ._ranks import rank_check
from ._repetition import repetition
from ._stepping.interpolation import DenseSolution
from ._stepping.observers import Observer
from ._stepping.problem import Problem, Save
from ._verification import Rerun
from .adjoints import BY_NAME, Adjoint, AdjointName, Checkpointed, Direct, Replay
from .adjoints._events import run_with_events
from .adjoints._knots import knots_of
from .adjoints._lane_events import run_lanes_with_events
from .adjoints.base import ForwardResult
from .controllers import Controller
from .events import Event
from .norms import Norm, is_auto
from .solution import Solution, Status, work_of
from .solvers import Solver, SolverName
from .solvers.symplectic import Symplectic

if TYPE_CHECKING:
    from typing_extensions import Unpack

Y = TypeVar("Y")
S = TypeVar("S")

#: Norms of the forward pass by name.
NormName = Literal["rms", "max", "mixed", "mixed_per_tensor", "auto"]


class SolveOptions(TypedDict, total=False):
    """The options of [`solve`][seminode.solve] that models take too, for type checkers."""

    solver: SolverName | Solver
    rtol: Any
    atol: Any
    controller: Controller | None
    norm: NormName | Norm | None
    adjoint: AdjointName | Adjoint
    jumps: Tensor | Sequence[float] | None
    record: bool
    progress: bool
    max_steps: int
    compile: bool | Literal["background"]
    batched: bool


class AllOptions(SolveOptions, total=False):
    """All keyword arguments of `solve` but `save`, for type checkers."""

    args: tuple[Any, ...]
    params: nn.Module | Iterable[Tensor] | None
    event: Event | Sequence[Event] | None
    dense: bool
    throw: bool
    observers: Sequence[Observer]


@overload
def solve(
    field: Callable[..., Any],
    y0: Y,
    ts: Tensor | Sequence[float],
    *,
    save: Save = "ts",
    **options: Unpack[AllOptions],
) -> Solution[Y]: ...


@overload
def solve(
    field: Callable[..., Any],
    y0: Y,
    ts: Tensor | Sequence[float],
    *,
    save: Callable[[Tensor, Y], S],
    **options: Unpack[AllOptions],
) -> Solution[S]: ...


@untraced
def solve(
    field: Callable[..., Any],
    y0: Any,
    ts: Tensor | Sequence[float],
    *,
    args: tuple[Any, ...] = (),
    solver: SolverName | Solver = "dopri5",
    rtol: Any = None,
    atol: Any = None,
    controller: Controller | None = None,
    norm: NormName | Norm | None = None,
    adjoint: AdjointName | Adjoint = Replay(),
    params: nn.Module | Iterable[Tensor] | None = None,
    jumps: Tensor | Sequence[float] | None = None,
    event: Event | Sequence[Event] | None = None,
    save: Save | Callable[[Tensor, Any], Any] = "ts",
    dense: bool = False,
    record: bool = False,
    progress: bool = False,
    throw: bool = True,
    max_steps: int = 100_000,
    compile: bool | Literal["background"] = False,
    batched: bool = False,
    observers: Sequence[Observer] = (),
) -> Solution[Any]:
    """Solve y′ = f(t, y), y(t₀) = y₀, and make the solution differentiable.

    Arguments:
        field: `field(t, y, *args)`, the derivative of y in the structure of y; t is a 0-d tensor in y's real dtype
            (float32 for half precision).
        y0: a tensor, or any nesting of tuples, lists and dicts of tensors of one dtype; float32, float64, complex64,
            complex128, or bfloat16 and float16, which are integrated in float32.
        ts: times of the outputs, increasing or decreasing; y0 belongs to the first. Inner times do not shorten steps;
            the last step ends exactly on ts[-1], and the field is not evaluated past it (except by `kvaerno5` and
            `yoshida4`, some of whose nodes lie outside of a step).
        args: further arguments of the field; tensors among them get gradients.
        solver: a name or an object; see `seminode.solvers`.
        rtol, atol: tolerances: a number, or a structure like y0. By default 1e-6 and 1e-8 in float64, 1e-4 and 1e-6 in
            float32, 1e-2 and 1e-4 in half precision.
        controller: step-size control; by default `Integral()`. Solvers without an error estimate need `FixedStep(dt)`.
        norm: of the error: `"rms"`, `"max"`, or a function of a structure like y0; by default the largest root mean
            square of any leaf. `"auto"` detects the leaves that are only integrals (see `integral_leaves`) and leaves
            them out, forward and backward; [`norms.Without`][seminode.norms.Without] declares them.
        adjoint: how to differentiate: an object, or a name such as `"backsolve"`; by default `Replay()`.
        params: the tensors of the field that get gradients; by default they are detected automatically.
        jumps: times at which the field is discontinuous in t. Steps end on them, and the field is evaluated on either
            side, never at the jump itself.
        event: an [`Event`][seminode.Event] or a sequence of them; see [Events](events.md). If one ends the solve, later
            outputs are left out, and `status` is `Status.EVENT`.
        save: `"ts"`, `"last"` (where the solve ends), `"steps"` (after every accepted step), or a function `save(t, y)`
            whose results are stacked instead of y.
        dense: also return the solution as a function of time.
        record: also return the times of all evaluations and steps.
        progress: show a progress bar on a terminal.
        throw: raise an error if the solve cannot continue; otherwise return the outputs so far, with the status. It
            also decides whether a gradient that is not finite is an error on the backward pass.
        max_steps: limit on the attempted steps of the whole solve.
        compile: compile each step, and the VJP of each step, into one program; see [Speed](speed.md). The first solve
            with a field takes seconds to compile it, later ones reuse the programs. `"background"` does not wait:
            solves run eagerly until another process has compiled the programs.
        batched: the first axis of every leaf of y0 is a batch whose samples have their own step sizes; see
            [Batches](batches.md). `ts` may be (B, T), with times for every sample. The field must treat samples
            independently, and its t has shape (B,).
        observers: objects that are told about every step; see `seminode.extending.Observer`.

    Example:
        >>> import torch, seminode as sn
        >>> y0 = torch.ones(3, dtype=torch.float64, requires_grad=True)
        >>> sol = sn.solve(lambda t, y: -y, y0, [0.0, 1.0])
        >>> sol.ys[-1].sum().backward()
        >>> bool((y0.grad - torch.exp(torch.tensor(-1.0))).abs().max() < 1e-6)
        True
    """
    with _normal_tensors() if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        y0, args = _without_inference((y0, args))
        checks.check_field(field)
        checks.check_flags(batched=batched)
        layout, flat, dtype = _packed(y0, batched)
        tensor_ts, times, lanes = _check_times(_without_inference(ts), flat, batched)
        chosen_solver, chosen_adjoint = checks.check_solver(solver), _check_adjoint(adjoint)
        checks.refuse_control(chosen_solver, controller, norm)
        chosen_controller = checks.check_controller(controller, chosen_solver)
        where, function = checks.check_save(save, chosen_controller)
        flat_field = Field(field, layout, dtype, checks.check_args(args), present_autocast(flat.device))
        chosen_params = None if params is None else chosen(params)
        problem = Problem(
            field=flat_field,
            y0=flat,
            ts=tensor_ts,
            times=times,
            solver=chosen_solver,
            controller=chosen_controller,
            error=checks.check_error_norm(norm, rtol, atol, y0, layout, flat, chosen_controller),
            jumps=checks.check_jumps(jumps),
            events=checks.check_events(event, flat_field, chosen_params, norm, chosen_solver, chosen_controller),
            params=chosen_params,
            integrals=checks.check_integrals(norm, layout),
            ranks=check_ranks(norm, chosen_solver),
            save=where,
            max_steps=checks.check_count("max_steps", max_steps),
            observers=tuple(observers),
            lanes=lanes,
            compile=checks.check_compile(compile),
            **checks.check_flags(dense=dense, record=record, progress=progress, throw=throw),
        )
        return _solved(problem, chosen_adjoint, norm, dtype, function)


def _packed(y0: Any, batched: bool) -> tuple[Layout, Tensor, torch.dtype]:
    """y0 as a flat tensor with its layout, and its own dtype."""
    layout = batch_checks.check_batch(y0) if batched else checks.check_state(y0)
    dtype = next(leaves_of(y0)).dtype
    return layout, layout.pack(y0).to(torch.float32 if dtype in HALF else dtype), dtype


def _check_times(ts: Any, like: Tensor, batched: bool) -> tuple[Tensor, tuple[float, ...], Tensor | None]:
    """ts as a tensor, on the host and, of a batched solve, those of every sample."""
    return batch_checks.check_lane_times(ts, like) if batched else (*checks.check_times(ts, like), None)


def _runner(problem: Problem, adjoint: Adjoint, norm: Any) -> Callable[[Problem], ForwardResult]:
    """The function that runs a problem."""
    run = adjoint.run
    if problem.events:
        run = functools.partial(run_with_events if problem.lanes is None else run_lanes_with_events, adjoint=adjoint)
    if is_auto(norm):
        run = functools.partial(ignoring_integrals, run=run)
    if isinstance(problem.solver, Symplectic):
        run = functools.partial(separable, solver=problem.solver, run=run)
    if problem.compile == "background":
        run = functools.partial(in_background, run=run, adjoint=adjoint)
    return run


def _solved(
    problem: Problem, adjoint: Adjoint, norm: Any, dtype: torch.dtype, function: Callable[[Tensor, Any], Any] | None
) -> Solution[Any]:
    """The solution of a checked problem, which knows how to repeat the solve."""
    transformed = transforms_active()
    batch_checks.check_batchable(problem, adjoint, norm, transformed)
    check_same_problem(problem, adjoint, norm)

    def solved(each: Problem, rerun: Callable[[], Rerun | None] | None = None) -> tuple[ForwardResult, Solution[Any]]:
        result = _run(each, adjoint, norm)
        return result, _solution(each, result, dtype, function, rerun)

    return solved(problem, None if transformed else repetition(problem, solved, measured=function is None))[1]


def _run(problem: Problem, adjoint: Adjoint, norm: Any) -> ForwardResult:
    """Run a problem; refuse sharded modules that it cannot use, and compare ranks if that is enabled."""
    check = rank_check()
    through_autograd = isinstance(adjoint, Direct) and not problem.compile
    differentiated = torch.is_grad_enabled() and not through_autograd
    common_steps = problem.ranks.several or not problem.controller.adaptive
    with releasing(), refusing_sharded(problem.field.reach, reason_to_refuse(differentiated, common_steps)):
        result = _explained(_runner(problem, adjoint, norm), problem)
    if check is not None:
        check.compare("a solve", work_of(result.stats), problem.ranks)
    return result


def _explained(run: Callable[[Problem], ForwardResult], problem: Problem) -> ForwardResult:
    """Run a problem; an error that comes from the signature of a function, or from the shape of t, says so."""
    try:
        return run(problem)
    except (RuntimeError, ValueError) as error:
        explanation = None if problem.lanes is None else batch_checks.explain_shape(error, len(problem.lanes))
        if explanation is None:
            raise
        raise ValueError(explanation) from error
    except TypeError as error:
        called = [("field", problem.field.func)]
        for function in problem.events:
            pairs = ("fn", function.event.fn), ("reset", function.event.reset)
            called += [(f"{function.name}.{name}", func) for name, func in pairs if func is not None]
        jacobian = getattr(problem.solver, "jacobian", None)
        called += [("jacobian", jacobian)] if callable(jacobian) else []
        for name, func in called:
            explanation = checks.explain_call(func, problem.field.args, name)
            if explanation is not None:
                raise TypeError(explanation) from error
        raise


def _check_adjoint(adjoint: Any) -> Adjoint:
    if isinstance(adjoint, Adjoint):
        return adjoint
    if isinstance(adjoint, str):
        if adjoint in BY_NAME:
            return BY_NAME[adjoint]()
        hint = "; pass sn.Checkpointed(n)" if adjoint == Checkpointed.__name__.lower() else ""
        raise ValueError(f"adjoint: expected one of {', '.join(BY_NAME)} or an object, found {adjoint!r}{hint}")
    raise TypeError(f"adjoint: expected a name or an object such as sn.Replay(), found {checks.described(adjoint)}")


def _solution(
    problem: Problem,
    result: ForwardResult,
    dtype: torch.dtype,
    function: Callable[[Tensor, Any], Any] | None,
    rerun: Callable[[], Rerun | None] | None,
) -> Solution[Any]:
    layout = problem.field.layout
    flat = result.ys if result.arrange is None else result.arrange(result.ys)
    flat = flat.to(dtype)
    ts = _output_times(problem, len(flat), result)
    ys = layout.unpack(flat, lead=1)
    if function is not None:
        ys = _apply(function, _lane_times(ts, problem), flat, layout)
    dense = None
    if result.coefficients is not None:
        knots = knots_of(problem, result.plans) if result.events is None else result.events.knots
        dense = DenseSolution(knots, result.coefficients, layout, dtype)
    return Solution(
        ts=ts,
        ys=ys,
        stats=result.stats,
        status=Status.of(result.error, result.events is not None and result.events.ended),
        error=result.error,
        dense=dense,
        record=result.record,
        events=() if result.events is None else result.events.occurrences,
        rerun=rerun,
    )


def _lane_times(ts: Tensor, problem: Problem) -> Tensor:
    """The times of outputs as a function of them sees them: of a batched solve, one for each sample."""
    return ts if problem.lanes is None or ts.ndim == 2 else ts.unsqueeze(1).expand(-1, len(problem.lanes))


def _output_times(problem: Problem, count: int, result: ForwardResult) -> Tensor:
    """The times of the outputs, as functions of `ts`; the first axis is that of the outputs."""
    if result.events is not None:
        return result.events.ts
    ts = problem.ts if problem.ts.ndim == 1 else problem.ts.T
    if problem.save == "ts":
        return ts[:count]
    if problem.save == "last":
        return ts[-1:][:count]
    if not result.plans:
        return ts[:1]
    return knots_of(problem, result.plans).to(device=ts.device, dtype=ts.dtype)


def _apply(function: Callable[[Tensor, Any], Any], ts: Tensor, ys: Tensor, layout: Layout) -> Any:
    """Stack function(t, y) over the outputs, leaf by leaf."""
    results = [function(t, layout.unpack(y)) for t, y in zip(ts, ys, strict=True)]
    leaves: list[list[Tensor]] = []
    node = None
    for result in results:
        named, node = flatten(result, "save(t, y)")
        for name, leaf in named:
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{name}: expected a tensor, found {type(leaf).__name__}")
        leaves.append([leaf for _, leaf in named])
    if node is None:
        return ys
    return unflatten(node, iter([torch.stack(column) for column in zip(*leaves, strict=True)]))


@contextlib.contextmanager
def _normal_tensors() -> Generator[None, None, None]:
    """Inside inference mode, solve outside of it: a field may take a gradient of its own (a Hamiltonian's, say)."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _without_inference(tree: Any) -> Any:
    return mapped(tree, lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x)

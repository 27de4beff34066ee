"""profile(): measure all adjoints with a few solvers, eager and compiled, on your own problem."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._field import checks as arguments
from .._field.capture import chosen
from .._field.pytree import HALF, flatten, leaves_of, mapped, real_dtype
from .._field.reach import reachable
from ..adjoints import Adjoint
from ..controllers import Controller, Integral
from ..norms import Norm
from ..solve import NormName
from ..solvers import Solver
from .contenders import Contender, check_adjoints, check_solvers, pairs, usual_solvers
from .isolation import Snapshot
from .measurement import Course
from .memory import total_bytes
from .recommendation import recommend
from .reference import Means, reference_gradient
from .results import Profile
from .subject import Subject, examine, largest, own, smallest


def profile(
    field: Callable[..., Any],
    y0: Any,
    ts: Tensor | Sequence[float],
    loss: Callable[[Any], Any],
    *,
    args: tuple[Any, ...] = (),
    rtol: Any = None,
    atol: Any = None,
    controller: Controller | None = None,
    norm: NormName | Norm | None = None,
    params: nn.Module | Iterable[Tensor] | None = None,
    jumps: Tensor | Sequence[float] | None = None,
    adjoints: Iterable[str | Adjoint] | str | Adjoint | None = None,
    solvers: Iterable[str | Solver] | str | Solver | None = None,
    compile: bool | Iterable[bool] = (False, True),
    tolerances: Iterable[float] = (),
    repeats: int = 3,
    time_limit: float = 30.0,
    max_steps: int = 100_000,
    memory_limit: float | None = None,
    reference: float = 1e-10,
    progress: bool = True,
    verbose: bool = True,
) -> Profile:
    """Measure adjoints and solvers, eager and compiled, on your problem, print a table, and recommend one of them.

    For each contender, the table has the evaluations and steps of both passes, their time, the peak memory, and the
    error of the gradient. For combinations that do not work it gives the reason. Random numbers, parameters, gradients,
    buffers, modes and the default dtype are restored afterwards.

    Arguments:
        field, y0, ts, args, rtol, atol, controller, norm, params, jumps, max_steps: as for [`solve`][seminode.solve].
        loss: a function `loss(ys)` that returns a scalar. `ys` has the structure of y0, with time as the first axis.
            The reference calls it with float64.
        adjoints: names or objects, such as `["Direct", sn.Checkpointed(4)]`; by default all seven.
        solvers: names or objects; by default three that suit the tolerance.
        compile: `False` for eager contenders, `True` for compiled ones, or both. Compilation takes seconds for each.
        tolerances: additional values of rtol, for the plot; atol keeps its ratio to rtol.
        repeats: timed runs of each contender, in turns. The fastest counts.
        time_limit: seconds for the reference, and for the timed runs of each row. A reference that is not finished
            by then is relaxed or left out, and a solve that would take much longer is stopped.
        memory_limit: bytes that a recommended row may need; by default half of the memory of the device.
        reference: the rtol of the reference gradient.
        progress: show a progress bar on a terminal.
        verbose: print the table.

    Example:
        >>> import torch, seminode as sn
        >>> field = sn.models.ConcatMLP(2, (8,))
        >>> y0 = torch.randn(5, 2)
        >>> found = sn.profile(
        ...     field, y0, [0.0, 1.0], lambda ys: ys[-1].square().mean(), solvers="dopri5", compile=False, verbose=False
        ... )
        >>> print(*(row.contender.adjoint_name for row in found.rows if not row.measured))
        Reversible
        >>> found.recommendation.row.error < 1e-3
        True
    """
    arguments.check_flags(progress=progress, verbose=verbose)
    counts = [arguments.check_count(n, x) for n, x in (("repeats", repeats), ("max_steps", max_steps))]
    limits = {"time_limit": time_limit, "reference": reference, "memory_limit": memory_limit}
    limits = {name: None if value is None else _positive(name, value) for name, value in limits.items()}
    kinds = check_adjoints(adjoints), check_solvers(solvers), _check_compile(compile)
    subject, times = _check_problem(field, y0, ts, loss, args, controller, norm, params, jumps)
    levels = _check_levels(subject, rtol, atol, tolerances)
    contenders = _contenders(kinds, levels, controller)
    reach = reachable((field, args, loss, params))
    kept = [x for x in (*reach.tensors, *subject.found, *leaves_of((y0, ts, args))) if isinstance(x, Tensor)]
    snapshot = Snapshot(reach.parts, [x for x in kept if x.requires_grad], subject.leaf.device)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            result = _profile(subject, snapshot, times, contenders, levels, counts, limits, progress)
    finally:
        snapshot.restore()
    if verbose:
        print(result)
    return result


def _profile(
    subject: Subject,
    snapshot: Snapshot,
    times: tuple[float, ...],
    contenders: Sequence[Contender],
    levels: Sequence[tuple[Any, Any]],
    counts: Sequence[int],
    limits: dict[str, Any],
    progress: bool,
) -> Profile:
    look = examine(subject, times[0])
    snapshot.restore()
    subject = _with_targets(subject, look.params)
    device = subject.leaf.device
    course = Course(subject, snapshot, None, counts[0], limits["time_limit"], counts[1], look.seconds, progress)
    main = levels[0]
    tightest = min((largest(r) or math.inf for r, _ in levels if r is not None), default=math.inf)
    rtol = max(1e-13, min(limits["reference"], 1e-3 * tightest))
    means = Means(_ratio(*main), snapshot.restore, limits["time_limit"], progress)
    known, gradient = reference_gradient(subject, look, rtol, means)
    if gradient is not None and not bool(gradient.any()):
        raise ValueError("loss: expected a gradient that is not zero, found 0 for y0, ts, args and all parameters")
    course.reference = gradient
    rows = sorted(course.run(contenders), key=lambda row: row.seconds if row.measured else math.inf)
    available = limits["memory_limit"] or (total_bytes(device) or math.inf) / 2
    at = [row for row in rows if main[0] is None or row.contender.rtol is main[0]]
    level = largest(main[0]) if main[0] is not None else arguments.DEFAULT_TOLERANCES[real_dtype(subject.leaf)][0]
    advice = recommend(at, level or 0.0, known.good_to, available)
    described = _describe_problem(subject, times, main), _describe_machine(device, counts)
    return Profile(tuple(rows), known, advice, *described)


def _check_problem(
    field: Any, y0: Any, ts: Any, loss: Any, args: Any, controller: Any, norm: Any, params: Any, jumps: Any
) -> tuple[Subject, tuple[float, ...]]:
    arguments.check_field(field)
    layout = arguments.check_state(y0)
    args = arguments.check_args(args)
    tensor_ts, times = arguments.check_times(ts, flatten(y0)[0][0][1])
    if times[0] == times[-1]:
        raise ValueError(f"ts: expected an interval to solve over, found the single time {times[0]:g}")
    if not callable(loss):
        raise TypeError(f"loss: expected a callable loss(ys), found {arguments.described(loss)}")
    if controller is not None and not isinstance(controller, Controller):
        raise TypeError(f"controller: expected a Controller, found {arguments.described(controller)}")
    arguments.check_jumps(jumps)
    arguments.check_norm(norm, layout)
    given = None if params is None else chosen(params)
    with torch.inference_mode(False):
        mine = own(y0), own(tensor_ts), own(args)
    return Subject(field, mine[0], mine[1], mine[2], loss, given, given or (), jumps, norm, controller), times


def _with_targets(subject: Subject, params: Sequence[Tensor]) -> Subject:
    """The subject with the tensors that get gradients: those of `params`, or those that the field uses."""
    found = subject if subject.params is not None else replace(subject, found=tuple(params))
    if not found.targets:
        raise ValueError(
            "field, y0, args: expected a parameter of the field, or a tensor in y0, ts or args, that requires a "
            "gradient, found none"
        )
    return found


def _check_levels(subject: Subject, rtol: Any, atol: Any, tolerances: Any) -> list[tuple[Any, Any]]:
    """Pairs of rtol and atol, those of the problem first; (None, None) with fixed steps."""
    layout, leaf = arguments.check_state(subject.y0), subject.leaf
    controller = subject.controller or Integral()
    like = layout.pack(subject.y0).detach()
    like = like.float() if like.dtype in HALF else like
    arguments.check_error_norm(subject.norm, rtol, atol, subject.y0, layout, like, controller)
    further = _check_tolerances(tolerances)
    if not controller.adaptive:
        if further:
            raise ValueError(f"tolerances: have no effect with {type(controller).__name__}, which ignores the error")
        return [(None, None)]
    defaults = arguments.DEFAULT_TOLERANCES[real_dtype(leaf)]
    rtol, atol = defaults[0] if rtol is None else rtol, defaults[1] if atol is None else atol
    top = largest(rtol)
    if further and not top:
        raise ValueError("tolerances: expected an rtol above zero to scale, found rtol = 0")
    scales = [each / top for each in further if top and each != top]
    return [(rtol, atol), *((_scaled(rtol, s), _scaled(atol, s)) for s in scales)]


def _scaled(tolerance: Any, scale: float) -> Any:
    return mapped(tolerance, lambda x: float(f"{x * scale:.12g}") if isinstance(x, float | int) else x * scale)


def _check_tolerances(tolerances: Any) -> list[float]:
    if isinstance(tolerances, float | int):
        tolerances = (tolerances,)
    if isinstance(tolerances, str) or not isinstance(tolerances, Iterable):
        raise TypeError(f"tolerances: expected a sequence of numbers, found {arguments.described(tolerances)}")
    return [_positive(f"tolerances[{i}]", each) for i, each in enumerate(cast("Iterable[Any]", tolerances))]


def _positive(name: str, value: Any) -> float:
    number = arguments.check_number(name, value)
    if number <= 0.0:
        raise ValueError(f"{name}: expected a number above zero, found {number:g}")
    return number


def _check_compile(compile: Any) -> list[bool]:
    several: list[Any] = [compile]
    if isinstance(compile, Iterable):
        several = list(cast("Iterable[Any]", compile))
    if not several:
        raise ValueError("compile: expected True, False or both, found none")
    for each in several:
        arguments.check_flags(compile=each)
    return list(dict.fromkeys(several))


def _contenders(kinds: Any, levels: Sequence[tuple[Any, Any]], controller: Controller | None) -> list[Contender]:
    adjoints, solvers, compiled = kinds
    level = None if levels[0][0] is None else largest(levels[0][0])
    both = pairs(adjoints, solvers, usual_solvers(controller, level))
    return [
        Contender(adjoint, solver, flag, rtol, atol)
        for flag in compiled
        for rtol, atol in levels
        for adjoint, solver in both
    ]


def _ratio(rtol: Any, atol: Any) -> float:
    """The ratio of atol to rtol for the reference: that of the problem, between 1e-6 and 1."""
    if rtol is None:
        return 1e-2
    top = largest(rtol)
    return min(1.0, max(1e-6, smallest(atol) / top)) if top else max(1e-6, min(1.0, smallest(atol)))


def _describe_problem(subject: Subject, times: tuple[float, ...], level: tuple[Any, Any]) -> dict[str, Any]:
    name = getattr(subject.field, "__name__", None) or type(subject.field).__name__
    leaves = flatten(subject.y0, "y0")[0]
    shapes = ", ".join(f"{path} {tuple(x.shape)}" for path, x in leaves[:4]) + (", …" if len(leaves) > 4 else "")
    dtype, device = str(subject.leaf.dtype).removeprefix("torch."), str(subject.leaf.device)
    size = sum(x.numel() for x in subject.targets)
    rtol, atol = largest(level[0]), largest(level[1])
    control = f"rtol {rtol:g}, atol {atol:g}" if rtol is not None else str(subject.controller)
    summary = f"{name}: {shapes}, {dtype} on {device}, {len(times)} outputs in [{times[0]:g}, {times[-1]:g}], {control}"
    targets = f"{size} number{'s' * (size > 1)} in {len(subject.targets)} tensor{'s' * (len(subject.targets) > 1)}"
    return {
        "summary": f"{summary}; gradients of {targets}",
        "field": name,
        "shapes": [list(x.shape) for _, x in leaves],
        "dtype": dtype,
        "device": device,
        "outputs": len(times),
        "interval": [times[0], times[-1]],
        "rtol": rtol,
        "atol": atol,
        "gradients": size,
    }


def _describe_machine(device: torch.device, counts: Sequence[int]) -> dict[str, Any]:
    version = getattr(sys.modules.get("seminode"), "__version__", "unknown")
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    versions = f"seminode {version}, torch {torch.__version__}, python {platform.python_version()}"
    timed = f"{threads} thread{'s' if threads > 1 else ''}, the quickest of {counts[0]}"
    return {
        "summary": f"{versions}; {name}, {timed}",
        "seminode": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": name,
        "threads": threads,
        "repeats": counts[0],
    }

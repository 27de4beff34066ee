"""Checks of what a user passes to `solve`: each says which argument, what was found, what is expected."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import norms
from .._compile.torch_private import transforms_active
from .._error_norm import ErrorNorm
from ..controllers import Controller, Integral
from ..errors import ToleranceWarning, warn
from ..events import Event
from ..norms import Norm
from ..solvers import BY_NAME, Solver
from .capture import restricted
from .event_function import EventFunction
from .pytree import Layout, flatten, leaves_of, real_dtype, same_nesting

if TYPE_CHECKING:
    from .._stepping.problem import Save
    from .field import Field

#: Default (rtol, atol) by the real dtype of the state. Half precision is integrated in float32, but the field answers
#: with two or three digits.
DEFAULT_TOLERANCES = {
    torch.float64: (1e-6, 1e-8),
    torch.float32: (1e-4, 1e-6),
    torch.float16: (1e-2, 1e-4),
    torch.bfloat16: (1e-2, 1e-4),
}


def check_field(field: Any) -> None:
    if isinstance(field, type):
        raise TypeError(
            f"field: expected a callable field(t, y, *args), found the class {field.__name__}; pass an object of it"
        )
    if not callable(field):
        raise TypeError(f"field: expected a callable field(t, y, *args), found {type(field).__name__}")


def explain_call(field: Any, args: tuple[Any, ...], name: str = "field") -> str | None:
    """Why field(t, y, *args) cannot be called, if its signature does not allow it; asked after a `TypeError`."""
    try:
        signature = inspect.signature(field.forward if isinstance(field, nn.Module) else field)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, None, *args)
    except TypeError:
        count, parameters = len(args), list(signature.parameters.values())
        passed = f"(t, y) and {count} of args" if count else "(t, y)"
        what = f"{type(field).__name__}.forward" if isinstance(field, nn.Module) else "it"
        message = f"{name}: is called with {passed}, but {what} takes {signature}"
        if len(parameters) == 1 and not count:
            return f"{message}. If it does not depend on the time, pass lambda t, y: net(y)"
        if len(parameters) < 2 + count:
            return f"{message}. The entries of args are passed one by one: write field(t, y, a, b) for args=(a, b)"
        return f"{message}. Pass the values that are missing in args="
    return None


def check_state(y0: Any) -> Layout:
    """The layout of y0: tensors of one floating or complex dtype on one device."""
    leaves, _ = flatten(y0, "y0")
    if not leaves:
        raise ValueError(f"y0: expected at least one tensor, found an empty {type(y0).__name__}")
    for name, leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name}: expected a tensor, found {type(leaf).__name__}")
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(f"{name}: expected a floating-point or complex dtype, found {leaf.dtype}")
        if real_dtype(leaf) not in DEFAULT_TOLERANCES or leaf.dtype == torch.complex32:
            raise TypeError(
                f"{name}: expected float32, float64, bfloat16, float16, complex64 or complex128, found {leaf.dtype}"
            )
    first_name, first = leaves[0]
    for name, leaf in leaves[1:]:
        if leaf.dtype != first.dtype:
            raise TypeError(
                f"y0: expected one dtype throughout, found {first.dtype} in {first_name} and {leaf.dtype} in {name}"
            )
        if leaf.device != first.device:
            raise ValueError(
                f"y0: expected one device throughout, found {first.device} in {first_name} and {leaf.device} in {name}"
            )
    if all(leaf.numel() == 0 for _, leaf in leaves):
        raise ValueError("y0: expected at least one element, found none")
    return Layout.of(y0, "y0")


def check_times(ts: Any, like: Tensor) -> tuple[Tensor, tuple[float, ...]]:
    """ts as a tensor and on the host."""
    given = ts
    if not isinstance(ts, Tensor):
        ts = _times_tensor(ts, "ts: expected a 1-D tensor or a sequence of times")
        if like.device.type != "cpu" and not ts.requires_grad:
            ts = ts.to(like.device, torch.float32 if like.device.type == "mps" else torch.float64)
    if ts.ndim != 1 or ts.numel() == 0:
        raise ValueError(f"ts: expected shape (n,) with n >= 1, found {tuple(ts.shape)}")
    if ts.is_complex() or ts.dtype == torch.bool:
        raise TypeError(f"ts: expected real times, found {ts.dtype}")
    try:
        # Inside a transform of torch.func one by one: `tolist` fails there before torch 2.8.
        times = tuple(map(float, ts.unbind() if transforms_active() else ts.tolist()))
    except RuntimeError as error:
        raise ValueError("ts: cannot be mapped over by torch.func.vmap; every solve has its own loop") from error
    if not ts.is_floating_point():
        ts = ts.to(torch.float64 if ts.device.type != "mps" else torch.float32)
    for i, t in enumerate(times):
        if not math.isfinite(t):
            raise ValueError(f"ts[{i}]: expected a finite time, found {t}")
    rising = times[-1] >= times[0]
    for i, (a, b) in enumerate(itertools.pairwise(times)):
        if (b < a) if rising else (b > a):
            way = "increasing" if rising else "decreasing"
            raise ValueError(f"ts: expected monotone times; they are {way} overall, but ts[{i + 1}] = {b} after {a}")
    if len(times) > 1 and times[0] == times[-1] and ts.requires_grad:
        raise ValueError("ts: all times are the same, so no step is taken and ts has no gradient; pass ts.detach()")
    # A copy: the caller may change theirs afterwards.
    return (ts.clone() if ts is given else ts), times


def _times_tensor(times: Any, expected: str) -> Tensor:
    """A tensor out of a sequence of numbers or 0-d tensors, whose gradients are kept."""
    if not isinstance(times, str | bytes | dict) and isinstance(times, Iterable):
        values = list(times)
        if all((isinstance(t, Tensor) and t.ndim == 0) or _is_real(t) for t in values):
            if not any(isinstance(t, Tensor) for t in values):
                return torch.tensor(values, dtype=torch.float64)
            return torch.stack([torch.as_tensor(t, dtype=torch.float64) for t in values])
    raise TypeError(f"{expected}, found {type(times).__name__}")


def check_solver(solver: Any) -> Solver:
    if isinstance(solver, Solver):
        return solver
    if isinstance(solver, type) and issubclass(solver, Solver):
        raise TypeError(f"solver: expected an object, found the class {solver.__name__}; pass {solver.__name__}()")
    if not isinstance(solver, str):
        raise TypeError(f"solver: expected a name or a Solver, found {type(solver).__name__}")
    if solver not in BY_NAME:
        near = [name for name in BY_NAME if name.startswith(solver.lower())] if solver else []
        near = near or difflib.get_close_matches(solver.lower(), BY_NAME, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"solver: unknown name {solver!r}{hint} Known: {', '.join(BY_NAME)}")
    return BY_NAME[solver]()


def refuse_control(solver: Solver, controller: Any, norm: Any) -> None:
    """Refuse to control the steps of a solver that chooses them itself."""
    for name, value in (("controller", controller), ("norm", norm)):
        if solver.external and value is not None:
            raise ValueError(f"{name}: solver {solver.name!r} controls its error itself; pass rtol and atol only")


#: Frozen, and checked when it is made.
DEFAULT_CONTROLLER = Integral()


def check_controller(controller: Any, solver: Solver) -> Controller:
    if controller is None:
        if solver.error_order is None and not solver.external:
            raise ValueError(
                f"controller: solver {solver.name!r} has no error estimate and needs one, "
                "such as controller=sn.FixedStep(0.1)"
            )
        return DEFAULT_CONTROLLER
    if not isinstance(controller, Controller):
        raise TypeError(f"controller: expected a Controller, found {described(controller)}")
    if controller.adaptive and solver.error_order is None and not solver.external:
        raise ValueError(
            f"controller: {type(controller).__name__} needs an error estimate, which solver {solver.name!r} "
            "does not have; use sn.FixedStep or an adaptive solver such as 'dopri5'"
        )
    return controller


def check_jumps(jumps: Any) -> tuple[float, ...]:
    if jumps is None:
        return ()
    tensor = jumps if isinstance(jumps, Tensor) else _times_tensor(jumps, "jumps: expected a sequence of times")
    if tensor.requires_grad:
        raise ValueError("jumps: gradients with respect to jump times are not computed; pass jumps.detach()")
    if tensor.ndim != 1:
        raise ValueError(f"jumps: expected shape (n,), found {tuple(tensor.shape)}")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"jumps: expected a sequence of times, found Tensor of {tensor.dtype}")
    values = [float(t) for t in tensor.detach().flatten().tolist()]
    for i, t in enumerate(values):
        if not math.isfinite(t):
            raise ValueError(f"jumps[{i}]: expected a finite time, found {t}")
    return tuple(sorted(set(values)))


def check_events(
    event: Any, field: Field, params: Sequence[Tensor] | None, norm: Any, solver: Solver, controller: Controller
) -> tuple[EventFunction, ...]:
    """The events of a solve. With `params`, their functions are differentiable in their arguments and those alone."""
    if event is None:
        return ()
    events: Any = (event,) if isinstance(event, Event) else event
    if not isinstance(events, list | tuple):
        raise TypeError(f"event: expected sn.Event(fn, ...) or a sequence of them, found {described(event)}")
    for i, each in enumerate(events):
        if not isinstance(each, Event):
            hint = f"; write sn.Event({getattr(each, '__name__', 'fn')})" if callable(each) else ""
            raise TypeError(f"event[{i}]: expected sn.Event(fn, ...), found {described(each)}{hint}")
    if events and solver.external:
        raise ValueError(f"event: solver {solver.name!r} takes its steps outside of the loop; pass solver='dopri5'")
    if events and not controller.land:
        raise ValueError("event: steps must land on events; leave out land=False")
    if events and norms.is_auto(norm):
        raise ValueError(
            "norm: 'auto' leaves out leaves that the field does not read, but an event may read them; name the leaves "
            "that no event reads with norm=sn.norms.Without(...)"
        )
    wrap = (lambda func: func) if params is None else partial(restricted, params=params)
    return tuple(EventFunction(each, i, field, wrap) for i, each in enumerate(events))


def check_error_norm(
    norm: Any, rtol: Any, atol: Any, y0: Any, layout: Layout, like: Tensor, controller: Controller
) -> ErrorNorm | None:
    """Tolerances and norm of error control; `None` where there is none."""
    if not controller.adaptive:
        for name, value in (("rtol", rtol), ("atol", atol), ("norm", norm)):
            # Of ranks with fixed steps, the backward passes must agree.
            if value is not None and (not isinstance(value, norms.Distributed) or norms.is_auto(value)):
                raise ValueError(f"{name}: does nothing with {type(controller).__name__}, which ignores the error")
        return None
    leaf = next(leaves_of(y0))
    checked = check_tolerances(rtol, atol, DEFAULT_TOLERANCES[real_dtype(leaf)], y0, layout, like)
    chosen = check_norm(norm, layout)
    return ErrorNorm(layout, norms.EachSample(chosen) if layout.axis else chosen, *checked, like)


def check_tolerances(
    rtol: Any, atol: Any, defaults: tuple[Any, Any], y0: Any, layout: Layout, like: Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """Both tolerances, as numbers or flat like the state."""
    checked_r = _tolerance("rtol", rtol, defaults[0], y0, layout, like)
    checked_a = _tolerance("atol", atol, defaults[1], y0, layout, like)
    nothing = checked_r + checked_a == 0.0
    if bool(nothing.any()) if isinstance(nothing, Tensor) else nothing:
        raise ValueError("rtol, atol: expected at least one above zero, found both zero")
    if rtol is not None:
        _warn_if_too_tight(checked_r, like)
    return checked_r, checked_a


def check_norm(norm: Any, layout: Layout) -> Norm:
    if norm is None:
        return norms.mixed_per_tensor if not layout.single else norms.rms
    if isinstance(norm, norms.Distributed):
        return norm.over(check_norm(norm.norm, layout))
    if isinstance(norm, str):
        if norm == "auto":  # narrowed down once the field has been looked at
            return check_norm(None, layout)
        if norm in norms.FORWARD:
            return norms.FORWARD[norm]
        if norm in norms.BACKWARD:
            raise ValueError(
                f"norm: {norm!r} reads the segments of an adjoint state, which the forward pass does not have; "
                f"expected one of {', '.join(norms.FORWARD)} or a callable"
            )
        raise ValueError(f"norm: expected one of {', '.join(norms.FORWARD)}, auto or a callable, found {norm!r}")
    if not callable(norm):
        raise TypeError(f"norm: expected a name or a callable, found {type(norm).__name__}")
    return cast(Norm, norm)


def check_integrals(norm: Any, layout: Layout) -> tuple[bool, ...]:
    """Which leaves a norm says are only integrals; none if it says nothing of the kind."""
    norm = norm.norm if isinstance(norm, norms.Distributed) else norm
    if not isinstance(norm, norms.Without):
        return ()
    if len(norm.integrals) != len(layout.names):
        raise ValueError(
            f"norm: Without() expects one flag for each of the {len(layout.names)} leaves of y0 "
            f"({', '.join(layout.names)}), found {len(norm.integrals)}"
        )
    return norm.integrals


def _tolerance(name: str, value: Any, default: Any, y0: Any, layout: Layout, like: Tensor) -> float | Tensor:
    if value is None:
        return default
    if _is_real(value) and not (isinstance(value, Tensor) and value.ndim > 0):
        return _checked_number(name, float(value))
    if not same_nesting(y0, value) or (layout.single and not _is_real(value)):
        raise TypeError(f"{name}: expected a number or the nesting of y0, found {type(value).__name__}")
    leaves = []
    for (path, leaf), shape in zip(flatten(value, name, layout.node)[0], layout.shapes, strict=True):
        if not _is_real(leaf):
            raise TypeError(f"{path}: expected a number or a real tensor, found {type(leaf).__name__}")
        given = torch.as_tensor(leaf, dtype=real_dtype(like), device=like.device)
        if not bool(((given >= 0) & torch.isfinite(given)).all()):
            raise ValueError(f"{path}: expected a finite number of at least 0, found {leaf}")
        try:
            leaves.append(given.expand(shape))
        except RuntimeError:
            raise ValueError(
                f"{path}: expected a shape that broadcasts to {tuple(shape)}, found {tuple(given.shape)}"
            ) from None
    return layout.join(leaves)


def _is_real(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(name: str, value: Any) -> float:
    if not _is_real(value) or (isinstance(value, Tensor) and value.ndim > 0):
        raise TypeError(f"{name}: expected a number, found {type(value).__name__}")
    return _checked_number(name, float(value))


def _checked_number(name: str, value: float) -> float:
    if not (value >= 0.0 and math.isfinite(value)):
        raise ValueError(f"{name}: expected a finite number of at least 0, found {value}")
    return value


def _warn_if_too_tight(rtol: float | Tensor, like: Tensor) -> None:
    smallest = rtol
    if isinstance(rtol, Tensor):
        smallest = float(rtol[rtol > 0].min()) if bool((rtol > 0).any()) else 0.0
    limit = 4 * torch.finfo(like.dtype).eps
    if 0.0 < smallest < limit:  # none at all is absolute control, which is fine
        warn(
            f"rtol = {smallest:g} is below {limit:.2g}, four times the rounding error of {like.dtype}: the solver "
            "would chase rounding noise. Use a looser rtol or a wider dtype.",
            ToleranceWarning,
        )


def check_save(save: Any, controller: Controller) -> tuple[Save, Callable[[Tensor, Any], Any] | None]:
    """Where to save, and a function to apply there."""
    if callable(save):
        return "ts", save
    if save not in ("ts", "last", "steps"):
        raise ValueError(f"save: expected 'ts', 'last', 'steps' or a callable save(t, y), found {save!r}")
    if save != "ts" and not controller.land:
        raise ValueError(f"save: {save!r} needs steps that end on ts[-1]; found a controller with land=False")
    return save, None


def check_args(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args: expected a tuple of extra arguments for the field, found {type(args).__name__}; "
            "for a single one write args=(x,)"
        )
    return tuple(args)


def check_count(name: str, count: Any, least: int = 1) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, found {count!r}")
    return count


def check_flags(**flags: Any) -> dict[str, bool]:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, found {value!r}")
    return flags


def check_compile(compile: Any) -> bool | Literal["background"]:
    if isinstance(compile, bool):
        return compile
    if isinstance(compile, str) and compile == "background":
        return "background"
    kind = ValueError if isinstance(compile, str) else TypeError
    raise kind(f'compile: expected True, False or "background", found {compile!r}')


def described(thing: Any) -> str:
    """What to call a thing of the wrong kind in a message."""
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__

"""Checks and adapts the arguments of torchdiffeq's functions. Wrong ones raise errors that say what to do."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._stepping.observers import Observer
from ..._stepping.schedule import Plan
from ..._stepping.step import Step
from ._errors import ArgumentError, FieldShapeError, MaxNumStepsExceeded
from ._methods import ALL_CALLBACKS, Method


class State(NamedTuple):
    """y0 as seminode takes it, and how to give it back."""

    y0: Any  # a tensor, or a tuple of tensors of one dtype
    shapes: list[torch.Size] | None  # None: a tensor

    @property
    def first(self) -> Tensor:
        return self.y0 if self.shapes is None else self.y0[0]

    def copied(self) -> State:
        """The same state in memory of its own, which the user does not change."""
        return self._replace(y0=self.y0.clone() if self.shapes is None else tuple(x.clone() for x in self.y0))

    def unpack(self, flat: Tensor) -> Any:
        """A flat state in the structure of y0."""
        if self.shapes is None:
            return flat.view(self.y0.shape)
        parts = flat.reshape(-1).split([shape.numel() for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))


def check_state(y0: Any) -> State:
    if isinstance(y0, Tensor):
        return State(y0, None)
    if not isinstance(y0, tuple) or not all(isinstance(x, Tensor) for x in y0):
        hint = "; write tuple(y0)" if isinstance(y0, list) else ""
        raise ArgumentError(f"y0 must be either a torch.Tensor or a tuple of them, found {type(y0).__name__}{hint}")
    dtypes = {x.dtype for x in y0}
    if len(dtypes) > 1:  # as torch.cat does
        dtype = y0[0].dtype
        for x in y0[1:]:
            dtype = torch.promote_types(dtype, x.dtype)
        y0 = tuple(x.to(dtype) for x in y0)
    return State(y0, [x.shape for x in y0])


def check_times(t: Any, y0: Tensor, name: str = "t") -> Tensor:
    if not isinstance(t, Tensor):
        raise ArgumentError(
            f"{name} must be a torch.Tensor, found {type(t).__name__}; pass torch.tensor([...]) of floating-point times"
        )
    if not t.is_floating_point():
        raise TypeError(f"`{name}` must be a floating point Tensor but is a {t.type()}; pass {name}.to(y0.dtype)")
    if t.ndim != 1:
        raise ArgumentError(f"{name} must be one dimensional, found shape {tuple(t.shape)}; pass {name}.reshape(-1)")
    if not len(t):
        raise ArgumentError(f"{name} must hold at least one time, the one of y0; found none")
    values: list[float] = t.tolist()
    pairs = list(itertools.pairwise(values))
    if not all(a < b for a, b in pairs) and not all(a > b for a, b in pairs):
        raise ArgumentError(
            f"{name} must be strictly increasing or decreasing, found {_first_break(values)}. Sort the times and "
            "remove repeated ones (torch.unique)."
        )
    if t.device != y0.device:
        warnings.warn("t is not on the same device as y0. Coercing to y0.device.", stacklevel=4)
    return t


def _first_break(values: list[float]) -> str:
    rising = values[-1] > values[0]
    for i in range(1, len(values)):
        if values[i] == values[i - 1] or (values[i] > values[i - 1]) != rising:
            return f"{values[i]} after {values[i - 1]} (index {i})"
    return str(values)


def check_tolerance(name: str, value: Any, state: State) -> Any:
    """A tolerance as seminode takes it: a number, or a tensor like y0, or one for each entry of a tuple."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise ArgumentError(f"{name} cannot require gradient; pass {name}.detach()")
    if not isinstance(value, Iterable) or (isinstance(value, Tensor) and value.ndim == 0):
        return float(value)
    if state.shapes is None:
        return torch.as_tensor(value, dtype=torch.float64)
    values = tuple(value)
    if len(values) != len(state.shapes):
        raise ArgumentError(
            f"If using tupled {name} it must have the same length as the tuple y0: found {len(values)} tolerances for "
            f"{len(state.shapes)} tensors"
        )
    return values


def adapted(func: Callable[..., Any], state: State, method: Method | None = None) -> Callable[..., Any]:
    """The field with results in the structure, shapes and dtype of y0.

    torchdiffeq takes any iterable of tensors with the right numbers of entries, in any dtype. If y0 is a tensor, the
    shape of the result may lack leading axes of length 1 or have more of them; methods on a grid broadcast it too.
    """
    any_shape = method is not None and method.external
    broadcast = method is not None and not method.adaptive
    if state.shapes is None:

        def field(t: Tensor, y: Tensor) -> Any:
            f = func(t, y)
            same = type(f) is Tensor and f.shape == y.shape and f.dtype == y.dtype
            return f if same else _like(f, y, any_shape, broadcast)

        return field

    def fields(t: Tensor, y: tuple[Tensor, ...]) -> Any:
        found = tuple(func(t, y))
        if len(found) != len(y):
            raise ArgumentError(
                f"func must return one tensor for each of the {len(y)} tensors of y0, found {len(found)}"
            )
        return tuple(_leaf_like(f, x, i) for i, (f, x) in enumerate(zip(found, y, strict=True)))

    return fields


def _like(f: Any, y: Tensor, any_shape: bool, broadcast: bool) -> Any:
    if not isinstance(f, Tensor):
        return f
    if f.shape == y.shape or _inner(f.shape) == _inner(y.shape) or (any_shape and f.numel() == y.numel()):
        return f.to(y.dtype).reshape(y.shape)
    if broadcast and _broadcasts(f.shape, y.shape):
        return f.to(y.dtype).expand(y.shape)
    raise FieldShapeError(
        f"func must return a tensor of the shape of y0, {tuple(y.shape)}, found {tuple(f.shape)}; transpose, reshape "
        "or expand the result in func"
    )


def _leaf_like(f: Any, y: Tensor, index: int) -> Any:
    if not isinstance(f, Tensor):
        return f
    if f.numel() != y.numel():
        raise FieldShapeError(
            f"func must return tensors with the numbers of entries of y0: y0[{index}] has shape {tuple(y.shape)}, "
            f"found {tuple(f.shape)}"
        )
    return f.to(y.dtype).reshape(y.shape)


def _inner(shape: torch.Size) -> tuple[int, ...]:
    """A shape without its leading axes of length 1."""
    return tuple(itertools.dropwhile(lambda size: size == 1, shape))


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def callbacks(func: Any, suffix: str = "") -> dict[str, Callable[..., Any]]:
    """The callbacks of a field, by their names without the suffix."""
    named = {name: getattr(func, name + suffix, None) for name in ALL_CALLBACKS}
    return {name: callback for name, callback in named.items() if callback is not None}


def supported(given: dict[str, Callable[..., Any]], name: str, method: Method) -> dict[str, Callable[..., Any]]:
    """The callbacks that a method calls; others warn."""
    invalid = set(given) - method.valid_callbacks()
    if invalid:
        warnings.warn(f"Solver '{name}' does not support callbacks {invalid}", stacklevel=5)
    return {name: callback for name, callback in given.items() if name not in invalid}


class Callbacks(Observer):
    """Calls a field's callbacks with the start, the state and the length of each step."""

    def __init__(self, given: dict[str, Callable[..., Any]], unpack: Callable[[Tensor], Any], dtype: torch.dtype):
        self._step, self._accept, self._reject = (given.get(name) for name in ALL_CALLBACKS)
        self._unpack, self._dtype = unpack, dtype

    def _call(self, callback: Callable[..., Any] | None, plan: Plan, y0: Tensor) -> None:
        if callback is None:
            return
        t0 = torch.tensor(plan.t0, dtype=self._dtype, device=y0.device)
        dt = torch.tensor(abs(plan.dt), dtype=self._dtype, device=y0.device)
        callback(t0, self._unpack(y0), dt)

    def tried(self, plan: Plan, y0: Tensor) -> None:
        self._call(self._step, plan, y0)

    def accepted(self, step: Step, ratio: float) -> None:
        self._call(self._accept, step.plan, step.y0)

    def rejected(self, step: Step, ratio: float) -> None:
        self._call(self._reject, step.plan, step.y0)


class StepLimit(Observer):
    """Ends a solve that tries too many steps between two output times."""

    def __init__(self, limit: int, times: Sequence[float]):
        self._limit, self._times = limit, list(times)
        self._sign = -1.0 if times[-1] < times[0] else 1.0
        self._count = 0

    def tried(self, plan: Plan, y0: Tensor) -> None:
        if self._count >= self._limit:
            raise MaxNumStepsExceeded(
                f"max_num_steps exceeded ({self._count}>={self._limit}): {self._limit} steps were tried since the last "
                f"output time, and the solve has only reached t = {plan.t0:g} (dt = {plan.dt:.3g}). The problem may be "
                "stiff or the tolerance too tight: raise rtol and atol, or max_num_steps, or check whether the field "
                "grows without bound.",
                t=plan.t0,
                dt=plan.dt,
            )
        self._count += 1

    def accepted(self, step: Step, ratio: float) -> None:
        start, end = self._sign * step.plan.t0, self._sign * step.plan.t1
        if any(start < self._sign * t <= end for t in self._times):
            self._count = 0


def find_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters of a module; those of a replica of `nn.DataParallel` are plain attributes."""
    if not getattr(module, "_is_replica", False):
        return list(module.parameters())
    found = {}
    for each in module.modules():
        for value in vars(each).values():
            if isinstance(value, Tensor) and value.requires_grad:
                found[id(value)] = value
    return list(found.values())

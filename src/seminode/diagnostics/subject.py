"""The problem that is measured: a field, an initial state, times, a loss, and the tensors that get gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._field.capture import CaptureWatch
from .._field.field import Field
from .._field.pytree import HALF, Layout, leaves_of, mapped, real_dtype
from .._field.reach import reachable
from .._untyped import vector_norm
from ..controllers import Controller
from ..solution import Solution
from ..solve import solve
from .contenders import Contender
from .isolation import random_state


@dataclass(frozen=True, eq=False)
class Subject:
    """A problem with its own copies of y0, ts and args, so that the tensors of the user do not change."""

    field: Callable[..., Any]
    y0: Any
    ts: Tensor
    args: tuple[Any, ...]
    loss: Callable[[Any], Any]
    params: tuple[Tensor, ...] | None  # the argument; None: each solve detects them
    found: tuple[Tensor, ...]  # all parameters that get gradients
    jumps: Any = None
    norm: Any = None
    controller: Controller | None = None

    @property
    def leaf(self) -> Tensor:
        """The first tensor of the state."""
        return next(leaves_of(self.y0))

    @property
    def targets(self) -> list[Tensor]:
        """The tensors that get gradients."""
        given = (x for x in leaves_of((self.y0, self.ts, self.args)) if isinstance(x, Tensor) and x.requires_grad)
        return [*given, *self.found]

    def solve(self, contender: Contender, max_steps: int) -> Solution[Any]:
        return solve(
            self.field,
            self.y0,
            self.ts,
            args=self.args,
            solver=contender.solver,
            rtol=contender.rtol,
            atol=contender.atol,
            controller=self.controller,
            norm=self.norm,
            adjoint=contender.adjoint,
            params=self.params,
            jumps=self.jumps,
            max_steps=max_steps,
            compile=contender.compile,
        )


def own(tree: Any) -> Any:
    """The structure with copies of its tensors."""
    return mapped(tree, lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x)


@dataclass(frozen=True, eq=False)
class Look:
    """The result of one observed evaluation of the field and of the loss."""

    params: tuple[Tensor, ...]  # of the field
    used: tuple[Tensor, ...]  # all tensors that field and loss use in addition to their arguments
    modules: tuple[nn.Module, ...]
    random: bool  # whether random numbers were drawn
    seconds: float  # per evaluation of the field


def examine(subject: Subject, t0: float) -> Look:
    """Evaluate field and loss once and record which tensors they use. Errors of the user's code are not caught."""
    layout = Layout.of(subject.y0, "y0")
    y0 = layout.pack(subject.y0).detach()
    args = mapped(subject.args, lambda x: x.detach() if isinstance(x, Tensor) else x)
    y0 = y0.float() if y0.dtype in HALF else y0
    watch = CaptureWatch([x for x in leaves_of((y0, args)) if isinstance(x, Tensor)])
    before = random_state(y0.device)
    watched = Field(watch.over(subject.field), layout, subject.leaf.dtype, args)
    t = torch.full((), t0, dtype=real_dtype(y0), device=y0.device)
    with torch.no_grad():
        watched(t, y0)
    seconds = _seconds(Field(subject.field, layout, subject.leaf.dtype, args), t, y0)
    seen = check_loss(subject.loss, subject.y0, len(subject.ts))
    drawn = not all(map(torch.equal, before, random_state(y0.device)))
    reach = reachable((subject.field, *(x for x in leaves_of(args) if not isinstance(x, Tensor))))
    params = [*reach.leaves(), *watch.captured.values()]
    own_modules = reachable((subject.field, args, subject.loss)).modules
    held = [x for root in own_modules for x in (*root.parameters(), *root.buffers())]
    used = [*params, *_seen(watch), *_seen(seen), *held]
    return Look(
        params=tuple({id(x): x for x in params}.values()),
        used=tuple({id(x): x for x in used}.values()),
        modules=tuple(own_modules),
        random=drawn,
        seconds=seconds,
    )


def _seen(watch: CaptureWatch) -> list[Tensor]:
    return [*watch.captured.values(), *(tensor for tensor, _ in watch.constants.values())]


def _seconds(field: Field, t: Tensor, y0: Tensor) -> float:
    """The time of one evaluation."""
    with torch.no_grad():
        begin = now(y0.device)
        field(t, y0)
        return now(y0.device) - begin


def now(device: torch.device) -> float:
    """The time after the device has finished all its work."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


def check_loss(loss: Callable[[Any], Any], y0: Any, outputs: int) -> CaptureWatch:
    """Raise an error unless the loss is a differentiable scalar. Returns a record of the tensors that it uses."""
    ys = mapped(y0, lambda x: x.detach().expand(outputs, *x.shape).clone().requires_grad_())
    watch = CaptureWatch(leaves_of(ys))
    with torch.enable_grad():
        value = watch.over(loss)(ys)
    if not isinstance(value, Tensor):
        raise TypeError(f"loss: expected loss(ys) to return a scalar tensor, found {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"loss: expected loss(ys) to return a scalar, found shape {tuple(value.shape)}")
    if value.is_complex():
        raise TypeError(f"loss: expected loss(ys) to return a real scalar, found {value.dtype}")
    if not value.requires_grad:
        raise ValueError("loss: expected a value that can be differentiated, found a value that does not depend on ys")
    return watch


def flat_gradient(grads: Sequence[Tensor | None], targets: Sequence[Tensor]) -> Tensor:
    """All gradients as one real vector, in float64 if the device supports it."""
    wide = torch.float32 if targets[0].device.type == "mps" else torch.float64
    parts = [torch.zeros_like(x) if g is None else g.detach() for g, x in zip(grads, targets, strict=True)]
    real = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in parts)
    device = targets[0].device
    return torch.cat([x.reshape(-1).to(device, wide) for x in real])


def relative_error(gradient: Tensor, reference: Tensor) -> float:
    """The relative error in the Euclidean norm, over all gradients together."""
    return float(vector_norm(gradient - reference) / vector_norm(reference))


def largest(tolerance: Any) -> float | None:
    """The largest number in a tolerance, which can be a structure.

    >>> largest((1e-3, torch.tensor([1e-4, 1e-2], dtype=torch.float64)))
    0.01
    """
    if tolerance is None:
        return None
    return max(float(torch.as_tensor(x, dtype=torch.float64).max()) for x in leaves_of(tolerance))


def smallest(tolerance: Any) -> float:
    """The smallest positive number in a tolerance; zero if there is none."""
    values = [torch.as_tensor(x, dtype=torch.float64).reshape(-1) for x in leaves_of(tolerance)]
    above = [float(x[x > 0].min()) for x in values if bool((x > 0).any())]
    return min(above, default=0.0)

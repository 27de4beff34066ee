"""Export of fixed-step solves: a solve as a module of plain tensor operations, without a loop that looks at values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .._field.checks import check_count, check_field, check_solver, check_times, described
from .._field.pytree import HALF, real_dtype
from ..solvers import SolverName
from ..solvers.explicit import ExplicitRungeKutta


class UnrolledSolve(nn.Module):
    r"""A solve with fixed steps of an explicit Runge–Kutta method, unrolled into plain tensor operations.

    It computes what `solve(field, y0, ts, solver=..., controller=FixedStep(...))` computes where steps end on all ts,
    also of a state in half precision, and raises the same errors if the field returns another shape or dtype.
    Nothing in it depends on values, so that `torch.export`, ONNX export and `torch.compile` see one graph. It is for
    deployment: in training, `solve` has adjoints, checks and statistics.

    Arguments:
        field: f(t, y), a module or a function of tensors.
        ts: times of the outputs, fixed numbers; y0 belongs to the first.
        steps: number of steps between two of them.
        solver: the name of an explicit Runge–Kutta method.
        last: whether to return only y at the last time.

    Shapes: y0 (…) ↦ (times, …), or with `last` (…).

    Example:
        >>> import torch, seminode as sn
        >>> from seminode.models import ConcatMLP
        >>> from seminode.training import UnrolledSolve
        >>> field, y0 = ConcatMLP(2, (8,)), torch.randn(5, 2)
        >>> unrolled = UnrolledSolve(field, (0.0, 1.0), steps=4, solver="rk4")
        >>> solved = sn.solve(field, y0, (0.0, 1.0), solver="rk4", controller=sn.FixedStep(0.25))
        >>> torch.allclose(unrolled(y0), solved.ys, atol=1e-6)
        True
    """

    def __init__(
        self,
        field: Callable[[Tensor, Tensor], Tensor],
        ts: Tensor | Sequence[float],
        *,
        steps: int,
        solver: SolverName = "rk4",
        last: bool = False,
    ):
        super().__init__()
        check_field(field)
        self.field = field
        _, self.ts = check_times(ts, torch.zeros((), dtype=torch.float64))
        self.steps = check_count("steps", steps)
        self.last = last
        method = check_solver(solver)
        if not isinstance(method, ExplicitRungeKutta):
            raise ValueError(f"solver: expected an explicit Runge–Kutta method, found {method.name!r}")
        self._method = method

    def forward(self, y0: Tensor) -> Tensor:
        """y at all times, or at the last one, from `y0`."""
        if not isinstance(y0, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"y0: expected a tensor, found {described(y0)}")
        if not (y0.is_floating_point() or y0.is_complex()):
            raise TypeError(f"y0: expected a floating-point or complex dtype, found {y0.dtype}")
        # As in `solve`, states of half precision are integrated in float32.
        y = y0.float() if y0.dtype in HALF else y0
        outputs = [y]
        for start, end in pairwise(self.ts):
            dt = (end - start) / self.steps
            for i in range(self.steps):
                y = self._step(start + i * dt, dt, y, y0.dtype)
            outputs.append(y)
        return (y if self.last else torch.stack(outputs)).to(y0.dtype)

    def _step(self, t0: float, dt: float, y: Tensor, dtype: torch.dtype) -> Tensor:
        clock = real_dtype(y)

        def evaluate(c: float, state: Tensor, /, *, stage: int) -> Tensor:
            t = torch.full((), t0 + c * dt, dtype=clock, device=state.device)
            return _checked(self.field(t, state.to(dtype)), state, dtype).to(state.dtype)

        return self._method.step(evaluate, dt, y, None).y1

    def extra_repr(self) -> str:
        return f"solver={self._method.name!r}, ts={self.ts}, steps={self.steps}, last={self.last}"


def _checked(value: Any, state: Tensor, dtype: torch.dtype) -> Tensor:
    """What a field returned; other shapes and dtypes would be broadcast and promoted without an error."""
    if not isinstance(value, Tensor):
        raise TypeError(f"field(t, y): expected a tensor, found {type(value).__name__}")
    if value.shape != state.shape:
        raise ValueError(f"field(t, y): expected shape {tuple(state.shape)} as in y0, found {tuple(value.shape)}")
    if value.dtype != dtype and not torch.is_autocast_enabled(state.device.type):
        raise TypeError(f"field(t, y): expected dtype {dtype} as in y0, found {value.dtype}")
    return value


def export_solve(module: nn.Module, y0: Tensor, *, dynamic_batch: bool = True) -> Any:
    """A module with unrolled solves as a `torch.export.ExportedProgram`, which needs only PyTorch, not this library.

    Save it with `torch.export.save`. For ONNX, pass it to `torch.onnx.export(program, (y0,), path, dynamo=True)`, which
    needs the packages onnx and onnxscript.

    Arguments:
        module: an [`UnrolledSolve`][seminode.training.UnrolledSolve], or a module that contains some, such as
            `nn.Sequential(lift, UnrolledSolve(...), readout)`.
        y0: an example of the input, with a batch of at least two samples if the batch is dynamic.
        dynamic_batch: whether the exported program accepts other sizes of the first axis.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from seminode.models import ConcatMLP
        >>> from seminode.training import UnrolledSolve, export_solve
        >>> unrolled = UnrolledSolve(ConcatMLP(2, (8,)), (0.0, 1.0), steps=2, last=True)
        >>> model = nn.Sequential(unrolled, nn.Linear(2, 1))
        >>> program = export_solve(model, torch.randn(4, 2)).module()
        >>> x = torch.randn(7, 2)
        >>> torch.allclose(program(x), model(x))
        True
    """
    if not any(isinstance(part, UnrolledSolve) for part in _parts(module)):
        raise TypeError(
            f"module: expected an UnrolledSolve or a module with one, found {type(module).__name__}; adaptive solves "
            "choose their steps by values and cannot be exported"
        )
    shapes = None
    if dynamic_batch:
        if y0.ndim == 0 or len(y0) < 2:
            raise ValueError(f"y0: expected a batch of at least 2 samples, found shape {tuple(y0.shape)}")
        shapes = ({0: torch.export.Dim("batch")},)
    return torch.export.export(module, (y0,), dynamic_shapes=shapes)


def _parts(module: Any) -> list[nn.Module]:
    return list(module.modules()) if isinstance(module, nn.Module) else []

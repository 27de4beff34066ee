"""torchdiffeq's adjoint: its norms and its procedure, as options of `Backsolve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import errors, norms
from ...adjoints import Backsolve
from ...errors import SolveError, ToleranceWarning
from ...extending import BackwardRequest
from ...norms import AdjointState, Norm, Reading
from ._arguments import State
from ._errors import translated

#: A norm of (a_t, y, a_y, *a_params), where y and a_y are flat if y0 is a tuple.
TupleNorm = Callable[[tuple[Tensor, ...]], Any]


class AdjointNorms:
    """The adjoint norms that torchdiffeq offers, over its tuples."""

    def __init__(self, state: State, state_norm: Norm | None):
        self._state = state
        self._norm = norms.mixed_per_tensor if state_norm is None else state_norm

    def default(self, parts: tuple[Tensor, ...]) -> Tensor:
        sizes = [self.seminorm(parts), *(norms.rms(x) for x in parts[3:] if x.numel())]
        return torch.stack(sizes).max()

    def seminorm(self, parts: tuple[Tensor, ...]) -> Tensor:
        time, y, adj_y = parts[:3]
        sizes = [self._norm(self._state.unpack(y)), self._norm(self._state.unpack(adj_y))]
        return torch.stack(
            [time.abs().reshape(()), *(torch.as_tensor(x).reshape(()).to(time.real) for x in sizes)]
        ).max()

    def over_leaves(self, norm: Callable[[tuple[Tensor, ...]], Any]) -> TupleNorm:
        """A user's norm, which sees the tensors of a tuple y0 one by one."""
        state = self._state
        if state.shapes is None:
            return norm
        return lambda parts: norm((parts[0], *state.unpack(parts[1]), *state.unpack(parts[2]), *parts[3:]))

    def chosen(self, norm: Any) -> TupleNorm:
        """The norm of `adjoint_options`: `None`, "seminorm" or a function."""
        if norm is None:
            return self.default
        if isinstance(norm, str):
            if norm != "seminorm":
                raise ValueError(f'adjoint_options["norm"]: expected "seminorm" or a function, found {norm!r}')
            return self.seminorm
        return self.over_leaves(norm)


@dataclass(frozen=True, repr=False, eq=False)
class PeerAdjoint(Backsolve):
    """`Backsolve` as torchdiffeq runs it.

    a_t is always a part of the state. The norm is read from `adjoint_options` when the backward pass begins, so it can
    be replaced until then. Parameters that the field does not use have gradients of zero.

    Arguments:
        adjoint_options: whose `"norm"` is a function of (a_t, y, a_y, *a_params).
        tuple_norms: the norms of torchdiffeq for this state.
        whole: whether the parameters must be in the state though the norm does not read them.
    """

    adjoint_options: dict[str, Any] = field(default_factory=dict[str, Any])
    tuple_norms: AdjointNorms | None = None
    whole: bool = False

    @property
    def name(self) -> str:
        return "odeint_adjoint"

    @property
    def backward_norm(self) -> Norm:
        chosen, tuple_norms = self.adjoint_options["norm"], self.tuple_norms
        own = tuple_norms is not None and chosen == tuple_norms.seminorm
        return Reading(lambda y: chosen(as_tuple(y)), time=True, params=self.whole or not own)

    def backward(self, request: BackwardRequest) -> list[Tensor | None]:
        try:
            with errors.without(ToleranceWarning):
                grads = super().backward(request)
        except SolveError as error:
            raise translated(error) from error
        inputs = zip(grads, request.tensors, request.needs, strict=True)
        filled = [torch.zeros_like(x) if g is None and need else g for g, x, need in inputs]
        return [*grads[:2], *filled[2:]]


def as_tuple(y: AdjointState) -> tuple[Tensor, ...]:
    """The state of a backward pass as torchdiffeq orders it: a_t, y, a_y and the parameters."""
    return y.a_t, _flat(y.z), _flat(y.a_z), *y.a_params


def _flat(y: Any) -> Tensor:
    return y if isinstance(y, Tensor) else torch.cat([x.reshape(-1) for x in y])


def unpacking(state: State, params: Sequence[Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """From the flat vector of a backward pass to the tuple that callbacks see."""
    size = state.first.numel() if state.shapes is None else sum(shape.numel() for shape in state.shapes)

    def unpack(w: Tensor) -> tuple[Tensor, ...]:
        time, y, adj_y, *rest = w.split([1, size, size, *(x.numel() for x in params)])
        own = state.first.shape if state.shapes is None else (size,)
        shaped = (part.view(x.shape) for part, x in zip(rest, params, strict=True))
        return time.reshape(()), y.view(own), adj_y.view(own), *shaped

    return unpack

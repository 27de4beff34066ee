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
        named: the parameters as the user's norms and callbacks see them.
        whole: whether the parameters must be in the state though the norm does not read them.
    """

    adjoint_options: dict[str, Any] = field(default_factory=dict[str, Any])
    tuple_norms: AdjointNorms | None = None
    named: NamedParameters | None = None
    whole: bool = False

    @property
    def name(self) -> str:
        return "odeint_adjoint"

    @property
    def backward_norm(self) -> Norm:
        chosen, tuple_norms, named = self.adjoint_options["norm"], self.tuple_norms, self.named
        own = tuple_norms is not None and chosen == tuple_norms.seminorm
        if named is None or own or (tuple_norms is not None and chosen == tuple_norms.default):
            return Reading(lambda y: chosen(as_tuple(y)), time=True, params=self.whole or not own)
        return Reading(lambda y: chosen((*as_tuple(y)[:3], *named.errors(y.a_params))), time=True, params=True)

    def backward(self, request: BackwardRequest) -> list[Tensor | None]:
        if self.named is not None:
            first = len(request.needs) - len(request.inputs.params)
            pairs = zip(request.inputs.params, request.needs[first:], strict=True)
            self.named.integrated = tuple(x for x, need in pairs if need)
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


class NamedParameters:
    """The tensors of `adjoint_params`, and those for which the backward pass integrates gradients.

    The two differ where the field uses a tensor that was computed from a parameter before the solve: its gradient is
    integrated, and autograd takes it on to the parameter afterwards. A tensor that is named twice is integrated once.
    """

    def __init__(self, named: Sequence[Tensor]):
        self._named = tuple(named)
        self.integrated = self._named  # as soon as the backward pass begins

    def gradients(self, integrals: Sequence[Tensor]) -> list[Tensor]:
        """The integrals so far as gradients of the named parameters, in their order."""
        by_id = {id(x): g for x, g in zip(self.integrated, integrals, strict=True)}
        own = {id(x) for x in self._named}
        computed = [x for x in self.integrated if id(x) not in own]
        found = [by_id.get(id(x)) for x in self._named]
        if computed:
            weights = [by_id[id(x)].to(x.dtype).view(x.shape) for x in computed]
            further = torch.autograd.grad(computed, self._named, weights, retain_graph=True, allow_unused=True)
            found = [a if b is None else b if a is None else a + b for a, b in zip(found, further, strict=True)]
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, self._named, strict=True)]

    def errors(self, ratios: Sequence[Tensor]) -> list[Tensor]:
        """Like `gradients` for errors in units of the tolerance.

        A tensor that was computed from a parameter has its own tolerance. So the chain rule gives the direction only,
        and the size of the largest entry is kept.
        """
        largest = torch.stack([x.abs().max() for x in ratios if x.numel()] or [torch.zeros(())]).max()
        own = {id(x): g for x, g in zip(self.integrated, ratios, strict=True)}
        pairs = zip(self.gradients(ratios), self._named, strict=True)
        return [g if g is own.get(id(x)) else _resized(g, largest) for g, x in pairs]

    def unpacking(self, state: State) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """From the flat vector of a backward pass to the tuple that callbacks see."""
        size = state.first.numel() if state.shapes is None else sum(shape.numel() for shape in state.shapes)
        own = state.first.shape if state.shapes is None else (size,)

        def unpack(w: Tensor) -> tuple[Tensor, ...]:
            time, y, adj_y, *rest = w.split([1, size, size, *(x.numel() for x in self.integrated)])
            shaped = [part.view(x.shape) for part, x in zip(rest, self.integrated, strict=True)]
            return time.reshape(()), y.view(own), adj_y.view(own), *self.gradients(shaped)

        return unpack


def _resized(x: Tensor, largest: Tensor) -> Tensor:
    size = x.abs().max() if x.numel() else x.sum()
    return x if not bool(size) else x * (largest / size).to(x.dtype)

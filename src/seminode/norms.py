r"""Norms of a state: plain functions from a structure of tensors to a 0-d tensor.

A step is accepted when the norm of error / (atol + rtol·max(|y0|, |y1|)) is at most one. A norm receives that ratio
in the structure of the state: the tensor, tuple or dict that the user passed as `y0`. On the backward pass of a
continuous adjoint it receives an [`AdjointState`][seminode.norms.AdjointState] instead, with the segments a_t, z, a_z
and the parameter gradients.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._field.pytree import Layout, leaves_of, real_dtype
from ._untyped import vector_norm

Norm = Callable[[Any], Tensor]


class AdjointState(NamedTuple):
    """The segments of the augmented adjoint state of Kidger, Chen and Lyons (2021), in their order.

    Attributes:
        a_t: gradient with respect to the time.
        z: the state, solved backward in time.
        a_z: adjoint of the state.
        a_params: gradients with respect to the parameters.
    """

    a_t: Any
    z: Any
    a_z: Any
    a_params: Any


def _leaves(y: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(y) if leaf.numel() > 0]


def rms(y: Any) -> Tensor:
    r"""Root mean square of all entries, as one vector.

    >>> rms((torch.tensor([3.0]), torch.tensor([4.0, 0.0, 0.0]))).item()
    2.5
    """
    if isinstance(y, Tensor):
        return vector_norm(y) / math.sqrt(y.numel())
    leaves = _leaves(y)
    size = sum(leaf.numel() for leaf in leaves)
    return vector_norm(_stack([vector_norm(leaf) for leaf in leaves])) / math.sqrt(size)


def max(y: Any) -> Tensor:
    """Largest absolute value of all entries."""
    return _stack([leaf.abs().max() for leaf in _leaves(y)]).max()


def mixed_per_tensor(y: Any) -> Tensor:
    """Largest root mean square of the leaves: the default on the forward pass."""
    leaves = _leaves(y)
    if len(leaves) == 1:
        return rms(leaves[0])
    return _stack([rms(leaf) for leaf in leaves]).max()


def mixed(y: Any) -> Tensor:
    """Like `mixed_per_tensor`, but with the gradients of all parameters as one vector.

    This is the default of Kidger, Chen and Lyons (2021) on the backward pass. On any state other than an
    `AdjointState` it equals `mixed_per_tensor`.
    """
    if not isinstance(y, AdjointState):
        return mixed_per_tensor(y)
    parts = [mixed_per_tensor(part) for part in (y.a_t, y.z, y.a_z) if _leaves(part)]
    if _leaves(y.a_params):
        parts.append(rms(y.a_params))
    return _stack(parts).max()


class Without:
    """`mixed_per_tensor` over all leaves except plain integrals, on the forward and on the backward pass.

    A plain integral is a leaf that the field does not read. `Without` does not check this; `norm="auto"` detects such
    leaves automatically.

    Arguments:
        integrals: one flag per leaf, in the order of the state; `True` marks a plain integral.

    >>> float(Without((False, True))((torch.tensor([2.0]), torch.tensor([5.0]))))
    2.0
    """

    def __init__(self, integrals: Sequence[bool]):
        self.integrals = tuple(integrals)
        if all(self.integrals):
            raise ValueError(f"integrals: expected at least one leaf that is not an integral, found {self.integrals}")

    def __call__(self, y: Any) -> Tensor:
        leaves = leaves_of(y)
        return mixed_per_tensor([leaf for leaf, skip in zip(leaves, self.integrals, strict=True) if not skip])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Without) and self.integrals == other.integrals

    def __hash__(self) -> int:
        return hash((Without, self.integrals))

    def __repr__(self) -> str:
        return f"Without({self.integrals})"


class Reading:
    """A norm of an `AdjointState` that says which plain integrals it reads.

    What it does not read need not be part of the solver's state: it is summed beside it, which is cheaper.

    Arguments:
        norm: the function of an `AdjointState`.
        time: whether it reads `a_t`; otherwise that is an empty tuple.
        params: whether it reads `a_params`; otherwise that is an empty tuple.
    """

    def __init__(self, norm: Norm, *, time: bool = False, params: bool = False):
        self.norm, self.time, self.params = norm, time, params

    def __call__(self, y: AdjointState) -> Tensor:
        return self.norm(y)


def seminorm(y: AdjointState) -> Tensor:
    """The seminorm of Kidger, Chen and Lyons (2021): the larger of the norms of z and a_z.

    a_t and a_params are plain integrals, so error control ignores them.
    """
    _only_adjoint("seminorm", y)
    if not _leaves(y.z):  # z is interpolated from the forward solution, not solved for
        return mixed_per_tensor(y.a_z)
    return torch.maximum(mixed_per_tensor(y.z), mixed_per_tensor(y.a_z))


def seminorm_rms(y: AdjointState) -> Tensor:
    """Root mean square of z and a_z, as one vector: a variant of the seminorm."""
    _only_adjoint("seminorm_rms", y)
    return rms((y.z, y.a_z))


def _only_adjoint(name: str, y: Any) -> None:
    if not isinstance(y, AdjointState):
        raise TypeError(f"norms.{name} expects an AdjointState (a_t, z, a_z, a_params), found {type(y).__name__}")


def _stack(values: list[Tensor]) -> Tensor:
    return torch.stack(values) if len(values) > 1 else values[0].reshape(1)


FORWARD: dict[str, Norm] = {"rms": rms, "max": max, "mixed": mixed, "mixed_per_tensor": mixed_per_tensor}
BACKWARD: dict[str, Norm] = {
    "mixed": mixed,
    "mixed_per_tensor": mixed_per_tensor,
    "seminorm": seminorm,
    "seminorm_rms": seminorm_rms,
}


class EachSample:
    """A norm of every sample, for batched solves: from leaves with a batch axis in front to one number per sample.

    >>> EachSample(rms)(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([3.5355, 0.0000])
    """

    def __init__(self, norm: Norm):
        self.norm = norm

    def __call__(self, y: Any) -> Tensor:
        if self.norm is rms and isinstance(y, Tensor):
            return _each_rms(y)
        if self.norm in (mixed_per_tensor, mixed):
            sizes = [_each_rms(leaf) for leaf in _leaves(y)]
            return sizes[0] if len(sizes) == 1 else torch.stack(sizes).amax(0)
        return torch.func.vmap(self.norm)(y)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EachSample) and self.norm == other.norm

    def __hash__(self) -> int:
        return hash((EachSample, self.norm))


def _each_rms(y: Tensor) -> Tensor:
    rows = y.reshape(len(y), -1)
    return vector_norm(rows, dim=1) / math.sqrt(rows.shape[1])


class ErrorNorm:
    """The norm of an error relative to the tolerances.

    `rtol` and `atol` are numbers or flat tensors that broadcast against the state. Of a batched solve, whose layout has
    a batch axis, the norm gives one number per sample, and so do the methods that return a number here.
    """

    def __init__(self, layout: Layout, norm: Norm, rtol: float | Tensor, atol: float | Tensor, like: Tensor):
        self.layout = layout
        self.norm = norm
        self.rtol = rtol
        # The usual case, the root mean square of one tensor, divides by √n on the host: one kernel less per step.
        self._root = math.sqrt(like.numel()) if norm is rms and layout.single else None
        dtype = real_dtype(like)
        # With atol = 0, an entry that stays exactly zero would give 0/0 = NaN.
        floor = torch.finfo(dtype).tiny
        if isinstance(atol, Tensor):
            self.atol = atol.clamp(min=floor)
        else:
            self.atol = torch.full((), builtins.max(atol, floor), dtype=dtype, device=like.device)

    def allowed(self, magnitude: Tensor) -> Tensor:
        """atol + rtol·magnitude."""
        if isinstance(self.rtol, float):
            return torch.add(self.atol, magnitude, alpha=self.rtol)
        return self.atol + self.rtol * magnitude

    def size(self, x: Tensor, y: Tensor) -> float:
        """‖x / (atol + rtol·|y|)‖."""
        return self.measured(x / self.allowed(y.abs()))

    def ratio(self, error: Tensor, y0: Tensor, y1: Tensor) -> float:
        """‖error / (atol + rtol·max(|y0|, |y1|))‖: a step is accepted when this is at most one."""
        return self.measured(error / self.allowed(torch.maximum(y0.abs(), y1.abs())))

    def worst_leaf(self, error: Tensor, y0: Tensor, y1: Tensor) -> str | None:
        """Name of the leaf with the largest relative error; `None` if the state has only one leaf."""
        if self.layout.single:
            return None
        ratio = error / self.allowed(torch.maximum(y0.abs(), y1.abs()))
        sizes = [float(rms(leaf)) if leaf.numel() else 0.0 for leaf in self.layout.segments(ratio)]
        return self.layout.names[sizes.index(builtins.max(sizes))]

    def measured(self, ratio: Tensor) -> float:
        """The norm of an error that is already divided by the tolerance, as a Python float."""
        if self._root is not None:
            return vector_norm(ratio).item() / self._root
        size: Any = self.norm(self.layout.unpack(ratio))  # which a user may have written
        expected = 1 if self.layout.axis == 0 else len(ratio)
        if isinstance(size, Tensor) and size.numel() == expected and not size.is_complex():
            return self.read(size)
        returned: Any = type(size).__name__
        if isinstance(size, Tensor):
            returned = size.dtype if size.is_complex() else tuple(size.shape)
        raise ValueError(f"norm: expected a function that returns a 0-d tensor, found {returned}")

    def read(self, size: Tensor) -> Any:
        """A norm as a Python float; one number per sample, as a tensor on the host."""
        return size.item() if self.layout.axis == 0 else size.to("cpu", torch.float64)

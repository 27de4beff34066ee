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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._field.pytree import leaves_of, real_dtype
from ._ranks import Alone, Ranks
from ._untyped import numbers, vector_norm

Norm = Callable[[Any], Tensor]


class AdjointState(NamedTuple):
    """The segments of the augmented adjoint state of Kidger, Chen and Lyons (2021), in their order.

    Attributes:
        a_t: gradient with respect to the time.
        z: the state, solved backward in time.
        a_z: adjoint of the state.
        a_params: gradients with respect to the parameters.

    Example:
        A norm of your own for the backward pass, which reads the adjoint alone:

        >>> import seminode as sn
        >>> def adjoint_only(y: AdjointState) -> torch.Tensor:
        ...     return rms(y.a_z)
        >>> y0 = torch.ones(2, requires_grad=True)
        >>> sn.solve(lambda t, y: -y, y0, [0.0, 1.0], adjoint=sn.Backsolve(norm=adjoint_only)).ys.sum().backward()
        >>> y0.grad  # 1 + e⁻¹
        tensor([1.3679, 1.3679])
    """

    a_t: Any
    z: Any
    a_z: Any
    a_params: Any


def _leaves(y: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(y) if leaf.numel() > 0]


def rms(y: Any) -> Tensor:
    r"""Root mean square of all entries, as one vector, √(Σ yᵢ²/n).

    Arguments:
        y: a tensor, or a structure of tensors.

    >>> rms((torch.tensor([3.0]), torch.tensor([4.0, 0.0, 0.0]))).item()
    2.5
    """
    if isinstance(y, Tensor):
        return vector_norm(y) / y.numel() ** 0.5  # `math.sqrt` would fix a size in a program for any size
    leaves = _leaves(y)
    size = sum(leaf.numel() for leaf in leaves)
    return vector_norm(_stack([vector_norm(leaf) for leaf in leaves])) / size**0.5


def max(y: Any) -> Tensor:
    """Largest absolute value of all entries.

    Arguments:
        y: a tensor, or a structure of tensors.

    >>> max((torch.tensor([3.0]), torch.tensor([-4.0, 0.0, 0.0]))).item()
    4.0
    """
    return _stack([leaf.abs().max() for leaf in _leaves(y)]).max()


def mixed_per_tensor(y: Any) -> Tensor:
    """Largest root mean square of the leaves: the default on the forward pass.

    Arguments:
        y: a tensor, or a structure of tensors.

    >>> mixed_per_tensor((torch.tensor([3.0]), torch.tensor([4.0, 0.0, 0.0, 0.0]))).item()
    3.0
    """
    leaves = _leaves(y)
    if len(leaves) == 1:
        return rms(leaves[0])
    return _stack([rms(leaf) for leaf in leaves]).max()


def mixed(y: Any) -> Tensor:
    """Like `mixed_per_tensor`, but with the gradients of all parameters as one vector.

    This is the default of Kidger, Chen and Lyons (2021) on the backward pass. On any state other than an
    `AdjointState` it equals `mixed_per_tensor`.

    Arguments:
        y: an `AdjointState`; or a tensor, or a structure of tensors.

    >>> small, zero = torch.tensor([1.0]), torch.zeros(3)
    >>> state = AdjointState(a_t=(), z=small, a_z=small, a_params=(torch.tensor([4.0]), zero))
    >>> mixed(state).item(), mixed_per_tensor(state).item()  # all parameters as one vector, and each alone
    (2.0, 4.0)
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
    leaves automatically. The idea is that of the seminorm (Kidger, Chen and Lyons, ICML 2021, arXiv:2009.09457).

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

    What it does not read need not be part of the solver's state: it is summed separately, which is cheaper.

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

    Arguments:
        y: an `AdjointState`.

    Reference: Kidger, Chen and Lyons, *"Hey, that's not an ODE": Faster ODE Adjoints via Seminorms*, ICML 2021,
    arXiv:2009.09457.

    >>> state = AdjointState(
    ...     torch.tensor([9.0]), z=torch.tensor([1.0]), a_z=torch.tensor([2.0]), a_params=torch.ones(5)
    ... )
    >>> seminorm(state).item()
    2.0
    """
    _only_adjoint("seminorm", y)
    if not _leaves(y.z):  # z is interpolated from the forward solution, not solved for
        return mixed_per_tensor(y.a_z)
    return torch.maximum(mixed_per_tensor(y.z), mixed_per_tensor(y.a_z))


def seminorm_rms(y: AdjointState) -> Tensor:
    """Root mean square of z and a_z, as one vector: a variant of the seminorm.

    Arguments:
        y: an `AdjointState`.

    >>> state = AdjointState(
    ...     torch.tensor([9.0]), z=torch.tensor([1.0]), a_z=torch.tensor([7.0]), a_params=torch.ones(5)
    ... )
    >>> seminorm_rms(state).item()
    5.0
    """
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


def depends_on_state_only(norm: Norm) -> bool:
    """Whether a norm is one of this module. A function of the user's may read what changes between two calls."""
    if isinstance(norm, Moments | EachSample):
        return depends_on_state_only(norm.norm)
    return isinstance(norm, Without) or any(norm is own for own in (*FORWARD.values(), *BACKWARD.values()))


class Moments:
    """What a rank contributes to a norm over all ranks, as a vector; `value` makes the norm of their reductions.

    All norms here but `max` are the largest of some root mean squares. Each of these is a sum of squares, reduced over
    the ranks, divided by the number of entries on all of them.
    """

    def __init__(self, norm: Norm):
        self.norm = norm

    def __call__(self, y: Any) -> Tensor:
        if self.norm is max:
            leaves = _leaves(y)
            return max(leaves).double().reshape(1) if leaves else torch.zeros(1, dtype=torch.float64)
        return torch.stack([vector_norm(_stack([vector_norm(x).double() for x in g])) ** 2 for g in self._groups(y)])

    def counts(self, y: Any) -> Tensor:
        """How many entries each of them has on this rank."""
        return torch.tensor([sum(x.numel() for x in group) for group in self._groups(y)], dtype=torch.float64)

    def _groups(self, y: Any) -> list[list[Tensor]]:
        """The leaves by the root mean square that they belong to; empty ones too, which may have entries elsewhere."""
        if self.norm is rms:
            return [list(leaves_of(y))]
        if self.norm is seminorm_rms:
            return [[*leaves_of(y.z), *leaves_of(y.a_z)]]
        if self.norm is seminorm:
            return [[leaf] for part in (y.z, y.a_z) for leaf in leaves_of(part)]
        flags = self.norm.integrals if isinstance(self.norm, Without) else (False,) * len(list(leaves_of(y)))
        return [[leaf] for leaf, skip in zip(leaves_of(y), flags, strict=True) if not skip]

    def value(self, moments: Tensor, counts: Sequence[float], ranks: Alone) -> float:
        """The norm over all ranks, from the moments of this one and the numbers of entries on all."""
        if self.norm is max:
            return ranks.largest(numbers(moments))[0]
        pairs = zip(ranks.sums(moments), counts, strict=True)
        sizes = [math.sqrt(total / count) if count else 0.0 for total, count in pairs]
        return math.nan if any(map(math.isnan, sizes)) else builtins.max(sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and self.norm == other.norm

    def __hash__(self) -> int:
        return hash((Moments, self.norm))


@dataclass(frozen=True)
class Distributed:
    """What [`distributed`][seminode.norms.distributed] returns: a norm over the states of all ranks together."""

    norm: Any
    group: Any

    def over(self, norm: Norm) -> Distributed:
        """Another norm over the same ranks."""
        return Distributed(norm, self.group)

    def __call__(self, y: Any) -> Tensor:
        if isinstance(self.norm, str):
            raise TypeError(f"norms.distributed({self.norm!r}) depends on a field: it is an argument of solve")
        ranks, moments = Ranks(self.group), Moments(self.norm or mixed_per_tensor)
        counts = ranks.sums(moments.counts(y)) if self.norm is not max else []
        first = next(leaves_of(y))
        return torch.tensor(moments.value(moments(y), counts, ranks), dtype=real_dtype(first), device=first.device)

    def __repr__(self) -> str:
        return f"distributed({getattr(self.norm, '__name__', self.norm or '')})"


def distributed(norm: str | Norm | None = None, group: Any = None) -> Distributed:
    """A norm over the states of all ranks of a process group, so that all of them take the same steps.

    They are the steps of one process with the whole batch, to rounding: forward and backward, with every adjoint. Each
    attempted step costs one reduction of a few numbers. A field that communicates needs this norm; with any
    other field, ranks may take different steps. All ranks must make the same solves in the same order. See
    [Several processes](distributed.md).

    Arguments:
        norm: `"rms"`, `"max"`, `"mixed"`, `"mixed_per_tensor"`, `"auto"`, or [`Without`][seminode.norms.Without]; by
            default that of `solve`.
        group: a `torch.distributed.ProcessGroup`; by default that of all processes.

    Example:
        >>> distributed("rms")
        distributed(rms)
        >>> solve(field, y0, ts, norm=distributed())  # doctest: +SKIP
    """
    chosen: Any = norm
    if isinstance(norm, str):
        if norm not in FORWARD and norm != "auto":
            raise ValueError(f"norm: expected one of {', '.join(FORWARD)} or auto, found {norm!r}")
        chosen = FORWARD.get(norm, norm)
    elif isinstance(norm, Distributed):
        raise TypeError("norm: expected a norm of the state of one rank, found a distributed one")
    elif norm is not None and not isinstance(norm, Without) and norm not in FORWARD.values():
        raise TypeError(
            f"norm: expected one of {', '.join(FORWARD)}, auto or norms.Without(...), since for other functions it is "
            f"not known how to reduce it over ranks; found {norm!r}. A norm of your own can call "
            "torch.distributed.all_reduce itself, with compile=False"
        )
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, found {type(group).__name__}")
    return Distributed(chosen, group)


def is_auto(norm: Any) -> bool:
    """Whether a norm leaves out the integrals that are detected."""
    norm = norm.norm if isinstance(norm, Distributed) else norm
    return isinstance(norm, str) and norm == "auto"


def over_ranks(norm: Norm, ranks: Alone) -> Norm:
    """A norm over several ranks, if there are several."""
    return Distributed(norm, ranks.group) if isinstance(ranks, Ranks) else norm


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

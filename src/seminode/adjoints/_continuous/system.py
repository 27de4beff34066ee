"""The adjoint equation as an ordinary system for the one loop.

    z′ = f(t, z),    a_z′ = −a_zᵀ ∂f/∂z,    a_θ′ = −a_zᵀ ∂f/∂θ,    a_t′ = −a_zᵀ ∂f/∂t

The right-hand sides read z and a_z only. a_θ and a_t are plain integrals: they may be part of the solver's state, as
in the published method, or be summed separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..._compile.torch_private import backpropagate
from ..._field.accounting import Accounting, Evaluation
from ..._field.determinism import Determinism
from ..._field.field import Field
from ..._field.pytree import Layout, flatten, real_dtype
from ..._stepping.observers import Counter
from ...norms import AdjointState


class Integrand(NamedTuple):
    """An evaluation of the field whose graph is kept, for its VJP with respect to the parameters."""

    f: Tensor
    a: Tensor


class Source(Protocol):
    """Where z comes from if it is not solved for: a function of time."""

    def __call__(self, t: float) -> Tensor: ...

    def polynomials(self, times: Sequence[float]) -> tuple[list[Tensor], list[float]]:
        """For each time the coefficients of a polynomial that is z near by, and where to evaluate it."""
        ...


class Reduction:
    """The part of a state that is an ODE: all leaves but those that are only integrals.

    The adjoint of an integral leaf is constant, since nothing reads the leaf, and the backward pass does not need its
    value: neither is solved for.
    """

    def __init__(self, layout: Layout, integrals: Sequence[bool]):
        self._layout = layout
        self._integrals = integrals
        self.trivial = not any(integrals)
        self.key = tuple(integrals)
        self.indices = [i for i, integral in enumerate(integrals) if not integral]

    def reduce(self, flat: Tensor) -> Tensor:
        """The ODE part as a vector."""
        if self.trivial:
            return flat.reshape(-1)
        segments = self._layout.fitting(flat).segments(flat)
        return torch.cat([segments[i].reshape(-1) for i in self.indices])

    def size(self, flat: Tensor) -> int:
        """How many entries the ODE part has."""
        if self.trivial:
            return flat.numel()
        shapes = self._layout.fitting(flat).shapes
        return sum(math.prod(shapes[i]) for i in self.indices)

    def restore(self, part: Tensor, rest: Tensor) -> Tensor:
        """The whole, with the integrals taken from `rest`."""
        if self.trivial:
            return part.view(rest.shape)
        segments = self._layout.fitting(rest).segments(rest)
        pieces = iter(part.split([segments[i].numel() for i in self.indices]))
        return torch.cat(
            [s.reshape(-1) if no else next(pieces) for s, no in zip(segments, self._integrals, strict=True)]
        )


class AdjointSystem:
    """The right-hand side of the adjoint equation over one flat vector.

    The vector holds a_t, z, a_z and a_θ in this order; a_t only `with_time`, a_θ only if `integrals_in_state`. With a
    `source`, a function of time, the field sees z from there. The solver integrates z all the same: a_z may be easy to
    solve for where z moves fast, and steps that are too long for z are too long for the parameter integral.
    `source_slope` gives z′ then; without it, it is the field at the source, in which a stiff problem magnifies the
    error of z.

    With `computed`, the captured tensors that were computed, every evaluation is checked for tensors that nobody
    differentiates; `None` leaves that check out.
    """

    def __init__(
        self,
        field: Field,
        reduction: Reduction,
        targets: Sequence[Tensor],
        determinism: Determinism,
        counter: Counter,
        *,
        source: Source | None = None,
        source_slope: Callable[[float], Tensor] | None = None,
        integrals_in_state: bool = False,
        with_time: bool = False,
        computed: Sequence[Tensor] | None = None,
    ):
        self.field = field
        self.targets = list(targets)
        self._determinism, self._counter = determinism, counter
        self.source = source
        self._source_slope = source_slope
        self.integrals_in_state = integrals_in_state
        self.with_time = with_time
        self.vjp_y = self.vjp_params = 0
        self.f: Tensor | None = None  # of the latest evaluation
        self.reduction = reduction
        self._computed = computed
        self.z = self.a = torch.empty(0)  # whole, for the leaves that are not solved for

    @cached_property
    def _accounting(self) -> Accounting:
        return Accounting(self.targets, self._computed or ())

    def layout(self, like: Tensor, targets: Sequence[Tensor] | None = None) -> Layout:
        """Where each segment sits, for states and targets with the sizes of these."""
        layout = self.field.layout.fitting(like)
        targets = self.targets if targets is None else targets
        segments, names = layout.segments(like), layout.names
        kept = [(segments[i], names[i].removeprefix("y0")) for i in self.reduction.indices]
        own = tuple(x for x, _ in kept) if not self.reduction.trivial else layout.unpack(like)
        state: AdjointState = AdjointState(
            a_t=like.new_empty((), dtype=real_dtype(like)) if self.with_time else (),
            z=own,
            a_z=own,
            a_params=tuple(_like(x, like) for x in targets) if self.integrals_in_state else (),
        )
        found = ["a_t"] if self.with_time else []
        found += [f"{part}{name}" for part in ("z", "a_z") for _, name in kept]
        found += [f"a_params[{i}]" for i in range(len(state.a_params))]
        leaves, node = flatten(state)
        return Layout(node, tuple(found), tuple(leaf.shape for _, leaf in leaves))

    def pack(self, z: Tensor, a: Tensor, a_t: Tensor | None, totals: Sequence[Tensor | None]) -> Tensor:
        """The vector, from whole states; the leaves that are not solved for are remembered."""
        self.z, self.a = z, a
        parts = [self.reduction.reduce(z), self.reduction.reduce(a)]
        if self.with_time:
            assert a_t is not None
            parts.insert(0, a_t.to(z.dtype).reshape(1))
        if self.integrals_in_state:
            sums = zip(totals, self.targets, strict=True)
            parts += [_like(torch.zeros_like(x) if s is None else s, z).reshape(-1) for s, x in sums]
        self._sizes = [part.numel() for part in parts]
        return torch.cat(parts)

    def unpack(self, w: Tensor, t: float) -> tuple[Tensor, Tensor]:
        """z and a_z, whole; z from its source if it has one."""
        z, a = self.split(w, self.z, self.a)
        return (z if self.source is None else self.source(t)), a

    def split(self, w: Tensor, z: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """z and a_z out of the vector, whole: what is not solved for is taken from z and a."""
        first, size = int(self.with_time), self.reduction.size(z)
        _, own_z, own_a, _ = w.split([first, size, size, w.numel() - first - 2 * size])
        return self.reduction.restore(own_z, z), self.reduction.restore(own_a, a)

    def integrals(self, w: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """a_t and a_θ, where they are solved for."""
        parts = w.split(self._sizes)
        a_t = parts[0].real.reshape(()) if self.with_time else None
        if not self.integrals_in_state:
            return a_t, []
        sums = parts[len(parts) - len(self.targets) :]
        found: list[Tensor | None] = []
        for s, x in zip(sums, self.targets, strict=True):
            if x.is_complex() and not s.is_complex():
                s = torch.view_as_complex(s.reshape(*x.shape, 2).clone())  # whose place in memory may not be even
            s = s.real if s.is_complex() and not x.is_complex() else s
            found.append(s.reshape(x.shape))
        return a_t, found

    def slope(
        self, t: float, w: Tensor, params: bool, keep: bool = False
    ) -> tuple[Tensor, list[Tensor | None], Integrand | None]:
        """The slope of the vector; with `params` also aᵀ∂f/∂θ, with `keep` what it takes to compute that later."""
        params = params or self.integrals_in_state
        z, a = self.unpack(w, t)
        z, time, f = self.evaluate(t, z)
        leaves = [z, *([time] if self.with_time else []), *(self.targets if params else [])]
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if f.requires_grad:
            grads = backpropagate([f], leaves, [a], retain_graph=keep)
        self.vjp_y += 1
        self.vjp_params += params and bool(self.targets)
        split = 1 + self.with_time
        of_params = [_dense(g) for g in grads[split:]]
        self.f = f.detach() if self._source_slope is None else self._source_slope(t)
        grad_z = torch.zeros_like(z) if grads[0] is None else grads[0]
        k = self._join(grads[1] if self.with_time else None, grad_z, of_params)
        kept = Integrand(f, a) if keep else None
        return k, of_params, kept

    def _join(self, of_time: Tensor | None, of_z: Tensor, of_params: Sequence[Tensor | None]) -> Tensor:
        assert self.f is not None
        parts = [self.reduction.reduce(self.f), self.reduction.reduce(of_z)]
        solved = parts[0].numel() + self.with_time
        if self.with_time:
            parts.insert(0, of_z.new_zeros(1) if of_time is None else of_time.reshape(1).to(of_z.dtype))
        if self.integrals_in_state:
            pairs = zip(of_params, self.targets, strict=True)
            grads = [torch.zeros_like(x) if g is None else g for g, x in pairs]
            parts += [(g if g.dtype == of_z.dtype else _like(g, of_z)).reshape(-1) for g in grads]
        else:
            parts[-1] = parts[-1].neg()
        k = torch.cat(parts)
        if self.integrals_in_state:
            k[solved:].neg_()
        if self.with_time:
            k[:1].neg_()
        return k

    def evaluate(self, t: float, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z and t as leaves, and the field there with its graph."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            time = torch.full((), t, dtype=real_dtype(z), device=z.device, requires_grad=self.with_time)
            f = self._answer(self.field, time, z)
        if self._computed is not None:
            self._accounting.check([Evaluation(time, z, f)], ())
        return z, time, f

    def evaluate_batch(self, times: Tensor, zs: Tensor) -> Tensor:
        """The field at several times, with its graph."""
        with torch.enable_grad():
            return self._answer(torch.func.vmap(self.field, randomness="same"), times, zs)

    def _answer(self, field: Callable[..., Tensor], t: Tensor, z: Tensor) -> Tensor:
        if self._determinism.stateful:
            return self._determinism.evaluate(field, t, z, repeated=self._counter.check)
        return field(t, z)

    def count_vjps(self, y: int, params: int) -> None:
        """VJPs that a program has computed."""
        self.vjp_y += y
        if self.targets:
            self.vjp_params += y if self.integrals_in_state else params

    def params_vjp(self, integrand: Integrand, count: int = 1) -> list[Tensor | None]:
        """aᵀ∂f/∂θ from an evaluation, or the sum over a batch of them."""
        self.vjp_params += count
        if not integrand.f.requires_grad or not self.targets:
            return [None] * len(self.targets)
        return [_dense(g) for g in backpropagate([integrand.f], self.targets, [integrand.a])]


def _dense(grad: Tensor | None) -> Tensor | None:
    """A gradient that can be summed and measured: embeddings have sparse ones."""
    return grad if grad is None or grad.layout is torch.strided else grad.to_dense()


def _like(x: Tensor, state: Tensor) -> Tensor:
    """A gradient in the dtype of the state; a complex one beside a real state as pairs."""
    x = x.detach()
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() and not state.is_complex() else x).to(state.dtype)

r"""Integrals along a solution: a flow's log-determinant, a regulariser's cost.

With z′ = f(t, z), a running integral adds a leaf c′ = r(t, z) per sample to the state. Nothing reads it, so it is no
part of the ODE; and all rates of one evaluation share what is costly, f and its products with the Jacobian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from .products import vjp

Velocity = Callable[[Tensor, Tensor], Tensor]


class Evaluation:
    """One evaluation of z′ = f(t, z), and what running integrals want to know about it: each is computed once.

    Attributes:
        velocity: f itself.
        t, z: where it is evaluated; z has shape (batch, ...).
        noise: v, shaped like z, the same throughout a solve; `None` where nothing asked for it.
    """

    def __init__(self, velocity: Velocity, t: Tensor, z: Tensor, noise: Tensor | None = None):
        self.velocity = velocity
        self.t = t
        self.z = z
        self.noise = noise

    @cached_property
    def linearised(self) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
        """f, and the function v ↦ vᵀ ∂f/∂z."""
        return vjp(partial(self.velocity, self.t), self.z)

    @cached_property
    def f(self) -> Tensor:
        return self.velocity(self.t, self.z) if self.noise is None else self.linearised[0]

    @cached_property
    def vjp(self) -> Tensor:
        """vᵀ ∂f/∂z."""
        assert self.noise is not None, "a running integral that reads vjp must say needs_noise"
        return self.linearised[1](self.noise)[0]


class Running(ABC):
    """A rate to be integrated along a solution, per sample.

    To write one, provide:

    1. `name`: what its integral is called;
    2. `needs_noise`: whether it reads `Evaluation.vjp` or `Evaluation.noise`;
    3. `rate(at)`: shape (batch,).
    """

    name: str
    needs_noise: bool = False

    @abstractmethod
    def rate(self, at: Evaluation) -> Tensor: ...


class Regulariser(Running):
    """A running cost that is added to a loss with a weight λ."""

    weight: float


def check_names(regularisers: Sequence[Regulariser], *taken: str) -> tuple[Regulariser, ...]:
    """Refuse regularisers whose integrals could not be told apart."""
    if isinstance(regularisers, str) or not isinstance(regularisers, Sequence):
        raise TypeError(f"regularisers: expected a sequence of them, found {type(regularisers).__name__}")
    for i, one in enumerate(regularisers):
        if not isinstance(one, Regulariser):
            found = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise TypeError(f"regularisers[{i}]: expected a Regulariser, found {found}")
    names = [*taken, *(regulariser.name for regulariser in regularisers)]
    if len(set(names)) < len(names):
        raise ValueError(f"regularisers: expected names of their own, found {names}")
    return tuple(regularisers)


def penalty(regularisers: Sequence[Regulariser], costs: dict[str, Tensor]) -> Tensor:
    """Σ λ·mean(cost), what to add to the loss; `costs` has one value per sample under each regulariser's name."""
    terms = [regulariser.weight * costs[regulariser.name].mean() for regulariser in regularisers]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def per_sample_mean(x: Tensor) -> Tensor:
    """Over all axes but the first."""
    return x.flatten(1).mean(1)


def along(
    velocity: Velocity, running: Sequence[Running], t: Tensor, state: tuple[Tensor, ...], noise: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The field of (z, c₁, c₂, …): bind the first two arguments with `functools.partial`, pass noise in `args`."""
    at = Evaluation(velocity, t, state[0], noise)
    rates = [integral.rate(at) for integral in running]  # first, so that f comes out of their linearisation
    return (at.f, *rates)


def start(z: Tensor, running: Sequence[Running], **values: Tensor) -> tuple[Tensor, ...]:
    """The state at the start: zeros, but for integrals whose values are given by name."""
    return (z, *(values.get(integral.name, z.new_zeros(z.shape[0])) for integral in running))


def integrals_of(running: Sequence[Running]) -> tuple[bool, ...]:
    """Which leaves of the state are only integrals."""
    return (False, *(True for _ in running))


def noise_for(running: Sequence[Running], z: Tensor, kind: str = "gaussian") -> tuple[Any, ...]:
    """The `args` of a solve: one draw of noise if any integral wants it, else none."""
    if not any(integral.needs_noise for integral in running):
        return ()
    if kind == "gaussian":
        return (torch.randn_like(z),)
    if kind == "rademacher":
        return (torch.randint_like(z, 2).mul_(2).sub_(1),)
    raise ValueError(f"noise: expected 'gaussian' or 'rademacher', found {kind!r}")

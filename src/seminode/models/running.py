r"""Integrals along a solution: a flow's log-determinant, a regulariser's cost.

For z′ = f(t, z), a running integral adds a leaf with c′ = r(t, z), one value per sample, to the state. The field does
not read this leaf, so it is left out of error control. All rates share one evaluation of f and its VJPs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .._field.checks import described
from .products import vjp

Velocity = Callable[[Tensor, Tensor], Tensor]

#: Distributions of the noise in stochastic estimates.
Noise = Literal["gaussian", "rademacher"]


class Evaluation:
    """One evaluation of z′ = f(t, z), with cached values that the rates of running integrals share.

    Attributes:
        velocity: the function f.
        t, z: the point of the evaluation; z has shape (batch, ...).
        noise: v, of the shape of z and constant during a solve; `None` if no running integral needs it.
        f: the value f(t, z).
    """

    def __init__(self, velocity: Velocity, t: Tensor, z: Tensor, noise: Tensor | None = None):
        self.velocity = velocity
        self.t = t
        self.z = z
        self.noise = noise

    @cached_property
    def linearised(self) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
        """f(t, z), and the function v ↦ vᵀ ∂f/∂z."""
        return vjp(partial(self.velocity, self.t), self.z)

    @cached_property
    def f(self) -> Tensor:
        return self.velocity(self.t, self.z) if self.noise is None else self.linearised[0]

    @cached_property
    def vjp(self) -> Tensor:
        """vᵀ ∂f/∂z."""
        assert self.noise is not None, "a running integral that reads `vjp` must set `needs_noise`"
        return self.linearised[1](self.noise)[0]


class Running(ABC):
    """An integral along a solution, one value per sample.

    A subclass provides:

    1. `name`: the name of the integral;
    2. `needs_noise`: whether `rate` reads `Evaluation.vjp` or `Evaluation.noise`;
    3. `rate(at)`: the integrand at an `Evaluation`, of shape (batch,).

    Example:
        The length of the way along a solution; half of a circle here:

        >>> import torch
        >>> from seminode.models import Running, SolvingModule
        >>> class Length(Running):
        ...     name = "length"
        ...
        ...     def rate(self, at):
        ...         return at.f.norm(dim=1)
        >>> rotation = lambda t, z: torch.stack((-z[:, 1], z[:, 0]), 1)
        >>> z0, model = torch.tensor([[1.0, 0.0]]), SolvingModule(rtol=1e-6)
        >>> zs, ends = model.solve_along(rotation, z0, [0.0, torch.pi], [Length()])
        >>> round(ends["length"].item(), 3)
        3.142
    """

    name: str
    needs_noise: bool = False

    @abstractmethod
    def rate(self, at: Evaluation) -> Tensor:
        """The integrand, of shape (batch,).

        Arguments:
            at: an evaluation of the field, with `t`, `z`, the value `f`, and with `needs_noise` the noise v and `vjp`,
                vᵀ ∂f/∂z.
        """


class Regulariser(Running):
    """A running cost that is added to a loss with a weight λ: a `Running` with one more attribute, `weight`.

    Example:
        >>> import torch
        >>> from seminode.models import NeuralODE, Regulariser, penalty
        >>> class Size(Regulariser):
        ...     name, weight = "size", 0.1
        ...
        ...     def rate(self, at):
        ...         return at.z.square().sum(1)
        >>> model = NeuralODE(lambda t, z: -z, regularisers=[Size()], rtol=1e-6)
        >>> y, costs = model(torch.ones(3, 2), costs=True)
        >>> costs["size"], penalty(model.regularisers, costs)  # ∫ 2e⁻²ᵗ dt
        (tensor([0.8647, 0.8647, 0.8647]), tensor(0.0865))
    """

    weight: float


def check_names(regularisers: Any, *taken: str) -> tuple[Regulariser, ...]:
    """Check that all are `Regulariser` objects with distinct names, none of which is in `taken`."""
    if isinstance(regularisers, str) or not isinstance(regularisers, Sequence):
        raise TypeError(f"regularisers: expected a sequence of regularisers, found {type(regularisers).__name__}")
    checked: list[Regulariser] = []
    for i, regulariser in enumerate(cast("Sequence[Any]", regularisers)):
        if not isinstance(regulariser, Regulariser):
            raise TypeError(f"regularisers[{i}]: expected a Regulariser, found {described(regulariser)}")
        checked.append(regulariser)
    names = [*taken, *(regulariser.name for regulariser in checked)]
    if len(set(names)) < len(names):
        raise ValueError(f"regularisers: expected distinct names, found {names}")
    return tuple(checked)


def penalty(regularisers: Sequence[Regulariser], costs: dict[str, Tensor]) -> Tensor:
    """The term Σ λ·mean(cost) of the loss.

    Arguments:
        regularisers: those of a model, with their weights λ.
        costs: what the model returns with `costs=True`: one value per sample for the name of each regulariser.

    Example:
        >>> from seminode.models import KineticEnergy, penalty
        >>> penalty([KineticEnergy(0.5)], {"kinetic": torch.tensor([1.0, 3.0])})
        tensor(1.)
    """
    terms = [regulariser.weight * costs[regulariser.name].mean() for regulariser in regularisers]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def per_sample_mean(x: Tensor) -> Tensor:
    """The mean over all axes but the first."""
    return x.flatten(1).mean(1)


def along(
    velocity: Velocity, running: Sequence[Running], t: Tensor, state: tuple[Tensor, ...], noise: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The field of the state (z, c₁, c₂, …).

    Bind the first two arguments with `functools.partial` and pass the noise to `solve` in `args`.
    """
    at = Evaluation(velocity, t, state[0], noise)
    rates = [integral.rate(at) for integral in running]  # before f, so that f is a by-product of their VJPs
    return (at.f, *rates)


def start(z: Tensor, running: Sequence[Running], **values: Tensor) -> tuple[Tensor, ...]:
    """The initial state (z, c₁, c₂, …): integrals start at 0, or at the values given by name."""
    return (z, *(values.get(integral.name, z.new_zeros(z.shape[0])) for integral in running))


def integrals_of(running: Sequence[Running]) -> tuple[bool, ...]:
    """One flag per leaf of the state (z, c₁, c₂, …): whether it is a plain integral."""
    return (False, *(True for _ in running))


def noise_for(running: Sequence[Running], z: Tensor, kind: Noise = "gaussian") -> tuple[Any, ...]:
    """The `args` of a solve: one sample of the noise if any integral needs it, otherwise nothing."""
    if not any(integral.needs_noise for integral in running):
        return ()
    if kind == "gaussian":
        return (torch.randn_like(z),)
    if kind == "rademacher":
        return (torch.randint_like(z, 2).mul_(2).sub_(1),)
    raise ValueError(f"noise: expected 'gaussian' or 'rademacher', found {kind!r}")

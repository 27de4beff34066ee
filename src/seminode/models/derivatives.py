"""Total time derivatives along a solution: z′ = f(t, z), z″ = ∂f/∂t + (∂f/∂z) f, and so on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._field.checks import check_count
from .products import vjp

#: (t, z) ↦ (z′, z″, …)
Derivatives = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def total_derivatives(
    velocity: Callable[[Tensor, Tensor], Tensor], t: Tensor, z: Tensor, order: int
) -> tuple[Tensor, ...]:
    r"""(z′, z″, …, z⁽ᴷ⁾) of the solution of z′ = f(t, z) that passes through z at time t.

    Each follows from the one before by the chain rule, z⁽ᵏ⁺¹⁾ = ∂z⁽ᵏ⁾/∂t + (∂z⁽ᵏ⁾/∂z) f. f is evaluated once, whatever
    K is; each further order makes the whole two to three times as dear. All results can be differentiated.

    Arguments:
        velocity: f(t, z), K − 1 times differentiable; for a gradient of the result, K times.
        t: a 0-d tensor.
        z: of any shape.
        order: K, at least 1.

    Example:
        >>> t, z = torch.tensor(2.0), torch.tensor([3.0])
        >>> total_derivatives(lambda t, z: t * z, t, z, 3)  # z′ = tz, z″ = (1 + t²)z, z‴ = (3t + t³)z
        (tensor([6.]), tensor([15.]), tensor([42.]))
    """
    check_count("order", order)

    def first(t: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return (velocity(t, z),)

    upto: Derivatives = first
    for _ in range(order - 1):
        upto = _one_more(upto)
    return upto(t, z)


def _one_more(upto: Derivatives) -> Derivatives:
    """From (z′, …, z⁽ᵏ⁾) to (z′, …, z⁽ᵏ⁺¹⁾) as functions of (t, z).

    z⁽ᵏ⁺¹⁾ is a product of the Jacobian of z⁽ᵏ⁾ with the vector (1, f). f is known only after the evaluation that the
    product is about, and u ↦ uᵀJ is linear with transpose v ↦ Jv: two pull-backs do it with one evaluation, where
    forward mode would need another one for f.
    """

    def further(t: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        known, pull = vjp(upto, t, z)
        others = tuple(torch.zeros_like(x) for x in known[:-1])

        def transposed(u: Tensor) -> tuple[Tensor, ...]:
            return pull((*others, u))

        _, push = vjp(transposed, torch.zeros_like(known[-1]))
        (following,) = push((torch.ones_like(t), known[0]))
        return (*known, following)

    return further

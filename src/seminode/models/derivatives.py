"""Total time derivatives along a solution: z′ = f(t, z), z″ = ∂f/∂t + (∂f/∂z) f, and so on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._field.checks import check_count
from .products import vjp

#: A function (t, z) ↦ (z′, z″, …).
Derivatives = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def total_derivatives(
    velocity: Callable[[Tensor, Tensor], Tensor], t: Tensor, z: Tensor, order: int
) -> tuple[Tensor, ...]:
    r"""(z′, z″, …, z⁽ᴷ⁾) of the solution of z′ = f(t, z) that passes through z at time t.

    Each derivative follows from the previous one by the chain rule, z⁽ᵏ⁺¹⁾ = ∂z⁽ᵏ⁾/∂t + (∂z⁽ᵏ⁾/∂z) f. f is evaluated
    once for any K. Each further order multiplies the total cost by two to three. All results are differentiable.

    Reference: in regularisers, Kelly, Bettencourt, Johnson and Duvenaud, *Learning Differential Equations that are Easy
    to Solve*, NeurIPS 2020, arXiv:2007.04504.

    Arguments:
        velocity: f(t, z), differentiable K − 1 times, or K times if the result is to be differentiated.
        t: time, a 0-d tensor.
        z: state, a tensor of any shape.
        order: K, at least 1.

    Example:
        >>> t, z = torch.tensor(2.0), torch.tensor([3.0])
        >>> total_derivatives(lambda t, z: t * z, t, z, 3)  # z′ = tz, z″ = (1 + t²)z, z‴ = (3t + t³)z
        (tensor([6.]), tensor([15.]), tensor([42.]))
    """
    check_count("order", order)

    def first(t: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return (velocity(t, z),)

    derivatives: Derivatives = first
    for _ in range(order - 1):
        derivatives = _next_order(derivatives)
    return derivatives(t, z)


def _next_order(derivatives: Derivatives) -> Derivatives:
    """From the function (t, z) ↦ (z′, …, z⁽ᵏ⁾) to the function (t, z) ↦ (z′, …, z⁽ᵏ⁺¹⁾).

    z⁽ᵏ⁺¹⁾ = J (1, f), where J is the Jacobian of z⁽ᵏ⁾ with respect to (t, z). Forward mode would need f before it
    evaluates z⁽ᵏ⁾, hence a second evaluation. Here the JVP is two VJPs: u ↦ uᵀJ is linear, and its own VJP is v ↦ Jv.
    """

    def next_derivatives(t: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        values, vjp_fn = vjp(derivatives, t, z)
        zeros = tuple(torch.zeros_like(x) for x in values[:-1])

        def last_vjp(u: Tensor) -> tuple[Tensor, ...]:
            return vjp_fn((*zeros, u))

        _, jvp_fn = vjp(last_vjp, torch.zeros_like(values[-1]))
        (following,) = jvp_fn((torch.ones_like(t), values[0]))
        return (*values, following)

    return next_derivatives

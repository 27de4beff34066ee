"""The field near a state: its value, and products with its Jacobian.

A complex state counts as twice as many real numbers, so that fields which are not holomorphic have a Jacobian too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: About how many numbers the cotangents of one batch of VJPs have, at most.
CHUNK = 1 << 20


def to_real(x: Tensor) -> Tensor:
    """The entries as one vector of real numbers."""
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)


def from_real(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `to_real`."""
    if like.is_complex():
        return torch.view_as_complex(x.reshape(*like.shape, 2))
    return x.reshape(like.shape)


class Linearisation:
    """An evaluation f = f(y) with its graph, where y is a leaf: derivatives of f with respect to y come from it."""

    def __init__(self, f: Tensor, y: Tensor):
        self.f, self.y = f, y
        self.size = to_real(y.detach()).numel()
        self._transposed: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, evaluate: Callable[[Tensor], Tensor], y: Tensor) -> Linearisation:
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            return cls(evaluate(leaf), leaf)

    def vjp(self, u: Tensor) -> Tensor:
        """uᵀJ, for a vector of real numbers."""
        if not self.f.requires_grad:
            return torch.zeros_like(u)
        (grad,) = torch.autograd.grad(self.f, self.y, from_real(u, self.y), retain_graph=True, allow_unused=True)
        return torch.zeros_like(u) if grad is None else to_real(grad)

    def jvp(self, v: Tensor) -> Tensor:
        """Jv, for a vector of real numbers: the derivative of u ↦ uᵀJ, which is linear."""
        if not self.f.requires_grad:
            return torch.zeros_like(v)
        if self._transposed is None:
            with torch.enable_grad():
                u = torch.zeros_like(self.f, requires_grad=True)
                (grad,) = torch.autograd.grad(self.f, self.y, u, create_graph=True, allow_unused=True)
            self._transposed = u, torch.zeros_like(self.y) if grad is None else grad
        u, grad = self._transposed
        if not grad.requires_grad:
            return torch.zeros_like(v)
        (product,) = torch.autograd.grad(grad, u, from_real(v, self.y), retain_graph=True, allow_unused=True)
        return torch.zeros_like(v) if product is None else to_real(product)

    def vjps(self, us: Tensor) -> Tensor:
        """uᵀJ for the rows of a matrix, by as few passes as possible."""
        rows = max(1, CHUNK // self.size)
        return torch.cat([self._vjps(part) for part in us.split(rows)])

    def _vjps(self, us: Tensor) -> Tensor:
        if not self.f.requires_grad:
            return torch.zeros_like(us)
        seeds = (
            torch.stack([from_real(u, self.y) for u in us]) if self.y.is_complex() else us.reshape(-1, *self.y.shape)
        )
        try:
            (grads,) = torch.autograd.grad(
                self.f, self.y, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
        except RuntimeError:  # an operation without a rule for batches
            return torch.stack([self.vjp(u) for u in us])
        if grads is None:
            return torch.zeros_like(us)
        return (torch.view_as_real(grads.resolve_conj()) if grads.is_complex() else grads).reshape(len(us), -1)

    def matrix(self) -> Tensor:
        """The Jacobian, (n, n)."""
        return self.vjps(torch.eye(self.size, dtype=self._dtype, device=self.y.device))

    def blocks(self) -> Tensor | None:
        """The Jacobian of a field that treats the samples of the first axis on their own, (B, d, d).

        `None` if it does not: one more VJP, with random cotangents, tells.
        """
        count = len(self.y)
        size = self.size // count
        eye = torch.eye(size, dtype=self._dtype, device=self.y.device)
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(count, size, dtype=torch.float64, generator=generator).to(eye)
        seeds = torch.cat([eye[:, None, :].expand(size, count, size), probe[None]])
        found = self.vjps(seeds.reshape(size + 1, -1)).reshape(size + 1, count, size)
        blocks, expected = found[:-1].transpose(0, 1), found[-1]
        product = torch.einsum("bi,bij->bj", probe, blocks)
        scale = torch.einsum("bi,bij->bj", probe.abs(), blocks.abs()).amax()
        same = (product - expected).abs().amax() <= 1e3 * torch.finfo(eye.dtype).eps * scale
        return blocks if bool(same) else None

    @property
    def _dtype(self) -> torch.dtype:
        return self.y.real.dtype if self.y.is_complex() else self.y.dtype

"""Central differences of a solve: of the frozen map, whose step sizes are held fixed, and of the solve itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import seminode as sn
from seminode._field.pytree import flatten, unflatten


@dataclass(frozen=True)
class Case:
    """A problem with every kind of differentiable input, all in float64."""

    y0: Any
    ts: Tensor
    arg: Tensor
    weight: Tensor
    jumps: tuple[float, ...] = ()

    def inputs(self) -> dict[str, list[Tensor]]:
        leaves = [leaf for _, leaf in flatten(self.y0)[0]]
        return {"y0": leaves, "ts": [self.ts], "args": [self.arg], "params": [self.weight]}

    def moved(self, name: str, directions: Sequence[Tensor], h: float) -> Case:
        """The case with one kind of input moved along a direction."""
        if name == "y0":
            leaves, node = flatten(self.y0)
            moved = [leaf + h * d for (_, leaf), d in zip(leaves, directions, strict=True)]
            return replace(self, y0=unflatten(node, iter(moved)))
        field = {"ts": "ts", "args": "arg", "params": "weight"}[name]
        return replace(self, **{field: getattr(self, field) + h * directions[0]})

    def requiring_grad(self) -> Case:
        leaves, node = flatten(self.y0)
        fresh = [leaf.clone().requires_grad_() for _, leaf in leaves]
        return replace(
            self,
            y0=unflatten(node, iter(fresh)),
            ts=self.ts.clone().requires_grad_(),
            arg=self.arg.clone().requires_grad_(),
            weight=self.weight.clone().requires_grad_(),
        )

    def field(self) -> Callable[..., Any]:
        """Nonlinear, coupled across leaves, time-dependent, discontinuous at the jumps; closes over the weight."""
        weight, jumps = self.weight, self.jumps

        def field(t: Tensor, y: Any, arg: Tensor) -> Any:
            leaves, node = flatten(y)
            flat = torch.cat([leaf.reshape(-1) for _, leaf in leaves])
            side = 1.0
            for jump in jumps:
                side = side * torch.where(t < jump, 1.0, -0.8)
            k = torch.tanh(weight @ flat) * torch.cos(2.0 * t + arg) + side * 0.5 * torch.sin(flat + arg)
            pieces = k.split([leaf.numel() for _, leaf in leaves])
            return unflatten(node, iter([p.reshape(leaf.shape) for p, (_, leaf) in zip(pieces, leaves, strict=True)]))

        return field

    def solve(self, **options: Any) -> sn.Solution:
        return sn.solve(self.field(), self.y0, self.ts, args=(self.arg,), jumps=self.jumps or None, **options)


def loss(ys: Any) -> Tensor:
    """Reads every entry of every output, each in its own way."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (_, leaf) in enumerate(flatten(ys)[0]):
        weights = torch.cos(torch.arange(leaf.numel(), dtype=torch.float64) + i).reshape(leaf.shape)
        total = total + (weights * leaf).sum() + 0.1 * (leaf**2).sum()
    return total


NESTINGS = ("tensor", "tuple", "list", "dict")


def case(nesting: str, backward: bool = False, jumps: bool = False, end: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    y0 = {
        "tensor": normal(2, 2),
        "tuple": (normal(3), normal(1, 1)),
        "list": [normal(2), (normal(2),)],
        "dict": {"q": normal(2), "rest": {"p": normal(1), "s": normal(1)[0]}},
    }[nesting]
    ts = torch.tensor([0.0, 0.13, 0.4, 0.743, 0.81, 1.0], dtype=torch.float64) * end
    if backward:
        ts = ts.flip(0)
    places = (0.31 * end, 0.62 * end) if jumps else ()
    return Case(y0, ts, torch.tensor(0.3, dtype=torch.float64), 0.7 * normal(4, 4), places)


def gradients(problem: Case, **options: Any) -> tuple[dict[str, list[Tensor]], sn.Solution]:
    problem = problem.requiring_grad()
    solution = problem.solve(**options)
    loss(solution.ys).backward()
    return {
        name: [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
        for name, tensors in problem.inputs().items()
    }, solution


def directional(
    problem: Case, name: str, directions: Sequence[Tensor], h: float, order: int = 4, **options: Any
) -> float:
    """The central difference of the loss along a direction of one kind of input, of order four or two.

    The second order takes half as many solves. It is enough for a step h whose square is far below the tolerance.
    """

    def at(x: float) -> float:
        with torch.no_grad():
            return float(loss(problem.moved(name, directions, x).solve(**options).ys))

    if order == 2:
        return (at(h) - at(-h)) / (2.0 * h)
    return (8.0 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12.0 * h)

"""Quadrature rules on [0, 1] as data: nodes, weights, and the weights of a lower rule on the same nodes.

Radau, Lobatto, Gauss: Hairer, Wanner, *Solving ODEs II*, IV.5; Kronrod's extension of the three-point Gauss rule:
Kronrod, *Nodes and weights of quadrature formulas* (1965).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, sqrt


def interpolatory(nodes: Sequence[float]) -> tuple[float, ...]:
    """The weights that integrate polynomials of degree len(nodes) − 1 exactly.

    >>> interpolatory((0.0, 0.5, 1.0))
    (0.1666..., 0.666..., 0.1666...)
    """
    weights = []
    for i, x in enumerate(nodes):
        basis = [1.0]  # the Lagrange polynomial of node i, constant first
        for j, z in enumerate(nodes):
            if j != i:
                shifted = zip([*(-z * c for c in basis), 0.0], [0.0, *basis], strict=True)
                basis = [(a + b) / (x - z) for a, b in shifted]
        weights.append(fsum(c / (m + 1) for m, c in enumerate(basis)))
    return tuple(weights)


@dataclass(frozen=True)
class Rule:
    """∫₀¹ g ≈ Σ wⱼ g(xⱼ), exact up to `degree`; with `lower` in place of w a coarser rule, to compare with."""

    nodes: tuple[float, ...]
    weights: tuple[float, ...]
    lower: tuple[float, ...]
    degree: int

    @cached_property
    def sharpening(self) -> float:
        """By which power of the relative difference to the lower rule the error of this one falls.

        In a step of length h the lower rule has a relative error of order h^a, this one of order h^b: the power is b/a.
        """
        lower = 0  # the first degree at which the lower rule fails
        while abs(fsum(w * x**lower for w, x in zip(self.lower, self.nodes, strict=True)) - 1 / (lower + 1)) < 1e-12:
            lower += 1
        return (self.degree + 1) / lower

    @property
    def left(self) -> bool:
        return self.nodes[0] == 0.0

    @property
    def right(self) -> bool:
        return self.nodes[-1] == 1.0

    @property
    def inner(self) -> range:
        """The nodes that are no end of the interval."""
        return range(int(self.left), len(self.nodes) - int(self.right))


def _without_last(nodes: Sequence[float], weights: Sequence[float], degree: int) -> Rule:
    return Rule(tuple(nodes), tuple(weights), (*interpolatory(nodes[:-1]), 0.0), degree)


def _mirrored(half: Sequence[float]) -> list[float]:
    return [*half, *(1.0 - x for x in reversed(half))]


LOBATTO = {
    3: _without_last((0.0, 0.5, 1.0), (1 / 6, 2 / 3, 1 / 6), 3),
    4: _without_last(_mirrored((0.0, 0.5 - sqrt(0.05))), (1 / 12, 5 / 12, 5 / 12, 1 / 12), 5),
}
#: With a node at the left end only.
RADAU = {
    2: _without_last((0.0, 2 / 3), (1 / 4, 3 / 4), 2),
    3: _without_last(
        (0.0, (6 - sqrt(6)) / 10, (6 + sqrt(6)) / 10), (1 / 9, (16 + sqrt(6)) / 36, (16 - sqrt(6)) / 36), 4
    ),
}
GAUSS = {
    2: _without_last(_mirrored((0.5 - sqrt(1 / 12),)), (0.5, 0.5), 3),
    3: _without_last((0.5 - sqrt(0.15), 0.5, 0.5 + sqrt(0.15)), (5 / 18, 4 / 9, 5 / 18), 5),
}

# On [−1, 1]: the three Gauss nodes are the second, fourth and sixth.
_KRONROD_NODES = (
    0.960491268708020283423507092629080,
    0.774596669241483377035853079956480,
    0.434243749346802558002071502844628,
)
_KRONROD_WEIGHTS = (
    0.104656226026467265193823857192073,
    0.268488089868333440728569280666710,
    0.401397414775962222905051818618432,
    0.450916538658474142345110087045571,
)
KRONROD = Rule(
    (*((1 - x) / 2 for x in _KRONROD_NODES), 0.5, *((1 + x) / 2 for x in reversed(_KRONROD_NODES))),
    tuple(w / 2 for w in (*_KRONROD_WEIGHTS, *reversed(_KRONROD_WEIGHTS[:-1]))),
    (0.0, 5 / 18, 0.0, 4 / 9, 0.0, 5 / 18, 0.0),
    11,
)

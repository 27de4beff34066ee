"""Rooted trees and the order conditions of Runge-Kutta methods (Hairer, Norsett, Wanner, chapter II.2).

A tree is the tuple of its subtrees; () is a single vertex. A method is of order p if and only if
sum_i b_i phi_i(tree) = 1 / gamma(tree) for every tree of at most p vertices; its dense output, if and only if
sum_i b_i(x) phi_i(tree) = x^|tree| / gamma(tree).
"""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from seminode.tableaux import Tableau

Tree = tuple["Tree", ...]
Array = NDArray[np.float64]


@cache
def rooted_trees(order: int) -> tuple[Tree, ...]:
    """All rooted trees with `order` vertices, each once."""
    return tuple(sorted(set(_forests(order - 1, order - 1))))


def _forests(vertices: int, largest: int) -> list[Tree]:
    """Sorted tuples of trees that have `vertices` vertices together and at most `largest` each."""
    if vertices == 0:
        return [()]
    return [
        tuple(sorted((tree, *rest)))
        for size in range(1, min(vertices, largest) + 1)
        for tree in rooted_trees(size)
        for rest in _forests(vertices - size, size)
    ]


def vertices(tree: Tree) -> int:
    """|tree|"""
    return 1 + sum(vertices(subtree) for subtree in tree)


def density(tree: Tree) -> int:
    """gamma(tree), the product of the sizes of all subtrees, the tree itself included."""
    return vertices(tree) * prod(density(subtree) for subtree in tree)


def slope_weights(tree: Tree, a: Array) -> Array:
    """phi_i(tree) = prod over subtrees of sum_j a_ij phi_j(subtree), for every slope i."""
    weights = np.ones(len(a))
    for subtree in tree:
        weights = weights * (a @ slope_weights(subtree, a))
    return weights


def slope_matrix(tableau: Tableau) -> Array:
    """The matrix a of all slopes: the end slope f(t1, y1) is one more stage, whose row is b."""
    s = tableau.stages
    a = np.zeros((s + 1, s + 1))
    for i, row in enumerate((*tableau.a, tableau.b)):
        a[i, : len(row)] = row
    return a


def defect(tableau: Tableau, weights: ArrayLike, order: int, x: float = 1.0) -> float:
    """Largest violation of the conditions of exactly this order by the weights of all s + 1 slopes at x."""
    a = slope_matrix(tableau)
    trees = rooted_trees(order)
    sums = np.array([slope_weights(tree, a) for tree in trees]) @ np.asarray(weights, dtype=float)
    exact = np.array([x**order / density(tree) for tree in trees])
    return float(abs(sums - exact).max())

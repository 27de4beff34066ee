"""What a solve costs in F, the price of one evaluation of the field: the one place that says so."""

from __future__ import annotations

from ..solution import Stats


def backward_cost(backward: Stats) -> int:
    """Of a backward pass, in F: pulling an evaluation back costs about F for the state and again for the parameters.

    >>> backward_cost(Stats(nfe=6, vjp_y=6, vjp_params=5))
    17
    """
    return backward.nfe + backward.vjp_y + backward.vjp_params


def cost(forward: Stats, backward: Stats) -> int:
    """Of both passes, in F.

    >>> cost(Stats(nfe=8), Stats(nfe=6, vjp_y=6, vjp_params=5))
    25
    """
    return forward.nfe + backward_cost(backward)

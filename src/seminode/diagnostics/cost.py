"""The cost of a solve in F, the cost of one evaluation of the field."""

from __future__ import annotations

from ..solution import Stats


def backward_cost(backward: Stats) -> int:
    """The cost of a backward pass in F: a VJP costs about F for the state and another F for the parameters.

    Arguments:
        backward: the counters of the pass, `sol.stats.backward`.

    >>> backward_cost(Stats(nfe=6, vjp_y=6, vjp_params=5))
    17
    """
    return backward.nfe + backward.vjp_y + backward.vjp_params


def cost(forward: Stats, backward: Stats) -> int:
    """The cost of both passes in F, the cost of one evaluation of the field.

    Arguments:
        forward: the counters of the solve, `sol.stats`.
        backward: those of its backward pass, `sol.stats.backward`.

    >>> cost(Stats(nfe=8), Stats(nfe=6, vjp_y=6, vjp_params=5))
    25
    """
    return forward.nfe + backward_cost(backward)

"""How long the first step is, where the controller leaves that to the problem."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from .._error_norm import ErrorNorm
from .elementwise import choose, isfinite, maximum, minimum


def first_step(
    y0: Tensor, f0: Tensor, error: ErrorNorm, order: int, probe: Callable[[float], tuple[float, Tensor]]
) -> float:
    """The first step by the algorithm of Hairer, Nørsett and Wanner (*Solving ODEs I*, II.4).

    Arguments:
        y0, f0: the state and the field at the start.
        error: the norm of the error test.
        order: order of the error estimate.
        probe: `probe(h)` takes an Euler step of at most h and returns its length and the field at its end.
    """
    allowed = error.allowed(y0.abs())
    d0, d1 = error.measured(y0 / allowed), error.measured(f0 / allowed)
    h0 = choose((d0 < 1e-5) | (d1 < 1e-5), lambda: 1e-6, lambda: 0.01 * d0 / d1)
    h0 = choose((h0 > 0.0) & (h0 < math.inf), lambda: h0, lambda: 1e-6)  # elsewhere a norm has overflowed
    h0, f1 = probe(h0)
    d2 = error.measured((f1 - f0) / allowed) / h0
    largest = maximum(d1, d2)

    def refined() -> float:
        h1 = choose(largest <= 1e-15, lambda: maximum(1e-6, 1e-3 * h0), lambda: (0.01 / largest) ** (1.0 / order))
        return minimum(100.0 * h0, h1)

    # Where a norm is infinite, the error test rejects the step if it is too long.
    return choose(isfinite(largest), refined, lambda: h0)

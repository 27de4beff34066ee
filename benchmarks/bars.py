"""The targets of the race: speed-ups at equal gradient error, and distances from the limit."""

from __future__ import annotations

#: Targets for each problem, against torchdiffeq's adjoint, its fastest mode and diffrax's fastest; then for seminode
#: without compilation. A name without an entry takes that of its first word.
BARS: dict[str, dict[str, float]] = {
    "small": {"adjoint": 10.0, "best": 4.5, "diffrax": 1.15, "eager adjoint": 3.0, "eager direct": 1.3},
    "cde": {"adjoint": 5.0, "best": 3.0, "diffrax": 1.8, "eager best": 1.0},
    "cde-1024": {"adjoint": 5.0, "best": 3.0, "diffrax": 1.2, "eager best": 1.0},
    "pendulum": {"adjoint": 5.0, "best": 1.7, "diffrax": 2.0, "eager best": 1.0},
    "pendulum-fitted": {"adjoint": 5.0, "best": 1.3, "diffrax": 1.3, "eager best": 1.0},
    "flow": {"adjoint": 2.5, "best": 1.7, "diffrax": 2.0, "eager best": 1.0},
    # The peers' own problems.
    "diffrax": {"diffrax": 1.0},
    "spiral": {"diffrax": 1.0},
    "reversible": {"diffrax": 1.0},
    "sampling": {"diffrax": 1.0, "eager best": 1.5},
    "sampling-large": {"diffrax": 1.0, "eager best": 1.0},
}
#: Against diffrax's BacksolveAdjoint with the same solver, on every problem.
BACKSOLVE = 1.2
#: Against torchode on its own benchmark, eager and compiled (`benchmarks.batched`).
TORCHODE_LOOP = 2.0
#: The largest time allowed, in units of the limit: by problem, and for all others.
LIMITS = {"small": 1.7}
LIMIT = 1.25


def bars_of(problem: str) -> dict[str, float]:
    """The targets of a problem by its name, or by the longest beginning of it that ends at a hyphen."""
    words = problem.split("-")
    names = ("-".join(words[:n]) for n in range(len(words), 0, -1))
    return next((BARS[name] for name in names if name in BARS), {})

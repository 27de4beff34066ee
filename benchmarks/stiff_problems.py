"""Stiff problems of the *Test set for initial value problem solvers* (Mazzia and Magherini, 2008), and van der Pol's.

Each right-hand side is written once, in terms of `Arrays`, so that NumPy, torch and JAX solve the same problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arrays:
    """The functions of an array library that the problems need."""

    stack: Callable[[Sequence[Any]], Any]
    cat: Callable[[Sequence[Any]], Any]
    arange: Callable[[int, int], Any]
    where: Callable[[Any, float, float], Any]


@dataclass(frozen=True)
class StiffProblem:
    """y′ = rhs(arrays, t, y) on [0, end]. A tolerance rtol goes with atol = rtol·scale."""

    name: str
    rhs: Callable[[Arrays, Any, Any], Any]
    y0: Sequence[float]
    end: float
    scale: float
    jumps: tuple[float, ...] = ()
    #: Published values at the end, by index.
    published: dict[int, float] = field(default_factory=dict)
    #: For the reference: the same problem in fewer unknowns, its start, and all unknowns as a function of these.
    reduced: tuple[Callable[[Arrays, Any, Any], Any], Sequence[float], Callable[[Any], Sequence[Any]]] | None = None


def van_der_pol(xp: Arrays, t: Any, y: Any) -> Any:
    return xp.stack([y[1], 1000.0 * (1.0 - y[0] ** 2) * y[1] - y[0]])


def robertson(xp: Arrays, t: Any, y: Any) -> Any:
    first, second, third = 0.04 * y[0], 1e4 * y[1] * y[2], 3e7 * y[1] ** 2
    return xp.stack([second - first, first - second - third, third])


def hires(xp: Arrays, t: Any, y: Any) -> Any:
    fast = 280.0 * y[5] * y[7]
    return xp.stack(
        [
            -1.71 * y[0] + 0.43 * y[1] + 8.32 * y[2] + 0.0007,
            1.71 * y[0] - 8.75 * y[1],
            -10.03 * y[2] + 0.43 * y[3] + 0.035 * y[4],
            8.32 * y[1] + 1.71 * y[2] - 1.12 * y[3],
            -1.745 * y[4] + 0.43 * y[5] + 0.43 * y[6],
            -fast + 0.69 * y[3] + 1.71 * y[4] - 0.43 * y[5] + 0.69 * y[6],
            fast - 1.81 * y[6],
            -fast + 1.81 * y[6],
        ]
    )


def oregonator(xp: Arrays, t: Any, y: Any) -> Any:
    return xp.stack(
        [
            77.27 * (y[1] + y[0] * (1.0 - 8.375e-6 * y[0] - y[1])),
            (y[2] - (1.0 + y[0]) * y[1]) / 77.27,
            0.161 * (y[0] - y[2]),
        ]
    )


#: Rate constants of the air pollution problem.
POLLUTION_RATES = (
    *(0.35, 26.6, 1.23e4, 8.6e-4, 8.2e-4, 1.5e4, 1.3e-4, 2.4e4, 1.65e4, 9e3, 0.022, 1.2e4, 1.88, 1.63e4, 4.8e6),
    *(3.5e-4, 0.0175, 1e8, 4.44e11, 1240.0, 2.1, 5.78, 0.0474, 1780.0, 3.12),
)
#: What each of its 25 reactions consumes.
POLLUTION_REACTANTS = (
    *((1,), (2, 4), (5, 2), (7,), (7,), (7, 6), (9,), (9, 6), (11, 2), (11, 1), (13,), (10, 2), (14,), (1, 6), (3,)),
    *((4,), (4,), (16,), (16,), (17, 6), (19,), (19,), (1, 4), (19, 1), (20,)),
)
#: The reactions that enter the balance of each of its 20 species, with a sign, or twice.
POLLUTION_BALANCE = (
    (-1, -10, -14, -23, -24, 2, 3, 9, 11, 12, 22, 25),
    (-2, -3, -9, -12, 1, 21),
    (-15, 1, 17, 19, 22),
    (-2, -16, -17, -23, 15),
    (-3, 4, 4, 6, 7, 13, 20),
    (-6, -8, -14, -20, 3, 18, 18),
    (-4, -5, -6, 13),
    (4, 5, 6, 7),
    (-7, -8),
    (-12, 7, 9),
    (-9, -10, 8, 11),
    (9,),
    (-11, 10),
    (-13, 12),
    (14,),
    (-18, -19, 16),
    (-20,),
    (20,),
    (-21, -22, -24, 23, 25),
    (-25, 24),
)


def pollution(xp: Arrays, t: Any, y: Any, rates: Any = POLLUTION_RATES) -> Any:
    reactions = []
    for i, species in enumerate(POLLUTION_REACTANTS):
        reaction = rates[i] * y[species[0] - 1]
        reactions.append(reaction * y[species[1] - 1] if len(species) > 1 else reaction)
    return xp.stack([sum(reactions[r - 1] if r > 0 else -reactions[-r - 1] for r in row) for row in POLLUTION_BALANCE])


def e5(xp: Arrays, t: Any, y: Any) -> Any:
    first, second, third, fourth = 7.89e-10 * y[0], 1.1e7 * y[0] * y[2], 1.13e9 * y[1] * y[2], 1.13e3 * y[3]
    down, up = first - third, second - fourth
    return xp.stack([-first - second, down, down - up, up])  # y2 = y3 + y4, of which rounding would not leave much


def e5_reduced(xp: Arrays, t: Any, y: Any) -> Any:
    """E5 without y2, which is y3 + y4. With all four, rounding errors add up along this sum at tight tolerances."""
    a, c, d = y
    slopes = e5(xp, t, [a, c + d, c, d])
    return xp.stack([slopes[0], slopes[2], slopes[3]])


def medical_akzo(xp: Arrays, t: Any, y: Any) -> Any:
    """Penetration of antibodies into a tumour: 200 grid points with two concentrations each, of which one diffuses."""
    n = len(y) // 2
    u, v = y[0::2], y[1::2]
    inflow = xp.where(t <= 5.0, 2.0, 0.0)
    left = xp.cat([inflow.reshape(1), u[:-1]])
    right = xp.cat([u[1:], u[-1:]])
    x = xp.arange(1, n + 1) / n - 1.0
    reaction = 100.0 * u * v
    du = x**3 / 8.0 * (right - left) * (n / 2.0) + x**4 / 16.0 * (left - 2.0 * u + right) * n**2 - reaction
    return xp.stack([du, -reaction]).T.reshape(-1)


def problems(cells: int = 200) -> dict[str, StiffProblem]:
    """All problems by name; `cells` is the number of grid points of the medical Akzo problem."""
    polluted = [0.0] * 20
    for species, value in ((2, 0.2), (4, 0.04), (7, 0.1), (8, 0.3), (9, 0.01), (17, 0.007)):
        polluted[species - 1] = value
    every = [
        StiffProblem("van der Pol", van_der_pol, (2.0, 0.0), 2000.0, 1e-2),
        StiffProblem("Robertson", robertson, (1.0, 0.0, 0.0), 1e8, 1e-6, published={}),
        StiffProblem("HIRES", hires, (1.0, *[0.0] * 6, 0.0057), 321.8122, 1e-4, published={0: 7.371312573325668e-4}),
        StiffProblem(
            "OREGO",
            oregonator,
            (1.0, 2.0, 3.0),
            360.0,
            1e-2,
            published={0: 1.000814870318523, 1: 1228.178521549917, 2: 132.0554942846706},
        ),
        StiffProblem(
            "POLLU", pollution, polluted, 60.0, 1e-6, published={0: 0.05646255480022769, 1: 0.1342484130422339}
        ),
        StiffProblem(
            "E5",
            e5,
            (1.76e-3, 0.0, 0.0, 0.0),
            1e11,
            1e-17,  # at rtol = 1e-8, a smaller one would ask for less than the rounding errors of y2
            reduced=(e5_reduced, (1.76e-3, 0.0, 0.0), lambda y: (y[0], y[1] + y[2], y[1], y[2])),
        ),
        StiffProblem("medical Akzo", medical_akzo, (0.0, 1.0) * cells, 20.0, 1e-4, jumps=(5.0,)),
    ]
    return {problem.name: problem for problem in every}

"""DETEST, the 25 non-stiff problems of Hull, Enright, Fellen and Sedgwick, solved by seminode and by SciPy.

`python -m benchmarks.detest` prints end-point error and field evaluations (NFE) for each problem, tolerance
and solver, then the NFE of seminode relative to SciPy's at equal end-point error. The problems: "Comparing
numerical methods for ordinary differential equations", SIAM J. Numer. Anal. 9 (1972) 603-637.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy import integrate, optimize, special
from torch import Tensor

import seminode as sn
from seminode.solvers import SolverName

SciPyName = Literal["RK45", "DOP853"]
MethodName = SolverName | SciPyName
SEMINODE: tuple[SolverName, ...] = ("dopri5", "tsit5", "dopri8")
SCIPY: tuple[SciPyName, ...] = ("RK45", "DOP853")
PAIRS: tuple[tuple[SolverName, SciPyName], ...] = (("dopri5", "RK45"), ("tsit5", "RK45"), ("dopri8", "DOP853"))
RTOLS = (1e-3, 1e-5, 1e-7, 1e-9)
LADDER = tuple(10.0 ** (-k / 2) for k in range(6, 19))
REQUIRED_RATIO = 1.05
ERROR_FLOOR = 1e-12  # errors below this are dominated by the error of the reference


@dataclass(frozen=True, eq=False)
class DetestProblem:
    """y' = field(t, y), y(0) = y0 on [0, t_end] in float64; `exact(t)` is the closed form, if it exists."""

    name: str
    field: Callable[[Tensor, Tensor], Tensor]
    y0: Tensor
    t_end: float = 20.0
    exact: Callable[[float], Tensor] | None = None


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def linear(matrix: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda t, y: matrix @ y


def root(function: Callable[[float], float], low: float, high: float) -> float:
    return optimize.root_scalar(function, bracket=(low, high), xtol=1e-15).root


# Class A: single equations.


def a3_exact(t: float) -> Tensor:
    return vector(math.exp(math.sin(t)))


def a4_exact(t: float) -> Tensor:
    return vector(20 / (1 + 19 * math.exp(-t / 4)))


def a5_exact(t: float) -> Tensor:
    """A logarithmic spiral: t = r cos(a), y = r sin(a) turns the equation into dr/da = -r, r(pi/2) = 4."""

    def radius(a: float) -> float:
        return 4 * math.exp(math.pi / 2 - a)

    angle = root(lambda a: radius(a) * math.cos(a) - t, -0.7, 2.0)
    return vector(radius(angle) * math.sin(angle))


CLASS_A = (
    DetestProblem("A1", lambda t, y: -y, vector(1), exact=lambda t: vector(math.exp(-t))),
    DetestProblem("A2", lambda t, y: -(y**3) / 2, vector(1), exact=lambda t: vector(1 / math.sqrt(t + 1))),
    DetestProblem("A3", lambda t, y: y * torch.cos(t), vector(1), exact=a3_exact),
    DetestProblem("A4", lambda t, y: y / 4 * (1 - y / 20), vector(1), exact=a4_exact),
    DetestProblem("A5", lambda t, y: (y - t) / (y + t), vector(4), exact=a5_exact),
)

# Class B: small systems.


def b1(t: Tensor, y: Tensor) -> Tensor:
    """Lotka-Volterra: two conflicting populations."""
    prey, predator = y.unbind()
    return torch.stack([2 * (prey - prey * predator), prey * predator - predator])


def b2_exact(t: float) -> Tensor:
    """A linear chemical reaction with eigenvalues 0, -1, -3."""
    slow, fast = math.exp(-t), math.exp(-3 * t)
    return vector(1 + (slow + fast) / 2, 1 - fast, 1 + (fast - slow) / 2)


def b3(t: Tensor, y: Tensor) -> Tensor:
    """A nonlinear chemical reaction."""
    y1, y2, _ = y.unbind()
    return torch.stack([-y1, y1 - y2**2, y2**2])


def b3_exact(t: float) -> Tensor:
    """The Riccati equation y2' = exp(-t) - y2^2: y2 = u'/u, with Bessel functions for u'' = exp(-t) u."""
    s = math.exp(-t / 2)
    i1, k1 = special.i1(2), special.k1(2)
    u = k1 * special.i0(2 * s) + i1 * special.k0(2 * s)
    du = s * (i1 * special.k1(2 * s) - k1 * special.i1(2 * s))
    return vector(s**2, du / u, 1 - s**2 - du / u)


def b4(t: Tensor, y: Tensor) -> Tensor:
    """The integral surface of a torus."""
    y1, y2, y3 = y.unbind()
    r = torch.sqrt(y1**2 + y2**2)
    return torch.stack([-y2 - y1 * y3 / r, y1 - y2 * y3 / r, y1 / r])


def b4_exact(t: float) -> Tensor:
    r = 2 + math.cos(t)
    return vector(r * math.cos(t), r * math.sin(t), math.sin(t))


def b5(t: Tensor, y: Tensor) -> Tensor:
    """Euler's equations of a rigid body without external forces."""
    y1, y2, y3 = y.unbind()
    return torch.stack([y2 * y3, -y1 * y3, -0.51 * y1 * y2])


def b5_exact(t: float) -> Tensor:
    return vector(*special.ellipj(t, 0.51)[:3])


B2_MATRIX = torch.tensor([[-1, 1, 0], [1, -2, 1], [0, 1, -1]], dtype=torch.float64)
CLASS_B = (
    DetestProblem("B1", b1, vector(1, 3)),
    DetestProblem("B2", linear(B2_MATRIX), vector(2, 0, 1), exact=b2_exact),
    DetestProblem("B3", b3, vector(1, 0, 0), exact=b3_exact),
    DetestProblem("B4", b4, vector(3, 0, 0), exact=b4_exact),
    DetestProblem("B5", b5, vector(0, 1, 1), exact=b5_exact),
)

# Class C: moderate systems.


def decay_chain(rates: Iterable[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """Radioactive decay of each nuclide into the next; the last one is stable."""
    rate = vector(*rates)
    return linear(torch.diag(rate, -1) - torch.diag(torch.cat([rate, vector(0)])))


def c1_exact(t: float) -> Tensor:
    """Equal rates: a Poisson process, stopped at its ninth jump."""
    before = [math.exp(-t) * t**k / math.factorial(k) for k in range(9)]
    return vector(*before, float(special.gammainc(9, t)))


def c2_exact(t: float) -> Tensor:
    """Rates 1, ..., 9: a Yule process, stopped at ten individuals."""
    decayed = -math.expm1(-t)
    return vector(*(math.exp(-t) * decayed**k for k in range(9)), decayed**9)


def diffusion(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The heat equation by the method of lines, second differences on n points."""
    neighbour = torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
    return linear(neighbour + neighbour.T - 2 * torch.eye(n, dtype=torch.float64))


def diffusion_exact(n: int, t: float) -> Tensor:
    """Eigenvectors of the second difference are sines, eigenvalues -4 sin^2(k pi / (2 (n + 1)))."""
    k = torch.arange(1, n + 1, dtype=torch.float64)
    sines = torch.sin(torch.outer(k, k) * math.pi / (n + 1))
    decay = torch.exp(-4 * t * torch.sin(k * math.pi / (2 * (n + 1))) ** 2)
    return 2 / (n + 1) * (sines @ (decay * sines[0]))


def unit(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)[0]


# C5: Jupiter, Saturn, Uranus, Neptune and Pluto around the Sun, whose mass includes the inner planets. The
# state is five positions relative to the Sun, then five velocities, with 100 days as the unit of time.
GRAVITY = 2.95912208286
SUN_MASS = 1.00000597682
PLANET_MASSES = vector(0.954786104043e-3, 0.285583733151e-3, 0.437273164546e-4, 0.517759138449e-4, 0.277777777778e-5)
PLANETS = torch.tensor(
    [
        [3.42947415189, 3.35386959711, 1.35494901715],
        [6.64145542550, 5.97156957878, 2.18231499728],
        [11.2630437207, 14.6952576794, 6.27960525067],
        [-30.1552268759, 1.65699966404, 1.43785752721],
        [-21.1238353380, 28.4465098142, 15.3882659679],
        [-0.557160570446, 0.505696783289, 0.230578543901],
        [-0.415570776342, 0.365682722812, 0.169143213293],
        [-0.325325669158, 0.189706021964, 0.0877265322780],
        [-0.0240476254170, -0.287659532608, -0.117219543175],
        [-0.176860753121, -0.216393453025, -0.0148647893090],
    ],
    dtype=torch.float64,
)


def c5(t: Tensor, y: Tensor) -> Tensor:
    """y_i'' = G (-(M + m_i) y_i / |y_i|^3 + sum_{j != i} m_j ((y_j - y_i) / d_ij^3 - y_j / |y_j|^3))."""
    position, velocity = y.view(2, 5, 3).unbind()
    sunward = position / torch.linalg.vector_norm(position, dim=1, keepdim=True) ** 3
    apart = position[None, :] - position[:, None]
    # The identity avoids 0/0 for the distance of a planet to itself.
    cubed = (apart.square().sum(-1) + torch.eye(5, dtype=y.dtype)) ** 1.5
    pull = torch.einsum("j,ijk->ik", PLANET_MASSES, apart / cubed[..., None])
    # The Sun's own acceleration, sum_j m_j y_j / |y_j|^3, includes j = i: there M + m_i becomes M.
    acceleration = GRAVITY * (pull - SUN_MASS * sunward - PLANET_MASSES @ sunward)
    return torch.cat([velocity, acceleration]).flatten()


CLASS_C = (
    DetestProblem("C1", decay_chain([1] * 9), unit(10), exact=c1_exact),
    DetestProblem("C2", decay_chain(range(1, 10)), unit(10), exact=c2_exact),
    DetestProblem("C3", diffusion(10), unit(10), exact=partial(diffusion_exact, 10)),
    DetestProblem("C4", diffusion(51), unit(51), exact=partial(diffusion_exact, 51)),
    DetestProblem("C5", c5, PLANETS.flatten()),
)

# Class D: the two-body problem, a Kepler orbit from its perihelion, for five eccentricities.


def orbit(t: Tensor, y: Tensor) -> Tensor:
    position, velocity = y.view(2, 2).unbind()
    return torch.cat([velocity, -position / torch.linalg.vector_norm(position) ** 3])


def orbit_exact(e: float, t: float) -> Tensor:
    """Kepler's equation E - e sin(E) = t gives the eccentric anomaly E."""
    t = math.remainder(t, 2 * math.pi)
    anomaly = root(lambda x: x - e * math.sin(x) - t, -math.pi, math.pi)
    cos, sin, b = math.cos(anomaly), math.sin(anomaly), math.sqrt(1 - e**2)
    return vector(cos - e, b * sin, -sin / (1 - e * cos), b * cos / (1 - e * cos))


def orbit_problem(name: str, e: float) -> DetestProblem:
    perihelion = vector(1 - e, 0, 0, math.sqrt((1 + e) / (1 - e)))
    return DetestProblem(name, orbit, perihelion, exact=partial(orbit_exact, e))


CLASS_D = (
    orbit_problem("D1", 0.1),
    orbit_problem("D2", 0.3),
    orbit_problem("D3", 0.5),
    orbit_problem("D4", 0.7),
    orbit_problem("D5", 0.9),
)

# Class E: equations of second order, y = (x, x').


def e1(t: Tensor, y: Tensor) -> Tensor:
    """Bessel's equation of order one half in t + 1."""
    x, dx = y.unbind()
    return torch.stack([dx, -dx / (t + 1) - (1 - 0.25 / (t + 1) ** 2) * x])


def e1_exact(t: float) -> Tensor:
    s = t + 1
    scale = math.sqrt(2 / (math.pi * s))
    return vector(scale * math.sin(s), scale * (math.cos(s) - math.sin(s) / (2 * s)))


def e2(t: Tensor, y: Tensor) -> Tensor:
    """Van der Pol's oscillator."""
    x, dx = y.unbind()
    return torch.stack([dx, (1 - x**2) * dx - x])


def e3(t: Tensor, y: Tensor) -> Tensor:
    """Duffing's equation, forced."""
    x, dx = y.unbind()
    return torch.stack([dx, x**3 / 6 - x + 2 * torch.sin(2.78535 * t)])


def e4(t: Tensor, y: Tensor) -> Tensor:
    """A body falling through air."""
    _, dx = y.unbind()
    return torch.stack([dx, 0.032 - 0.4 * dx**2])


def e4_exact(t: float) -> Tensor:
    terminal = math.sqrt(0.08)
    s = 0.4 * terminal * t
    return vector(30 + math.log(math.cosh(s)) / 0.4, terminal * math.tanh(s))


def e5(t: Tensor, y: Tensor) -> Tensor:
    """Linear pursuit."""
    _, dx = y.unbind()
    return torch.stack([dx, torch.sqrt(1 + dx**2) / (25 - t)])


def e5_exact(t: float) -> Tensor:
    q = 25 / (25 - t)
    return vector((25 * math.log(q) - t + t**2 / 50) / 2, (q - 1 / q) / 2)


CLASS_E = (
    DetestProblem("E1", e1, e1_exact(0), exact=e1_exact),
    DetestProblem("E2", e2, vector(2, 0)),
    DetestProblem("E3", e3, vector(0, 0)),
    DetestProblem("E4", e4, vector(30, 0), exact=e4_exact),
    DetestProblem("E5", e5, vector(0, 0), exact=e5_exact),
)

PROBLEMS = {problem.name: problem for problem in CLASS_A + CLASS_B + CLASS_C + CLASS_D + CLASS_E}

# Measurements.


@dataclass(frozen=True)
class Run:
    """The end-point error of one solve, NaN if it did not reach t_end, and its NFE."""

    error: float
    nfe: int


def solve_scipy(problem: DetestProblem, method: SciPyName, rtol: float, atol: float) -> tuple[Tensor, int]:
    """y(t_end) and the NFE of SciPy's `solve_ivp`."""

    def field(t: float, y: np.ndarray) -> np.ndarray:
        return problem.field(torch.tensor(t, dtype=torch.float64), torch.from_numpy(y)).numpy()

    span, y0 = (0.0, problem.t_end), problem.y0.numpy()
    sol = integrate.solve_ivp(field, span, y0, method=method, rtol=rtol, atol=atol)
    y = torch.from_numpy(sol.y[:, -1].copy())
    return (y if sol.success else torch.full_like(y, math.nan)), sol.nfev


def solve_seminode(problem: DetestProblem, solver: SolverName, rtol: float, atol: float) -> tuple[Tensor, int]:
    """y(t_end) and the NFE of `seminode.solve`."""
    ts = vector(0, problem.t_end)
    try:
        with torch.no_grad():
            sol = sn.solve(problem.field, problem.y0, ts, solver=solver, rtol=rtol, atol=atol)
    except sn.SolveError as error:
        return torch.full_like(problem.y0, math.nan), error.stats.nfe
    return sol.ys[-1], sol.stats.nfe


@cache
def reference(problem: DetestProblem) -> Tensor:
    """y(t_end): the closed form, or SciPy's DOP853 at tolerances close to rounding."""
    if problem.exact is not None:
        return problem.exact(problem.t_end)
    return solve_scipy(problem, "DOP853", rtol=1e-13, atol=1e-14)[0]


def endpoint_error(problem: DetestProblem, y: Tensor) -> float:
    """max_i |y_i - ref_i| / (1 + |ref_i|) at t_end."""
    ref = reference(problem)
    return float(((y - ref).abs() / (1 + ref.abs())).max())


@cache
def measure(problem: DetestProblem, method: MethodName, rtol: float, atol: float) -> Run:
    if method == "RK45" or method == "DOP853":
        y, nfe = solve_scipy(problem, method, rtol, atol)
    else:
        y, nfe = solve_seminode(problem, method, rtol, atol)
    return Run(endpoint_error(problem, y), nfe)


# Work at equal accuracy.


def work_precision(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """(log error, log NFE), both monotone, error increasing.

    The end-point error is not a monotone function of the tolerance (it may pass through zero). Neighbours out of
    order are replaced by their mean: isotonic regression of log error against NFE.
    """
    pools: list[list[np.ndarray]] = []
    for run in sorted(runs, key=lambda run: run.nfe):
        if not run.error >= ERROR_FLOOR:  # NaN too
            continue
        pools.append([np.log([run.error, run.nfe])])
        while len(pools) > 1 and np.mean(pools[-1], 0)[0] >= np.mean(pools[-2], 0)[0]:
            pools[-2:] = [pools[-2] + pools[-1]]
    curve = np.array([np.mean(pool, 0) for pool in reversed(pools)]).reshape(-1, 2)
    return curve[:, 0], curve[:, 1]


def nfe_ratio(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """NFE(ours) / NFE(theirs) at equal error: the median over the errors that both reach; NaN if there are none."""
    (error_a, nfe_a), (error_b, nfe_b) = work_precision(ours), work_precision(theirs)
    if not (len(error_a) and len(error_b)):
        return math.nan
    low, high = max(error_a[0], error_b[0]), min(error_a[-1], error_b[-1])
    if low >= high:
        return math.nan
    error = np.linspace(low, high, 101)
    return float(np.exp(np.median(np.interp(error, error_a, nfe_a) - np.interp(error, error_b, nfe_b))))


def ladder(problem: DetestProblem, method: MethodName, atol_factor: float = 1.0) -> list[Run]:
    return [measure(problem, method, rtol, atol_factor * rtol) for rtol in LADDER]


def nfe_ratios(problem: DetestProblem, atol_factor: float = 1.0) -> list[float]:
    """The NFE ratio for each of `PAIRS`."""
    return [nfe_ratio(ladder(problem, a, atol_factor), ladder(problem, b, atol_factor)) for a, b in PAIRS]


# The command.


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def run_table(problems: Sequence[DetestProblem], rtols: Sequence[float], atol_factor: float) -> str:
    """End-point error and NFE for each problem, tolerance and solver."""
    rows = []
    for problem in problems:
        for rtol in rtols:
            row = [problem.name, f"{rtol:.0e}"]
            for method in (*SEMINODE, *SCIPY):
                run = measure(problem, method, rtol, atol_factor * rtol)
                row += [f"{run.error:.1e}", str(run.nfe)]
            rows.append(row)
        print(f"{problem.name}: table done", file=sys.stderr)
    return table(["problem", "rtol", *(cell for name in (*SEMINODE, *SCIPY) for cell in (name, "NFE"))], rows)


def ratio_table(problems: Sequence[DetestProblem], atol_factor: float) -> str:
    """NFE of seminode over NFE of SciPy at equal end-point error for each problem, and the medians."""
    ratios = []
    for problem in problems:
        ratios.append(nfe_ratios(problem, atol_factor))
        print(f"{problem.name}: ratios done", file=sys.stderr)
    rows = [[problem.name, *(f"{r:.3f}" for r in row)] for problem, row in zip(problems, ratios, strict=True)]
    lines = [table(["problem", *(f"{ours} / {theirs}" for ours, theirs in PAIRS)], rows), ""]
    for (ours, theirs), column in zip(PAIRS, np.array(ratios).T, strict=True):
        compared = column[np.isfinite(column)]
        median = np.median(compared) if len(compared) else math.nan
        required = f" (required: <= {REQUIRED_RATIO})" if (ours, theirs) == PAIRS[0] else ""
        line = f"- {ours} / {theirs}: {len(compared)} problems, median NFE ratio {median:.3f}{required}"
        lines.append(line)
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def floats(text: str) -> list[float]:
        return [float(item) for item in text.split(",")]

    def problems(text: str) -> list[DetestProblem]:
        unknown = [name for name in text.split(",") if name not in PROBLEMS]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(PROBLEMS)}")
        return [PROBLEMS[name] for name in text.split(",")]

    everything = [*PROBLEMS.values()]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detest", description="Solve the DETEST problems.")
    parser.add_argument("--problems", type=problems, default=everything, help="such as A1,B2; default: all")
    parser.add_argument("--rtols", type=floats, default=[*RTOLS], help="default: 1e-3,1e-5,1e-7,1e-9")
    parser.add_argument("--atol-factor", type=float, default=1.0, help="atol = factor * rtol; default: 1")
    parser.add_argument("--markdown", type=Path, help="also write the output to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_arguments(argv)
    report = "\n".join(
        [
            f"# DETEST, non-stiff: {len(options.problems)} problems, t in [0, 20], float64",
            "",
            "Under each solver: max_i |y_i - ref_i| / (1 + |ref_i|) at t = 20.",
            f"dopri5, tsit5, dopri8: seminode; RK45, DOP853: SciPy; atol = {options.atol_factor:g} * rtol.",
            "",
            run_table(options.problems, options.rtols, options.atol_factor),
            "",
            "## NFE ratio at equal end-point error",
            "",
            f"Median over the errors that both reach, for rtol = {LADDER[0]:.0e} ... {LADDER[-1]:.0e}.",
            "",
            ratio_table(options.problems, options.atol_factor),
        ]
    )
    print(report)
    if options.markdown:
        options.markdown.write_text(report + "\n")


if __name__ == "__main__":
    main()

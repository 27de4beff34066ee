"""Stiff problems: steps, evaluations, Jacobians, factorisations, seconds and errors of seminode, diffrax and SciPy.

    python -m benchmarks.stiff [--problems Robertson HIRES] [--rtols 1e-4 1e-6 1e-8] [--cells 200]

`error` is ‖y − reference‖ / ‖reference‖ at the end, in units of rtol, and `worst` the largest entry of
|y − reference| / (|reference| + atol/rtol); references are SciPy's Radau at rtol = 1e-12. seminode and diffrax use the
same controller, dt ← dt·0.9·ratio^(−1/k) within factors of 0.2 and 10. diffrax reports its steps only; its time does
not include compilation. An error of `inf` says that a solve has failed. One thread.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp

import seminode as sn

from .stiff_problems import Arrays, StiffProblem, problems

NUMPY = Arrays(np.stack, np.concatenate, np.arange, lambda test, a, b: np.asarray(a if test else b))
TORCH = Arrays(
    lambda xs: torch.stack(list(xs)),
    lambda xs: torch.cat(list(xs)),
    lambda a, b: torch.arange(a, b, dtype=torch.float64),
    lambda test, a, b: torch.where(test, a, b).to(torch.float64),
)
SEMINODE = ("kvaerno5", "radauIIA5")
SCIPY = ("Radau", "BDF")
#: diffrax gives up after so many steps.
MOST_STEPS = 200_000


class Result(NamedTuple):
    """What a solve cost, and how far its end is from the reference, in units of rtol: by the norm, and at worst."""

    solver: str
    steps: int | None
    nfe: int | None
    jacobians: int | None
    factorisations: int | None
    seconds: float
    error: float
    worst: float


def reference(problem: StiffProblem) -> Any:
    """The solution at the end by SciPy's Radau at a tight tolerance."""
    if problem.reduced is not None:
        rhs, y0, every = problem.reduced
        return np.array(every(reference(replace(problem, rhs=rhs, y0=y0, reduced=None))))
    return scipy_solve(problem, "Radau", 1e-12, 1e-12 * min(problem.scale, 1e-4))[0]


def scipy_solve(problem: StiffProblem, method: str, rtol: float, atol: float) -> tuple[Any, list[Any]]:
    """The end of the solution, and what the solve of each piece between jumps reports."""
    y, pieces = np.array(problem.y0), []
    times = [0.0, *problem.jumps, problem.end]
    for start, end in itertools.pairwise(times):
        inside = np.nextafter(start, end) if start in problem.jumps else start

        def rhs(t: float, y: Any, inside: float = inside) -> Any:
            return problem.rhs(NUMPY, max(t, inside), y)

        pieces.append(solve_ivp(rhs, (start, end), y, method=method, rtol=rtol, atol=atol))
        y = pieces[-1].y[:, -1]
    return y, pieces


def errors_of(problem: StiffProblem, y: Any, exact: Any, rtol: float) -> tuple[float, float]:
    difference = np.abs(np.asarray(y) - exact)
    relative = np.linalg.norm(difference) / max(np.linalg.norm(exact), problem.scale)
    return float(relative) / rtol, float(np.max(difference / (np.abs(exact) + problem.scale))) / rtol


def with_seminode(problem: StiffProblem, solver: str, rtol: float, exact: Any) -> Result:
    y0 = torch.tensor(problem.y0, dtype=torch.float64)
    begin = time.perf_counter()
    with torch.no_grad():
        sol = sn.solve(
            lambda t, y: problem.rhs(TORCH, t, y),
            y0,
            [0.0, problem.end],
            solver=solver,  # type: ignore[arg-type]
            rtol=rtol,
            atol=rtol * problem.scale,
            controller=sn.PID(pcoeff=0.0, icoeff=1.0),
            jumps=list(problem.jumps),
            save="last",
        )
    seconds = time.perf_counter() - begin
    stats = sol.stats
    steps = stats.accepted + stats.rejected
    errors = errors_of(problem, sol.ys[-1].numpy(), exact, rtol)
    return Result(f"seminode {solver}", steps, stats.nfe, stats.jacobians, stats.factorisations, seconds, *errors)


def with_scipy(problem: StiffProblem, method: str, rtol: float, exact: Any) -> Result:
    begin = time.perf_counter()
    y, pieces = scipy_solve(problem, method, rtol, rtol * problem.scale)
    seconds = time.perf_counter() - begin
    steps = sum(len(piece.t) - 1 for piece in pieces)
    nfe, jacobians, lus = (sum(getattr(piece, name) for piece in pieces) for name in ("nfev", "njev", "nlu"))
    return Result(f"SciPy {method}", steps, nfe, jacobians, lus, seconds, *errors_of(problem, y, exact, rtol))


def with_diffrax(problem: StiffProblem, rtol: float, exact: Any) -> Result:
    import diffrax
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    arrays = Arrays(jnp.stack, jnp.concatenate, jnp.arange, jnp.where)
    controller: Any = diffrax.PIDController(
        rtol=rtol,
        atol=rtol * problem.scale,
        pcoeff=0.0,
        icoeff=1.0,
        dcoeff=0.0,
        factormin=0.2,
        factormax=10.0,
        safety=0.9,
    )
    if problem.jumps:
        controller = diffrax.ClipStepSizeController(controller, jump_ts=jnp.array(problem.jumps))

    @jax.jit
    def solve(y0: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, _: problem.rhs(arrays, t, y))
        return diffrax.diffeqsolve(
            term,
            diffrax.Kvaerno5(),
            0.0,
            problem.end,
            None,
            y0,
            stepsize_controller=controller,
            max_steps=MOST_STEPS,
            throw=False,
        )

    y0 = jnp.array(problem.y0)
    solve(y0).ys.block_until_ready()
    begin = time.perf_counter()
    sol = solve(y0)
    y = np.asarray(sol.ys[-1])
    seconds = time.perf_counter() - begin
    steps = int(sol.stats["num_steps"])
    succeeded = bool(sol.result == diffrax.RESULTS.successful)
    errors = errors_of(problem, y, exact, rtol) if succeeded else (np.inf, np.inf)
    return Result("diffrax Kvaerno5", steps, None, None, None, seconds, *errors)


def measure(problem: StiffProblem, rtols: Sequence[float], peers: bool = True) -> dict[float, list[Result]]:
    exact = reference(problem)
    found: dict[float, list[Result]] = {}
    for rtol in rtols:
        found[rtol] = [with_seminode(problem, solver, rtol, exact) for solver in SEMINODE]
        if peers:
            with contextlib.suppress(ImportError):
                found[rtol].append(with_diffrax(problem, rtol, exact))
            found[rtol] += [with_scipy(problem, method, rtol, exact) for method in SCIPY]
    return found


def table(problem: StiffProblem, found: dict[float, list[Result]]) -> str:
    lines = [
        f"{problem.name}, {len(problem.y0)} unknowns, to t = {problem.end:g}, atol = rtol·{problem.scale:g}",
        f"{'rtol':>6} {'solver':20} {'steps':>7} {'nfe':>8} {'jac':>6} {'lu':>6} "
        f"{'seconds':>8} {'error':>8} {'worst':>8}",
    ]
    for rtol, results in found.items():
        for x in results:
            counts = [x.steps, x.nfe, x.jacobians, x.factorisations]
            steps, nfe, jac, lu = ("-" if n is None else str(n) for n in counts)
            lines.append(
                f"{rtol:6.0e} {x.solver:20} {steps:>7} {nfe:>8} {jac:>6} {lu:>6} {x.seconds:8.2f} {x.error:8.2g} "
                f"{x.worst:8.2g}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    names = list(problems())
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=names, choices=names)
    parser.add_argument("--rtols", nargs="+", type=float, default=[1e-4, 1e-6, 1e-8])
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--alone", action="store_true", help="without diffrax and SciPy")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"seminode {sn.__version__}, torch {torch.__version__}, float64, one thread")
    for name in options.problems:
        problem = problems(options.cells)[name]
        print("\n" + table(problem, measure(problem, options.rtols, not options.alone)), flush=True)


if __name__ == "__main__":
    main()

"""Work–precision diagrams of gradients: the error of each adjoint against the cost of the forward and backward pass.

    python -m benchmarks.work_precision [--out docs/images/work_precision.png] [--json PATH]

Four small problems in float64, over a range of tolerances; each problem has its own ratio of atol to rtol. Cost and
error are those of `benchmarks.adjoints`: evaluations and VJPs in units of F, and seconds in one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import seminode as sn

from .adjoints import Ours, backsolve, compare, pendulum, reference_gradient
from .problems import GradientProblem, cde_problem, flow_problem, linear_problem

OUT = Path("docs/images/work_precision.png")
RTOLS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


@dataclass(frozen=True, eq=False)
class Column:
    """A problem, its tolerances, and the tolerance of its reference."""

    build: Callable[..., GradientProblem]
    rtols: Sequence[float] = RTOLS
    reference_rtol: float = 1e-11


def steep_flow(dtype: torch.dtype) -> GradientProblem:
    """The flow with three times its initial weights, as after training; otherwise a few steps meet every tolerance."""
    problem = flow_problem(dtype=dtype)
    with torch.no_grad():
        for parameter in problem.field.parameters():
            parameter.mul_(3.0)
    return problem


#: The ReLUs of the neural CDE have kinks, so its gradients converge slowly and tight tolerances are expensive.
COLUMNS = {
    "linear, rates from 1 to 8": Column(partial(linear_problem, stiffness=8.0)),
    "double pendulum": Column(partial(pendulum, 100, 8)),
    "neural CDE": Column(partial(cde_problem, batch=4, knots=9, channels=4, hidden=12, width=12), RTOLS[:-1], 1e-12),
    "normalising flow": Column(steep_flow),
}
# Methods that need more steps are left out of the plot.
METHODS = tuple(
    replace(method, max_steps=2000)
    for method in (
        Ours("Replay", sn.Replay()),
        backsolve("mixed", "fresh"),
        backsolve("seminorm", "fresh"),
        backsolve("seminorm", "carry"),
        Ours("Interpolating", sn.Interpolating()),
        Ours("Quadrature", sn.Quadrature()),
        Ours("Reversible, dopri5", sn.Reversible(), sn.ReversibleRK("dopri5")),
    )
)
# The colour-blind safe palette of Okabe and Ito. Quadrature takes the same steps as Backsolve; it is dashed, with
# hollow markers, so that both are visible.
COLOURS = ("#000000", "#D55E00", "#E69F00", "#009E73", "#56B4E9", "#0072B2", "#CC79A7")
STYLES: dict[str, dict[str, Any]] = {
    method.name: {"color": colour, "marker": marker}
    for method, colour, marker in zip(METHODS, COLOURS, "osv^DoP", strict=True)
}
STYLES["Quadrature"] |= {"linestyle": "--", "markerfacecolor": "none", "markersize": 7}


@dataclass(frozen=True)
class Point:
    """One gradient: method, tolerance, cost and error."""

    problem: str
    method: str
    rtol: float
    cost: int
    seconds: float
    error: float


def points(title: str, column: Column, repeats: int = 2) -> list[Point]:
    problem = column.build(dtype=torch.float64)
    reference = reference_gradient(problem, column.reference_rtol)
    ratio = problem.atol / problem.rtol
    result = []
    for rtol in column.rtols:
        measurements, reasons = compare(replace(problem, rtol=rtol, atol=ratio * rtol), METHODS, repeats)
        result += [Point(title, name, rtol, m.cost, m.seconds, m.error(reference)) for name, m in measurements.items()]
        for name, reason in reasons.items():
            print(f"{title}, rtol {rtol:g}: {name}: {reason}", file=sys.stderr)
    return result


def draw(measured: Sequence[Point], out: Path) -> None:
    """Write the plot as a PNG."""
    from matplotlib.figure import Figure
    from PIL import Image

    titles = list(dict.fromkeys(point.problem for point in measured))
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    axes = figure.subplots(2, len(titles), sharey="col", squeeze=False)
    costs: Mapping[str, Callable[[Point], float]] = {
        "forward + backward, F": lambda point: point.cost,
        "forward + backward, seconds": lambda point: point.seconds,
    }
    for row, (label, cost) in zip(axes, costs.items(), strict=True):
        for axis, title in zip(row, titles, strict=True):
            curves(axis, [point for point in measured if point.problem == title], cost)
            axis.set_xlabel(label)
        row[0].set_ylabel("relative error of the gradient")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    # The plot has few colours, so a palette of 128 reduces the file to a quarter of its size.
    Image.open(out).convert("RGB").quantize(128).save(out, optimize=True)


def curves(axis: Any, measured: Sequence[Point], cost: Callable[[Point], float]) -> None:
    """One curve per method, over the tolerances."""
    for name, style in STYLES.items():
        of_method = [point for point in measured if point.method == name]
        xs, ys = [cost(point) for point in of_method], [point.error for point in of_method]
        axis.loglog(xs, ys, label=name, **{"markersize": 4.5, "linewidth": 1.2, **style})
    missing = [name for name in STYLES if all(point.method != name for point in measured)]
    if missing:
        note = f"not shown: {'; '.join(missing)}"
        axis.text(0.02, 0.02, note, transform=axis.transAxes, fontsize="x-small", color="0.3")
    ticks(axis)
    axis.grid(True, color="0.9", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def ticks(axis: Any) -> None:
    """A few round numbers, for ranges from half a decade to three decades."""
    low, high = axis.get_xlim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    for digits in ((1, 2, 5), (1, 3), (1,)):
        chosen = [digit * 10.0**k for k in decades for digit in digits if low <= digit * 10.0**k <= high]
        if len(chosen) <= 5:
            break
    axis.set_xticks(chosen, [f"{tick:g}" for tick in chosen])
    axis.set_xticks([], minor=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"file of the plot; default: {OUT}")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    all_points: list[Point] = []
    for title, column in COLUMNS.items():
        all_points += points(title, column)
        print(f"{title}: done", file=sys.stderr)
    draw(all_points, options.out)
    print(f"{len(all_points)} points in {options.out}")
    if options.json:
        options.json.write_text(json.dumps([asdict(point) for point in all_points], indent=1) + "\n")


if __name__ == "__main__":
    main()

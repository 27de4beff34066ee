"""Work and precision of gradients: the error of each adjoint against the price of forward and backward pass.

    python -m benchmarks.work_precision [--out docs/images/work_precision.png] [--json PATH]

Four small problems in float64, over a range of tolerances; the ratio of atol to rtol is the problem's own. Price and
error are those of `benchmarks.adjoints`: evaluations and pulled-back evaluations (F), and seconds in one thread.
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
    """A problem, the tolerances it is solved to, and that of its reference."""

    build: Callable[..., GradientProblem]
    rtols: Sequence[float] = RTOLS
    reference_rtol: float = 1e-11


def steep_flow(dtype: torch.dtype) -> GradientProblem:
    """With weights three times those it starts from, as training makes them; else a few steps do for any tolerance."""
    problem = flow_problem(dtype=dtype)
    with torch.no_grad():
        for parameter in problem.field.parameters():
            parameter.mul_(3.0)
    return problem


#: Gradients converge slowly through the kinks of a neural CDE's ReLUs, and to tight tolerances it becomes expensive.
COLUMNS = {
    "linear, rates from 1 to 8": Column(partial(linear_problem, stiffness=8.0)),
    "double pendulum": Column(partial(pendulum, 100, 8)),
    "neural CDE": Column(partial(cde_problem, batch=4, knots=9, channels=4, hidden=12, width=12), RTOLS[:-1], 1e-12),
    "normalising flow": Column(steep_flow),
}
# Whoever needs more steps is off the chart.
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
# Okabe and Ito's colours, which all eyes can tell apart. Quadrature takes the steps of Backsolve: dashed and hollow, it
# lets the other show.
COLOURS = ("#000000", "#D55E00", "#E69F00", "#009E73", "#56B4E9", "#0072B2", "#CC79A7")
STYLES: dict[str, dict[str, Any]] = {
    method.name: {"color": colour, "marker": marker}
    for method, colour, marker in zip(METHODS, COLOURS, "osv^DoP", strict=True)
}
STYLES["Quadrature"] |= {"linestyle": "--", "markerfacecolor": "none", "markersize": 7}


@dataclass(frozen=True)
class Point:
    """One gradient: by which method, to which tolerance, at what price and how good."""

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
        found, reasons = compare(replace(problem, rtol=rtol, atol=ratio * rtol), METHODS, repeats)
        result += [Point(title, name, rtol, m.cost, m.seconds, m.error(reference)) for name, m in found.items()]
        for name, reason in reasons.items():
            print(f"{title}, rtol {rtol:g}: {name}: {reason}", file=sys.stderr)
    return result


def draw(found: Sequence[Point], out: Path) -> None:
    """Write the picture, a png."""
    from matplotlib.figure import Figure
    from PIL import Image

    titles = list(dict.fromkeys(point.problem for point in found))
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    axes = figure.subplots(2, len(titles), sharey="col", squeeze=False)
    prices: Mapping[str, Callable[[Point], float]] = {
        "forward + backward, F": lambda point: point.cost,
        "forward + backward, seconds": lambda point: point.seconds,
    }
    for row, (label, price) in zip(axes, prices.items(), strict=True):
        for axis, title in zip(row, titles, strict=True):
            curves(axis, [point for point in found if point.problem == title], price)
            axis.set_xlabel(label)
        row[0].set_ylabel("relative error of the gradient")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    # A picture of eight colours and their shades needs no millions of them: a quarter of the size.
    Image.open(out).convert("RGB").quantize(128).save(out, optimize=True)


def curves(axis: Any, found: Sequence[Point], price: Callable[[Point], float]) -> None:
    """One for each method, over the tolerances."""
    for name, style in STYLES.items():
        mine = [point for point in found if point.method == name]
        xs, ys = [price(point) for point in mine], [point.error for point in mine]
        axis.loglog(xs, ys, label=name, **{"markersize": 4.5, "linewidth": 1.2, **style})
    missing = [name for name in STYLES if all(point.method != name for point in found)]
    if missing:
        note = f"off the chart: {'; '.join(missing)}"
        axis.text(0.02, 0.02, note, transform=axis.transAxes, fontsize="x-small", color="0.3")
    ticks(axis)
    axis.grid(True, color="0.9", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def ticks(axis: Any) -> None:
    """A few round numbers, whether the prices span half a decade or three."""
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
    parser.add_argument("--out", type=Path, default=OUT, help=f"the picture; default: {OUT}")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: list[Point] = []
    for title, column in COLUMNS.items():
        found += points(title, column)
        print(f"{title}: done", file=sys.stderr)
    draw(found, options.out)
    print(f"{len(found)} points in {options.out}")
    if options.json:
        options.json.write_text(json.dumps([asdict(point) for point in found], indent=1) + "\n")


if __name__ == "__main__":
    main()

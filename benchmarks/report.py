"""Tables and the picture of docs/benchmarks.md, from the results of the races.

    python -m benchmarks.report [--results benchmarks/results] [--page docs/benchmarks.md]

Between its two marks the page is written anew; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .detest import table
from .verdict import verdict_table, verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PAGE, PICTURE, README = Path("docs/benchmarks.md"), Path("docs/images/benchmarks.png"), Path("README.md")
MARKS = "<!-- bench -->", "<!-- /bench -->"
COLOURS = {
    "seminode": "#c2185b",
    "torchdiffeq": "#5c6bc0",
    "torchode": "#26a69a",
    "torchcde": "#8d6e63",
    "diffrax": "#f9a825",
}

Result = Mapping[str, Any]


def seconds(value: float) -> str:
    """Three digits, in the unit that fits."""
    return f"{value:.3g} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"


def ordered(result: Result) -> list[Mapping[str, Any]]:
    """The fastest first, and last those that could not."""
    return sorted(result["rows"], key=lambda row: row.get("minimum", float("inf")))


def race_row(row: Mapping[str, Any]) -> list[str]:
    if "minimum" not in row or "error" not in row:
        return [row["name"], *6 * ["–"], row.get("failed", "")]
    halves = [
        seconds(min(each[half] for each in row["rounds"])) if half in row["rounds"][0] else "–"
        for half in ("forward", "backward")
    ]
    numbers = [seconds(row["minimum"]), seconds(row["median"]), *halves, f"{row['error']:.1e}", seconds(row["first"])]
    note = row.get("failed") or f"{len(row['rounds'])} rounds"
    return [row["name"], *numbers, note]


HEADER = ("contender", "minimum", "median", "forward", "backward", "gradient error", "first pass", "")


def race_table(result: Result) -> str:
    return table(HEADER, [race_row(row) for row in ordered(result)])


def versions(results: Sequence[Result]) -> str:
    found: dict[str, str] = {}
    for result in results:
        for row in result["rows"]:
            found |= row.get("versions", {})
    return ", ".join(f"{library} {version}" for library, version in sorted(found.items()))


def circumstances(results: Sequence[Result]) -> str:
    """Where, when and with what; one line for all results, which are of one race unless it says otherwise."""
    machines = sorted({f"{result['machine']['processor']}, {result['threads']} thread" for result in results})
    dates = sorted(result["date"][:10] for result in results)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{'; '.join(machines)}; {when}; {versions(results)}."


def summary_table(results: Sequence[Result]) -> str:
    """Times as fast as the peers, for each problem: what the verdicts come to."""
    rows = []
    for result in results:
        ratios = {each.against: each for each in verdicts(result)}
        cells = [result["problem"]]
        for against in SUMMARY:
            each = ratios.get(against)
            if each is None or each.ratio is None:
                cells.append("–")
            else:
                wanted = "" if each.bar is None else f" ({each.bar:g}: {each.says})"
                cells.append(f"{each.ratio:.2f}{wanted}")
        rows.append(cells)
    return table(("problem", *SUMMARY), rows)


SUMMARY = (
    "torchdiffeq's adjoint",
    "torchdiffeq's best",
    "diffrax's best",
    "torchdiffeq's adjoint, seminode eager",
    "torchdiffeq's odeint, seminode eager",
    "torchdiffeq's best, seminode eager",
)


def section(result: Result) -> str:
    good = result["reference"]
    about = (
        f"rtol {result['rtol']:g}, atol {result['atol']:g}, {result['parameters']:,} parameters. "
        f"Reference: {good['how']}; it agrees with a coarser one to {good['good_to']:.0e}."
    )
    return f"### {result['title']}\n\n{about}\n\n{race_table(result)}\n\n{verdict_table(result)}"


def scaling_section(found: Result) -> str:
    from .scaling import scaling_table

    tables = [scaling_table(axis, measured) for axis, measured in found["along"].items()]
    text = (
        "Seconds of both passes, and megabytes at the peak, by size. `Checkpointed(32)` takes steps again, the more "
        "often the more there are; op by op, `Direct` leaves autograd with every operation to keep account of."
    )
    return "\n\n".join(["## Scaling", text, *tables])


def overhead_section(found: Result) -> str:
    from .overhead import FIELDS, ratio_table
    from .overhead import report as steps

    kinds = [kind for kind in FIELDS if kind in found]
    texts = [f"{kind.capitalize()} field:\n\n```text\n{steps(found[kind])}\n```" for kind in kinds]
    if "evaluations" in found:
        texts += ["Compiled solves, forth and back, over their evaluations alone:", ratio_table(found["evaluations"])]
    return "\n\n".join(["## Overhead", *texts])


#: What is measured besides the race, by the name of its results.
OTHERS = {"overhead": overhead_section, "scaling": scaling_section}


def text(results: Sequence[Result], others: Mapping[str, Result] | None = None) -> str:
    """The part of the page between the marks."""
    sections = [OTHERS[name](found) for name, found in (others or {}).items()]
    return "\n\n".join([race_text(results), *sections])


def race_text(results: Sequence[Result]) -> str:
    if not results:
        return "No results yet."
    image = "![Seconds of all contenders on every problem](images/benchmarks.png)"
    parts = [circumstances(results), image, "## In short", summary_table(results), "## All of it"]
    return "\n\n".join([*parts, *map(section, results)])


#: What the table in the README compares with, and how it calls it.
SHORT = {
    "torchdiffeq's adjoint": "torchdiffeq's `odeint_adjoint`",
    "torchdiffeq's best": "torchdiffeq's fastest",
    "diffrax's best": "diffrax's fastest",
}


def short_text(results: Sequence[Result]) -> str:
    """For the README."""
    rows = []
    for result in results:
        found = {each.against: each for each in verdicts(result)}
        ours = found["torchdiffeq's best"].ours
        cells = [f"`{result['problem']}`", "–" if ours is None else seconds(ours["minimum"])]
        ratios = [found[against].ratio for against in SHORT]
        rows.append([*cells, *("–" if ratio is None else f"{ratio:.2f}×" for ratio in ratios)])
    about = (
        "A forward and a backward pass in one thread, and how many times as fast that is as the peers' where the "
        "gradient is at least as good; below 1 they are faster. What was asked for and where it was missed is in "
        "[Benchmarks](docs/benchmarks.md), which `make bench` measures anew."
    )
    return f"{textwrap.fill(about, 120)}\n\n{table(('problem', 'seminode', *SHORT.values()), rows)}"


def placed(page: str, new: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The page with what is between its marks replaced."""
    begin, end = marks
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"


def panel(axes: Axes, result: Result) -> None:
    """Dots, the fastest at the top; minimum filled, median as the end of a line, the error beside it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows = [row for row in ordered(result) if "minimum" in row and "error" in row]
    for place, row in enumerate(rows):
        colour = COLOURS.get(row["library"], "black")
        axes.plot([row["minimum"], row["median"]], [place, place], color=colour, linewidth=1.5, alpha=0.5)
        axes.plot(row["minimum"], place, "o" if row["compiled"] else "s", color=colour, markersize=5)
        axes.annotate(
            f"{row['error']:.0e}",
            (1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
            color="0.35",
        )
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=6)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(COLOURS.get(row["library"], "black"))
        label.set_fontweight("bold" if row["library"] == "seminode" else "normal")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", which="both", linewidth=0.3, color="0.85")
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("seconds, forward and backward", fontsize=7)
    axes.set_title(result["problem"], fontsize=9, fontweight="bold", loc="left")
    axes.set_title("gradient error", fontsize=6, color="0.35", loc="right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(results: Sequence[Result], out: Path) -> None:
    from matplotlib.figure import Figure

    columns = 2 if len(results) > 1 else 1
    count = -(-len(results) // columns)
    most = max(len(result["rows"]) for result in results)
    figure = Figure(figsize=(6.4 * columns, (0.6 + 0.135 * most) * count), layout="constrained")
    grid = figure.subplots(count, columns, squeeze=False).flatten()
    for axes, result in zip(grid, results, strict=False):
        panel(axes, result)
    for axes in grid[len(results) :]:
        axes.set_visible(False)
    figure.supxlabel("round: compiled, square: op by op; the line goes from the minimum to the median", fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def load(folder: Path) -> list[Result]:
    """The results there are, in the order of the suite."""
    from .suite import ENTRIES

    paths = [folder / f"{name}.json" for name in ENTRIES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(argv)
    results = load(options.results)
    paths = {name: options.results / f"{name}.json" for name in OTHERS}
    others = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    options.page.write_text(placed(options.page.read_text(), text(results, others)))
    if results:
        draw(results, options.picture)
        options.readme.write_text(placed(options.readme.read_text(), short_text(results), MARKS))


if __name__ == "__main__":
    main()

"""Tables and the figure of docs/benchmarks.md, the table of the README and those of docs/tested.md, from saved results.

    python -m benchmarks.report [--results benchmarks/results] [--page docs/benchmarks.md] [--tested docs/tested.md]

Replaces what is between the marks of each page. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .curves import points
from .detest import table
from .limits import f_unit
from .panels import draw
from .verdict import Verdict, limit_verdict, verdict_table, verdicts

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
PAGE, PICTURE, README = Path("docs/benchmarks.md"), Path("docs/images/benchmarks.png"), Path("README.md")
TESTED = Path("docs/tested.md")
MARKS = "<!-- bench -->", "<!-- /bench -->"

Result = Mapping[str, Any]


def seconds(value: float) -> str:
    """Three digits, in seconds or milliseconds."""
    return f"{value:.3g} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"


def ordered(result: Result) -> list[Mapping[str, Any]]:
    """The fastest first; those that failed last."""
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


def problem_unit(result: Result) -> float | None:
    """Seconds of one unit of F: an evaluation and its VJP as compiled programs, the fastest that was measured."""
    units = [f_unit(row["costs"]) for row in result["rows"] if row["library"] == "seminode" and row.get("costs")]
    return min(units, default=None)


def curve_row(row: Mapping[str, Any], factors: Sequence[float], unit: float | None) -> list[str]:
    found = {each.factor: each for each in points(row)}
    cells = [row["name"]]
    for factor in factors:
        at = found.get(factor)
        cells.append("–" if at is None else f"{seconds(at.minimum)}, {at.error:.1e}")
    timed = "minimum" in row
    cells.append("–" if unit is None or not timed else f"{row['minimum'] / unit:.0f}")
    return [*cells, f"{row['minimum'] / row['limit']:.2f}" if timed and "limit" in row else "–"]


def curve_table(result: Result) -> str:
    """Time and error of every setting at every tolerance; at the nominal one in units of F and of the limit, too."""
    factors = sorted({each["factor"] for row in result["rows"] for each in row.get("curve", ())}, reverse=True)
    if not factors:
        return "These results have no curves."
    unit = problem_unit(result)
    header = ("contender", *(f"tolerance × {factor:g}" for factor in factors), "units of F", "times the limit")
    return table(header, [curve_row(row, factors, unit) for row in ordered(result)])


def limit_line(result: Result) -> str:
    """How far seminode's fastest compiled setting is from its evaluations and VJPs alone."""
    found = limit_verdict(result)
    if found is None:
        return "Times the limit: not measured."
    return f"Times the limit: {found.times:.2f} ({found.setting}; target at most {found.bar:g}: {found.says})."


def versions(results: Sequence[Result]) -> str:
    found: dict[str, str] = {}
    for result in results:
        for row in result["rows"]:
            found |= row.get("versions", {})
    known = {library: version for library, version in found.items() if version != "not installed"}
    return ", ".join(f"{library} {version}" for library, version in sorted(known.items()))


def circumstances(results: Sequence[Result]) -> str:
    """Machine, date and versions of all results, in one line."""
    machines = sorted({f"{result['machine']['processor']}, {result['threads']} thread" for result in results})
    dates = sorted(result["date"][:10] for result in results)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return textwrap.fill(f"{'; '.join(machines)}; {when}; {versions(results)}.", 120)


def summary_table(results: Sequence[Result]) -> str:
    """The speed-up over each peer on each problem, and whether it meets the target."""
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
        f"Reference: {good['how']}; a coarser reference agrees with it to {good['good_to']:.0e}."
    )
    parts = [f"### {result['title']}", textwrap.fill(about, 120), race_table(result)]
    if any("curve" in row for row in result["rows"]):
        parts += [curve_table(result), limit_line(result)]
    return "\n\n".join([*parts, verdict_table(result)])


def scaling_section(found: Result) -> str:
    from .scaling import scaling_table

    tables = [scaling_table(axis, measured) for axis, measured in found["along"].items()]
    text = (
        "Seconds of the forward and backward pass together, and peak memory, by size. The last column of the first "
        "table divides the time per step between 1,000 and 10,000 steps by the time per step between 100 and 1,000 "
        "steps; it is 1 if time is linear in the number of steps. `Checkpointed(32)` recomputes each step more often "
        "if there are more steps. Without compilation, `Direct` leaves every operation for autograd to record."
    )
    return "\n\n".join(["## Scaling", textwrap.fill(text, 120), *tables])


def overhead_section(found: Result) -> str:
    from .overhead import FIELDS, ratio_table
    from .overhead import report as steps

    kinds = [kind for kind in FIELDS if kind in found]
    texts = [f"{kind.capitalize()} field:\n\n```text\n{steps(found[kind])}\n```" for kind in kinds]
    if "evaluations" in found:
        about = "Seconds of compiled solves, and of the same number of field evaluations (with their VJPs) alone:"
        texts += [about, ratio_table(found["evaluations"])]
    return "\n\n".join(["## Overhead", *texts])


#: Sections for other measurements, by the name of their results.
OTHERS = {"overhead": overhead_section, "scaling": scaling_section}


def text(results: Sequence[Result], others: Mapping[str, Result] | None = None) -> str:
    """The part of the page between the marks."""
    sections = [OTHERS[name](found) for name, found in (others or {}).items()]
    return "\n\n".join([race_text(results), *sections])


def race_text(results: Sequence[Result]) -> str:
    if not results:
        return "No results yet."
    image = "![Seconds of all contenders on every problem](images/benchmarks.png)"
    about = (
        "Speed-up over each library at equal gradient error, or with a smaller error of seminode's gradient. Values "
        "below 1 mean that seminode is slower. The target is in parentheses. In the last three columns seminode runs "
        "without compilation."
    )
    summary = ["## Summary", textwrap.fill(about, 120), summary_table(results)]
    parts = [circumstances(results), image, *summary, "## All settings"]
    return "\n\n".join([*parts, *map(section, results)])


#: Comparisons in the table of the README, with their headings.
SHORT = {
    "torchdiffeq's best": "fastest torchdiffeq / seminode",
    "diffrax's best": "fastest diffrax / seminode",
}


def quotient(verdict: Verdict | None) -> str:
    """Both times in one unit and their ratio, such as `30.2 ms / 2.9 ms = 10.41×`."""
    if verdict is None or verdict.peer is None or verdict.ratio is None:
        return "–"
    scale, unit = (1.0, "s") if verdict.peer.seconds >= 1.0 else (1e3, "ms")
    theirs, ours = verdict.times(scale)
    return f"{theirs} {unit} / {ours} {unit} = {verdict.ratio:.2f}×"


def short_text(results: Sequence[Result]) -> str:
    """For the README."""
    rows = []
    for result in results:
        found = {each.against: each for each in verdicts(result)}
        rows.append([f"`{result['problem']}`", *(quotient(found.get(against)) for against in SHORT)])
    about = (
        "Time of one pass on one thread (forward and backward, except for `…-forward` and `sampling-…`): that of the "
        "other library's fastest setting, divided by that of seminode at the same error of the gradient, or of the "
        "samples. Above 1, seminode is faster. The two libraries are compared at different errors, so the time of "
        "seminode differs within a row. "
        "[Benchmarks](docs/benchmarks.md) lists all settings, our targets, and which targets were missed; `make bench` "
        "repeats the measurements."
    )
    return f"{textwrap.fill(about, 120)}\n\n{table(('problem', *SHORT.values()), rows)}"


def placed(page: str, new: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The page, with the text between its marks replaced."""
    begin, end = marks
    before, rest = page.split(begin)
    after = rest.split(end)[1]
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"


def load(folder: Path) -> list[Result]:
    """The saved results, in the order of the suite."""
    from .suite import ENTRIES

    paths = [folder / f"{name}.json" for name in ENTRIES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def named(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The saved results of other measurements that exist."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main(argv: Sequence[str] | None = None) -> None:
    from .tested import SECTIONS, results_text

    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--tested", type=Path, default=TESTED)
    options = parser.parse_args(argv)
    results = load(options.results)
    others = named(options.results, OTHERS)
    options.tested.write_text(placed(options.tested.read_text(), results_text(named(options.results, SECTIONS))))
    options.page.write_text(placed(options.page.read_text(), text(results, others)))
    if results:
        draw(results, options.picture)
        options.readme.write_text(placed(options.readme.read_text(), short_text(results), MARKS))


if __name__ == "__main__":
    main()

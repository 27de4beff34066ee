"""A profile as plain text of 120 columns."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .subject import largest

if TYPE_CHECKING:
    from .results import Profile, Row

WIDTH = 120
#: The ratio of the median to the minimum time from which a warning is shown.
NOISY = 1.3


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(0.01234), seconds_text(12.34)
    ('12.3 ms', '12.3 s')
    """
    return f"{_digits(1e3 * seconds)} ms" if seconds < 1.0 else f"{_digits(seconds)} s"


def memory_text(size: float) -> str:
    """
    >>> memory_text(3_400_000), memory_text(512)
    ('3.4 MB', '0.5 kB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def _digits(value: float) -> str:
    """A number with three significant digits."""
    if not math.isfinite(value):
        return "–"
    places = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(places, 3)}f}"


def text(profile: Profile) -> str:
    """The table, the contenders that were not measured, and the recommendation."""
    measured = [row for row in profile.rows if row.measured]
    lines = [*_wrapped(_heading(profile)), ""]
    notes = list(dict.fromkeys(note for row in measured for note in row.notes))
    if measured:
        lines += _table(measured, notes, profile.reference.good_to)
    lines += [line for i, note in enumerate(notes, 1) for line in _wrapped([f"[{i}] {_short(note)}"], 4)]
    refused = _grouped(row for row in profile.rows if not row.measured)
    if refused:
        lines += ["", "Not measured:", *(line for each in refused for line in _wrapped([f"- {each}"], 2))]
    return "\n".join([*lines, "", *_wrapped(_advice(profile))])


def _heading(profile: Profile) -> list[str]:
    problem, machine = profile.problem, profile.machine
    lines = [str(problem["summary"])] if "summary" in problem else []
    lines += [str(machine["summary"])] if "summary" in machine else []
    return [*lines, f"errors relative to: {profile.reference}", *_noise(profile.rows)]


def _noise(rows: Iterable[Row]) -> list[str]:
    """A warning if the times of the repeats differ much."""
    ratios = [row.median_seconds / row.seconds for row in rows if row.measured]
    ratio = statistics.median(ratios) if ratios else 1.0
    if ratio < NOISY:
        return []
    return [f"the clock is noisy: medians are {ratio:.1f} times the minima. Use more repeats, or a quieter machine"]


def _advice(profile: Profile) -> list[str]:
    chosen = profile.recommendation
    if chosen is None and profile.reference.dtype == "none":
        return ["No recommendation: without a reference, the errors of the gradients are unknown."]
    if chosen is None:
        return ["No recommendation: no gradient could be measured and trusted."]
    return [chosen.reason, f"    {chosen.call}"]


def _wrapped(lines: Iterable[str], indent: int = 0) -> list[str]:
    found: list[str] = []
    for line in lines:
        inner = " " * indent
        found += textwrap.wrap(line, WIDTH, subsequent_indent=inner, break_on_hyphens=False) or [""]
    return found


def _short(note: str) -> str:
    """The category of a warning and its first sentence."""
    head, stop, _ = note.partition(". ")
    return head + stop.rstrip()


def _grouped(rows: Iterable[Row]) -> list[str]:
    """One line per reason, with the labels of all contenders that have it."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        labels = by_reason.setdefault(row.reason or "no timed run", [])
        if row.contender.label not in labels:
            labels.append(row.contender.label)
    return [f"{'; '.join(labels)}: {reason}" for reason, labels in by_reason.items()]


def _table(rows: Sequence[Row], notes: Sequence[str], good_to: float | None) -> list[str]:
    unit, scale = ("ms", 1e3) if min(row.seconds for row in rows) < 1.0 else ("s", 1.0)
    levels = {largest(row.contender.rtol) for row in rows}
    head = ["adjoint", "solver", "compile", "nfe", "steps", "nfe", "steps", "F", "error"]
    head += ["forward", "backward", unit, "memory", ""]
    head = [*head[:3], "rtol", *head[3:]] if len(levels) > 1 else head
    cells = [_cells(row, scale, notes, good_to, len(levels) > 1) for row in rows]
    left = {0, 1, 2, len(head) - 1}
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    gap = 2 if sum(widths) + 2 * len(widths) <= WIDTH else 1
    widths[0] = max(len("adjoint"), min(widths[0], widths[0] + WIDTH - sum(widths) - gap * (len(widths) - 1)))
    lines: list[str] = []
    for row in (head, *cells):
        fitted = [_fit(x, width, i in left) for i, (x, width) in enumerate(zip(row, widths, strict=True))]
        lines.append((" " * gap).join(fitted).rstrip())
    return [_groups(lines[0], head, widths, gap), *lines]


def _fit(cell: str, width: int, left: bool) -> str:
    cell = cell if len(cell) <= width else cell[: width - 1] + "…"
    return cell.ljust(width) if left else cell.rjust(width)


def _groups(header: str, head: Sequence[str], widths: Sequence[int], gap: int) -> str:
    """The line above the header with the names of the passes."""
    first = head.index("nfe")
    second = head.index("nfe", first + 1)
    places = [sum(widths[:i]) + gap * i for i in (first, second)]
    line = ""
    for place, name in zip(places, ("forward", "backward"), strict=True):
        line = line.ljust(place) + name
    return line


def _error(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "–"


def _cells(row: Row, scale: float, notes: Sequence[str], good_to: float | None, with_rtol: bool) -> list[str]:
    contender, forward, backward = row.contender, row.forward, row.backward
    cells = [contender.adjoint_name, contender.solver_name, "yes" if contender.compile else "no"]
    if with_rtol:
        level = largest(contender.rtol)
        cells.append("–" if level is None else f"{level:.0e}")
    for stats in (forward, backward):
        cells += [str(stats.nfe), f"{stats.accepted}/{stats.rejected}"]
    unresolved = good_to is not None and row.error < good_to
    cells += [str(row.cost), f"<{good_to:.0e}" if unresolved else _error(row.error)]
    cells += [_digits(scale * min(row.forward_seconds)), _digits(scale * min(row.backward_seconds))]
    cells += [_digits(scale * row.seconds), "–" if row.memory is None else memory_text(row.memory)]
    return [*cells, " ".join(f"[{1 + notes.index(note)}]" for note in row.notes)]

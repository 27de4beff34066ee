"""A table of text that can be printed, written as Markdown or written as HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, groupby
from typing import NamedTuple

#: The width of notes on a terminal, in characters.
WIDTH = 110


class Column(NamedTuple):
    """The name of a column, the name of its group of columns, and whether narrow screens leave it out."""

    name: str
    group: str = ""
    minor: bool = False


@dataclass(frozen=True)
class Table:
    """A table of text. A row with a single cell is a heading of the rows below it.

    Example:
        >>> table = Table("sizes", "Sizes", (Column(""), Column("now")), (("fruit",), ("apples", "12")), ("Counted.",))
        >>> print(table.text())
        Sizes
        <BLANKLINE>
                now
        ------  ---
        fruit
        apples   12
        <BLANKLINE>
        - Counted.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) not in (1, len(self.columns)):
                raise ValueError(f"rows: expected 1 or {len(self.columns)} cells, found {len(row)} in {row}")

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The names of the groups and the number of columns of each; empty if there are no groups."""
        found = [(name, len(list(columns))) for name, columns in groupby(self.columns, key=lambda column: column.group)]
        return found if any(name for name, _ in found) else []

    def text(self) -> str:
        """The table for a terminal."""
        cells = [[_narrow(cell) for cell in row] for row in self.rows]
        names = [column.name for column in self.columns]
        widths = [
            max(len(row[i]) for row in [names, *(row for row in cells if len(row) > 1)]) for i in range(len(names))
        ]
        lines = [self.title, ""]
        if self.groups:
            lines.append("  ".join(_above(self.groups, widths)).rstrip())
        lines.append(_aligned(names, widths))
        lines.append("  ".join("-" * width for width in widths))
        for row in cells:
            if len(row) == 1:
                lines += ["", row[0]] if self.groups else row
            else:
                lines.append(_aligned(row, widths))
        notes = [textwrap.fill(note, WIDTH, initial_indent="- ", subsequent_indent="  ") for note in self.notes]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def markdown(self) -> str:
        """The table as Markdown, with a bold title."""
        names = [plain(": ".join(dict.fromkeys(filter(None, (column.group, column.name))))) for column in self.columns]
        rows = [names, ["---"] + ["---:"] * (len(names) - 1)]
        for row in self.rows:
            cells = list(map(plain, row))
            rows.append([f"**{cells[0]}**"] + [""] * (len(names) - 1) if len(row) == 1 else cells)
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        notes = "".join(f"\n- {plain(note)}" for note in self.notes)
        return f"**{plain(self.title)}**\n\n{table}\n" + (f"{notes}\n" if notes else "")

    def html(self) -> str:
        """The table as HTML, in a box that scrolls if the page is too narrow, with the notes below it."""
        minor = [column.minor for column in self.columns]
        head = "".join(
            f'<th scope="col"{_class(column.minor)}>{_html_name(column.name)}</th>' for column in self.columns
        )
        firsts = accumulate((n for _, n in self.groups), initial=0)
        above = "".join(
            f'<th scope="colgroup" colspan="{n}"{_class(all(minor[at : at + n]))}>{escape(name)}</th>'
            for at, (name, n) in zip(firsts, self.groups, strict=False)
        )
        groups = "".join(f'<colgroup span="{n}"></colgroup>' for _, n in self.groups)
        rows = "\n".join(_html_row(row, minor) for row in self.rows)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(self.title)}">\n'
            f'<table id="table-{escape(self.name)}"><caption>{escape(self.title)}</caption>{groups}\n<thead>'
            + (f"<tr>{above}</tr>\n" if above else "")
            + f"<tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n"
            + (f'<ul class="notes">{notes}</ul>\n' if notes else "")
        )


def plain(text: object) -> str:
    r"""Text that Markdown shows as it is, in one line: no markup, no HTML, no new cells of a table.

    Example:
        >>> print(plain("a|b\n<i>*c*</i> snake_case"))
        a\|b &lt;i&gt;\*c\*&lt;/i&gt; snake_case
    """
    line = escape(" ".join(str(text).splitlines()), quote=False)
    line = re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line)  # an underscore inside of a word is no markup
    return re.sub(r"^(#|[-+=](?= )|\d+(?=[.)] ))", _escaped_start, line)


def _escaped_start(found: re.Match[str]) -> str:
    """What would begin a heading or a list, so that it does not."""
    return f"{found[0]}\\" if found[0][0].isdigit() else f"\\{found[0]}"


def _narrow(cell: str) -> str:
    return cell.replace(" ± ", "±")


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """A line with the first cell aligned to the left and the others to the right."""
    first, *rest = row
    return "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]).rstrip()


def _above(groups: Sequence[tuple[str, int]], widths: list[int]) -> Iterator[str]:
    """The names of groups, centred over their columns. A group that is too narrow for its name is widened."""
    at = 0
    for name, n in groups:
        lacking = len(name) - (sum(widths[at : at + n]) + 2 * (n - 1))
        widths[at + n - 1] += max(0, lacking)
        yield name.center(sum(widths[at : at + n]) + 2 * (n - 1))
        at += n


def _html_name(name: str) -> str:
    """The name of a column, which may be broken where that helps a narrow screen."""
    return escape(name).replace("seminorm", "semi&shy;norm")


def _class(minor: bool) -> str:
    return ' class="minor"' if minor else ""


def _html_row(row: Sequence[str], minor: Sequence[bool]) -> str:
    if len(row) == 1:
        span = f'colspan="{len(minor)}"'
        return f'<tr class="heading"><th scope="rowgroup" {span}><span>{escape(row[0])}</span></th></tr>'
    cells = "".join(f"<td{_class(less)}>{_html_cell(cell)}</td>" for cell, less in zip(row[1:], minor[1:], strict=True))
    return f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'


def _html_cell(cell: str) -> str:
    """A cell whose deviation, the part from ± on, is set smaller. A unit stays beside its number.

    >>> _html_cell("14.36 ± 1.09"), _html_cell("39.26 k")
    ('14.36 <span class="sd">± 1.09</span>', '39.26&nbsp;k')
    >>> _html_cell("14.36 ± 1.09 M")
    '14.36&nbsp;M <span class="sd">± 1.09<span class="unit">&nbsp;M</span></span>'
    """
    found = re.fullmatch(r"(\S+)( ± [\d.,]+)?( [kMG%])?", cell)
    if found is None:
        return escape(cell)
    mean, sd, unit = (escape((part or "").strip()) for part in found.groups())
    unit = f"&nbsp;{unit}" if unit else ""
    again = f'<span class="unit">{unit}</span>' if unit else ""
    return mean + unit + (f' <span class="sd">{sd}{again}</span>' if sd else "")

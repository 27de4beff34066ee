"""The display of a sweep: a table that is updated on a terminal, and one line per event elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

#: The largest number of lines in the table; the number of bytes that are read from the end of a log.
LINES, TAIL = 20, 8192


class Sight(NamedTuple):
    """A run that is being made."""

    name: str
    seconds: float
    log: Path


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a file, which may be being written; none if there is no such file."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]


def clock(seconds: float) -> str:
    """Seconds as minutes and hours.

    >>> clock(59.6), clock(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class SweepDisplay:
    """The progress of a sweep."""

    def __init__(self, total: int) -> None:
        self._live = sys.stderr.isatty()
        self._bar = tqdm(total=total, desc="sweep", unit="run", disable=not self._live, dynamic_ncols=True)
        self._lines: list[tqdm] = []

    def event(self, text: str) -> None:
        """Print a line that stays on the screen."""
        if self._live:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, flush=True)

    def settled(self) -> None:
        """Count one run as finished."""
        self._bar.update()

    def tick(self, running: Sequence[Sight], waiting: int, failed: int) -> None:
        """Update the table."""
        if not self._live:
            return
        told = f"{len(running)} running, {waiting} waiting" + (f", {failed} failed" if failed else "")
        self._bar.set_postfix_str(told, refresh=True)
        shown = running[:LINES]
        width = shutil.get_terminal_size().columns - 1
        longest = max((len(each.name) for each in shown), default=0)
        while len(self._lines) < len(shown):
            position = len(self._lines) + 1
            self._lines.append(tqdm(total=0, bar_format="{desc}", position=position, leave=False))
        for i, line in enumerate(self._lines):
            text = ""
            if i < len(shown):
                latest = "".join(last_lines(shown[i].log, 1))
                text = f"  {shown[i].name:<{longest}} {clock(shown[i].seconds):>7}  {latest}"
            line.set_description_str(text[:width], refresh=True)

    def close(self) -> None:
        for line in reversed(self._lines):
            line.close()
        self._bar.close()

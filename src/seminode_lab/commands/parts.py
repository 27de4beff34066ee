"""The commands `seminode table` and `seminode figure`: single parts of a report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .options import add_runs, complete_runs, guarded

TABLE = """\
Print tables from run folders: ncde, cnf, hnn, rejections, savings, libraries. Without names, print all tables that have
data."""

FIGURE = """\
Draw figures from run folders, as PNG and SVG, and print the paths. Without names, draw all figures with data."""

AGAIN = "the same command starts over"


def configure_table(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `seminode table`."""
    parser.description = TABLE
    add_runs(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables")
    parser.add_argument("--format", choices=("text", "markdown", "html"), default="text", help="default: text")


def configure_figure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `seminode figure`."""
    parser.description = FIGURE
    add_runs(parser)
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures, such as f1a or f6")
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder; default: figures in the first DIR")


def run_table(options: argparse.Namespace) -> int:
    """Print tables."""
    return guarded(options, _table, AGAIN)


def run_figure(options: argparse.Namespace) -> int:
    """Draw figures."""
    return guarded(options, _figure, AGAIN)


def picked(kind: str, names: Sequence[str], there: Sequence[str]) -> list[str]:
    """The full names for names or first parts of names; all by default.

    >>> picked("figures", ["f1"], ["f1-accuracy", "f1-nfe", "f2"])
    ['f1-accuracy', 'f1-nfe']
    """
    found = {name: [full for full in there if f"{full}-".startswith(f"{name}-")] for name in names}
    for name, full in found.items():
        if not full:
            raise ValueError(f"NAME: expected one of the {kind} {', '.join(there)}, found {name!r}")
    return [full for name in found for full in found[name]] or list(there)


def _table(options: argparse.Namespace) -> int:
    from .. import tables
    from ..repeats import noise_of

    runs, noise = complete_runs(options.folder), noise_of(options.folder)
    makers: dict[str, Callable[..., Any]] = {
        name: partial(getattr(tables, name), noise=noise) for name in ("ncde", "cnf", "hnn")
    }
    makers["rejections"] = tables.rejections
    makers["savings"] = partial(tables.savings, noise=noise)
    makers["libraries"] = tables.libraries
    chosen = picked("tables", options.names, tuple(makers))
    found = [makers[name](runs) for name in chosen] if options.names else tables.all_tables(runs, noise)
    print("\n\n".join(getattr(table, options.format)() for table in found))
    return 0


def _figure(options: argparse.Namespace) -> int:
    from ..figures import pictures
    from ..figures.style import save

    drawn = {picture.name: picture for picture in pictures(complete_runs(options.folder), options.folder)}
    out = options.out or options.folder / "figures"
    for name in picked("figures", options.names, tuple(drawn)):
        saved = save(drawn[name], out)
        for path in (saved.png, saved.svg, saved.gif):
            if path is not None:
                print(path)
    return 0

"""The commands `seminode reproduce`, a sweep and what follows from it, and `seminode report`, what follows alone."""

from __future__ import annotations

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path

from . import sweep
from .options import add_runs, complete_runs, guarded

REPRODUCE = """\
Reproduce the paper: all runs of a preset (as seminode sweep does), the tables, the figures and the report.

The last line is the report's path. It can be stopped at any time; the same command goes on."""

REPORT = """\
The tables, the figures and the report from run folders that are there."""


def configure_reproduce(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `seminode reproduce`."""
    sweep.configure(parser)
    parser.description = REPRODUCE


def configure_report(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `seminode report`."""
    parser.description = REPORT
    add_runs(parser)


def run_reproduce(options: argparse.Namespace) -> int:
    """Sweep, measure and report. Failed runs are left out of the report; the status is then 1."""
    return guarded(options, _reproduce, "all runs are kept; the same command goes on")


def run_report(options: argparse.Namespace) -> int:
    """Report."""
    return guarded(options, _report, "the same command starts again")


def _reproduce(options: argparse.Namespace) -> int:
    from ..data.folders import data_dir
    from ..measuring import measure_all

    status = sweep.sweep(options)
    out = sweep.out_of(options)
    measure_all(options.preset, out, data_dir(options.data_dir), partial(print, flush=True))
    report(out)
    return status


def _report(options: argparse.Namespace) -> int:
    return report(options.folder)


def report(folder: Path) -> int:
    """Print the tables, write the report, and print its paths, that of the page last."""
    from ..report import write
    from ..tables import all_tables

    for table in all_tables(complete_runs(folder)):
        print(f"{table.text()}\n")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        written = write(folder)
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
    print(written.markdown)
    print(written.html)
    return 0

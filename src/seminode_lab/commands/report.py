"""The commands `seminode reproduce` (make runs and report on them) and `seminode report` (report on existing runs)."""

from __future__ import annotations

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path

from . import sweep
from .options import add_runs, complete_runs, guarded

#: The presets whose reports have experiments beyond the paper's, which take minutes.
THOROUGH = ("cpu", "long", "paper")

REPRODUCE = """\
Reproduce the paper: make all runs of a preset (like seminode sweep), the tables, the figures and the report.

The last line of the output is the path of the report. The command can be stopped at any time; the same command resumes
it."""

REPORT = """\
Make the tables, the figures and the report from existing run folders."""


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
    return guarded(options, _reproduce, "all runs are kept; the same command resumes them")


def run_report(options: argparse.Namespace) -> int:
    """Make the report."""
    return guarded(options, _report, "the same command starts over")


def _reproduce(options: argparse.Namespace) -> int:
    from .. import knife, origins
    from ..data.folders import data_dir
    from ..extras import measure_extras
    from ..measuring import measure_all

    status = sweep.sweep(options)
    if options.repeat is not None:
        status = max(status, sweep.repeat(options))
    out = sweep.out_of(options)
    say = partial(print, flush=True)
    measure_all(options.preset, out, data_dir(options.data_dir), say)
    if options.preset in THOROUGH:
        knife.measure(out, data_dir(options.data_dir), say)
        origins.measure(out, say)
        measure_extras(options.preset, out, data_dir(options.data_dir), say)
    report(out)
    return status


def _report(options: argparse.Namespace) -> int:
    return report(options.folder)


def report(folder: Path) -> int:
    """Print the tables, write the report, and print a summary and the paths of the report, the HTML page last."""
    from ..repeats import noise_of
    from ..report import in_short, write
    from ..tables import all_tables

    # The report names what it leaves out itself.
    found = complete_runs(folder, name_others=False)
    for table in all_tables(found, noise_of(folder)):
        print(f"{table.text()}\n")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        written = write(folder)
    for note in notes:
        print(f"note: {note.message}", file=sys.stderr)
    for line in in_short(found, folder):
        print(line)
    print(written.markdown)
    print(written.html)
    return 0

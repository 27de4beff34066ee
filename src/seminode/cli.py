"""The command `seminode`. A sub-command is a line in `COMMANDS`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from seminode_lab.commands import bench, parts, report
from seminode_lab.commands import run as running
from seminode_lab.commands import sweep as sweeping
from seminode_lab.data import command as data

from .diagnostics import command as profiling


class Command(NamedTuple):
    """A sub-command: what it is called, what it does in a line, its arguments, and the work; that returns a status."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = (
    Command("profile", "which adjoint and solver, compiled or not?", profiling.configure, profiling.run),
    Command("data", "which data are there, and are they whole? download them", data.configure, data.run),
    Command("run", "train one model of the paper", running.configure, running.run),
    Command("sweep", "train all models of a preset, in many processes", sweeping.configure, sweeping.run),
    Command("reproduce", "all runs, tables, figures and the report", report.configure_reproduce, report.run_reproduce),
    Command("report", "tables, figures and the report from runs", report.configure_report, report.run_report),
    Command("table", "tables from runs", parts.configure_table, parts.run_table),
    Command("figure", "figures from runs", parts.configure_figure, parts.run_figure),
    Command("bench", "compare with other libraries", bench.configure, bench.run),
)


def parser() -> argparse.ArgumentParser:
    """With all sub-commands."""
    description = "Solve, differentiate and train neural differential equations in PyTorch."
    top = argparse.ArgumentParser(prog="seminode", description=description)
    top.add_argument("--version", action="version", version=f"seminode {_version()}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="command", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help)
        command.configure(own)
        own.set_defaults(run=command.run)
    return top


def _version() -> str:
    return getattr(sys.modules["seminode"], "__version__", "unknown")


def main(argv: Sequence[str] | None = None) -> int:
    """The status is 0, 1 for what was tried and failed, or 2 for what cannot be used as it was given.

    >>> main(["profile", "nowhere"])
    2
    """
    options = parser().parse_args(argv)
    return options.run(options)

"""The command `seminode sweep`: makes all runs of a preset."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .options import (
    add_machine,
    add_preset,
    add_writing,
    at_least_one,
    check_device,
    check_minutes,
    cores,
    given,
    guarded,
)

if TYPE_CHECKING:
    from ..settings import Settings
    from ..worker import Order

DESCRIPTION = """\
Make all runs of a preset: every row, in every mode, with every seed, each in its own process.

Complete runs are skipped, incomplete ones are resumed, and runs whose process dies are retried. The command can be
stopped at any time; the same command resumes it. Each run has a log, DIR/logs/NAME.log."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    configure_choice(parser)
    add_writing(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="parallel runs; default: 1, with Ray all that fit")
    parser.add_argument("--engine", default="local", metavar="NAME", help="local (default) or ray")
    repeat = "make every run N times, in DIR/repeats, to know how much the seconds of identical runs differ"
    parser.add_argument("--repeat", type=int, metavar="N", help=repeat)
    parser.add_argument(
        "--retries", type=int, default=2, metavar="N", help="retries of a run whose process dies; default: 2"
    )


def configure_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose runs of a preset."""
    add_preset(parser)
    add_machine(parser)
    experiments = "only these: ncde, cnf, hnn"
    parser.add_argument("--experiment", nargs="+", action="extend", metavar="NAME", help=experiments)
    only = "only runs whose names match, such as 'ncde-*-best-*'"
    parser.add_argument("--only", nargs="+", action="extend", metavar="PATTERN", help=only)
    parser.add_argument("--library", metavar="NAME", help="library that solves: torchdiffeq; default: seminode")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds per row; default: that of the preset")


def run(options: argparse.Namespace) -> int:
    """Make the runs."""
    return guarded(
        options, sweep if options.repeat is None else repeat, "all runs are kept; the same command resumes them"
    )


def sweep(options: argparse.Namespace) -> int:
    """Make the runs; return the exit status, which is 1 if a run failed."""
    return _made(options, _orders(options))


def _made(options: argparse.Namespace, orders: list[Order]) -> int:
    from ..engines import ENGINES
    from ..sweeping import SweepRunner, failures

    engine = ENGINES[options.engine]()
    try:
        jobs = options.jobs or (len(orders) if options.engine == "ray" else 1)
        found = SweepRunner(orders, engine, jobs, options.retries).go()
    finally:
        engine.close()
    print(found)
    for line in failures(found, orders[0].out if orders else out_of(options)):
        print(line, file=sys.stderr)
    return 1 if found.failed else 0


def repeat(options: argparse.Namespace) -> int:
    """Make the runs several times, round by round, and summarise their seconds; return the exit status."""
    from ..repeats import ROUNDS, collect

    if options.repeat < 2:
        raise ValueError(f"repeat: expected a whole number of at least 2, found {options.repeat}")
    orders, statuses = _orders(options), []
    for i in range(options.repeat):
        print(f"round {i + 1} of {options.repeat}", flush=True)
        statuses.append(_made(options, [replace(order, out=order.out / ROUNDS / str(i)) for order in orders]))
    print(collect(out_of(options)))
    return max(statuses)


def out_of(options: argparse.Namespace) -> Path:
    return options.out or Path("out", options.preset)


def _orders(options: argparse.Namespace) -> list[Order]:
    from ..data.folders import data_dir
    from ..engines import ENGINES
    from ..worker import Order

    if options.engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, found {options.engine!r}")
    for name in ("jobs", "threads"):
        at_least_one(name, getattr(options, name))
    check_minutes(options.checkpoint_minutes)
    runs = _runs(options)
    out = out_of(options).absolute()
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"out: expected a folder, found the file {str(out)!r}")
    root = data_dir(options.data_dir).absolute()
    usual = 1 if options.engine == "ray" else max(1, cores() // (options.jobs or 1))
    given = (options.threads or usual, not options.no_tensorboard, options.checkpoint_minutes)
    return [Order(run, out, root, *given) for run in runs]


def _runs(options: argparse.Namespace) -> list[Settings]:
    from ..settings import rows
    from ..sweeping import chosen

    for name in options.experiment or ():
        rows(options.preset)[0].changed(experiment=name)  # raises an error for an unknown experiment
    found = chosen(options.preset, options.experiment or (), options.only or (), options.seeds, options.library)
    changes = given(options, "device", "compile")
    for device in {run.changed(**changes).device for run in found}:
        check_device(device)
    return [run.changed(**changes) for run in found]

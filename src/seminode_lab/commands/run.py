"""The command `seminode run EXPERIMENT`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .options import add_place, add_preset, at_least_one, check_device, check_minutes, cores, given, guarded

if TYPE_CHECKING:
    from ..settings import Settings

DESCRIPTION = """\
Make one run: train and evaluate a model, and write everything to a run folder, from which the run can be resumed.

A run is given by a row of a preset (--row), a mode (--norm) and a seed. If other settings are changed, the run is not
part of the preset, and its folder is in out/own by default."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("experiment", metavar="EXPERIMENT", help="ncde, cnf or hnn")
    add_preset(parser)
    parser.add_argument("--row", metavar="NAME", help="row of the preset, or a part of its name; default: the first")
    norms = "mixed, seminorm (default), published (hnn only: as in the paper's code) or best (seminode's choice)"
    parser.add_argument("--norm", default="seminorm", metavar="MODE", help=norms)
    parser.add_argument("--rtol", type=float, metavar="R", help="relative tolerance; selects the row that has it")
    parser.add_argument("--atol", type=float, metavar="A", help="absolute tolerance")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    adjoints = "replaces the adjoint of the mode: backsolve, quadrature, replay, direct, 'checkpointed(4)', …"
    parser.add_argument("--adjoint", metavar="NAME", help=adjoints)
    parser.add_argument("--library", metavar="NAME", help="library that solves: torchdiffeq; default: seminode")
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of training")
    parser.add_argument("--batch", type=int, metavar="N", help="samples per batch")
    add_place(parser)
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="processes that share every batch; default: 1"
    )
    parser.add_argument("--resume", action="store_true", help="resume a run that was stopped")
    parser.add_argument("--no-progress", action="store_true", help="print plain lines instead of a progress bar")


def run(options: argparse.Namespace) -> int:
    """Make the run, or print the result of one that is complete."""
    return guarded(options, _run, "the same command with --resume continues from the last checkpoint")


def _run(options: argparse.Namespace) -> int:
    import torch

    from ..attempts import attempt, summary
    from ..data.folders import data_dir

    settings, own = settings_of(options)
    check_device(settings.device)
    at_least_one("threads", options.threads)
    at_least_one("nproc", options.nproc)
    check_minutes(options.checkpoint_minutes)
    out = options.out or Path("out", "own" if own else settings.preset)
    root = data_dir(options.data_dir)
    if options.nproc > 1:
        return _together(options, settings, out, root)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(options.threads or threads)
        display = "lines" if options.no_progress else "bar"
        minutes = options.checkpoint_minutes
        result = attempt(settings, out, root, options.resume, display, not options.no_tensorboard, minutes)
    finally:
        torch.set_num_threads(threads)
    if int(os.environ.get("RANK", "0")) == 0:  # of several processes, one speaks for all
        print(summary(settings, result, out))
    return 0


def _together(options: argparse.Namespace, settings: Settings, out: Path, root: Path) -> int:
    """Make the run with several processes, as `torchrun` would."""
    from ..running import common_steps
    from ..worker import Order

    common_steps(settings)  # raises an error if the mode is not for several processes
    threads = options.threads or max(1, cores() // options.nproc)
    given = (threads, not options.no_tensorboard, options.checkpoint_minutes, options.resume)
    order = Order(settings, out.absolute(), root.absolute(), *given)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"]
    command = [sys.executable, *launcher, "-m", "seminode_lab.worker", order.written()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(threads)}
    return 1 if subprocess.run(command, env=env, check=False).returncode else 0


def settings_of(options: argparse.Namespace) -> tuple[Settings, bool]:
    """The settings of the run, and whether it is not part of the preset."""
    from ..running import options_of
    from ..settings import rows

    for name in ("epochs", "batch"):
        at_least_one(name, getattr(options, name))
    if options.seed < 0:
        raise ValueError(f"seed: expected a whole number of at least 0, found {options.seed}")
    for name in ("rtol", "atol"):
        value = getattr(options, name)
        if value is not None and not 0.0 < value < 1.0:
            raise ValueError(f"{name}: expected a number between 0 and 1, found {value:g}")
    preset = rows(options.preset)
    preset[0].changed(experiment=options.experiment)  # raises an error for an unknown experiment
    row = _row([row for row in preset if row.experiment == options.experiment], options)
    changes = given(options, "rtol", "atol", "batch", "device", "compile", "adjoint", "library")
    if options.epochs is not None:
        changes["schedule"] = replace(row.schedule, epochs=options.epochs)
    settings = row.changed(**changes, mode=options.norm, seed=options.seed)
    options_of(settings)  # raises an error if the experiment does not have this mode
    return settings, settings.changed(mode=row.mode, seed=row.seed) != row


def _row(found: list[Settings], options: argparse.Namespace) -> Settings:
    """The row with the given name and tolerance; the first one if several match."""
    names = ", ".join(row.row for row in found) or "none"
    if options.row is not None:
        fitting = [row for row in found if row.row == options.row] or [row for row in found if options.row in row.row]
        if not fitting:
            raise ValueError(f"row: expected a part of one of {names}; found {options.row!r}")
        found = fitting
    if not found:
        raise ValueError(f"experiment: the preset {options.preset!r} has no {options.experiment!r}")
    return next((row for row in found if row.rtol == options.rtol), found[0])

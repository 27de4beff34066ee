"""Arguments and error handling that the commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seminode.cli import missing_dependency

if TYPE_CHECKING:
    from ..store import Finished

PRESETS = "quick (shipped data, minutes), cpu (real data, reduced, hours), long (from scratch, days) or paper"


def add_preset(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="quick", metavar="NAME", help=f"{PRESETS}; default: quick")


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add the folders of runs and data, and the options of PyTorch."""
    add_writing(parser)
    add_machine(parser)


def add_writing(parser: argparse.ArgumentParser) -> None:
    """Add the folder of runs, and what is written to it."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of run folders; default: out/PRESET")
    often = "minutes between checkpoints within an epoch; default: 10"
    parser.add_argument("--checkpoint-minutes", type=float, default=10.0, metavar="M", help=often)
    parser.add_argument("--no-tensorboard", action="store_true", help="write no TensorBoard logs")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the folder of data and the options of PyTorch."""
    parser.add_argument("--data-dir", metavar="DIR", help="folder with data")
    parser.add_argument("--device", metavar="D", help="PyTorch device, such as cpu or cuda; default: the preset's")
    compiled: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": None}
    parser.add_argument("--compile", help="compile steps; default: that of the preset", **compiled)
    parser.add_argument("--threads", type=int, metavar="N", help="PyTorch threads per process")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options with these names that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, found {value}")


def check_minutes(minutes: float) -> None:
    if not minutes > 0.0:
        raise ValueError(f"checkpoint_minutes: expected a positive number, found {minutes:g}")


def check_device(device: str) -> None:
    """Raise an error if PyTorch cannot use the device."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device: expected one that PyTorch can use here, found {device!r} ({reason})") from error


def add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of run folders")


def complete_runs(folder: Path, *, name_others: bool = True) -> list[Finished]:
    """The complete runs in a folder. Others are left out, and named on standard error with the reason."""
    from ..measures import gather
    from ..store import StoreError, runs

    if not folder.is_dir():
        raise NotADirectoryError(f"DIR: expected a folder of run folders, found {str(folder)!r}")
    notes: list[str] = []
    gathered = gather(runs(folder, lambda error: notes.append(str(error))))
    notes += [f"{folder / name}: {reason}" for name, reason in gathered.left_out.items()]
    for note in notes if name_others else ():
        print(f"note: left out: {' '.join(note.split())}", file=sys.stderr)
    problems = (*gathered.problems, *gathered.peers)
    found = sorted((run for problem in problems for run in problem.runs), key=lambda run: run.path)
    if not found:
        raise StoreError(f"{folder}: expected run folders, found none that is complete")
    return found


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _renamed(message: str, options: argparse.Namespace) -> str:
    """A message with the name of the argument as in the command.

    >>> options = argparse.Namespace(norm="fast", data_dir="a.txt")
    >>> _renamed("mode: expected one of …", options), _renamed("data_dir: expected a folder", options)
    ('--norm: expected one of …', '--data-dir: expected a folder')
    """
    name, colon, rest = message.partition(": ")
    name = "norm" if name == "mode" else name
    positional = name == "experiment" and options.command == "run"
    return f"--{name.replace('_', '-')}: {rest}" if colon and hasattr(options, name) and not positional else message


def guarded(options: argparse.Namespace, work: Callable[[argparse.Namespace], int], after_interrupt: str) -> int:
    """Do some work and return its exit status.

    Errors that a user can cause are printed in one line. The status is then 1 if the work failed, 2 if the arguments
    are invalid or a dependency is missing, and 130 after an interrupt, as is the custom.
    """
    try:
        return work(options)
    except KeyboardInterrupt:
        status, message = 130, f"interrupted; {after_interrupt}"
    except ImportError as error:
        # The data sets raise an `ImportError` without a module's name, whose message says what they need.
        reason = str(error) if error.name is None else missing_dependency(error)
        if reason is None:
            raise
        status, message = 2, reason
    except Exception as error:
        from ..attempts import BUSY, explained, in_one_line

        known = explained(error)
        if known is None:
            raise
        status, message = 1 if known[0] == BUSY else known[0], _renamed(in_one_line(known[1]), options)
    print(f"seminode {options.command}: {message}", file=sys.stderr)
    return status

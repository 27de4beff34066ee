"""The command `seminode estimate`: says what runs will cost, before any is made."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from .options import at_least_one, check_device, given, guarded
from .sweep import configure_choice

if TYPE_CHECKING:
    from pathlib import Path

    from ..estimating import Estimate
    from ..settings import Settings

DESCRIPTION = """\
Measure one update of every row and mode of a preset, and print what all runs will cost: hours, memory, evaluations.

Nothing is trained or written. The data of the preset are needed."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    configure_choice(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table."""
    return guarded(options, _estimate, "the same command starts over")


def _estimate(options: argparse.Namespace) -> int:
    from ..data.folders import data_dir
    from ..estimating import table
    from ..settings import PRESETS
    from ..sweeping import chosen

    at_least_one("threads", options.threads)
    runs = chosen(options.preset, options.experiment or (), options.only or (), options.seeds, options.library)
    runs = [run.changed(**given(options, "device", "compile")) for run in runs]
    for device in {run.device for run in runs}:
        check_device(device)
    first = {(run.row, run.mode): run for run in reversed(runs)}
    seeds = {name: options.seeds or count for name, count in PRESETS[options.preset][1].items()}
    found = []
    for number, settings in enumerate(reversed(first.values()), 1):
        print(f"measuring {number} of {len(first)}: {settings.row}-{settings.mode}", file=sys.stderr, flush=True)
        found.append(alone(settings, data_dir(options.data_dir), options.threads))
    print(table(found, seeds).text())
    return 0


def alone(settings: Settings, root: Path, threads: int | None) -> Estimate:
    """Measure in a process of its own, whose memory is then that of the run."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, settings, root, threads).result()


def _measured(settings: Settings, root: Path, threads: int | None) -> Estimate:
    import torch

    from ..estimating import estimate

    torch.set_num_threads(threads or torch.get_num_threads())
    return estimate(settings, root)

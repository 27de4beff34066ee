"""The command `seminode measure`: measurements on one batch, with the weights of runs in a folder."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from .options import add_preset, guarded

DESCRIPTION = """\
Measure on one batch of each experiment, with the weights of runs in DIR that have a checkpoint: precision (the error
of gradients over their cost, for all adjoints and norms), ablation (what the parts of best contribute), overshoot (the
last step of the published procedure), scale (what the scale of a flow's loss changes) and libraries (every row with
seminode and with torchdiffeq). data describes the data sets of the runs. The files are written to DIR, and `seminode
report DIR` shows them."""
PARTS = ("precision", "data", "ablation", "overshoot", "scale", "libraries")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of run folders")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(PARTS)}; default: all")
    add_preset(parser)
    parser.add_argument("--data-dir", metavar="DIR", help="folder with data")
    parser.add_argument("--threads", type=int, metavar="N", help="PyTorch threads")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the paths of the files."""
    return guarded(options, _measure, "the same command goes on with what is missing")


def _measure(options: argparse.Namespace) -> int:
    import torch

    from ..data.folders import data_dir
    from ..extras import measure_extras
    from ..measuring import measure_all
    from .options import at_least_one

    at_least_one("threads", options.threads)
    unknown = [name for name in options.names if name not in PARTS]
    if unknown:
        raise ValueError(f"NAME: expected one of {', '.join(PARTS)}, found {unknown[0]!r}")
    if not options.folder.is_dir():
        raise NotADirectoryError(f"DIR: expected a folder of run folders, found {str(options.folder)!r}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    chosen, root, say = options.names or PARTS, data_dir(options.data_dir), partial(print, flush=True)
    if "precision" in chosen:
        measure_all(options.preset, options.folder, root, say)
    for path in measure_extras(options.preset, options.folder, root, say, chosen):
        print(path)
    return 0

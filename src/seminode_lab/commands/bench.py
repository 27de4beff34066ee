"""The command `seminode bench`: runs the benchmarks, which are in the repository but not in the installed package."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from .options import given, guarded

DESCRIPTION = """\
Compare with torchdiffeq, torchode, torchcde and diffrax. Takes hours, or minutes with --quick.

The command works only in a clone of the repository. `python -m benchmarks` has more options."""
PEERS = ("torchdiffeq", "torchode", "torchcde", "diffrax")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("--quick", action="store_true", help="tiny problems, to check that everything works")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="race, overhead, scaling, detest, report")
    parser.add_argument(
        "--problems", nargs="+", metavar="NAME", help="problems of the race: small, cde, flow, pendulum …"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of the race")


def run(options: argparse.Namespace) -> int:
    """Run the benchmarks."""
    return guarded(options, _bench, "the results of finished problems are kept")


def _bench(options: argparse.Namespace) -> int:
    if not (Path.cwd() / "benchmarks" / "race.py").is_file():
        raise ValueError(f"works only in a clone of the repository, and {str(Path.cwd())!r} is none")
    missing = [name for name in PEERS if not importlib.util.find_spec(name)]
    if missing:
        raise ValueError(f"needs {', '.join(missing)}: pip install -c constraints.txt -e '.[bench]'")
    arguments = ["--quick"] if options.quick else []
    for name, found in given(options, "parts", "problems", "rounds").items():
        arguments += [f"--{name}", *map(str, found if isinstance(found, list) else [found])]
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments]).returncode

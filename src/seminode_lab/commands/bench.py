"""The command `seminode bench`: the benchmarks of the repository, which are not part of the package."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from .options import given, guarded

DESCRIPTION = """\
Compare with torchdiffeq, torchode, torchcde and diffrax: hours, or minutes with --quick.

To be called in a clone of the repository. `python -m benchmarks` knows more options."""
PEERS = ("torchdiffeq", "torchode", "torchcde", "diffrax")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    parser.add_argument("--quick", action="store_true", help="tiny problems, to see that all works")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="race, overhead, scaling, detest, report")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="of the race: small, cde, flow, pendulum …")
    parser.add_argument("--rounds", type=int, metavar="N", help="of the race")


def run(options: argparse.Namespace) -> int:
    """Bench."""
    return guarded(options, _bench, "results of problems that are done are kept")


def _bench(options: argparse.Namespace) -> int:
    if not (Path.cwd() / "benchmarks" / "race.py").is_file():
        raise ValueError(f"bench: expected to be called in a clone of the repository, found {str(Path.cwd())!r}")
    missing = [
        name for name in ("torchdiffeq", "torchode", "torchcde", "diffrax") if not importlib.util.find_spec(name)
    ]
    if missing:
        raise ValueError(f'bench: needs {", ".join(missing)}: pip install -c constraints.txt -e ".[bench]"')
    arguments = ["--quick"] if options.quick else []
    for name, found in given(options, "parts", "problems", "rounds").items():
        arguments += [f"--{name}", *map(str, found if isinstance(found, list) else [found])]
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments]).returncode

"""`python -m seminode.compat SCRIPT [ARGS]`: run a script with torchdiffeq and torchcde replaced by the drop-ins."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ._replacing import available, installed
from .torchdiffeq import _ledger, use


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m seminode.compat",
        description=f"Run a Python script with {' and '.join(available())} replaced by the drop-ins of seminode. At "
        "the end, the cost of its solves is printed to the standard error stream.",
    )
    made.add_argument("--adjoint", help="differentiate with this adjoint of seminode, such as replay or direct")
    made.add_argument("--compile", action="store_true", help="compile the steps of the solver")
    made.add_argument("script", type=Path, help="the script to run")
    made.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    if not options.script.is_file():
        parser().error(f"script: expected a file, found {options.script}")
    try:
        if options.adjoint is not None:
            use(adjoint=options.adjoint)
        if options.compile:
            use(compile=True)
    except ValueError as error:
        parser().error(str(error))
    ledger = _ledger.keep()
    saved = sys.argv, sys.path
    sys.argv = [str(options.script), *options.args]
    sys.path = [str(options.script.resolve().parent), *sys.path[1:]]
    try:
        with installed():
            runpy.run_path(str(options.script), run_name="__main__")
    finally:
        sys.argv, sys.path = saved
        print(f"seminode.compat\n{ledger.summary()}", file=sys.stderr)


if __name__ == "__main__":
    main()

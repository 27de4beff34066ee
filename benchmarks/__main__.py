"""Run all benchmarks in sequence: `python -m benchmarks`. Unknown options are passed on to the race.

python -m benchmarks [--parts race overhead scaling detest report] [--quick] [--problems small cde] [--rounds 3] ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

PARTS = ("race", "overhead", "scaling", "detest", "report")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run all benchmarks.", add_help=False)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    options, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    quick = ["--quick"] if options.quick else []
    arguments = {
        "race": [*quick, *rest],
        "overhead": quick,
        "scaling": quick,
        "detest": ["--problems", "A1,B2"] if options.quick else [],
        "report": [],
    }
    # Results of the tiny problems do not belong in the report.
    parts = [part for part in PARTS if part in options.parts and not (part == "report" and options.quick)]
    for part in parts:
        print(f"\n# {part}", flush=True)
        import_module(f".{part}", __package__).main(arguments[part])


if __name__ == "__main__":
    main()

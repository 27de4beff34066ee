"""Damaged files: how many of each format are read or refused, with which peak of memory, and how many do harm.

    python -m benchmarks.fuzzing [--examples 5000] [--seed 0] [--out FILE]

Files of tests/seminode_lab/data/corpus are damaged at random and given to the readers of seminode_lab, each format in a
process that may allocate one gigabyte. A process stops at the first error that is not one of the reader's own. After
them come small files that expand to gigabytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .detest import table
from .race import RESULTS, circumstances

PROGRAMS = Path(__file__).resolve().parents[1] / "tests"


def measure(examples: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    sys.path.insert(0, str(PROGRAMS))
    from hostile_files import BOMBS, READERS, expand, in_a_small_process

    found: dict[str, list[dict[str, Any]]] = {"damaged": [], "expanding": []}
    for form in READERS:
        found["damaged"].append(in_a_small_process(form, str(examples), str(seed)))
        print(found["damaged"][-1], file=sys.stderr, flush=True)
    for kind in BOMBS:
        found["expanding"].append(expand(kind) | {"kind": kind})
        print(found["expanding"][-1], file=sys.stderr, flush=True)
    return found


def fuzz_table(found: Mapping[str, Any]) -> str:
    """A row per format, and one per kind of file that expands."""
    rows = []
    for each in found["damaged"]:
        rows.append([each["format"], *_cells(each)])
    for each in found["expanding"]:
        rows.append([f"{each['format']} of {each['bytes'] / 1e6:.1f} MB that expands ({each['kind']})", *_cells(each)])
    return table(["files", "how many", "refused", "uncaught errors", "peak memory"], rows)


def _cells(each: Mapping[str, Any]) -> list[str]:
    if "error" in each:
        return ["–", "–", each["error"], "–"]
    return [f"{each['examples'] or 1:,}", f"{each['refused']:,}", "0", f"{each['peak_megabytes']:,} MB"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzzing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "fuzzing.json")
    options = parser.parse_args(argv)
    found = {"circumstances": circumstances(1), **measure(options.examples, options.seed)}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(fuzz_table(found))
    rows = found["damaged"] + found["expanding"]
    raise SystemExit(any("error" in each or each["peak_megabytes"] >= 1000 for each in rows))


if __name__ == "__main__":
    main()

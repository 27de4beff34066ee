"""Gradients of models wrapped in DDP and FSDP2, with every adjoint, eager and compiled, against one process.

    python -m benchmarks.distributed [--processes 2 4] [--out FILE]

The processes communicate by gloo and run the cases of tests/rank_programs.py. A number is the largest error of a
gradient, relative to the gradient of one process with the whole batch, where forward and backward passes of all ranks
took the steps of that process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .detest import table
from .race import RESULTS, circumstances

PROGRAMS = Path(__file__).resolve().parents[1] / "tests"
#: A relative difference that is due to rounding. The cotangents of `fresh` depend on the number of ranks.
ROUNDING, FRESH = 1e-13, 1e-9


def cell(name: str, found: Sequence[Any]) -> str:
    """What the ranks found in a case, in a word or a number."""
    failed = [each for each in found if isinstance(each, str)]
    if len(failed) == len(found) and all(each.startswith("ValueError: field: calls FSDP") for each in failed):
        return "refused"
    if failed:
        return "FAILED"
    if isinstance(found[0], float):  # the field itself is sharded
        return shown(max(found)) if max(found) < ROUNDING else "FAILED"
    same = all(each[key][0] == each[key][1] for each in found for key in ("stats", "backward"))
    error = max(each["error"] for each in found)
    return shown(error) if same and error < (FRESH if "fresh" in name else ROUNDING) else "FAILED"


def shown(error: float) -> str:
    return f"{error:.0e}" if error else "0"


def measure(world: int) -> dict[str, str]:
    """The cells for so many processes, by the names of the cases."""
    sys.path.insert(0, str(PROGRAMS))
    from rank_programs import spawn

    cells: dict[str, str] = {}
    for program in ("everything", "compiled"):
        with tempfile.TemporaryDirectory() as folder:
            results = spawn(program, world, Path(folder))
        for name in results[0]:
            if name.startswith(("DDP", "FSDP2", "field")):
                cells[name] = cell(name, [each[name] for each in results])
                if cells[name] == "FAILED":
                    print(f"{world} processes, {name}: {results[0][name]}", file=sys.stderr)
        print(f"{world} processes, {program}: done", file=sys.stderr, flush=True)
    return cells


def distributed_table(found: Mapping[str, Any]) -> str:
    """A row per adjoint."""
    worlds, rows = found["processes"], []
    names = [name.split(", ")[1] for name in next(iter(worlds.values())) if name.startswith("DDP") and "eager" in name]
    columns = [(wrapper, engine) for wrapper in ("DDP", "FSDP2") for engine in ("eager", "compiled")]
    for adjoint in names:
        row = [f"`{adjoint}`"]
        for wrapper, engine in columns:
            row.append(" / ".join(cells[f"{wrapper}, {adjoint}, {engine}"] for cells in worlds.values()))
        row.append(" / ".join(cells[f"field sharded, {adjoint}"] for cells in worlds.values()))
        rows.append(row)
    header = ["adjoint", *(f"{wrapper}, {engine}" for wrapper, engine in columns), "FSDP2 of the field, eager"]
    return table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed.json")
    options = parser.parse_args(argv)
    found = {"circumstances": circumstances(1), "processes": {str(n): measure(n) for n in options.processes}}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(distributed_table(found))
    raise SystemExit(any("FAILED" in cells.values() for cells in found["processes"].values()))


if __name__ == "__main__":
    main()

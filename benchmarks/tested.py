"""The tables of docs/tested.md, from saved results. `python -m benchmarks.report` puts them there."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .detest import table
from .distributed import distributed_table
from .fuzzing import fuzz_table
from .mutation import SURVIVING, survivors
from .soak import soak_table


def versions_section(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("python", "torch", "numpy", "scipy", "tqdm", "passed", "failed", "skipped")
    cells = [[f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in names] for row in rows]
    header = ["Python", "torch", "NumPy", "SciPy", "tqdm", "tests passed", "failed", "skipped"]
    return f"## Versions\n\n{table(header, cells)}"


def distributed_section(found: Mapping[str, Any]) -> str:
    worlds = " and ".join(found["processes"])
    about = (
        f"The largest relative difference between the gradient of {worlds} gloo processes with `norms.distributed()` "
        "and that of one process with the whole batch. A number also means that all ranks took the steps of that "
        "process, forward and backward. The cotangents of `Backsolve fresh` depend on the scale of the loss. Compiled "
        "graphs run without Inductor here. [Several processes](distributed.md) explains what is refused."
    )
    return "\n\n".join(["## Several processes", textwrap.fill(about, 120), distributed_table(found)])


def fuzzing_section(found: Mapping[str, Any]) -> str:
    return f"## Damaged files\n\n{fuzz_table(found)}"


def soak_section(found: Mapping[str, Any]) -> str:
    return f"## Endurance\n\n{soak_table(found['lines'])}"


def mutation_section(found: Mapping[str, Any]) -> str:
    rows = []
    for module, counts in found["score"].items():
        killed, survived, equivalent = (counts[name] for name in ("killed", "survived", "equivalent"))
        share = killed / max(1, killed + survived)
        rows.append([module, *(f"{n:,}" for n in (killed, survived, equivalent)), f"{share:.0%}"])
    parts = ["## Mutants", table(["module", "killed", "survived", "equivalent", "score"], rows)]
    known = json.loads(SURVIVING.read_text())
    left = [
        f"- `{row['module']}`, line {row['line']}: {row['name'].partition(': ')[2]}: "
        f"{known.get(row['name'], 'not looked into yet.')}"
        for row in survivors(found)
    ]
    parts.append("Survivors, and the reasons:\n\n" + "\n".join(left) if left else "No mutant survived.")
    if found["equivalent"]:
        reasons = [f"- {name}: {reason}" for name, reason in found["equivalent"].items()]
        parts.append("Equivalent mutants, which no test can notice, and the reasons:\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)


#: The sections of the page, by the names of their results.
SECTIONS = {
    "versions": versions_section,
    "distributed": distributed_section,
    "fuzzing": fuzzing_section,
    "soak": soak_section,
    "mutation": mutation_section,
}


def results_text(found: Mapping[str, Any]) -> str:
    """The part of the page between the marks."""
    return "\n\n".join(section(found[name]) for name, section in SECTIONS.items() if name in found)

"""The table of what the parts of the mode `best` contribute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .ablation import MIXED, Cost, file_of
from .grid import Column, Table
from .measures import DATA, KINDS
from .settings import EXPERIMENTS
from .store import StoreError, read_json

COLUMNS = (
    Column(""),
    Column("forward NFE", minor=True),
    *map(Column, ("backward NFE", "seconds", "speed-up")),
    Column("first pass (s)", minor=True),
)
KINDS_OF_ROWS = {"start": "", "alone": "mixed norm, only with: ", "together": "", "without": "all together, but: "}
NOTE = (
    "One batch, forward and backward, with the same weights and noise for all. Only with: one part of best is added to "
    "the mixed norm in the published procedure. All together: all parts of best, compiled. But: all of them except one "
    "(the adjoint is then that of the mixed norm), or with another adjoint. Seconds are those of the fastest of the "
    "timed passes, of the processor on a CPU; the first pass compiles if needed (later variants reuse what earlier "
    "ones have compiled) and is not among them."
)


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The heading and the rows of an experiment."""
    settings = found["settings"]
    data = DATA.get(settings["data"], settings["data"])
    weights = found.get("weights")
    state = "untrained" if weights is None else f"weights after {weights['updates']:,} updates"
    kind = KINDS[settings["experiment"]]
    yield (f"{kind}: {data}, rtol {settings['rtol']:g}, batch of {found['batch']}, {state}",)
    costs = [Cost(**each) for each in found["costs"]]
    base = next((min(cost.seconds) for cost in costs if cost.name == MIXED and cost.seconds), None)
    for cost in costs:
        label = KINDS_OF_ROWS.get(cost.kind, "") + cost.name + (" *" if cost.note else "")
        if cost.reason is not None or not cost.seconds:
            yield (label, *["not measured"] * (len(COLUMNS) - 1))
            continue
        fastest = min(cost.seconds)
        faster = "" if base is None else f"{base / fastest:.2f}"
        yield (label, f"{cost.forward:,}", f"{cost.backward:,}", f"{fastest:.3g}", faster, f"{cost.preparation:.3g}")


def ablation(folder: Path) -> Table:
    """The table of all experiments that were measured; without rows if there are none."""
    lines: list[tuple[str, ...]] = []
    notes: dict[str, None] = {}
    for experiment in EXPERIMENTS:
        path = folder / file_of(experiment)
        if not path.exists():
            continue
        try:
            found = read_json(path)
            lines += rows(found)
            notes |= {f"* {each['note']}." if each["note"] else "": None for each in found["costs"]}
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path}: damaged ({type(error).__name__}: {error}); delete it to have it made again"
            ) from error
    said = (NOTE, *filter(None, notes)) if lines else ()
    return Table("ablation", "What the parts of best contribute", COLUMNS, tuple(lines), said)

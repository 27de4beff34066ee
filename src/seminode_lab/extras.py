"""Measurements beyond the paper's: ablation, overshoot, another library beside ours, and a description of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from . import ablation, loss_scale, overshoot, side_by_side, sources
from .running import Root
from .settings import EXPERIMENTS, rows

PARTS = ("data", "ablation", "overshoot", "scale", "libraries")


def measure_extras(
    preset: str,
    out: Path,
    root: Root = None,
    progress: Callable[[str], None] | None = None,
    parts: Sequence[str] = PARTS,
) -> list[Path]:
    """Measure what is not measured yet, and return the files."""
    first = {row.experiment: row for row in reversed(rows(preset))}
    found = [sources.measure(out, root)] if "data" in parts else []
    if "ablation" in parts:
        found += [ablation.measure(first[name], out, root, progress) for name in EXPERIMENTS if name in first]
    if "overshoot" in parts and "cnf" in first:
        found.append(overshoot.measure(first["cnf"], out, root, progress))
    if "scale" in parts and "cnf" in first:
        found.append(loss_scale.measure(first["cnf"], out, root, progress))
    if "libraries" in parts:
        found += side_by_side.measure_all(preset, out, root, progress)
    return found

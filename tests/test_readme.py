"""The numbers in the first table of the README are those of the saved results."""

from __future__ import annotations

import json
import re

from project import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(name: str) -> str:
    (found,) = re.findall(rf"^\| \*\*{name}\*\* \|.*$", README, re.MULTILINE)
    return found


def test_speed_is_the_range_of_the_benchmark_table() -> None:
    rows = re.findall(r"^\| +`[\w-]+` \|(.*)\|$", README, re.MULTILINE)
    columns = list(zip(*([float(ratio) for ratio in re.findall(r"= ([\d.]+)×", each)] for each in rows), strict=True))
    adjoint, _, diffrax = columns
    assert len(rows) == 6
    assert f"{min(adjoint):.1f} to {max(adjoint):.1f} times as fast as `odeint_adjoint`" in row("Speed")
    assert f"diffrax: {min(diffrax):.2f} to {max(diffrax):.2f} times" in row("Speed")


def test_the_drop_in_has_the_range_of_its_programs() -> None:
    programs = json.loads((ROOT / "benchmarks" / "results" / "dropin.json").read_text())["programs"].values()
    assert len(programs) == 10
    ranges = []
    for setting in ("drop-in", "switched"):
        ratios = [each["original"]["seconds"] / each[setting]["seconds"] for each in programs]
        ranges.append((min(ratios), max(ratios)))
    (low, high), (slowest, fastest) = ranges
    assert f"{low:.2f} to {high:.2f} times as fast on ten programs, {slowest:.2f} to {fastest:.1f}" in row("No rewrite")

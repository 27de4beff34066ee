"""The numbers in the first table of the README are those of the saved results."""

from __future__ import annotations

import json
import re

from project import ROOT

#: The models of the paper.
MODELS = ("cde", "cde-1024", "pendulum", "pendulum-fitted", "flow")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(name: str) -> str:
    (found,) = re.findall(rf"^\| \*\*{name}\*\* \|.*$", README, re.MULTILINE)
    return found


def columns_of(rows: list[tuple[str, str]]) -> list[tuple[str, float, float]]:
    """The name of each problem, and the speed-ups over torchdiffeq and diffrax."""
    found = []
    for name, cells in rows:
        torchdiffeq, diffrax = map(float, re.findall(r"= ([\d.]+)×", cells))
        found.append((name, torchdiffeq, diffrax))
    return found


def test_speed_is_the_range_of_the_benchmark_table() -> None:
    rows = re.findall(r"^\| +`([\w-]+)` \|(.*)\|$", README, re.MULTILINE)
    models = [each for each in columns_of(rows) if each[0] in MODELS]
    assert len(models) == len(MODELS)
    torchdiffeq, diffrax = ([each[i] for each in models] for i in (1, 2))
    assert f"{min(torchdiffeq):.1f} to {max(torchdiffeq):.1f} times as fast as torchdiffeq" in row("Speed")
    assert f"{min(diffrax):.1f} to {max(diffrax):.1f} times as fast as diffrax" in row("Speed")
    small = next(each for each in columns_of(rows) if each[0] == "small")
    assert f"On `small`, a network that is not from the paper, {small[1]:.1f} and {small[2]:.2f} times" in row("Speed")


def test_the_drop_in_has_the_range_of_its_programs() -> None:
    programs = json.loads((ROOT / "benchmarks" / "results" / "dropin.json").read_text())["programs"].values()
    assert len(programs) == 10
    ranges = []
    for setting in ("drop-in", "switched"):
        ratios = [each["original"]["seconds"] / each[setting]["seconds"] for each in programs]
        ranges.append((min(ratios), max(ratios)))
    (low, high), (slowest, fastest) = ranges
    assert f"{low:.2f} to {high:.2f} times as fast on ten programs, {slowest:.2f} to {fastest:.1f}" in row("No rewrite")

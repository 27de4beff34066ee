"""The limit of a pass: its evaluations and VJPs times the compiled cost of one; and times in units of F."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def f_unit(costs: Sequence[Mapping[str, float]]) -> float:
    """One unit of F: an evaluation and its VJP, of the most expensive field if there are several."""
    return max(each["evaluation"] + each.get("vjp", 0.0) for each in costs)


def limit(costs: Sequence[Mapping[str, float]], needed: Sequence[Mapping[str, int]]) -> float | None:
    """Seconds of all evaluations and VJPs alone; `None` if they are not known of every solve."""
    if not needed or len(costs) != len(needed):
        return None
    pairs = zip(costs, needed, strict=True)
    return sum(n["evaluations"] * cost["evaluation"] + n["vjps"] * cost.get("vjp", 0.0) for cost, n in pairs)
